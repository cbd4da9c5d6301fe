// What a program costs beside the attention around it: ns per instruction and score, per target.
// Bound: a load of one vector per instruction, from L1, and a load and a store of the scores.
#include "cpu/kernels/highway.hpp"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "../bench/micro/program_bench.cpp"  // from src/, an include folder
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/kernels/program-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {

void run_for_bench(const expr::Tape& tape, const ProgramTile& tile, bool is_mask) {
  is_mask ? run_mask_program(tape, tile) : run_score_program(tape, tile);
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace fovea::cpu {
namespace {

using RunFunction = void(const expr::Tape&, const ProgramTile&, bool);

struct Case {
  std::string name;
  Expr formula;
};

/// The tile of the kernels: 256 keys, 48 lanes with AVX-512, 16 with AVX2.
constexpr std::int64_t kKeys = 256;

std::vector<Case> cases(const std::vector<float>& bias, const std::vector<std::int32_t>& ids,
                        const std::vector<std::uint8_t>& dense) {
  const Arguments x = arguments();
  const Captured b = capture("bias", view(bias.data(), {64, 1024}));
  const Captured doc = capture("doc", view(ids.data(), {1024}));
  const std::int64_t shape[] = {64, 1024};
  const Captured m = capture("mask", TensorView(dense.data(), make_spec(Dtype::boolean, shape)));
  const Captured slopes = capture("slopes", view(bias.data(), {8}));
  const Expr same_document = doc[x.q_idx] == doc[x.kv_idx];
  const Expr causal = x.kv_idx <= x.q_idx;
  return {
      {"scale", x.score * 0.5},
      {"add_per_key", x.score + to_float(x.kv_idx)},
      {"add_per_query", x.score + to_float(x.q_idx)},
      {"six_adds", ((((((x.score + 1.0) + to_float(x.kv_idx)) + to_float(x.q_idx)) + x.score) +
                     to_float(x.kv_idx)) +
                    2.0)},
      {"alibi", x.score - slopes[x.q_head] * abs(x.q_idx - x.kv_idx)},
      {"softcap", tanh(x.score * 0.05) * 20.0},
      {"six_mixed",
       max(min(abs(x.score * 0.5 + slopes[x.q_head]) - to_float(x.kv_idx), 100.0) * x.score, -3.0)},
      {"t5_buckets", x.score + b(x.q_head, min(abs(x.q_idx - x.kv_idx), Expr(31)))},
      {"bias_f32", x.score + b(x.q_idx, x.kv_idx)},
      {"exp", exp(x.score)},
      {"causal", causal},
      {"window", causal && x.q_idx - x.kv_idx <= 128},
      {"documents", same_document && causal},
      {"dense_mask", m(x.q_idx, x.kv_idx)},
      {"chunked", floor_div(x.q_idx, Expr(128)) == floor_div(x.kv_idx, Expr(128))},
      {"dilated_3", (x.q_idx - x.kv_idx) % 3 == 0},
      {"dilated_4", (x.q_idx - x.kv_idx) % 4 == 0},
      {"relative", x.score + b(x.q_head, x.q_idx - x.kv_idx + 512)},
  };
}

void bench_program(benchmark::State& state, const Expr& formula, RunFunction* function, int lanes) {
  const expr::Tape tape = expr::lower(formula.shared());
  const std::vector<CapturedTensor> captured = formula.type() == ExprType::boolean
                                                   ? MaskMod(formula).captures().tensors
                                                   : ScoreMod(formula).captures().tensors;
  std::vector<TensorView> tensors;
  for (const std::string& name : tape.tensors) {
    for (const CapturedTensor& each : captured) {
      if (each.name == name) tensors.push_back(each.view);
    }
  }
  const std::size_t score_bytes = static_cast<std::size_t>(kKeys * lanes) * sizeof(float);
  const std::size_t scratch_bytes = program_scratch_bytes(tape, kKeys, lanes);
  const std::unique_ptr<void, decltype(&std::free)> memory(
      std::aligned_alloc(64, score_bytes + scratch_bytes), &std::free);
  auto* scores = static_cast<float*>(memory.get());
  std::vector<std::int32_t> q_idx, q_head;
  for (int lane = 0; lane < lanes; ++lane) {
    q_idx.push_back(lane);
    q_head.push_back(0);
  }
  const ProgramTile tile{.scores = scores,
                         .num_keys = kKeys,
                         .lanes = lanes,
                         .q_idx = q_idx.data(),
                         .q_head = q_head.data(),
                         .tensors = tensors.data(),
                         .scratch = static_cast<std::byte*>(memory.get()) + score_bytes};
  std::fill_n(scores, kKeys * lanes, 0.5F);
  for (auto _ : state) {
    function(tape, tile, formula.type() == ExprType::boolean);
    benchmark::ClobberMemory();
  }
  const double num_scores = static_cast<double>(kKeys * lanes);
  using benchmark::Counter;
  state.counters["ops"] = tape.num_per_score_ops();
  // Seconds per score, printed with SI prefixes: 100p is 0.1 ns.
  state.counters["s/score"] =
      Counter(num_scores, Counter::kIsIterationInvariantRate | Counter::kInvert);
  const double num_ops = std::max(tape.num_per_score_ops(), 1);
  state.counters["s/op/score"] =
      Counter(num_scores * num_ops, Counter::kIsIterationInvariantRate | Counter::kInvert);
}

void register_target(const std::string& target, RunFunction* function, int lanes,
                     const std::vector<Case>& all) {
  for (const Case& each : all) {
    benchmark::RegisterBenchmark((target + "/" + each.name).c_str(), [=](benchmark::State& state) {
      bench_program(state, each.formula, function, lanes);
    });
  }
}

}  // namespace
}  // namespace fovea::cpu

int main(int argc, char** argv) {
  using namespace fovea::cpu;
  const std::vector<float> bias(64 * 1024, 0.25F);
  const std::vector<std::int32_t> ids(1024, 3);
  const std::vector<std::uint8_t> dense(64 * 1024, 1);
  const std::vector<Case> all = cases(bias, ids, dense);
#if HWY_TARGETS & HWY_AVX3
  if (__builtin_cpu_supports("avx512bw")) {
    register_target("avx3", &fovea::cpu::N_AVX3::run_for_bench, 48, all);
  }
#endif
#if HWY_TARGETS & HWY_AVX2
  if (__builtin_cpu_supports("avx2")) {
    register_target("avx2", &fovea::cpu::N_AVX2::run_for_bench, 16, all);
  }
#endif
  register_target("static", &fovea::cpu::HWY_STATIC_DISPATCH(run_for_bench), 12, all);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

#endif  // HWY_ONCE
