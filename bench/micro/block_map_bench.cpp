// Block maps of whole sequences, on one thread. Bars: a 65,536-token causal window of 1,024 in under 1 ms; 100
// documents in 65,536 tokens in under 20 ms. The counters say how many tiles a map leaves to the kernels.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include "fovea/mask.hpp"

#include "mask/block_map.hpp"

namespace fovea::mask {
namespace {

constexpr std::int64_t kSeqlen = 65536;
constexpr std::int64_t kTile = 128;

/// Ids of sequences packed end to end, the first ones about twice as long as the last; `step` != 1 makes them unsorted.
std::vector<std::int32_t> packed_documents(std::int64_t num_documents, std::int32_t step) {
  std::vector<std::int32_t> ids(kSeqlen);
  for (std::int64_t i = 0; i < kSeqlen; ++i) {
    const auto document =
        static_cast<std::int32_t>(num_documents * i * (i + kSeqlen) / (2 * kSeqlen * kSeqlen));
    ids[static_cast<std::size_t>(i)] = document * step % 10007;
  }
  return ids;
}

void build(benchmark::State& state, const MaskMod& mask) {
  BlockMap map;
  for (auto _ : state) {
    map = build_block_map(mask, kSeqlen, kSeqlen, kTile, kTile);
    benchmark::DoNotOptimize(map.rows.data());
  }
  const TileCount count = map.count();
  state.counters["full"] = static_cast<double>(count.full);
  state.counters["partial"] = static_cast<double>(count.partial);
}

void causal_window(benchmark::State& state) { build(state, window(1024, 0)); }
void causal_and_window(benchmark::State& state) { build(state, causal() && window(1024, 1024)); }
void streaming_window(benchmark::State& state) { build(state, streaming(4, 1024)); }
void chunks(benchmark::State& state) { build(state, causal() && chunked(8192)); }
void dilation(benchmark::State& state) { build(state, dilated(2)); }

void sorted_documents(benchmark::State& state) {
  const std::vector<std::int32_t> ids = packed_documents(state.range(0), 1);
  build(state, documents(view(ids.data(), {1, kSeqlen})));
}
void unsorted_documents(benchmark::State& state) {
  const std::vector<std::int32_t> ids = packed_documents(state.range(0), 37);
  build(state, documents(view(ids.data(), {1, kSeqlen})));
}
void causal_documents(benchmark::State& state) {
  const std::vector<std::int32_t> ids = packed_documents(state.range(0), 1);
  build(state, causal() && documents(view(ids.data(), {1, kSeqlen})));
}

BENCHMARK(causal_window)->Unit(benchmark::kMillisecond);
BENCHMARK(causal_and_window)->Unit(benchmark::kMillisecond);
BENCHMARK(streaming_window)->Unit(benchmark::kMillisecond);
BENCHMARK(chunks)->Unit(benchmark::kMillisecond);
BENCHMARK(dilation)->Unit(benchmark::kMillisecond);
BENCHMARK(sorted_documents)->Arg(100)->Arg(5000)->Unit(benchmark::kMillisecond);
BENCHMARK(causal_documents)->Arg(100)->Unit(benchmark::kMillisecond);
BENCHMARK(unsorted_documents)->Arg(100)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace fovea::mask

BENCHMARK_MAIN();
