// Kernels of gradients: every kernel of such plans compiles, and spills no more than a few registers before its walk.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"
#include "cuda/backward/attention_backward.hpp"
#include "cuda/backward/sm100.hpp"
#include "cuda/backward/sm80.hpp"
#include "cuda/backward/sm80_one_walk.hpp"
#include "cuda/backward/sm90.hpp"
#include "cuda/backward/sm90_wide.hpp"
#include "problem/backward.hpp"

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
  bool is_in_any_order = false;
  bool wants_captured = false;  // gradients of what the program captures
};

void PrintTo(const Posed& posed, std::ostream* out) { *out << posed.name; }

GradientProblem validated(const Posed& posed) {
  const std::int64_t head_dim_v = posed.head_dim_v > 0 ? posed.head_dim_v : posed.head_dim;
  const auto spec = [&](std::int64_t heads, std::int64_t head_dim) {
    if (posed.is_packed)
      return make_spec(posed.dtype, std::array<std::int64_t, 3>{8192, heads, head_dim});
    return make_spec(posed.dtype, std::array<std::int64_t, 4>{2, 4096, heads, head_dim});
  };
  BackwardProblem problem;
  problem.forward.q = problem.dq = spec(16, posed.head_dim);
  problem.forward.k = problem.dk = spec(4, posed.head_dim);
  problem.forward.v = problem.dv = spec(4, head_dim_v);
  problem.forward.out = problem.dout = spec(16, head_dim_v);
  problem.forward.mask = posed.mask;
  problem.forward.score = posed.score;
  problem.forward.dropout.p = posed.dropout_p;
  problem.forward.has_sinks = problem.wants_dsinks = true;
  problem.forward.is_deterministic = !posed.is_in_any_order;
  if (posed.wants_captured) {
    for (const CapturedTensor& each : posed.score.captures().tensors) {
      std::vector<std::int64_t> shape;
      for (int dim = 0; dim < each.view.rank(); ++dim) shape.push_back(each.view.size(dim));
      if (shape.empty()) shape = {1};
      problem.dcaptured.push_back({each.name, make_spec(Dtype::f32, shape)});
    }
  }
  if (posed.is_packed) {
    problem.forward.num_sequences = 8;
    problem.forward.seqlen_q = problem.forward.seqlen_kv = up_to(4096);
  }
  return validate(problem, "test");
}

BackwardPlan plan_of(const Posed& posed, const DeviceTraits& device) {
  return choose_backward(validated(posed), device);
}

std::vector<Posed> posed_problems() {
  std::vector<Posed> all = {{.name = "d64_f32", .head_dim = 64, .dtype = Dtype::f32},
                            {.name = "d512", .head_dim = 512}};
  all.push_back({.name = "d128"});
  for (const std::int64_t head_dim : {64, 128, 256}) {
    all.push_back(
        {.name = fmt::format("d{}_causal", head_dim), .head_dim = head_dim, .mask = causal()});
  }
  all.push_back({.name = "d192_128", .head_dim = 192, .head_dim_v = 128});
  for (const std::int64_t head_dim : {64, 128}) {
    const auto tail = [&](const char* name) { return fmt::format("d{}_{}", head_dim, name); };
    all.push_back({.name = tail("softcap"), .head_dim = head_dim, .score = softcap(30)});
    all.push_back({.name = tail("dropout"), .head_dim = head_dim, .dropout_p = 0.1F});
    all.push_back(
        {.name = tail("packed"), .head_dim = head_dim, .mask = causal(), .is_packed = true});
    all.push_back({.name = tail("f16"), .head_dim = head_dim, .dtype = Dtype::f16});
  }
  return all;
}

/// A captured tensor of floats that nothing reads: only its shape counts here.
TensorView shaped(const std::vector<std::int64_t>& shape) {
  static const float nothing = 0;
  return TensorView(&nothing, make_spec(Dtype::f32, shape));
}

/// Ids that nothing reads: only their shape counts here.
MaskMod two_rows_of_documents() {
  return documents(TensorView(static_cast<const void*>(nullptr),
                              make_spec(Dtype::i32, std::array<std::int64_t, 2>{2, 4096})));
}

/// Programs whose captured data is read in every order: a bias, a table by distance and slopes, keys and a temperature.
std::vector<Posed> posed_captured() {
  const auto of_text = [](std::string_view text, const fovea::Captures& captures) {
    return parse_score_mod(text, captures);
  };
  const ScoreMod dense = bias(shaped({16, 4096, 4096}));
  const ScoreMod distances =
      of_text("score + table[q_head, q_idx - kv_idx + 256] + slopes[q_head] * (kv_idx - q_idx)",
              {.tensors = {{"table", shaped({16, 512})}, {"slopes", shaped({16})}}});
  const ScoreMod keys = of_text("score * exp(t) + bias[kv_idx]",
                                {.tensors = {{"t", shaped({})}, {"bias", shaped({4096})}}});
  std::vector<Posed> all;
  for (const std::int64_t head_dim : {64, 128, 256, 512}) {
    const auto tail = [&](const char* name) { return fmt::format("d{}_{}", head_dim, name); };
    const auto add = [&](const char* name, const ScoreMod& score) {
      all.push_back({.name = tail(name),
                     .head_dim = head_dim,
                     .mask = causal(),
                     .score = score,
                     .wants_captured = true});
    };
    add("bias", dense);
    add("distances", distances);
    add("keys", keys);
  }
  all.push_back({.name = "d64_f32_distances",
                 .head_dim = 64,
                 .dtype = Dtype::f32,
                 .score = distances,
                 .wants_captured = true});
  all.push_back({.name = "d128_f16_packed_dropped_bias",
                 .dtype = Dtype::f16,
                 .score = dense,
                 .dropout_p = 0.1F,
                 .is_packed = true,
                 .wants_captured = true});
  return all;
}

/// Bytes of stores and loads: 255 registers hold the sums of dk and dv of 128 and S and dP of 64 queries, but for
/// eight; a cap, which reads a score and its magnitude, wants most.
constexpr int kMostSpilled = 40;

class BackwardSpecs : public ::testing::TestWithParam<Posed> {};

TEST_P(BackwardSpecs, CompileAndSpillNextToNothing) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  for (const jit::Architecture architecture :
       of_this_run({{.major = 8, .minor = 0}, {.major = 9, .minor = 0}})) {
    const DeviceTraits device = typical_device(architecture.major, architecture.minor);
    BackwardPlan plan = plan_of(GetParam(), device);
    ASSERT_NE(plan.candidate, "");
    // HopperBackwardSpecs and OneWalkSpecs are of others.
    if (plan.candidate == Sm90Backward::kName || plan.candidate == Sm80OneWalk::kName)
      plan = choose_backward_by(Sm80Backward::kName, validated(GetParam()), device);
    for (const PlannedKernel& kernel : planned_kernels(plan)) {
      const jit::Cubin& cubin = compiled(kernel.text, architecture);
      EXPECT_LE(cubin.report.spill_bytes, kMostSpilled)
          << kernel.text.label << " for " << architecture.major << "." << architecture.minor << ", "
          << cubin.report.registers << " registers, " << cubin.report.compile_ms << " ms";
    }
  }
}

/// Two registers around the formula of a mask, on tiles that it cuts; a loop over tiles and calls around a kernel of
/// sm_80, which hardly ever runs.
constexpr int kMostSpilledByMasks = 16, kMostSpilledAgain = 144;
/// With the store of elements in place, at every pair of a thread's sums, such a kernel had 150 KB and took 1.5 s to
/// compile, longer than all else that a step of training needs.
constexpr std::size_t kMostBytesAgain = std::size_t{120} << 10U;
/// By turns the warp that loads has 32 registers, and asks for ranges of ids on its way.
constexpr int kMostSpilledByRanges = 392;
/// Sums of head_dim 128 leave too few registers for the bits of dropout, and for what a program loads for each score.
constexpr int kMostSpilledByDropout = 112, kMostSpilledByLoads = 88;
/// And where dS goes to memory too.
constexpr int kMostSpilledByPairs = 108;

/// A register: in f16 under a mask, and beside the program of packed rows.
constexpr int kMostSpilledByF16 = 8, kMostSpilledByPackedPrograms = 8;

int most_spilled(const Posed& posed, const Sm90BackwardSpec& spec) {
  if (spec.head_dim_qk == 128 && spec.has_dropout) return kMostSpilledByDropout;
  if (spec.stores_pairs && spec.head_dim_qk == 128) return kMostSpilledByPairs;
  if (posed.name.ends_with("bias")) return kMostSpilledByLoads;
  if (posed.name.ends_with("documents") && spec.is_deterministic) return kMostSpilledByRanges;
  if (posed.mask == causal() && posed.dtype == Dtype::f16) return kMostSpilledByF16;
  if (posed.mask != MaskMod() && posed.mask != causal()) return kMostSpilledByMasks;
  return posed.is_packed && posed.score != ScoreMod() ? kMostSpilledByPackedPrograms : 0;
}

/// sm90/attention_backward: both of its forms.
class HopperBackwardSpecs : public ::testing::TestWithParam<Posed> {};

TEST_P(HopperBackwardSpecs, SpillNothingAndMultiplyATileOnce) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const BackwardPlan plan =
      choose_backward_by(Sm90Backward::kName, validated(GetParam()), typical_device(9, 0));
  for (const PlannedKernel& kernel : planned_kernels(plan)) {
    if (kernel.role == KernelRole::delta || kernel.role == KernelRole::sinks) continue;
    const jit::Cubin& cubin = compiled(kernel.text, {.major = 9, .minor = 0});
    if (kernel.role == KernelRole::redo_keys || kernel.role == KernelRole::redo_queries ||
        kernel.role == KernelRole::captured_tiles) {
      EXPECT_LE(cubin.report.spill_bytes, kMostSpilledAgain) << kernel.text.label;
      EXPECT_LE(cubin.image.size(), kMostBytesAgain) << kernel.text.label;
      continue;
    }
    const auto& spec = plan.steps.front().spec.as<Sm90BackwardSpec>();
    const int most = kernel.role == KernelRole::main ? most_spilled(GetParam(), spec) : 0;
    EXPECT_LE(cubin.report.spill_bytes, most) << kernel.text.label;
    EXPECT_LE(cubin.report.local_bytes, most) << kernel.text.label;
    EXPECT_EQ(cubin.report.num_wgmma_notes, 0) << cubin.report.log;
    if (kernel.role != KernelRole::main) continue;
    const auto code = machine_code(cubin);
    if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
    const int depth = spec.head_dim_qk / 16;
    std::map<std::string, int> products;
    const auto expect = [&](int columns, int times) {
      products[fmt::format("HGMMA.64x{}x16.F32", columns)] += times;
    };
    expect(spec.tile_q, 2 * depth + depth);            // scores before the loop and in it, dP
    expect(spec.tile_q, spec.has_dropout ? 0 : 1);     // delta
    expect(spec.head_dim_qk, 2 * (spec.tile_q / 16));  // dk and dv
    expect(64, spec.tile_q * spec.head_dim_qk / (64 * 64) * (kSm90BackwardKeys / 16));  // dq
    for (const auto& [name, times] : products) {
      EXPECT_EQ(count(*code, name), times) << name;
    }
  }
}

std::vector<Posed> posed_to_hopper() {
  std::vector<Posed> all = {
      {.name = "d128"},
      {.name = "d128_any_order", .is_in_any_order = true},
      {.name = "d128_causal", .mask = causal()},
      {.name = "d128_causal_any_order", .mask = causal(), .is_in_any_order = true},
      {.name = "d128_packed_causal", .mask = causal(), .is_packed = true},
      {.name = "d128_window", .mask = window(1024, 0)},
      {.name = "d128_causal_program", .mask = mask_mod([](auto x) { return x.q_idx >= x.kv_idx; })},
      {.name = "d128_blocks", .mask = mask_mod([](auto x) {
                                return x.q_idx / 64 == x.kv_idx / 64 || x.kv_idx % 8 == x.q_head;
                              })},
      {.name = "d128_documents", .mask = two_rows_of_documents()},
      {.name = "d128_any_order_documents",
       .mask = two_rows_of_documents(),
       .is_in_any_order = true},
      {.name = "d64_packed", .head_dim = 64, .is_packed = true},
      {.name = "d128_f16_any_order", .dtype = Dtype::f16, .is_in_any_order = true},
      {.name = "d128_f16", .dtype = Dtype::f16},
      {.name = "d128_f16_causal", .dtype = Dtype::f16, .mask = causal()},
      {.name = "d64_f16", .head_dim = 64, .dtype = Dtype::f16},
      {.name = "d64_f16_any_order", .head_dim = 64, .dtype = Dtype::f16, .is_in_any_order = true},
      {.name = "d64_f16_causal", .head_dim = 64, .dtype = Dtype::f16, .mask = causal()},
      {.name = "d64", .head_dim = 64},
      {.name = "d64_any_order", .head_dim = 64, .is_in_any_order = true},
      {.name = "d64_causal", .head_dim = 64, .mask = causal()}};
  const ScoreMod distances = alibi(shaped({16})), dense = bias(shaped({16, 4096, 4096}));
  for (const std::int64_t head_dim : {64, 128}) {
    for (const bool is_in_any_order : {false, true}) {
      const auto add = [&](const char* name, Posed posed) {
        posed.name = fmt::format("d{}{}_{}", head_dim, is_in_any_order ? "_any_order" : "", name);
        posed.head_dim = head_dim;
        posed.is_in_any_order = is_in_any_order;
        all.push_back(std::move(posed));
      };
      add("softcap", {.score = softcap(30)});
      add("causal_softcap", {.mask = causal(), .score = softcap(30)});
      add("alibi", {.score = distances});
      add("causal_alibi", {.mask = causal(), .score = distances});
      add("causal_bias", {.mask = causal(), .score = dense});
      add("dropout", {.dropout_p = 0.1F});
      add("causal_dropout", {.mask = causal(), .dropout_p = 0.1F});
    }
  }
  all.push_back({.name = "d128_learned_bias", .score = dense, .wants_captured = true});
  all.push_back(
      {.name = "d128_packed_softcap", .mask = causal(), .score = softcap(30), .is_packed = true});
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, HopperBackwardSpecs, ::testing::ValuesIn(posed_to_hopper()),
                         [](const auto& each) { return each.param.name; });

struct PosedToBlackwell {
  Posed posed;
  int minor;  // of compute capability 10
};

void PrintTo(const PosedToBlackwell& each, std::ostream* out) { *out << each.posed.name; }

/// sm100/attention_backward.
class BlackwellBackwardSpecs : public ::testing::TestWithParam<PosedToBlackwell> {};

TEST_P(BlackwellBackwardSpecs, SpillNothingAndMultiplyATileOnce) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const auto& [posed, minor] = GetParam();
  const BackwardPlan plan =
      choose_backward_by(Sm100Backward::kName, validated(posed), typical_device(10, minor));
  const PlannedKernels kernels = planned_kernels(plan);
  const auto main = std::ranges::find(kernels, KernelRole::main, &PlannedKernel::role);
  const jit::Cubin& cubin = compiled(main->text, {.major = 10, .minor = minor});
  EXPECT_EQ(cubin.report.spill_bytes, 0);
  EXPECT_LE(cubin.report.compile_ms, 6000);  // on a busy machine; alone a third of it
  const auto code = machine_code(cubin);
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  const auto& spec = plan.steps.front().spec.as<Sm100BackwardSpec>();
  const int depth = spec.head_dim_qk / 16;
  const int scores = 2 * depth;     // before the loop and in it
  const int gradients = 2 * depth;  // of the first tile and of others
  const int sums = 2 * (spec.tile_q / 16) + kSm90BackwardKeys / 16;  // dv and dk, dq
  EXPECT_EQ(count(*code, "UTCHMMA"), scores + gradients + sums);
  EXPECT_EQ(count(*code, "STTM.x16"), 4);  // P and dS, half at a time
}

INSTANTIATE_TEST_SUITE_P(
    All, BlackwellBackwardSpecs,
    ::testing::Values(
        PosedToBlackwell{{.name = "d128_causal", .mask = causal()}, 0},
        PosedToBlackwell{
            {.name = "d64_packed_causal_103", .head_dim = 64, .mask = causal(), .is_packed = true},
            3}),
    [](const auto& each) { return each.param.posed.name; });

/// Words of dropout beside sums of head_dim 256; what a mask loads, on tiles that it cuts.
constexpr int kMostSpilledByWideDropout = 160, kMostSpilledByWideParts = 8;

/// sm90/attention_backward_wide: both of its walks.
class WideHopperBackwardSpecs : public ::testing::TestWithParam<Posed> {};

TEST_P(WideHopperBackwardSpecs, SpillNothingAndMultiplyATileOnce) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const BackwardPlan plan =
      choose_backward_by(Sm90WideBackward::kName, validated(GetParam()), typical_device(9, 0));
  for (const PlannedKernel& kernel : planned_kernels(plan)) {
    const auto step = std::ranges::find(plan.steps, kernel.role, &BackwardStep::role);
    if (step == plan.steps.end() || step->is_redo()) continue;
    const jit::Cubin& cubin = compiled(kernel.text, {.major = 9, .minor = 0});
    const int most = step->spec->has_dropout                  ? kMostSpilledByWideDropout
                     : GetParam().name.ends_with("documents") ? kMostSpilledByWideParts
                                                              : 0;
    EXPECT_LE(cubin.report.spill_bytes, most) << kernel.text.label;
    EXPECT_LE(cubin.report.local_bytes, most) << kernel.text.label;
    EXPECT_EQ(cubin.report.num_wgmma_notes, 0) << cubin.report.log;
    if (!step->is_walk()) continue;
    const auto code = machine_code(cubin);
    if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
    const auto& spec = step->spec.as<Sm90WideBackwardSpec>();
    std::map<std::string, int> products;
    const auto expect = [&](int columns, int times) {
      products[fmt::format("HGMMA.64x{}x16.F32", columns)] += times;
    };
    // Scores before the loop and in it, and of keys dP; sums of 64 walked rows.
    expect(64, 2 * spec.head_dim_qk / 16 + (spec.owns_keys ? 2 : 1) * spec.head_dim_v / 16);
    expect(spec.head_dim_qk, 4);
    if (spec.owns_keys) expect(spec.head_dim_v, 4);
    for (const auto& [name, times] : products) EXPECT_EQ(count(*code, name), times) << name;
  }
}

std::vector<Posed> posed_to_wide_hopper() {
  return {{.name = "d256", .head_dim = 256},
          {.name = "d256_documents", .head_dim = 256, .mask = two_rows_of_documents()},
          {.name = "d192_128_causal", .head_dim = 192, .mask = causal(), .head_dim_v = 128},
          {.name = "d256_f16_packed_causal",
           .head_dim = 256,
           .dtype = Dtype::f16,
           .mask = causal(),
           .is_packed = true},
          {.name = "d256_causal_softcap", .head_dim = 256, .mask = causal(), .score = softcap(30)},
          {.name = "d256_dropout", .head_dim = 256, .dropout_p = 0.1F}};
}

INSTANTIATE_TEST_SUITE_P(All, WideHopperBackwardSpecs, ::testing::ValuesIn(posed_to_wide_hopper()),
                         [](const auto& each) { return each.param.name; });

/// Stores and loads: addresses that the compiler keeps across a tile, and what a mask's walk knows. Without them the
/// kernel is slower: docs/kernels/attention_backward_sm80.md.
constexpr int kMostSpilledByOneWalk = 176;

/// sm80/attention_backward_one_walk, and what runs around it.
class OneWalkSpecs : public ::testing::TestWithParam<Posed> {};

TEST_P(OneWalkSpecs, SpillNextToNothingAndMultiplyATileOnce) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  for (const jit::Architecture architecture :
       of_this_run({{.major = 8, .minor = 0}, {.major = 9, .minor = 0}})) {
    const BackwardPlan plan =
        choose_backward_by(Sm80OneWalk::kName, validated(GetParam()),
                           typical_device(architecture.major, architecture.minor));
    for (const PlannedKernel& kernel : planned_kernels(plan)) {
      const auto step = std::ranges::find(plan.steps, kernel.role, &BackwardStep::role);
      if (step == plan.steps.end()) continue;
      if (step->is_redo() && architecture.major != 8) continue;
      const jit::Cubin& cubin = compiled(kernel.text, architecture);
      EXPECT_LE(cubin.report.spill_bytes, step->is_redo()   ? kMostSpilledAgain
                                          : step->is_walk() ? kMostSpilledByOneWalk
                                                            : 0)
          << kernel.text.label << " for " << architecture.major << "." << architecture.minor << ", "
          << cubin.report.registers << " registers, " << cubin.report.compile_ms << " ms";
      if (!step->is_walk()) continue;
      const auto code = machine_code(cubin);
      if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
      const auto& spec = step->spec.as<Sm80BackwardSpec>();
      constexpr int kElementsOfProduct = 16 * 8 * 16;
      const int products = spec.tile_owned * spec.tile_walked / kElementsOfProduct *
                           (3 * spec.head_dim_qk + 2 * spec.head_dim_v) / spec.num_warps;
      EXPECT_EQ(count(*code, "HMMA.16816.F32"), products);
    }
  }
}

std::vector<Posed> posed_to_one_walk() {
  return {{.name = "d128"},
          {.name = "d128_causal_any_order", .mask = causal(), .is_in_any_order = true},
          {.name = "d128_packed_causal", .mask = causal(), .is_packed = true},
          {.name = "d128_f16_softcap", .dtype = Dtype::f16, .score = softcap(30)},
          {.name = "d64_causal", .head_dim = 64, .mask = causal()},
          {.name = "d256_any_order", .head_dim = 256, .is_in_any_order = true}};
}

INSTANTIATE_TEST_SUITE_P(All, OneWalkSpecs, ::testing::ValuesIn(posed_to_one_walk()),
                         [](const auto& each) { return each.param.name; });

/// Of steps that are beside those of the candidate: nothing is spilled.
class CapturedSpecs : public ::testing::TestWithParam<Posed> {};

/// Bytes of a thread of captured_tiles, for three of whose CTAs 168 registers are left: a few of the addresses that its
/// loads need at once.
constexpr int kMostSpilledByTiles = 48;

TEST_P(CapturedSpecs, CompileAndSpillNextToNothing) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  for (const jit::Architecture architecture : of_this_run({{.major = 8, .minor = 0},
                                                           {.major = 8, .minor = 9},
                                                           {.major = 9, .minor = 0},
                                                           {.major = 10, .minor = 0},
                                                           {.major = 12, .minor = 0}})) {
    const DeviceTraits device = typical_device(architecture.major, architecture.minor);
    PlannedKernels kernels;
    add_captured_kernels(plan_of(GetParam(), device).captured, kernels);
    ASSERT_FALSE(kernels.empty());
    for (const PlannedKernel& kernel : kernels) {
      const jit::Cubin& cubin = compiled(kernel.text, architecture);
      const bool are_tiles = kernel.role == KernelRole::captured_tiles;
      EXPECT_LE(cubin.report.spill_bytes, are_tiles ? 3 * kMostSpilledByTiles : 0)
          << kernel.text.label << " for " << architecture.major << "." << architecture.minor << ", "
          << cubin.report.registers << " registers, " << cubin.report.compile_ms << " ms";
      // Its sums are registers. In the others the walk over tiles has a few words of a stack.
      if (are_tiles) {
        EXPECT_LE(cubin.report.local_bytes, kMostSpilledByTiles) << kernel.text.label;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, CapturedSpecs, ::testing::ValuesIn(posed_captured()),
                         [](const auto& each) { return each.param.name; });

INSTANTIATE_TEST_SUITE_P(All, BackwardSpecs, ::testing::ValuesIn(posed_problems()),
                         [](const auto& each) { return each.param.name; });

}  // namespace
}  // namespace fovea::cuda
