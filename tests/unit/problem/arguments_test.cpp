// Arguments of packed calls, overlap and outputs: each refusal with its whole message.
#include <gtest/gtest.h>

#include <functional>
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
  args.cu_seqlens_kv = view(call.q.data(), {4});
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

}  // namespace
}  // namespace fovea::testing
