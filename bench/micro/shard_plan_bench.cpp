// Plans of context parallelism. Bar: 1,048,576 tokens in 1,000 documents over 512 ranks in under 50 ms.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "fovea/parallel.hpp"

namespace fovea {
namespace {

constexpr std::int64_t kSeqlen = 1 << 20;
constexpr int kWorldSize = 512;

/// Ids of so many documents, cut at random places.
std::vector<std::int32_t> random_documents(std::size_t num_documents) {
  std::mt19937_64 random(1);
  std::vector<std::int32_t> is_first(kSeqlen);
  for (std::size_t i = 1; i < num_documents; ++i) is_first[random() % is_first.size()] = 1;
  std::partial_sum(is_first.begin(), is_first.end(), is_first.begin());
  return is_first;
}

void plan(benchmark::State& state, const MaskMod& mask, ParallelScheme scheme) {
  const auto spec = [](std::int64_t heads) {
    return make_spec(Dtype::bf16, std::array{std::int64_t{1}, kSeqlen, heads, std::int64_t{128}});
  };
  const Problem problem{.q = spec(32), .k = spec(8), .v = spec(8), .mask = mask};
  double balance = 0;
  for (auto _ : state) balance = context_parallel_plan(problem, kWorldSize, scheme).balance();
  state.counters["balance"] = balance;
}

void causal_sequence(benchmark::State& state, ParallelScheme scheme) {
  plan(state, causal(), scheme);
}
void causal_documents(benchmark::State& state, ParallelScheme scheme) {
  const std::vector<std::int32_t> ids = random_documents(1000);
  plan(state, documents(view(ids.data(), {1, kSeqlen})) && causal(), scheme);
}

BENCHMARK_CAPTURE(causal_sequence, all_gather, ParallelScheme::all_gather)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(causal_documents, all_gather, ParallelScheme::all_gather)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(causal_documents, needed_only, ParallelScheme::needed_only)
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace fovea

BENCHMARK_MAIN();
