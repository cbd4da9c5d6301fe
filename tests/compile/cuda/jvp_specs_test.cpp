// Kernels of forward mode: every kernel of such plans compiles, spills next to nothing and multiplies each tile
// once.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"
#include "cuda/jvp/attention_jvp.hpp"
#include "cuda/jvp/sm80.hpp"
#include "problem/jvp.hpp"

namespace fovea::cuda {
namespace {

struct Posed {
  std::string name{};
  std::int64_t head_dim = 128;
  Dtype dtype = Dtype::bf16;
  MaskMod mask{};
  ScoreMod score{};
  float dropout_p = 0;
  bool is_packed = false;
  std::int64_t head_dim_v = 0;  // that of q
  bool moves_queries_alone = false;
  bool loads_ahead = false;
};

void PrintTo(const Posed& posed, std::ostream* out) { *out << posed.name; }

TangentProblem validated(const Posed& posed) {
  const std::int64_t head_dim_v = posed.head_dim_v > 0 ? posed.head_dim_v : posed.head_dim;
  const auto spec = [&](std::int64_t heads, std::int64_t head_dim) {
    if (posed.is_packed)
      return make_spec(posed.dtype, std::array<std::int64_t, 3>{8192, heads, head_dim});
    return make_spec(posed.dtype, std::array<std::int64_t, 4>{2, 4096, heads, head_dim});
  };
  JvpProblem problem;
  problem.forward.q = problem.q_tangent = spec(16, posed.head_dim);
  problem.forward.k = problem.k_tangent = spec(4, posed.head_dim);
  problem.forward.v = problem.v_tangent = spec(4, head_dim_v);
  problem.forward.out = problem.out_tangent = spec(16, head_dim_v);
  if (posed.moves_queries_alone) problem.k_tangent = problem.v_tangent = {};
  problem.forward.mask = posed.mask;
  problem.forward.score = posed.score;
  problem.forward.dropout.p = posed.dropout_p;
  problem.forward.wants_lse = problem.wants_lse_tangent = true;
  problem.forward.has_sinks = problem.has_sinks_tangent = true;
  for (const CapturedTensor& each : posed.score.captures().tensors)
    problem.captured_tangents.push_back({each.name, each.view.spec()});
  if (posed.is_packed) {
    problem.forward.num_sequences = 8;
    problem.forward.seqlen_q = problem.forward.seqlen_kv = up_to(4096);
  }
  return validate(problem, "test");
}

/// Products of 16 rows, 8 columns and a depth of 16 for the scores of a tile and what follows them.
std::int64_t products_of_a_tile(const JvpSpec& spec) {
  const auto count = [](int given, std::int32_t head_dim, std::int32_t keys) {
    return std::int64_t{given} * (head_dim / 16) * (keys / 8);
  };
  return count(1 + int{spec.has_q_tangent} + int{spec.has_k_tangent}, spec.head_dim_qk,
               spec.tile_kv) +
         count(2 + int{spec.has_v_tangent}, spec.tile_kv, spec.head_dim_v);
}

/// Bytes of stores and loads: 255 registers hold O and T of 128 columns, S and S' of 32 keys, but for a few.
constexpr int kMostSpilled = 32;
/// With nothing but Q' beside them, or O and T of 256 columns in f32, ptxas loads further ahead than it has registers.
constexpr int kMostSpilledAhead = 192;

/// Turing multiplies f16, in halves of the others' depth.
constexpr jit::Architecture kTuring{.major = 7, .minor = 5};

std::vector<jit::Architecture> architectures_of(const Posed& posed) {
  std::vector<jit::Architecture> all =
      of_this_run({{.major = 8, .minor = 0}, {.major = 9, .minor = 0}});
  if (posed.dtype == Dtype::f16) all.push_back(kTuring);
  return all;
}

class JvpSpecs : public ::testing::TestWithParam<Posed> {};

TEST_P(JvpSpecs, SpillNextToNothingAndMultiplyATileOnce) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  for (const jit::Architecture architecture : architectures_of(GetParam())) {
    const DeviceTraits device = typical_device(architecture.major, architecture.minor);
    const JvpPlan plan = choose_jvp(validated(GetParam()), device);
    ASSERT_NE(plan.candidate, "");
    const jit::KernelText text = planned_kernels(plan).front().text;
    const jit::Cubin& cubin = compiled(text, architecture);
    EXPECT_LE(cubin.report.spill_bytes, GetParam().loads_ahead ? kMostSpilledAhead : kMostSpilled)
        << text.label << " for " << architecture.major << "." << architecture.minor << ", "
        << cubin.report.registers << " registers, " << cubin.report.compile_ms << " ms";
    if (plan.candidate != Sm80Jvp::kName) continue;
    const auto code = machine_code(cubin);
    if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
    const bool has_halves = architecture == kTuring;
    EXPECT_EQ(count(*code, has_halves ? "HMMA.1688.F32" : "HMMA.16816.F32"),
              (has_halves ? 2 : 1) * products_of_a_tile(plan.spec))
        << text.label;
  }
}

std::vector<Posed> posed_problems() {
  std::vector<Posed> all = {
      {.name = "d64_f32", .head_dim = 64, .dtype = Dtype::f32},
      {.name = "d128_f32", .dtype = Dtype::f32},
      {.name = "d512", .head_dim = 512, .loads_ahead = true},
      {.name = "d192_128", .head_dim = 192, .head_dim_v = 128},
      {.name = "d40", .head_dim = 40},
      {.name = "d128_queries", .moves_queries_alone = true, .loads_ahead = true}};
  static const float nothing = 0;
  const ScoreMod slopes = parse_score_mod(
      "score + slopes[q_head] * (kv_idx - q_idx)",
      {.tensors = {{"slopes", TensorView(&nothing, make_spec(Dtype::f32,
                                                             std::array<std::int64_t, 1>{16}))}}});
  for (const std::int64_t head_dim : {64, 128, 256}) {
    const auto add = [&](const char* name, Posed posed) {
      posed.name = fmt::format("d{}_{}", head_dim, name);
      posed.head_dim = head_dim;
      all.push_back(std::move(posed));
    };
    add("full", {});
    add("causal", {.mask = causal()});
    add("f16", {.dtype = Dtype::f16});
    add("softcap", {.score = softcap(30)});
    add("slopes", {.mask = window(1024, 0), .score = slopes});
    add("dropout", {.dropout_p = 0.1F});
    add("packed", {.mask = causal(), .is_packed = true});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, JvpSpecs, ::testing::ValuesIn(posed_problems()),
                         [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace fovea::cuda
