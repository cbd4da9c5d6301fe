// Packed queries over a cache: every kernel of such plans compiles and spills nothing, also those beside the main one.
#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <ostream>
#include <string>
#include <utility>

#include "compile/cuda/compiler.hpp"
#include "cuda/append/append_to_cache.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/pages/rank_pages.hpp"
#include "cuda/prefix/prefix_places.hpp"
#include "cuda/rotary/rotary.hpp"
#include "cuda/sum/sum_parts.hpp"
#include "problem/decode.hpp"
#include "problem/forward.hpp"
#include "problem/shared_prefix.hpp"

namespace fovea::cuda {
namespace {

struct Packed {
  const char* name;
  std::int64_t max_seqlen_q;
  bool is_paged = true;
  Dtype dtype = Dtype::bf16;
  const char* on_hopper = "";
};

void PrintTo(const Packed& packed, std::ostream* out) { *out << packed.name; }

/// 32 q heads on 8.
ForwardPlan plan_of(const Packed& packed, const DeviceTraits& device) {
  Problem problem;
  problem.q = make_spec(packed.dtype, std::array<std::int64_t, 3>{512, 32, 128});
  problem.k = problem.v = make_spec(packed.dtype, std::array<std::int64_t, 3>{32768, 8, 128});
  problem.num_sequences = 64;
  problem.seqlen_q = up_to(packed.max_seqlen_q);
  problem.seqlen_kv = up_to(32768);
  problem.wants_lse = true;
  problem.mask = causal();
  ForwardProblem f = validate(problem, "test");
  f.is_cached = true;
  f.is_paged = packed.is_paged;
  f.cache = {.page_size = packed.is_paged ? 16 : 0, .has_aligned_rows = true};
  return choose_forward(f, device);
}

class PackedSpecs : public ::testing::TestWithParam<Packed> {};

TEST_P(PackedSpecs, CompileAndSpillNothing) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  for (const jit::Architecture architecture :
       {jit::Architecture{.major = 8, .minor = 0}, {.major = 9, .minor = 0}}) {
    const ForwardPlan plan =
        plan_of(GetParam(), typical_device(architecture.major, architecture.minor));
    EXPECT_TRUE(architecture.major != 9 || plan.candidate == GetParam().on_hopper)
        << plan.candidate;
    for (const PlannedKernel& kernel : planned_kernels(plan)) {
      const jit::Cubin& cubin = compiled(kernel.text, architecture);
      EXPECT_EQ(cubin.report.spill_bytes, 0) << kernel.text.label;
      EXPECT_EQ(cubin.report.num_wgmma_notes, 0) << kernel.text.label;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, PackedSpecs,
    ::testing::Values(
        Packed{.name = "decode", .max_seqlen_q = 1, .on_hopper = "cuda/sm90/decode"},
        Packed{.name = "decode_slots",
               .max_seqlen_q = 4,
               .is_paged = false,
               .on_hopper = "cuda/sm90/decode"},
        Packed{.name = "few_rows", .max_seqlen_q = 16, .on_hopper = "cuda/sm90/decode"},
        Packed{.name = "chunks", .max_seqlen_q = 512, .on_hopper = "cuda/sm90/attention_forward"},
        Packed{.name = "chunks_of_slots",
               .max_seqlen_q = 512,
               .is_paged = false,
               .on_hopper = "cuda/sm90/attention_forward"},
        Packed{.name = "f32",
               .max_seqlen_q = 8,
               .dtype = Dtype::f32,
               .on_hopper = "cuda/sm80/attention_forward_f32"}),
    [](const auto& each) { return std::string(each.param.name); });

TEST(PackedSpecs, TheAppendKernelSpillsNothing) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const jit::Cubin& cubin = compiled(append_text(), {.major = 8, .minor = 0});
  EXPECT_EQ(cubin.report.spill_bytes, 0);
}

/// 64 sequences of one query over pages: what both calls of a shared prefix load.
AttentionDecode decode_step() {
  const auto spec = [](std::initializer_list<std::int64_t> shape, Dtype dtype = Dtype::bf16) {
    return TensorView(static_cast<void*>(nullptr), make_spec(dtype, {shape.begin(), shape.size()}));
  };
  AttentionDecode args{.q = spec({64, 1, 32, 128}),
                       .cache = {.k = spec({4096, 16, 8, 128}),
                                 .v = spec({4096, 16, 8, 128}),
                                 .page_table = spec({64, 512}, Dtype::i32),
                                 .seqlens = spec({64}, Dtype::i32)},
                       .out = spec({64, 1, 32, 128})};
  args.shared_prefix.seqlen = 4096;
  return args;
}

TEST(SharedPrefixSpecs, CompileAndSpillNothing) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const jit::Architecture hopper{.major = 9, .minor = 0};
  const ScoreMod cap =
      parse_score_mod("cap * tanh(score / cap)", {.tensors = {tensor_slot("cap", Dtype::f32, 0)}});
  // The second reads a table of rows.
  for (const auto& [score, mask] : {std::pair{cap, causal()}, {ScoreMod(), window(1000, 0)}}) {
    AttentionDecode args = decode_step();
    args.score = score;
    args.mask = mask;
    const PrefixCalls calls =
        split_at_prefix(args, args.q, prefix_programs(args.score, args.mask, false), nullptr);
    for (const auto& [call, expected] : {std::pair{&calls.prefix, "cuda/sm90/attention_forward"},
                                         std::pair{&calls.suffix, "cuda/sm90/decode"}}) {
      const ForwardProblem f = validate_decode_problem(decode_problem(*call, 4096, 0, "test"),
                                                       cache_layout(*call), "test");
      const ForwardPlan plan = choose_forward(f, typical_device(9, 0));
      EXPECT_EQ(plan.candidate, expected);
      for (const PlannedKernel& kernel : planned_kernels(plan))
        EXPECT_EQ(compiled(kernel.text, hopper).report.spill_bytes, 0) << kernel.text.label;
    }
  }
  for (const jit::KernelText& text : {prefix_text(), rank_pages_text(), rotary_text(), sum_text()})
    EXPECT_EQ(compiled(text, hopper).report.spill_bytes, 0) << text.label;
}

}  // namespace
}  // namespace fovea::cuda
