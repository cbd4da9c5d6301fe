// What a warm call costs the host on the CPU beside its work: one row of one head and one key, in the caller's thread.
// Captured tensors move from call to call. Bars: 2 us above the work for Plan::run and DecodePlan::run; through C,
// program_call_bench has 3 us. plan_run_bench does the same for GPUs.
//
//   host_cost_bench --benchmark_filter='run/'
#include <benchmark/benchmark.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/kv_cache.hpp"

namespace fovea {
namespace {

constexpr std::size_t kTensors = 16;  // that calls take in turn
constexpr std::int64_t kCapacity = 64;

class OwnThread : public Executor {
 public:
  int concurrency() const override { return 1; }
  void run(std::int64_t count, const Task& task) override {
    for (std::int64_t i = 0; i < count; ++i) task.body(task.context, 0, i);
  }
};

OwnThread own_thread;
std::array<float, 8> row{}, out{};
std::array<std::array<float, kCapacity>, kTensors> tables{};
std::array<std::array<std::int32_t, 1>, kTensors> ids{};
std::array<float, kCapacity * 8> cache{};
std::array<std::int32_t, 1> length{1};

AttentionForward forward() {
  const auto input = view(row.data(), {1, 1, 1, 8});
  return {.q = input,
          .k = input,
          .v = input,
          .out = view(out.data(), {1, 1, 1, 8}),
          .executor = &own_thread};
}

AttentionDecode decode() {
  const auto keys = view(cache.data(), {1, kCapacity, 1, 8});
  return {.q = view(row.data(), {1, 1, 1, 8}),
          .cache = {.k = keys, .v = keys, .seqlens = view(length.data(), {1})},
          .out = view(out.data(), {1, 1, 1, 8}),
          .executor = &own_thread};
}

/// The same formula over one tensor after the other.
std::vector<ScoreMod> scores(std::int64_t keys) {
  std::vector<ScoreMod> all;
  for (auto& table : tables) all.push_back(bias(view(table.data(), {1, keys})));
  return all;
}

std::vector<MaskMod> masks() {
  std::vector<MaskMod> all;
  for (auto& id : ids) all.push_back(documents(view(id.data(), {1, 1})));
  return all;
}

void time_run(benchmark::State& state, const std::vector<ScoreMod>& score,
              const std::vector<MaskMod>& mask) {
  AttentionForward args = forward();
  args.score = score[0];
  args.mask = mask[0];
  const Plan plan = fovea::plan(problem_of(args));
  std::vector<std::byte> workspace(plan.workspace_bytes());
  args.workspace = workspace;
  std::size_t i = 0;
  for (auto _ : state) {
    args.score = score[++i % score.size()];
    args.mask = mask[i % mask.size()];
    plan.run(args);
  }
}

void time_decode(benchmark::State& state, const std::vector<ScoreMod>& score) {
  AttentionDecode args = decode();
  args.score = score[0];
  const DecodePlan plan = plan_decode(args, kCapacity);
  std::vector<std::byte> workspace(plan.workspace_bytes());
  args.workspace = workspace;
  std::size_t i = 0;
  for (auto _ : state) {
    args.score = score[++i % score.size()];
    plan.run(args);
  }
}

void add_benchmarks() {
  const auto add = [](const std::string& name, auto run) {
    benchmark::RegisterBenchmark(name.c_str(), std::move(run));
  };
  const std::vector<ScoreMod> none(1);
  const std::vector<MaskMod> all(1);
  add("run/plain", [=](benchmark::State& state) { time_run(state, none, all); });
  add("run/causal", [=](benchmark::State& state) { time_run(state, none, {causal()}); });
  add("run/bias", [=](benchmark::State& state) { time_run(state, scores(1), all); });
  add("run/documents", [=](benchmark::State& state) { time_run(state, none, masks()); });
  add("decode/plain", [=](benchmark::State& state) { time_decode(state, none); });
  add("decode/bias", [](benchmark::State& state) { time_decode(state, scores(kCapacity)); });
}

}  // namespace
}  // namespace fovea

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  fovea::add_benchmarks();
  benchmark::RunSpecifiedBenchmarks();
}
