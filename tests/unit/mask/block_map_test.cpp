#include "mask/block_map.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <thread>
#include <vector>

#include "unit/mask/dense_truth.hpp"

namespace fovea::mask {
namespace {

using Ids = std::vector<std::int32_t>;

// Around a tile of 8 on both sides, a prime, and lengths that leave one row or one key in the last tile.
const Sizes kSizes[] = {
    {.seqlen_q = 1, .seqlen_kv = 1, .tile_q = 8, .tile_kv = 8},
    {.seqlen_q = 1, .seqlen_kv = 130, .tile_q = 8, .tile_kv = 8},
    {.seqlen_q = 7, .seqlen_kv = 9, .tile_q = 8, .tile_kv = 8},
    {.seqlen_q = 64, .seqlen_kv = 64, .tile_q = 8, .tile_kv = 8},
    {.seqlen_q = 65, .seqlen_kv = 97, .tile_q = 16, .tile_kv = 8},
    {.seqlen_q = 97, .seqlen_kv = 65, .tile_q = 8, .tile_kv = 32},
    {.seqlen_q = 40, .seqlen_kv = 200, .tile_q = 3, .tile_kv = 5},
};

void expect_exact(const MaskMod& mask, const Visible& visible, const Sizes& sizes) {
  const Comparison result = compare_with_dense(mask, visible, sizes);
  EXPECT_EQ(result.wrong, "") << mask.to_string();
  EXPECT_EQ(result.num_undecided, 0)
      << mask.to_string() << ", seqlen_q " << sizes.seqlen_q << ", seqlen_kv " << sizes.seqlen_kv;
}

void expect_exact_everywhere(const MaskMod& mask, const Visible& visible) {
  for (const Sizes& sizes : kSizes) expect_exact(mask, visible, sizes);
}

/// Ids of `length` tokens in runs: id of run i is ids[i], every run `run_length` long.
Ids runs_of(const Ids& ids, std::size_t run_length, std::size_t length) {
  Ids result(length);
  for (std::size_t i = 0; i < length; ++i) result[i] = ids[i / run_length % ids.size()];
  return result;
}

TensorView row_of(const Ids& ids) {
  return view(ids.data(), {1, static_cast<std::int64_t>(ids.size())});
}

TEST(BlockMap, CausalIsExact) {
  expect_exact_everywhere(causal(), [](const Position& p) { return p.kv_idx <= p.pos(); });
  expect_exact_everywhere(causal(Align::top_left),
                          [](const Position& p) { return p.kv_idx <= p.q_idx; });
}

TEST(BlockMap, WindowsAreExact) {
  for (const std::int64_t left : {0, 1, 7, 8, 30}) {
    for (const std::int64_t right : {0, 3, 16}) {
      expect_exact_everywhere(window(left, right), [=](const Position& p) {
        return p.pos() - left <= p.kv_idx && p.kv_idx <= p.pos() + right;
      });
    }
    expect_exact_everywhere(window(left, std::nullopt),
                            [=](const Position& p) { return p.pos() - left <= p.kv_idx; });
  }
}

TEST(BlockMap, OneBandTellsItsEdges) {
  const BlockMapper mapper(window(30, 0), 8);
  std::vector<TileRun> runs;
  const TileRow cut{.q_begin = 40, .q_end = 48, .seqlen_q = 64, .seqlen_kv = 64};
  ASSERT_TRUE(mapper.row(cut, runs));
  EXPECT_EQ(mapper.row(cut, runs)->keys_of(41), (Span{11, 42}));
  EXPECT_TRUE(mapper.row(cut, runs)->keys_of(48).is_empty());  // nobody asked for that row
  const BlockMapper two_bands(streaming(3, 12), 8);
  EXPECT_FALSE(two_bands.row(cut, runs));
}

TEST(BlockMap, UnionsOfBandsAreExact) {
  expect_exact_everywhere(streaming(3, 12), [](const Position& p) {
    return (p.kv_idx < 3 || p.kv_idx >= p.pos() - 12) && p.kv_idx <= p.pos();
  });
  expect_exact_everywhere(!window(5, 9), [](const Position& p) {
    return p.kv_idx < p.pos() - 5 || p.kv_idx > p.pos() + 9;
  });
  const std::int32_t prefix = 21;
  expect_exact_everywhere(prefix_lm(view(&prefix, {1})),
                          [](const Position& p) { return p.kv_idx < 21 || p.kv_idx <= p.pos(); });
}

TEST(BlockMap, BandsWithSteepOrRisingEdgesAreExact) {
  expect_exact_everywhere(mask_mod([](auto x) { return x.kv_idx <= 3 * x.q_idx - 7; }),
                          [](const Position& p) { return p.kv_idx <= 3 * p.q_idx - 7; });
  expect_exact_everywhere(
      mask_mod([](auto x) { return x.kv_idx + x.q_idx >= 40 && x.q_idx != 12; }),
      [](const Position& p) { return p.kv_idx + p.q_idx >= 40 && p.q_idx != 12; });
  expect_exact_everywhere(mask_mod([](auto x) { return 2 * x.kv_idx <= x.q_idx; }),
                          [](const Position& p) { return 2 * p.kv_idx <= p.q_idx; });
}

TEST(BlockMap, ChunksAreExact) {
  for (const std::int64_t chunk : {1, 8, 13, 1000}) {
    const auto floor_div = [=](std::int64_t a) {
      return (a - ((a % chunk) + chunk) % chunk) / chunk;
    };
    expect_exact_everywhere(chunked(chunk), [=](const Position& p) {
      return floor_div(p.pos()) == floor_div(p.kv_idx);
    });
  }
}

TEST(BlockMap, DilationLeavesNothingUndecided) {
  for (const std::int64_t step : {1, 2, 7, 64}) {
    expect_exact_everywhere(dilated(step) && causal(), [=](const Position& p) {
      return (p.pos() - p.kv_idx) % step == 0 && p.kv_idx <= p.pos();
    });
  }
}

TEST(BlockMap, DocumentsAreExactSortedOrNot) {
  // Runs of about half a tile, a tile and more. Unsorted runs much shorter than that may stay undecided.
  for (const Ids& ids : {Ids{0, 1, 2, 3, 4}, Ids{5, 1, 3, -1}, Ids{7, 2, 9, 4, 2}}) {
    for (const std::size_t run_length : {7U, 11U, 19U, 40U}) {
      const Ids q = runs_of(ids, run_length, 97);
      expect_exact(documents(row_of(q)),
                   [&](const Position& p) {
                     const auto i = static_cast<std::size_t>(p.q_idx);
                     return q[i] == q[static_cast<std::size_t>(p.kv_idx)] && q[i] != -1;
                   },
                   {.seqlen_q = 97, .seqlen_kv = 97, .tile_q = 16, .tile_kv = 16});
    }
  }
}

TEST(BlockMap, DenseMasksAreExact) {
  // A checkerboard of 11 x 13 patches: tiles of 8 are empty, full or mixed.
  constexpr std::int64_t kSeqlenQ = 70;
  constexpr std::int64_t kSeqlenKv = 90;
  std::vector<std::uint8_t> bytes(kSeqlenQ * kSeqlenKv);
  const auto is_visible = [](std::int64_t q, std::int64_t kv) {
    return (q / 11 + kv / 13) % 2 == 0;
  };
  for (std::int64_t q = 0; q < kSeqlenQ; ++q) {
    for (std::int64_t kv = 0; kv < kSeqlenKv; ++kv) {
      bytes[static_cast<std::size_t>(q * kSeqlenKv + kv)] = is_visible(q, kv) ? 1 : 0;
    }
  }
  const Sizes sizes{.seqlen_q = kSeqlenQ, .seqlen_kv = kSeqlenKv, .tile_q = 8, .tile_kv = 8};
  const TensorView mask = view(bytes.data(), {kSeqlenQ, kSeqlenKv});
  expect_exact(
      dense_mask(mask), [&](const Position& p) { return is_visible(p.q_idx, p.kv_idx); }, sizes);
  expect_exact(
      dense_mask(mask) && causal(Align::top_left),
      [&](const Position& p) { return is_visible(p.q_idx, p.kv_idx) && p.kv_idx <= p.q_idx; },
      sizes);
}

TEST(BlockMap, DenseMasksAreExactInEveryLayout) {
  // Words of eight bytes that end inside of a tile or not; any byte but 0 is visible.
  constexpr std::int64_t kRows = 23, kColumns = 150;
  std::vector<std::uint8_t> bytes(std::size_t{2} * kRows * kColumns);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    constexpr std::uint8_t kTrue[] = {1, 0x80, 0xff, 2};
    bytes[i] = i / 9 % 7 < 3 ? 0 : kTrue[i % 4];
  }
  struct Strides {
    std::int64_t batch, row, column;
  };
  for (const Strides& strides : {Strides{kRows * kColumns, kColumns, 1},
                                 {kColumns, 2 * kColumns, 1},
                                 {0, -kColumns, 1},
                                 {0, 0, 1},
                                 {1, kColumns, 0},
                                 {0, kColumns, -1},
                                 {0, 1, kRows}}) {
    const std::int64_t shape[] = {2, kRows, kColumns};
    const std::int64_t in_elements[] = {strides.batch, strides.row, strides.column};
    const std::uint8_t* first = bytes.data() + (strides.row < 0 ? (kRows - 1) * kColumns : 0) +
                                (strides.column < 0 ? kColumns - 1 : 0);
    const TensorView mask(first, make_spec(Dtype::boolean, shape, in_elements));
    const Visible visible = [&](const Position& p) {
      return first[p.q_head * strides.batch + p.q_idx * strides.row + p.kv_idx * strides.column] !=
             0;
    };
    for (const std::int64_t tile_kv : {1, 7, 8, 16, 32}) {
      for (const std::int64_t heads : {1, 2}) {
        expect_exact(dense_mask(mask), visible,
                     {.seqlen_q = kRows,
                      .seqlen_kv = kColumns,
                      .tile_q = 5,
                      .tile_kv = tile_kv,
                      .num_heads = heads});
      }
    }
  }
}

TEST(BlockMap, MasksAtComputedIndicesAreSplitUntilTheyAreExact) {
  // kv (kv - 10): in [0, 7] bounds of the product and of the difference reach beyond the one element that is read.
  std::vector<std::uint8_t> bytes(16, 0);
  bytes[0] = 1;
  const TensorView view = fovea::view(reinterpret_cast<const bool*>(bytes.data()), {16});
  const Expr kv = arguments().kv_idx;
  expect_exact(MaskMod(capture("m", view)[kv * kv - kv * 10]),
               [](const Position& p) { return p.kv_idx <= 10; },
               {.seqlen_q = 4, .seqlen_kv = 40, .tile_q = 4, .tile_kv = 8});
}

TEST(BlockMap, TreeMasksAreExact) {
  // Seven draft tokens behind 40 context keys; token i descends from (i - 1) / 2.
  std::vector<std::int32_t> bits(7, 0);
  for (int i = 0; i < 7; ++i) {
    for (int ancestor = i; ancestor >= 0; ancestor = ancestor == 0 ? -1 : (ancestor - 1) / 2) {
      bits[static_cast<std::size_t>(i)] |= 1 << ancestor;
    }
  }
  expect_exact(tree(view(bits.data(), {7, 1})),
               [&](const Position& p) {
                 if (p.kv_idx < 40) return true;
                 return (bits[static_cast<std::size_t>(p.q_idx)] >> (p.kv_idx - 40) & 1) == 1;
               },
               {.seqlen_q = 7, .seqlen_kv = 47, .tile_q = 2, .tile_kv = 2});
}

TEST(BlockMap, HeadsThatShareATileAreMappedTogether) {
  const Ids lengths{3, 20, 11, 50};
  const Captured windows = capture("windows", view(lengths.data(), {4}));
  const MaskMod mask = mask_mod([&](auto x) { return x.kv_idx >= x.q_idx - windows[x.q_head]; });
  Sizes sizes{.seqlen_q = 64, .seqlen_kv = 64, .tile_q = 8, .tile_kv = 8, .num_heads = 4};
  expect_exact(
      mask,
      [&](const Position& p) {
        return p.kv_idx >= p.q_idx - lengths[static_cast<std::size_t>(p.q_head)];
      },
      sizes);
}

TEST(BlockMap, HeadsAreToldApartWhereOneRowIsLeft) {
  const Ids homes{0, 6};
  const Captured home = capture("homes", view(homes.data(), {2}));
  const MaskMod mask = mask_mod([&](auto x) { return floor_div(x.kv_idx, 8) == home[x.q_head]; });
  expect_exact(
      mask,
      [&](const Position& p) { return p.kv_idx / 8 == homes[static_cast<std::size_t>(p.q_head)]; },
      {.seqlen_q = 1, .seqlen_kv = 64, .tile_q = 1, .tile_kv = 8, .num_heads = 2});
}

TEST(BlockMap, EmptyProblemsHaveNoRuns) {
  EXPECT_TRUE(build_block_map(causal(), 0, 10, 8, 8).rows.empty());
  const BlockMap no_keys = build_block_map(causal(), 10, 0, 8, 8);
  ASSERT_EQ(no_keys.rows.size(), 2U);
  EXPECT_TRUE(no_keys.rows[0].empty());
  EXPECT_EQ(no_keys.count().total(), 0);
}

TEST(BlockMap, DefaultMaskIsFullToTheCutTile) {
  const BlockMap map = build_block_map(MaskMod(), 20, 20, 8, 8);
  EXPECT_EQ(map.count(), (TileCount{.empty = 0, .partial = 0, .full = 9}));
}

TEST(BlockMap, ClosedFormNeedsNoDataOfSinglePositions) {
  const Ids ids(16, 0);
  const std::int32_t prefix = 3;
  EXPECT_TRUE(BlockMapper(causal() && window(4, 0), 8).is_closed_form());
  EXPECT_TRUE(BlockMapper(prefix_lm(view(&prefix, {1})), 8).is_closed_form());
  EXPECT_TRUE(BlockMapper(chunked(4), 8).is_closed_form());
  EXPECT_FALSE(BlockMapper(documents(row_of(ids)), 8).is_closed_form());
}

TEST(BlockMap, TensorsWithoutDataLeaveTilesPartial) {
  const TensorView unknown = view(static_cast<const std::int32_t*>(nullptr), {1, 64});
  const BlockMap map = build_block_map(documents(unknown) && causal(), 64, 64, 8, 8);
  EXPECT_EQ(map.at(0, 1), TileKind::empty);
  EXPECT_EQ(map.at(1, 0), TileKind::partial);
  EXPECT_EQ(map.count().full, 0);
}

TEST(BlockMap, ArithmeticThatWrapsIsNotTakenForABand) {
  // q_idx + 2^31 - 3 wraps to a negative int from q_idx 3 on: those rows see nothing.
  constexpr std::int64_t kOffset = (std::int64_t{1} << 31) - 3;
  const MaskMod mask = mask_mod(
      [&](auto x) { return x.kv_idx <= x.q_idx + scalar(CapturedScalar::of("offset", kOffset)); });
  const Comparison result =
      compare_with_dense(mask, [](const Position& p) { return p.q_idx < 3; },
                         {.seqlen_q = 16, .seqlen_kv = 16, .tile_q = 4, .tile_kv = 4});
  EXPECT_EQ(result.wrong, "");
}

TEST(BlockMap, HugeWindowSidesAreUnbounded) {
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  expect_exact_everywhere(window(huge, huge), [](const Position&) { return true; });
  expect_exact_everywhere(window(huge, 0), [](const Position& p) { return p.kv_idx <= p.pos(); });
}

TEST(BlockMap, LongSequencesKeepMemorySmall) {
  constexpr std::int64_t kSeqlen = 65536;
  const BlockMap map = build_block_map(window(1024, 0), kSeqlen, kSeqlen, 128, 128);
  for (const std::vector<TileRun>& runs : map.rows) ASSERT_LE(runs.size(), 3U);
  EXPECT_EQ(map.at(511, 511), TileKind::partial);
  EXPECT_EQ(map.at(511, 507), TileKind::full);
  EXPECT_EQ(map.at(511, 502), TileKind::empty);
}

TEST(BlockMap, RowsCanBeAskedFromSeveralThreads) {
  const Ids ids = runs_of({4, 1, 3}, 21, 512);
  const BlockMapper mapper(documents(row_of(ids)) && causal(), 16);
  const BlockMap expected = build_block_map(documents(row_of(ids)) && causal(), 512, 512, 16, 16);
  std::vector<int> num_wrong(4, 0);
  {
    std::vector<std::jthread> workers;
    for (int& wrong : num_wrong) {
      workers.emplace_back([&] {
        std::vector<TileRun> runs;
        for (std::int64_t q = 0; q < 512; q += 16) {
          mapper.row({.q_begin = q, .q_end = q + 16, .seqlen_q = 512, .seqlen_kv = 512}, runs);
          wrong += runs == expected.rows[static_cast<std::size_t>(q / 16)] ? 0 : 1;
        }
      });
    }
  }
  EXPECT_EQ(num_wrong, std::vector<int>(4, 0));
}

}  // namespace
}  // namespace fovea::mask
