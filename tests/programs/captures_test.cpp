// What a kernel is given for captured tensors and scalars, and what it cannot be given.
#include "cuda/params/captures.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "cuda/params/range_tables.hpp"

namespace fovea::cuda {
namespace {

using ::testing::HasSubstr;

TensorView matrix(const std::int32_t* data, std::int64_t rows, std::int64_t columns) {
  TensorSpec spec;
  spec.dtype = Dtype::i32;
  spec.rank = 2;
  spec.shape[0] = rows;
  spec.shape[1] = columns;
  spec.strides[0] = columns;
  spec.strides[1] = 1;
  return {data, spec};
}

TEST(CaptureSlots, FollowTheNamesOfEachProgram) {
  const std::vector<std::int32_t> ids(6);
  const ScoreMod score =
      parse_score_mod("min(score, limit) + t",
                      {.scalars = {CapturedScalar::of("limit", 2.5), CapturedScalar::of("t", -3)}});
  const MaskMod mask =
      parse_mask_mod("ids[batch, kv_idx] < limit", {.tensors = {{"ids", matrix(ids.data(), 2, 3)}},
                                                    .scalars = {CapturedScalar::of("limit", 7)}});
  const expr::CudaProgram program = expr::print_cuda(score, mask);
  const Captures captures = CaptureSlots(program, score, mask).bind(score, mask);
  EXPECT_EQ(std::bit_cast<float>(captures.scalars[0]), 2.5F);
  EXPECT_EQ(captures.scalars[1], -3);
  EXPECT_EQ(captures.scalars[2], 7);
  EXPECT_EQ(captures.tensors[0].data, ids.data());
  EXPECT_EQ(captures.tensors[0].shape[1], 3);
  EXPECT_EQ(captures.tensors[0].strides[0], 3);
  EXPECT_EQ(captures.tensors[0].ranges, nullptr);
}

TEST(CaptureSlots, BeyondWhatKernelsTakeAreRefusedByNumber) {
  std::string formula = "score";
  fovea::Captures captures;
  for (int i = 0; i <= kMaxCapturedScalars; ++i) {
    const std::string name = "c" + std::to_string(i);
    captures.scalars.push_back(CapturedScalar::of(name, 0.5 * i));
    formula += " + " + name;
  }
  const auto refusal = captures_refusal(expr::print_cuda(parse_score_mod(formula, captures), {}));
  ASSERT_TRUE(refusal);
  EXPECT_THAT(*refusal, HasSubstr("capture 9 scalars"));
}

TEST(RangeTables, TakeAnEntryForEachRunAndEachGroup) {
  const std::vector<std::int32_t> ids(1);
  const MaskMod mask = documents(matrix(ids.data(), 3, 5000));
  const expr::CudaProgram program = expr::print_cuda({}, mask);
  const Captures captures = CaptureSlots(program, {}, mask).bind({}, mask);
  // 79 runs of 64 positions and 3 groups of 32 runs, 8 bytes each, for 3 lines.
  EXPECT_EQ(RangeTables(program).workspace_bytes(captures), (3 * (79 + 3) * 8 + 255) / 256 * 256);
}

TEST(RangeTables, AreNotNeededByMasksOfPositions) {
  EXPECT_TRUE(RangeTables(expr::print_cuda({}, causal() && window(10, 0))).is_empty());
}

}  // namespace
}  // namespace fovea::cuda
