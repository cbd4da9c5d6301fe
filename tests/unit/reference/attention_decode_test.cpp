#include "reference/attention_decode.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "reference/attention_forward.hpp"
#include "support/random.hpp"

namespace fovea::reference {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t kHeadsQ = 4, kHeadsKv = 2, kDim = 6, kDimV = 3;
constexpr std::int64_t kSeqlens[] = {5, 8};  // of two sequences, before the append

std::vector<float> normals(std::int64_t count, std::uint64_t stream) {
  const testing::Random random(1, stream);
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(random.normal(i)));
  return values;
}

/// Key i of sequence b, head h: what every cache below holds.
struct Keys {
  std::vector<float> k = normals(2 * 16 * kHeadsKv * kDim, 0);
  std::vector<float> v = normals(2 * 16 * kHeadsKv * kDimV, 1);
  const float* k_row(std::int64_t b, std::int64_t i) const {
    return k.data() + (b * 16 + i) * kHeadsKv * kDim;
  }
  const float* v_row(std::int64_t b, std::int64_t i) const {
    return v.data() + (b * 16 + i) * kHeadsKv * kDimV;
  }
};

const Keys kKeys;

/// Two queries a sequence over the first `lengths` keys, dense, by the forward oracle.
std::vector<double> dense_out(const std::vector<float>& q, std::int64_t b, std::int64_t seqlen_kv) {
  AttentionForward args{.q = view(q.data() + b * 2 * kHeadsQ * kDim, {1, 2, kHeadsQ, kDim}),
                        .k = view(kKeys.k_row(b, 0), {1, seqlen_kv, kHeadsKv, kDim}),
                        .v = view(kKeys.v_row(b, 0), {1, seqlen_kv, kHeadsKv, kDimV})};
  args.mask = causal();
  return reference::attention_forward(args).out;
}

void expect_is_dense(const std::vector<double>& out, const std::vector<float>& q,
                     std::int64_t num_new = 0) {
  for (std::int64_t b = 0; b < 2; ++b) {
    const std::vector<double> expected = dense_out(q, b, kSeqlens[b] + num_new);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(out[static_cast<std::size_t>(b) * expected.size() + i], expected[i], 1e-12);
  }
}

struct Decoded {
  std::vector<float> q = normals(2 * 2 * kHeadsQ * kDim, 2);
  AttentionDecode args() const {
    AttentionDecode result{.q = view(q.data(), {2, 2, kHeadsQ, kDim})};
    result.cache.seqlens = view(kSeqlens, {2});
    return result;
  }
};

TEST(ReferenceDecode, ContiguousSlotsInAnyOrderWithLeftPaddingAreDenseKeys) {
  const Decoded problem;
  constexpr std::int64_t kSlots[] = {2, 0}, kPadding[] = {0, 3}, kRowsInUse[] = {5, 11};
  std::vector<float> k(3 * 12 * kHeadsKv * kDim, kNaN), v(3 * 12 * kHeadsKv * kDimV, kNaN);
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t i = 0; i < kSeqlens[b]; ++i) {
      const std::int64_t row = kSlots[b] * 12 + kPadding[b] + i;
      std::copy_n(kKeys.k_row(b, i), kHeadsKv * kDim, k.begin() + row * kHeadsKv * kDim);
      std::copy_n(kKeys.v_row(b, i), kHeadsKv * kDimV, v.begin() + row * kHeadsKv * kDimV);
    }
  }
  AttentionDecode args = problem.args();
  args.cache.k = view(k.data(), {3, 12, kHeadsKv, kDim});
  args.cache.v = view(v.data(), {3, 12, kHeadsKv, kDimV});
  args.cache.seqlens = view(kRowsInUse, {2});
  args.cache.batch_idx = view(kSlots, {2});
  args.cache.left_padding = view(kPadding, {2});
  expect_is_dense(reference::attention_decode(args).out, problem.q);
}

/// Pages of three rows; the table's unused entries and all unused rows are poison.
struct Pages {
  std::vector<float> k = std::vector<float>(7 * 3 * kHeadsKv * kDim, kNaN);
  std::vector<float> v = std::vector<float>(7 * 3 * kHeadsKv * kDimV, kNaN);
  std::vector<std::int32_t> table{5, 0, -1, 1 << 30, 3, 6, 1, 2};

  explicit Pages(std::int64_t fewer = 0) {
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t i = 0; i < kSeqlens[b] - fewer; ++i) {
        const std::int64_t row =
            std::int64_t{table[static_cast<std::size_t>(b * 4 + i / 3)]} * 3 + i % 3;
        std::copy_n(kKeys.k_row(b, i), kHeadsKv * kDim, k.begin() + row * kHeadsKv * kDim);
        std::copy_n(kKeys.v_row(b, i), kHeadsKv * kDimV, v.begin() + row * kHeadsKv * kDimV);
      }
    }
  }
  KvCache cache() const {
    KvCache result{.k = view(k.data(), {7, 3, kHeadsKv, kDim}),
                   .v = view(v.data(), {7, 3, kHeadsKv, kDimV}),
                   .page_table = view(table.data(), {2, 4})};
    result.seqlens = view(kSeqlens, {2});
    return result;
  }
};

TEST(ReferenceDecode, PagedKeysAreDenseKeys) {
  const Decoded problem;
  const Pages pages;
  AttentionDecode args = problem.args();
  args.cache = pages.cache();
  expect_is_dense(reference::attention_decode(args).out, problem.q);
}

/// The same pages behind offsets, with a page between them that is nobody's.
TEST(ReferenceDecode, ListedPagesAreDenseKeys) {
  const Decoded problem;
  const Pages pages;
  const std::vector<std::int64_t> indptr{0, 3, 7};
  const std::vector<std::int32_t> indices{5, 0, -1, 3, 6, 1, 2};
  AttentionDecode args = problem.args();
  args.cache = pages.cache();
  args.cache.page_table = {};
  args.cache.page_indptr = view(indptr.data(), {3});
  args.cache.page_indices = view(indices.data(), {7});
  expect_is_dense(reference::attention_decode(args).out, problem.q);
}

TEST(ReferenceDecode, AppendedKeysComeLast) {
  const Decoded problem;
  const Pages pages(2);
  constexpr std::int64_t kBefore[] = {3, 6};
  std::vector<float> new_k, new_v;
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t i = kBefore[b]; i < kSeqlens[b]; ++i) {
      new_k.insert(new_k.end(), kKeys.k_row(b, i), kKeys.k_row(b, i) + kHeadsKv * kDim);
      new_v.insert(new_v.end(), kKeys.v_row(b, i), kKeys.v_row(b, i) + kHeadsKv * kDimV);
    }
  }
  AttentionDecode args = problem.args();
  args.cache = pages.cache();
  args.cache.seqlens = view(kBefore, {2});
  args.append.k = view(new_k.data(), {2, 2, kHeadsKv, kDim});
  args.append.v = view(new_v.data(), {2, 2, kHeadsKv, kDimV});
  const DecodeResult got = reference::attention_decode(args);
  expect_is_dense(got.out, problem.q);
  EXPECT_EQ(got.appended_v, std::vector<double>(new_v.begin(), new_v.end()));
}

// ---- Rotary ----

/// Position p turns pair j by p / 10^j radians.
struct Angles {
  std::vector<float> cos, sin;
  std::int64_t num_pairs = 0;
  explicit Angles(std::int64_t pairs) : num_pairs(pairs) {
    for (std::int64_t p = 0; p < 32; ++p) {
      for (std::int64_t j = 0; j < pairs; ++j) {
        const double angle = static_cast<double>(p) * std::pow(10, -static_cast<double>(j));
        cos.push_back(static_cast<float>(std::cos(angle)));
        sin.push_back(static_cast<float>(std::sin(angle)));
      }
    }
  }
  Rotary rotary(bool is_interleaved) const {
    return {.cos = view(cos.data(), {32, num_pairs}),
            .sin = view(sin.data(), {32, num_pairs}),
            .is_interleaved = is_interleaved};
  }
};

TEST(ReferenceRotary, PairsAreNeighboursOrHalvesAndTheRestIsCopied) {
  const Angles angles(2);
  const std::vector<double> row{1, 0, 0, 1, 7, 8};
  const double cos0 = std::cos(3.0), sin0 = std::sin(3.0);
  const double cos1 = std::cos(0.3), sin1 = std::sin(0.3);
  const std::vector<double> interleaved = rotated(row, angles.rotary(true), 3);
  const std::vector<double> expected_interleaved{cos0, sin0, -sin1, cos1, 7, 8};
  const std::vector<double> halves = rotated(row, angles.rotary(false), 3);
  const std::vector<double> expected_halves{cos0, -sin1, sin0, cos1, 7, 8};  // pairs (0, 2), (1, 3)
  for (std::size_t i = 0; i < row.size(); ++i) {
    EXPECT_NEAR(interleaved[i], expected_interleaved[i], 1e-6);
    EXPECT_NEAR(halves[i], expected_halves[i], 1e-6);
  }
}

/// Scores depend on differences of positions alone, so shifting all of them changes nothing.
TEST(ReferenceRotary, OnlyDistancesMatter) {
  const Angles angles(3);
  const std::vector<double> q{1, 2, 3, 4, 5, 6}, k{-1, 3, 0.5, 2, 1, 1};
  for (const bool is_interleaved : {true, false}) {
    const Rotary rotary = angles.rotary(is_interleaved);
    const auto score = [&](std::int64_t q_position, std::int64_t k_position) {
      const std::vector<double> a = rotated(q, rotary, q_position);
      const std::vector<double> b = rotated(k, rotary, k_position);
      double sum = 0;
      for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
      return sum;
    };
    EXPECT_NEAR(score(7, 4), score(20, 17), 1e-5);
    EXPECT_GT(std::fabs(score(7, 4) - score(7, 5)), 1e-2);
  }
}

/// A cache built up token by token from positions 0, 1, ... equals one whose positions were given.
TEST(ReferenceDecode, DefaultPositionsAreThoseInTheSequence) {
  const Decoded problem;
  const Pages pages(2);
  constexpr std::int64_t kBefore[] = {3, 6};
  constexpr std::int64_t kPositions[] = {3, 4, 6, 7};
  const Angles angles(2);
  const std::vector<float> new_k = normals(2 * 2 * kHeadsKv * kDim, 7);
  const std::vector<float> new_v = normals(2 * 2 * kHeadsKv * kDimV, 8);
  AttentionDecode args = problem.args();
  args.cache = pages.cache();
  args.cache.seqlens = view(kBefore, {2});
  args.append.k = view(new_k.data(), {2, 2, kHeadsKv, kDim});
  args.append.v = view(new_v.data(), {2, 2, kHeadsKv, kDimV});
  args.rotary = angles.rotary(false);
  const DecodeResult by_default = reference::attention_decode(args);
  args.rotary->positions = view(kPositions, {2, 2});
  const DecodeResult given = reference::attention_decode(args);
  EXPECT_EQ(by_default.out, given.out);
  EXPECT_EQ(by_default.appended_k, given.appended_k);
  const std::vector<double> first(new_k.begin(), new_k.begin() + kDim);
  const std::vector<double> expected = rotated(first, *args.rotary, 3);
  EXPECT_EQ(std::vector<double>(given.appended_k.begin(), given.appended_k.begin() + kDim),
            expected);
}

/// Two sequences of 1 and 3 queries, packed, beside a row of nobody: each is what it is alone.
TEST(ReferenceDecode, PackedSequencesAreWhatEachIsAlone) {
  constexpr std::int64_t kBefore[] = {3, 6}, kOffsets[] = {0, 1, 4}, kNewOffsets[] = {0, 2, 2};
  const Pages pages(2);
  const Angles angles(2);
  const std::vector<float> q = normals(5 * kHeadsQ * kDim, 2);
  const std::vector<float> new_k = normals(3 * kHeadsKv * kDim, 7);
  const std::vector<float> new_v = normals(3 * kHeadsKv * kDimV, 8);
  const auto args_of = [&](bool has_own_offsets) {
    AttentionDecode args{.q = view(q.data(), {5, kHeadsQ, kDim}), .cache = pages.cache()};
    args.cache.seqlens = view(kBefore, {2});
    args.cu_seqlens_q = view(kOffsets, {3});
    args.rotary = angles.rotary(false);
    if (has_own_offsets) {
      args.append.k = view(new_k.data(), {3, kHeadsKv, kDim});
      args.append.v = view(new_v.data(), {3, kHeadsKv, kDimV});
      args.append.cu_seqlens = view(kNewOffsets, {3});
    }
    return args;
  };
  for (const bool has_own_offsets : {false, true}) {
    const DecodeResult together = reference::attention_decode(args_of(has_own_offsets));
    ASSERT_EQ(together.lse.size(), 5U * kHeadsQ);
    for (std::int64_t b = 0; b < 2; ++b) {
      const std::int64_t count = kOffsets[b + 1] - kOffsets[b];
      AttentionDecode alone = args_of(false);
      alone.cu_seqlens_q = {};
      alone.q = view(q.data() + kOffsets[b] * kHeadsQ * kDim, {1, count, kHeadsQ, kDim});
      alone.cache.seqlens = view(kBefore + b, {1});
      alone.cache.page_table = view(pages.table.data() + b * 4, {1, 4});
      if (has_own_offsets && b == 0) {
        alone.append.k = view(new_k.data(), {1, 2, kHeadsKv, kDim});
        alone.append.v = view(new_v.data(), {1, 2, kHeadsKv, kDimV});
      }
      const DecodeResult expected = reference::attention_decode(alone);
      for (std::size_t i = 0; i < expected.out.size(); ++i) {
        const auto first = static_cast<std::size_t>(kOffsets[b] * kHeadsQ * kDimV);
        EXPECT_EQ(together.out[first + i], expected.out[i]) << b;
      }
      for (std::int64_t head = 0; head < kHeadsQ; ++head) {
        for (std::int64_t i = 0; i < count; ++i) {
          EXPECT_EQ(together.lse[static_cast<std::size_t>(head * 5 + kOffsets[b] + i)],
                    expected.lse[static_cast<std::size_t>(head * count + i)]);
        }
      }
    }
    for (std::int64_t head = 0; head < kHeadsQ; ++head)
      EXPECT_TRUE(std::isinf(together.lse[static_cast<std::size_t>(head * 5 + 4)]));
  }
}

TEST(ReferenceDecode, NewKeysAreSeenAsTheCacheHoldsThem) {
  const bfloat16 cache[2]{};  // one row in use of 0, and room for one more
  const std::int64_t seqlens[] = {0};
  const float q = 1, k = 1.0009765625F, v = 3.01171875F;  // no bf16 numbers
  AttentionDecode args{.q = view(&q, {1, 1, 1, 1})};
  args.cache = {.k = view(cache, {1, 2, 1, 1}), .v = view(cache, {1, 2, 1, 1})};
  args.cache.seqlens = view(seqlens, {1});
  args.append = {.k = view(&k, {1, 1, 1, 1}), .v = view(&v, {1, 1, 1, 1})};
  const DecodeResult got = reference::attention_decode(args);
  EXPECT_EQ(got.lse[0], 1);
  EXPECT_EQ(got.out[0], static_cast<double>(static_cast<float>(bfloat16(v))));
  EXPECT_EQ(got.appended_k[0], static_cast<double>(k));
}

}  // namespace
}  // namespace fovea::reference
