// Block maps and dense masks as callers see them: counts that can be done on paper, and each element against the mask
// written out by hand.
#include "fovea/block_map.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

namespace fovea::testing {
namespace {

using Runs = std::vector<TileRun>;

Runs runs_of(const BlockMap& map, std::int64_t q_tile, std::int64_t sequence = 0,
             std::int64_t q_head = 0) {
  const auto row = map.row(q_tile, sequence, q_head);
  return {row.begin(), row.end()};
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

std::string refusal_of(const BlockMapSpec& spec) {
  return refusal([&] { static_cast<void>(block_map(spec)); });
}

TEST(PublicBlockMap, OfACausalMaskIsAStaircase) {
  const BlockMap map =
      block_map({.mask = causal(), .seqlen_q = 128, .seqlen_kv = 130, .tile_q = 32, .tile_kv = 32});
  EXPECT_EQ(map.num_q_tiles(), 4);
  EXPECT_EQ(map.num_kv_tiles(), 5);
  // Query 0 stands at key 2: the first row sees keys 0 to 33.
  EXPECT_EQ(runs_of(map, 0), (Runs{{0, 2, TileKind::partial}}));
  EXPECT_EQ(runs_of(map, 3), (Runs{{0, 3, TileKind::full}, {3, 5, TileKind::partial}}));
  EXPECT_EQ(map.at(3, 2), TileKind::full);
  EXPECT_EQ(map.at(0, 2), TileKind::empty);
  EXPECT_EQ(map.count(), (TileCount{.empty = 6, .partial = 8, .full = 6}));
}

TEST(PublicBlockMap, HasEverySequenceAndHead) {
  const std::vector<std::int32_t> ids{0, 0, 1, 1, 2, 2, 2, 2};
  const MaskMod mask = documents(view(ids.data(), {2, 4})) &&
                       mask_mod([](auto x) { return x.q_head == 0 || x.kv_head == 1; });
  const BlockMapSpec spec{.mask = mask,
                          .batch = 2,
                          .num_heads_q = 4,
                          .num_heads_kv = 2,
                          .seqlen_q = 4,
                          .seqlen_kv = 4,
                          .tile_q = 2,
                          .tile_kv = 2};
  const BlockMap map = block_map(spec);
  EXPECT_EQ(map.num_sequences(), 2);
  EXPECT_EQ(map.num_heads(), 4);
  EXPECT_EQ(map.count(0, 0), (TileCount{.empty = 2, .partial = 0, .full = 2}));
  EXPECT_EQ(map.count(0, 1), (TileCount{.empty = 4, .partial = 0, .full = 0}));
  EXPECT_EQ(map.count(1, 2), (TileCount{.empty = 0, .partial = 0, .full = 4}));
  EXPECT_EQ(map.count(), (TileCount{.empty = 3 * 2 + 4 + 4, .partial = 0, .full = 3 * 2 + 3 * 4}));

  BlockMapSpec one = spec;
  one.sequence = 1;
  one.q_head = 3;
  EXPECT_EQ(block_map(one).count(), map.count(1, 3));
  EXPECT_EQ(block_map(one).num_sequences(), 1);
}

TEST(PublicBlockMap, OfPackedSequencesHasTheLengthsOfEach) {
  const std::vector<std::int64_t> cu_q{0, 70, 70, 100}, cu_kv{0, 10, 20, 150};
  const BlockMap map = block_map({.mask = causal(Align::top_left),
                                  .cu_seqlens_q = view(cu_q.data(), {4}),
                                  .cu_seqlens_kv = view(cu_kv.data(), {4})});
  EXPECT_EQ(map.num_sequences(), 3);
  EXPECT_EQ(map.num_q_tiles(0), 2);
  EXPECT_EQ(map.num_q_tiles(1), 0);
  EXPECT_EQ(map.seqlen_kv(2), 130);
  EXPECT_EQ(runs_of(map, 1, 0), (Runs{{0, 1, TileKind::full}}));
  EXPECT_EQ(runs_of(map, 0, 2), (Runs{{0, 1, TileKind::partial}}));
}

TEST(PublicBlockMap, IsDrawnAsTheCommandDraws) {
  const BlockMap map =
      block_map({.mask = causal(), .seqlen_q = 4, .seqlen_kv = 4, .tile_q = 2, .tile_kv = 2});
  EXPECT_NE(map.print().find("│░ │\n│█░│\n"), std::string::npos) << map.print();
  const MaskPicture picture = map.draw(0, 0, 2);
  EXPECT_EQ(picture.width, 2);
  EXPECT_EQ(picture.height, 2);
  EXPECT_EQ((std::vector<std::uint8_t>(picture.rgb.begin() + 3, picture.rgb.begin() + 6)),
            (std::vector<std::uint8_t>{255, 255, 255}));
}

TEST(PublicBlockMap, WithoutScoresIsEmpty) {
  EXPECT_EQ(block_map({.mask = causal()}).count(), TileCount{});
  EXPECT_EQ(block_map({.mask = causal(), .batch = 0, .seqlen_q = 8, .seqlen_kv = 8}).count(),
            TileCount{});
  const BlockMap no_keys = block_map({.mask = causal(), .seqlen_q = 8});
  EXPECT_EQ(no_keys.num_q_tiles(), 1);
  EXPECT_TRUE(no_keys.row(0).empty());
}

TEST(PublicBlockMap, RefusesWhatItCannotMap) {
  constexpr std::int64_t kBeyond = std::int64_t{1} << 31;
  EXPECT_EQ(refusal_of({.seqlen_q = -1}), "block_map: seqlen_q is -1; expected 0 to 2147483647");
  EXPECT_EQ(refusal_of({.seqlen_kv = kBeyond}),
            "block_map: seqlen_kv is 2147483648; expected 0 to 2147483647");
  EXPECT_EQ(refusal_of({.tile_q = 0}), "block_map: tile_q is 0; expected 1 to 2147483647");
  EXPECT_EQ(refusal_of({.num_heads_q = 3, .num_heads_kv = 2}),
            "block_map: num_heads_q is 3; expected a multiple of num_heads_kv, 2");
  EXPECT_EQ(refusal_of({.batch = 2, .sequence = 2}), "block_map: sequence is 2; expected 0 to 1");
  EXPECT_EQ(refusal_of({.q_head = -1}), "block_map: q_head is -1; expected 0 to 0");
  const std::vector<std::int32_t> falling{0, 3, 2}, late{1, 2}, right{0, 2, 4};
  const auto packed = [](const std::vector<std::int32_t>& q, const std::vector<std::int32_t>& kv) {
    return BlockMapSpec{.cu_seqlens_q = view(q.data(), {static_cast<std::int64_t>(q.size())}),
                        .cu_seqlens_kv = view(kv.data(), {static_cast<std::int64_t>(kv.size())})};
  };
  EXPECT_EQ(refusal_of(packed(falling, right)),
            "block_map: cu_seqlens_q[2] is 2 after 3; expected offsets from 0 that never decrease");
  EXPECT_EQ(refusal_of(packed(late, right)),
            "block_map: cu_seqlens_q[0] is 1 after 0; expected offsets from 0 that never decrease");
  BlockMapSpec one_sided = packed(right, right);
  one_sided.cu_seqlens_kv = {};
  EXPECT_EQ(refusal_of(one_sided),
            "block_map: cu_seqlens_kv is missing; expected i32 or i64 [num_sequences + 1]");
}

TEST(PublicBlockMap, RefusesMoreRowsThanMemoryHolds) {
  constexpr std::int64_t kLong = (std::int64_t{1} << 31) - 1;
  EXPECT_EQ(
      refusal_of({.seqlen_q = kLong, .seqlen_kv = 1, .tile_q = 1}),
      "block_map: 2147483647 rows of tiles in 1 sequences and 1 heads are to be mapped; expected "
      "at most 67108864 in all, take larger tiles, or one sequence or head");
  EXPECT_NE(refusal_of({.num_heads_q = kLong, .seqlen_q = 128, .seqlen_kv = 1}).find("2147483648"),
            std::string::npos);
  EXPECT_EQ(refusal_of({.seqlen_q = kLong, .seqlen_kv = kLong, .tile_q = kLong}), "(not refused)");
}

TEST(PublicBlockMap, RefusesCapturesAsACallDoes) {
  const std::vector<std::int64_t> wide{0, std::int64_t{1} << 40};
  EXPECT_NE(
      refusal_of({.mask = documents(view(wide.data(), {1, 2})), .seqlen_q = 2, .seqlen_kv = 2})
          .find("expected integers of 32 bits"),
      std::string::npos);
  const std::vector<std::int32_t> ids(5, 0);
  const Captured table = capture("ids", view(ids.data(), {5}));
  const MaskMod beside = mask_mod([&](auto x) { return table[x.kv_idx + 5] == 0; });
  EXPECT_NE(refusal_of({.mask = beside, .seqlen_q = 6, .seqlen_kv = 6}).find("block_map: mask"),
            std::string::npos);
}

TEST(PublicBlockMap, RefusesIndicesOutOfRange) {
  const BlockMap map = block_map({.mask = causal(), .seqlen_q = 70, .seqlen_kv = 70});
  EXPECT_EQ(refusal([&] { map.row(2); }), "BlockMap: q_tile is 2; expected 0 to 1");
  EXPECT_EQ(refusal([&] { map.at(0, -1); }), "BlockMap: kv_tile is -1; expected 0 to 1");
  EXPECT_EQ(refusal([&] { map.count(1, 0); }), "BlockMap: sequence is 1; expected 0 to 0");
  EXPECT_EQ(refusal([&] { map.row(0, 0, 1); }), "BlockMap: q_head is 1; expected 0 to 0");
}

// ---- materialize_mask ----

/// A mask that reads everything that one may read.
struct EveryVariable {
  std::vector<std::int32_t> ids = std::vector<std::int32_t>(2 * 40);
  EveryVariable() {
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i / 7 % 3);
  }
  BlockMapSpec spec() {
    const Captured table = capture("ids", view(ids.data(), {2, 40}));
    return {.mask = mask_mod([&](auto x) {
              return table(x.batch, x.kv_idx) != x.kv_head && (x.q_idx + x.q_head) % 3 != 0 &&
                     x.kv_idx < x.seqlen_kv - x.seqlen_q + x.q_idx;
            }),
            .batch = 2,
            .num_heads_q = 4,
            .num_heads_kv = 2,
            .seqlen_q = 37,
            .seqlen_kv = 40};
  }
  bool is_visible(std::int64_t b, std::int64_t h, std::int64_t q, std::int64_t kv) const {
    return ids[static_cast<std::size_t>(b * 40 + kv)] != h / 2 && (q + h) % 3 != 0 && kv < 3 + q;
  }
};

TEST(MaterializeMask, IsTheMaskOfEverySequenceAndHead) {
  EveryVariable every;
  std::vector<std::uint8_t> bytes(2 * 4 * 37 * 40, 7);
  materialize_mask(every.spec(), view(bytes.data(), {2, 4, 37, 40}));
  std::size_t at = 0;
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::int64_t q = 0; q < 37; ++q) {
        for (std::int64_t kv = 0; kv < 40; ++kv)
          ASSERT_EQ(bytes[at++], every.is_visible(b, h, q, kv) ? 1 : 0)
              << b << ' ' << h << ' ' << q << ' ' << kv;
      }
    }
  }
}

/// Strides of a transposed tensor; rows and keys behind the end.
TEST(MaterializeMask, OfOneTileIsWrittenWhereTheViewSays) {
  EveryVariable every;
  BlockMapSpec spec = every.spec();
  spec.sequence = 1;
  spec.q_head = 2;
  bool flags[16 * 16];
  materialize_mask(spec, view(flags, {1, 1, 16, 16}, {256, 256, 1, 16}), 32, 32);
  for (std::int64_t i = 0; i < 16; ++i) {
    for (std::int64_t j = 0; j < 16; ++j) {
      const bool exists = 32 + i < 37 && 32 + j < 40;
      ASSERT_EQ(flags[j * 16 + i], exists && every.is_visible(1, 2, 32 + i, 32 + j))
          << i << ' ' << j;
    }
  }
}

TEST(MaterializeMask, AgreesWithTheMap) {
  EveryVariable every;
  BlockMapSpec spec = every.spec();
  spec.tile_q = 3;
  spec.tile_kv = 4;
  const BlockMap map = block_map(spec);
  std::vector<std::uint8_t> bytes(2 * 4 * 37 * 40);
  materialize_mask(spec, view(bytes.data(), {2, 4, 37, 40}));
  std::int64_t num_proven = 0;
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::int64_t q = 0; q < 37; ++q) {
        for (std::int64_t kv = 0; kv < 40; ++kv) {
          const TileKind kind = map.at(q / 3, kv / 4, b, h);
          if (kind == TileKind::partial) continue;
          ++num_proven;
          ASSERT_EQ(bytes[static_cast<std::size_t>(((b * 4 + h) * 37 + q) * 40 + kv)],
                    kind == TileKind::full ? 1 : 0);
        }
      }
    }
  }
  EXPECT_GT(num_proven, 0);
}

TEST(MaterializeMask, WithoutAMaskIsAllVisible) {
  std::vector<std::uint8_t> bytes(4 * 4, 7);
  materialize_mask({.seqlen_q = 3, .seqlen_kv = 4}, view(bytes.data(), {1, 1, 4, 4}));
  EXPECT_EQ(bytes, (std::vector<std::uint8_t>{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0}));
}

TEST(MaterializeMask, RefusesBeforeItWrites) {
  std::vector<std::uint8_t> bytes(16, 7);
  const BlockMapSpec spec{.mask = causal(), .seqlen_q = 4, .seqlen_kv = 4};
  const auto refused = [&](const BlockMapSpec& of, const TensorView& visible, std::int64_t q = 0) {
    return refusal([&] { materialize_mask(of, visible, q); });
  };
  EXPECT_EQ(
      refused(spec, view(bytes.data(), {2, 1, 2, 4})),
      "materialize_mask: visible is u8 [2, 1, 2, 4]; expected bool or u8 [1, 1, rows, columns]");
  EXPECT_EQ(refused(spec, view(bytes.data(), {1, 1, 4, 4}), -1),
            "materialize_mask: q_begin is -1; expected 0 to 2147483647");
  const std::vector<std::uint8_t>& read_only = bytes;
  EXPECT_NE(refused(spec, view(read_only.data(), {1, 1, 4, 4})), "(not refused)");
  EXPECT_NE(refused(spec, view(bytes.data(), {1, 1, 4, 4}, {0, 0, 0, 1})), "(not refused)");
  const BlockMapSpec reads_itself{
      .mask = dense_mask(view(bytes.data(), {4, 4})), .seqlen_q = 4, .seqlen_kv = 4};
  EXPECT_NE(refused(reads_itself, view(bytes.data(), {1, 1, 4, 4})), "(not refused)");
  const std::int32_t* const no_data = nullptr;
  const BlockMapSpec unknown{
      .mask = documents(view(no_data, {1, 4})), .seqlen_q = 4, .seqlen_kv = 4};
  EXPECT_EQ(refused(unknown, view(bytes.data(), {1, 1, 4, 4})),
            "materialize_mask: captured 'segments' has no data; expected some here");
  EXPECT_EQ(bytes, std::vector<std::uint8_t>(16, 7));
}

}  // namespace
}  // namespace fovea::testing
