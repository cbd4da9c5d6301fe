// Kernels over caches of codes: registers suffice, and codes become operands in as few instructions as there should be.
#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <string>

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"
#include "cuda/device/shared/split.h"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/sm80_decode_coded.hpp"
#include "cuda/forward/sm90_coded.hpp"
#include "cuda/forward/sm90_converted.hpp"
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

ForwardPlan plan_of(const Shape& shape, bool has_left_padding = false) {
  Problem problem;
  problem.q =
      make_spec(Dtype::bf16, std::array<std::int64_t, 4>{2, shape.seqlen_q, 32, shape.head_dim});
  problem.k = problem.v =
      make_spec(shape.codes, std::array<std::int64_t, 4>{2, 32768, 8, shape.head_dim});
  problem.out = problem.q;
  problem.mask = causal();
  const CacheLayout cache{
      .page_size = shape.page_size, .has_left_padding = has_left_padding, .has_aligned_rows = true};
  return choose_forward(validate_decode_problem(problem, cache, "test"),
                        shape.is_hopper ? typical_device(9, 0) : typical_device(8, 0));
}

jit::Cubin compiled_for(const ForwardPlan& plan, bool is_hopper) {
  return compiled(planned_kernels(plan).front().text, {.major = is_hopper ? 9 : 8, .minor = 0});
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
  EXPECT_EQ(plan.spec->most_splits, kMostSplits / 4) << "few, however few the rows are";
  const jit::Cubin cubin = compiled_for(plan, true);
  EXPECT_EQ(cubin.report.spill_bytes, 0);
  const auto code = machine_code(cubin);
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  // Of 16 keys and 16 columns: values are multiplied by each eight rows, m16n8k16; keys of e4m3 by all rows in two
  // products, keys of int8 by each eight in one, or half of two of m16n8k32, whose operand is the code.
  const std::int64_t blocks = plan.spec->tile_kv * GetParam().head_dim / (16 * 16);
  const bool is_int8 = GetParam().codes == Dtype::i8;
  const bool has_few = has_few_rows(plan.spec.as<Sm90DecodeSpec>());
  EXPECT_EQ(has_few, 4 * GetParam().seqlen_q <= kFewDecodeRows);
  const int eights = has_few ? 1 : 2;
  EXPECT_EQ(count(*code, "HMMA.16816.F32 "), blocks * (eights + (is_int8 ? 0 : 2)));
  EXPECT_EQ(count(*code, "IMMA.16832.S8.S8 "), is_int8 ? blocks * eights : 0);
  // Four pairs of values become f16, and of keys of e4m3.
  EXPECT_EQ(count(*code, "F2FP.F16.E4M3.UNPACK_B"), is_int8 ? 0 : 8 * blocks);
  EXPECT_EQ(count(*code, "HADD2 "), is_int8 ? 4 * blocks : 0);
}

INSTANTIATE_TEST_SUITE_P(All, HopperCodedSpecs,
                         ::testing::Values(Shape{.name = "int8",
                                                 .codes = Dtype::i8,
                                                 .head_dim = 128,
                                                 .seqlen_q = 1,
                                                 .is_hopper = true},
                                           Shape{.name = "int8_many_rows",
                                                 .codes = Dtype::i8,
                                                 .head_dim = 128,
                                                 .seqlen_q = 3,
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

class HopperChunkSpecs : public ::testing::TestWithParam<Shape> {};

TEST_P(HopperChunkSpecs, SpillNothing) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const ForwardPlan plan = plan_of(GetParam(), /*has_left_padding=*/true);
  ASSERT_EQ(plan.candidate, Sm90ForwardCoded::kName);
  const jit::Cubin cubin = compiled_for(plan, true);
  EXPECT_EQ(cubin.report.num_wgmma_notes, 0);
  EXPECT_EQ(cubin.report.spill_bytes, 0);
  const auto code = machine_code(cubin);
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  // Of int8 a byte becomes a float by one instruction.
  const bool is_int8 = GetParam().codes == Dtype::i8;
  EXPECT_EQ(count(*code, "PRMT") >= GetParam().head_dim, is_int8);
  EXPECT_EQ(count(*code, "F2FP.F16.E4M3.UNPACK_B") >= GetParam().head_dim / 4, !is_int8);
}

/// Three CTAs of an SM keep memory busy.
TEST_P(HopperChunkSpecs, ConvertBeforehand) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const ForwardPlan plan = plan_of(GetParam());
  ASSERT_EQ(plan.candidate, Sm90ForwardConverted::kName);
  const jit::Cubin cubin = compiled(numbers_of_codes_text(*plan.numbers), {.major = 9, .minor = 0});
  EXPECT_EQ(cubin.report.spill_bytes, 0);
  EXPECT_LE(cubin.report.registers, 65536 / (3 * kNumbersThreads));
}

INSTANTIATE_TEST_SUITE_P(All, HopperChunkSpecs,
                         ::testing::Values(Shape{.name = "int8_pages",
                                                 .codes = Dtype::i8,
                                                 .head_dim = 128,
                                                 .seqlen_q = 512,
                                                 .is_hopper = true},
                                           Shape{.name = "e4m3_slots",
                                                 .codes = Dtype::e4m3,
                                                 .head_dim = 128,
                                                 .seqlen_q = 512,
                                                 .is_hopper = true,
                                                 .page_size = 0},
                                           Shape{.name = "int8_d64",
                                                 .codes = Dtype::i8,
                                                 .head_dim = 64,
                                                 .seqlen_q = 64,
                                                 .is_hopper = true}),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace fovea::cuda
