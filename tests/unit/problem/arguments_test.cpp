// Arguments of packed calls, overlap and outputs: each refusal with its whole message.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "unit/problem/problems.hpp"

namespace fovea::testing {
namespace {

struct PackedCall {
  std::vector<float> q = std::vector<float>(7 * 4 * 8), k = std::vector<float>(9 * 2 * 8),
                     v = std::vector<float>(9 * 2 * 6), out = std::vector<float>(7 * 4 * 6);
  std::vector<std::int32_t> cu_q = {0, 2, 2, 6};  // an empty sequence and a row after the last
  std::vector<std::int64_t> cu_kv = {0, 4, 5, 9};
  AttentionForward args() {
    return {.q = view(q.data(), {7, 4, 8}),
            .k = view(k.data(), {9, 2, 8}),
            .v = view(v.data(), {9, 2, 6}),
            .out = view(out.data(), {7, 4, 6}),
            .cu_seqlens_q = view(cu_q.data(), {4}),
            .cu_seqlens_kv = view(cu_kv.data(), {4})};
  }
};

std::string refusal_of(const AttentionForward& args, Problem problem = packed_problem()) {
  return refusal([&] { validate_arguments(validate(problem, "plan"), args, "run"); });
}

TEST(Arguments, EmptySequencesAndTrailingRowsAreLegal) {
  PackedCall call;
  EXPECT_EQ(refusal_of(call.args()), "(not refused)");
}

TEST(Arguments, CuSeqlensThatAreNoOffsetsAreRefused) {
  const auto with = [](std::vector<std::int32_t> cu, std::optional<UpTo> bound = {}) {
    PackedCall call;
    call.cu_q = std::move(cu);
    Problem problem = packed_problem();
    problem.seqlen_q = bound;
    return refusal_of(call.args(), problem);
  };
  EXPECT_EQ(with({1, 2, 2, 6}), "run: cu_seqlens_q starts at 1; expected 0");
  EXPECT_EQ(with({0, 3, 2, 6}),
            "run: cu_seqlens_q[2] is 2 after 3; expected offsets that never decrease");
  EXPECT_EQ(with({0, 2, 7, 8}), "run: cu_seqlens_q ends at 8; expected at most 7, the packed rows");
  EXPECT_EQ(with({0, 2, 2, 6}, up_to(3)),
            "run: cu_seqlens_q gives sequence 2 a length of 4; expected at most 3, the plan's "
            "seqlen_q");
}

TEST(Arguments, CuSeqlensOfAnotherShapeOrDtypeAreRefused) {
  PackedCall call;
  AttentionForward args = call.args();
  args.cu_seqlens_kv = {};
  EXPECT_EQ(refusal_of(args), "run: cu_seqlens_kv is missing; expected i32 or i64 [4]");
  args.cu_seqlens_kv = view(call.cu_kv.data(), {3});
  EXPECT_EQ(refusal_of(args), "run: cu_seqlens_kv is i64 [3]; expected i32 or i64 [4]");
  args.cu_seqlens_kv = TensorView(view(call.q.data(), {4}));
  EXPECT_EQ(refusal_of(args), "run: cu_seqlens_kv is f32 [4]; expected i32 or i64 [4]");
}

TEST(Arguments, OutputsNeedPlacesOfTheirOwn) {
  PackedCall call;
  AttentionForward args = call.args();
  args.out = view(call.out.data(), {7, 4, 6}, {0, 6, 1});
  EXPECT_EQ(refusal_of(args),
            "run: out is f32 [7, 4, 6] strides [0, 6, 1]; expected strides that give every element "
            "its own place");
  args.out = view(call.out.data() + call.out.size() - 1, {7, 4, 6}, {-24, -6, -1});
  EXPECT_EQ(refusal_of(args), "(not refused)");
  args.out = view(call.q.data(), {7, 4, 6});
  EXPECT_EQ(refusal_of(args), "run: out overlaps q; expected memory of its own");
  args.out = call.args().out;
  args.k = args.v = TensorView();
  EXPECT_EQ(refusal_of(args), "run: k is missing; expected f32 [9, 2, 8]");
}

TEST(Arguments, InputsMayShareMemoryAndRepeatIt) {
  PackedCall call;
  AttentionForward args = call.args();
  args.k = view(call.q.data(), {9, 2, 8}, {0, 0, 1});
  EXPECT_EQ(refusal_of(args), "(not refused)");
}

TEST(Arguments, MisalignedAndForeignMemoryIsRefused) {
  PackedCall call;
  AttentionForward args = call.args();
  const auto* bytes = reinterpret_cast<const std::byte*>(call.q.data());
  args.q = TensorView(static_cast<const void*>(bytes + 1), args.q.spec());
  EXPECT_EQ(refusal_of(args), "run: q is not aligned to its elements of 4 bytes");
  TensorSpec spec = args.q.spec();
  spec.device = Device::cuda(2);
  args.q = TensorView(call.q.data(), spec);
  EXPECT_EQ(refusal_of(args),
            "run: q lives on cuda:2; expected memory of cpu, the device of the plan");
}

TEST(Arguments, OutputsWhoseElementsMeetAreRefused) {
  PackedCall call;
  std::vector<float> room(1024);
  AttentionForward args = call.args();
  const auto with = [&](std::int64_t rows, std::int64_t heads, std::int64_t columns) {
    args.out = view(room.data() + 512, {7, 4, 6}, {rows, heads, columns});
    return refusal_of(args);
  };
  const std::string refused = "expected strides that give every element its own place";
  EXPECT_EQ(with(24, 6, 1), "(not refused)");
  EXPECT_THAT(with(24, 5, 1), ::testing::HasSubstr(refused));  // row 0 ends where row 1 begins
  EXPECT_THAT(with(23, 6, 1), ::testing::HasSubstr(refused));
  EXPECT_EQ(with(-24, 6, 1), "(not refused)");
  EXPECT_EQ(with(24, -6, -1), "(not refused)");
  EXPECT_THAT(with(24, -5, 1), ::testing::HasSubstr(refused));
  EXPECT_THAT(with(-23, 6, -1), ::testing::HasSubstr(refused));
  EXPECT_EQ(with(6, 42, 1), "(not refused)");
  EXPECT_EQ(with(1, 7, 28), "(not refused)");
}

TEST(Arguments, ReversedOutputsReachDownIntoInputs) {
  PackedCall call;
  std::vector<float> room(7 * 4 * 6 + 7 * 4 * 8);
  AttentionForward args = call.args();
  args.q = view(room.data(), {7, 4, 8});
  args.out = view(room.data() + room.size() - 1, {7, 4, 6}, {-24, -6, -1});
  EXPECT_EQ(refusal_of(args), "(not refused)");
  args.out = view(room.data() + room.size() - 2, {7, 4, 6}, {-24, -6, -1});
  EXPECT_EQ(refusal_of(args), "run: out overlaps q; expected memory of its own");
}

TEST(Arguments, StridesThatLeaveTheAddressSpaceAreRefused) {
  PackedCall call;
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t stride :
       {kMost, -kMost, -kMost - 1, kMost / 4 + 1, std::int64_t{1} << 61, std::int64_t{1} << 62}) {
    const std::string expected =
        "strides [" + std::to_string(stride) +
        ", 8, 1]; expected strides that keep every element within 2^60 bytes of the first, and "
        "inside the address space";
    AttentionForward args = call.args();
    args.out = view(call.out.data(), {7, 4, 6}, {stride, 8, 1});
    EXPECT_EQ(refusal_of(args), "run: out is f32 [7, 4, 6] " + expected);
    args = call.args();
    args.q = view(call.q.data(), {7, 4, 8}, {stride, 8, 1});
    EXPECT_EQ(refusal_of(args), "run: q is f32 [7, 4, 8] " + expected);
  }
  // Less than 2^60, but below address 0, or beyond the last.
  AttentionForward args = call.args();
  args.k = view(call.k.data(), {9, 2, 8}, {-(std::int64_t{1} << 54), 8, 1});
  EXPECT_THAT(refusal_of(args), ::testing::HasSubstr("inside the address space"));
  TensorSpec spec = args.v.spec();
  args.v = TensorView(reinterpret_cast<const void*>(~std::uintptr_t{3}), spec);
  args.k = call.args().k;
  EXPECT_THAT(refusal_of(args), ::testing::HasSubstr("inside the address space"));
}

TEST(Arguments, StridesOfASingleIndexMayBeAnything) {
  std::vector<float> floats(64);
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const Problem problem = {.q = spec_of(Dtype::f32, {1, 1, 1, 8}),
                           .k = spec_of(Dtype::f32, {1, 1, 1, 8}),
                           .v = spec_of(Dtype::f32, {1, 1, 1, 8})};
  const TensorView one = view(floats.data(), {1, 1, 1, 8}, {kMost, -kMost, kMost, 1});
  EXPECT_EQ(refusal_of({.q = one,
                        .k = one,
                        .v = one,
                        .out = view(floats.data() + 8, {1, 1, 1, 8}, {kMost, kMost, kMost, 1})},
                       problem),
            "(not refused)");
}

TEST(Arguments, SoftmaxScaleIsThePlans) {
  PackedCall call;
  Problem scaled = packed_problem();
  scaled.softmax_scale = 0.5F;
  const std::string refused =
      "run: softmax_scale differs from the plan's; expected the same, or make another plan";
  AttentionForward args = call.args();
  EXPECT_EQ(refusal_of(args, scaled), refused) << "not given";
  args.softmax_scale = 0.25F;
  EXPECT_EQ(refusal_of(args, scaled), refused);
  EXPECT_EQ(refusal_of(args), refused) << "the plan has the default";
  args.softmax_scale = 0.5F;
  EXPECT_EQ(refusal_of(args, scaled), "(not refused)");
}

}  // namespace
}  // namespace fovea::testing
