// Kernels over caches of codes: registers suffice, and codes become operands in as few instructions as there should be.
#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <string>

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/sm80_decode_coded.hpp"
#include "cuda/forward/sm90_decode_coded.hpp"
#include "problem/decode.hpp"

namespace fovea::cuda {
namespace {

struct Shape {
  const char* name;
  Dtype codes;
  std::int64_t head_dim;
  std::int64_t seqlen_q;   // of four heads for each key head
  bool is_hopper = false;  // else Ampere
  std::int64_t page_size = 16;
};

void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

ForwardPlan plan_of(const Shape& shape) {
  Problem problem;
  problem.q =
      make_spec(Dtype::bf16, std::array<std::int64_t, 4>{2, shape.seqlen_q, 32, shape.head_dim});
  problem.k = problem.v =
      make_spec(shape.codes, std::array<std::int64_t, 4>{2, 32768, 8, shape.head_dim});
  problem.out = problem.q;
  problem.mask = causal();
  const CacheLayout cache{.page_size = shape.page_size, .has_aligned_rows = true};
  return choose_forward(validate_decode_problem(problem, cache, "test"),
                        shape.is_hopper ? typical_device(9, 0) : typical_device(8, 0));
}

jit::Cubin compiled_for(const ForwardPlan& plan, bool is_hopper) {
  return compiler().compile(planned_kernels(plan).front().text,
                            {.major = is_hopper ? 9 : 8, .minor = 0});
}

class CodedSpecs : public ::testing::TestWithParam<Shape> {};

TEST_P(CodedSpecs, SpillNothing) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const ForwardPlan plan = plan_of(GetParam());
  const bool is_decode = GetParam().seqlen_q == 1;
  ASSERT_EQ(plan.candidate, is_decode ? Sm80DecodeCoded::kName : Sm80Coded::kName);
  const jit::Cubin cubin = compiled_for(plan, false);
  EXPECT_EQ(cubin.report.spill_bytes, 0);
  EXPECT_EQ(cubin.report.local_bytes, 0);
  const auto code = machine_code(cubin);
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  if (!is_decode) return;
  // Of 16 keys, for each 16 columns two products of Q K and two of P V.
  EXPECT_EQ(count(*code, "HMMA.16816.F32.BF16"), GetParam().head_dim / 4);
  EXPECT_EQ(count(*code, "0x43004300, RZ, 0xfc"), 0) << "a mask and bits are one instruction";
}

INSTANTIATE_TEST_SUITE_P(All, CodedSpecs,
                         ::testing::Values(Shape{"decode_int8", Dtype::i8, 128, 1},
                                           Shape{"decode_e4m3", Dtype::e4m3, 128, 1},
                                           Shape{"chunk_of_wide_heads", Dtype::i8, 256, 64}),
                         [](const auto& each) { return std::string(each.param.name); });

class HopperCodedSpecs : public ::testing::TestWithParam<Shape> {};

TEST_P(HopperCodedSpecs, ConvertPairs) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const ForwardPlan plan = plan_of(GetParam());
  ASSERT_EQ(plan.candidate, Sm90DecodeCoded::kName);
  const jit::Cubin cubin = compiled_for(plan, true);
  // Slices of 16 keys spill nothing and are 2 to 5 % slower (docs/kernels/decode_coded_sm90.md).
  // 56 bytes are what a causal mask of several queries over pages costs; a single query's is less.
  EXPECT_LE(cubin.report.spill_bytes, GetParam().seqlen_q > 1 ? 56 : 32);
  const auto code = machine_code(cubin);
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  // m16n8k16: each block of 16 keys with head_dim twice.
  const std::int64_t products = plan.spec->tile_kv * GetParam().head_dim / 64;
  EXPECT_EQ(count(*code, "HMMA.16816.F32 "), products);
  // Each product has two pairs of keys or values.
  const bool is_int8 = GetParam().codes == Dtype::i8;
  EXPECT_EQ(count(*code, "F2FP.F16.E4M3.UNPACK_B"), is_int8 ? 0 : 2 * products);
  EXPECT_EQ(count(*code, "HADD2 "), is_int8 ? 2 * products : 0);
}

INSTANTIATE_TEST_SUITE_P(All, HopperCodedSpecs,
                         ::testing::Values(Shape{.name = "int8",
                                                 .codes = Dtype::i8,
                                                 .head_dim = 128,
                                                 .seqlen_q = 1,
                                                 .is_hopper = true},
                                           Shape{.name = "int8_slots",
                                                 .codes = Dtype::i8,
                                                 .head_dim = 128,
                                                 .seqlen_q = 1,
                                                 .is_hopper = true,
                                                 .page_size = 0},
                                           Shape{.name = "e4m3_slots",
                                                 .codes = Dtype::e4m3,
                                                 .head_dim = 64,
                                                 .seqlen_q = 4,
                                                 .is_hopper = true,
                                                 .page_size = 0},
                                           Shape{.name = "e4m3",
                                                 .codes = Dtype::e4m3,
                                                 .head_dim = 128,
                                                 .seqlen_q = 3,
                                                 .is_hopper = true}),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace fovea::cuda
