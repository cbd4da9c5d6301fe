// Documents inside packed sequences: an id for each row, found through the offsets of the call.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "fovea/block_map.hpp"
#include "fovea/mask.hpp"

#include "support/compare.hpp"
#include "support/gradient_case.hpp"
#include "support/gradient_compare.hpp"

namespace fovea::testing {
namespace {

// A sequence shorter than a tile, an empty one, one of several tiles whose documents meet inside tiles.
const std::vector<Lengths> kSequences = {{19, 23}, {0, 7}, {150, 170}};

std::vector<std::int64_t> offsets(std::int64_t Lengths::*side) {
  std::vector<std::int64_t> result{0};
  for (const Lengths& lengths : kSequences) result.push_back(result.back() + lengths.*side);
  return result;
}

/// Documents of 13 rows, counted from the start of all rows, so that they cross sequences; every 17th row is padding.
double id_of_row(std::int64_t row) { return row % 17 == 5 ? -1.0 : static_cast<double>(row / 13); }

/// Of the rows of one side, as a tensor of the case.
TensorView ids(Case& problem, Dtype dtype, std::int64_t total) {
  return problem.capture(dtype, {total}, id_of_row);
}
TensorView begins(Case& problem, Dtype dtype, std::int64_t Lengths::*side) {
  const std::vector<std::int64_t> values = offsets(side);
  return problem.capture(dtype, {static_cast<std::int64_t>(values.size())}, [=](std::int64_t i) {
    return static_cast<double>(values[static_cast<std::size_t>(i)]);
  });
}

Case packed_case(Dtype index_dtype) {
  Case problem{.sequences = kSequences,
               .trailing_rows = 3,
               .num_heads_q = 4,
               .num_heads_kv = 2,
               .head_dim_qk = 16,
               .head_dim_v = 24,
               .cu_seqlens_dtype = index_dtype};
  const std::int64_t total_q = offsets(&Lengths::q).back() + problem.trailing_rows;
  const std::int64_t total_kv = offsets(&Lengths::kv).back() + problem.trailing_rows;
  problem.mask = documents({.segments_q = ids(problem, index_dtype, total_q),
                            .segments_kv = ids(problem, index_dtype, total_kv),
                            .cu_seqlens_q = begins(problem, index_dtype, &Lengths::q),
                            .cu_seqlens_kv = begins(problem, index_dtype, &Lengths::kv)});
  return problem;
}

/// What the words mean, from the ids alone.
bool is_visible(std::size_t sequence, std::int64_t q_idx, std::int64_t kv_idx) {
  const double of_q = id_of_row(offsets(&Lengths::q)[sequence] + q_idx);
  const double of_kv = id_of_row(offsets(&Lengths::kv)[sequence] + kv_idx);
  return of_q == of_kv && of_q != -1;
}

TEST(PackedDocuments, EqualTheOracleForward) {
  for (const Dtype dtype : {Dtype::i32, Dtype::i64}) {
    Case problem = packed_case(dtype);
    expect_equals_oracle(problem);
    problem.mask = problem.mask && causal();
    expect_equals_oracle(problem);
  }
}

TEST(PackedDocuments, EqualTheOracleBackward) {
  EXPECT_EQ(backward_difference({.forward = packed_case(Dtype::i32)}), "");
}

TEST(PackedDocuments, SeeTheRowsOfTheirOwnSequenceAndDocument) {
  const Case problem = packed_case(Dtype::i64);
  const std::vector<std::int64_t> cu_q = offsets(&Lengths::q), cu_kv = offsets(&Lengths::kv);
  const auto size = static_cast<std::int64_t>(cu_q.size());
  const BlockMapSpec spec{.mask = problem.mask,
                          .cu_seqlens_q = view(cu_q.data(), {size}),
                          .cu_seqlens_kv = view(cu_kv.data(), {size}),
                          .tile_q = 32,
                          .tile_kv = 32};
  constexpr std::int64_t kRows = 152, kKeys = 172;  // two behind the end of the longest
  std::vector<std::uint8_t> bytes(kSequences.size() * kRows * kKeys, 7);
  const auto batch = static_cast<std::int64_t>(kSequences.size());
  materialize_mask(spec, view(bytes.data(), {batch, 1, kRows, kKeys}));
  std::size_t at = 0;
  for (std::size_t i = 0; i < kSequences.size(); ++i) {
    for (std::int64_t q = 0; q < kRows; ++q) {
      for (std::int64_t kv = 0; kv < kKeys; ++kv) {
        const bool exists = q < kSequences[i].q && kv < kSequences[i].kv;
        ASSERT_EQ(bytes[at++], exists && is_visible(i, q, kv) ? 1 : 0)
            << "sequence " << i << ", q_idx " << q << ", kv_idx " << kv;
      }
    }
  }
  EXPECT_GT(block_map(spec).count(2, 0).empty, 0) << "documents apart are not proven so";
}

TEST(PackedDocuments, OneListServesBothSides) {
  const std::vector<std::int32_t> segments(40, 1), cu{0, 12, 40};
  const TensorView rows = view(segments.data(), {40}), begins = view(cu.data(), {3});
  const MaskMod one = documents({.segments_q = rows, .cu_seqlens_q = begins});
  EXPECT_EQ(one.captures().tensors.size(), 2U);
  EXPECT_EQ(one, documents({.segments_q = rows,
                            .segments_kv = rows,
                            .cu_seqlens_q = begins,
                            .cu_seqlens_kv = begins}));
}

template <typename Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "(not refused)";
}

TEST(PackedDocuments, RefuseWhatIsMissingOrOfAnotherRank) {
  const std::vector<std::int32_t> values(8, 0);
  const TensorView list = view(values.data(), {8}), table = view(values.data(), {2, 4});
  EXPECT_EQ(
      refusal([&] { static_cast<void>(documents({.segments_q = table, .cu_seqlens_q = list})); }),
      "documents: segments_q is i32 [2, 4]; expected rank 1, [total_q]");
  EXPECT_EQ(refusal([&] { static_cast<void>(documents({.segments_q = list})); }),
            "documents: cu_seqlens_q is missing; expected a tensor, [num_sequences + 1]");
  EXPECT_EQ(refusal([&] {
              static_cast<void>(
                  documents({.segments_q = list, .segments_kv = list, .cu_seqlens_q = list}));
            }),
            "documents: cu_seqlens_kv is missing; expected a tensor, [num_sequences + 1]");
}

}  // namespace
}  // namespace fovea::testing
