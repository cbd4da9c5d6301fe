// What a mask leaves, through the C ABI: the same as block_map and materialize_mask, in arrays of the caller's.
#include "fovea/block_map.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "fovea/fovea.h"
#include "fovea/mask.hpp"

#include "unit/ffi/c_call.hpp"

namespace fovea::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Two sequences, four heads, a window; shapes alone: no tensor of q or k has memory.
struct MapCall {
  MapCall() {
    q.tensor.data = k.tensor.data = nullptr;
    forward.struct_size = sizeof(forward);
    forward.version = FOVEA_ABI_VERSION;
    forward.q = &q.tensor;
    forward.k = &k.tensor;
    forward.causal = 1;
    forward.has_window_left = 1;
    forward.window_left = 20;
    forward.mask_mod = "kv_idx != 3 || q_head == 1";
    args.struct_size = sizeof(args);
    args.version = FOVEA_ABI_VERSION;
    args.forward = &forward;
    args.tile_q = 8;
    args.tile_kv = 4;
  }
  BlockMapSpec spec() const {
    return {.mask = window(20, {}) && causal() && parse_mask_mod("kv_idx != 3 || q_head == 1"),
            .batch = 2,
            .num_heads_q = 4,
            .num_heads_kv = 2,
            .seqlen_q = 30,
            .seqlen_kv = 45,
            .tile_q = 8,
            .tile_kv = 4};
  }

  FloatTensor q{{2, 30, 4, 8}}, k{{2, 45, 2, 8}};
  fovea_attention_forward_args forward{};
  fovea_block_map_args args{};
};

constexpr std::uint8_t* kNoKinds = nullptr;

TEST(CBlockMap, TilesAreThoseOfTheMap) {
  const MapCall call;
  std::array<std::int64_t, 4> shape{};
  ASSERT_EQ(outcome_of(fovea_mask_tiles, &call.args, kNoKinds, 0, shape.data()).message, "");
  ASSERT_THAT(shape, ElementsAre(2, 4, 4, 12));
  std::vector<std::uint8_t> kinds(2 * 4 * 4 * 12, 9);
  ASSERT_EQ(
      outcome_of(fovea_mask_tiles, &call.args, kinds.data(), kinds.size(), shape.data()).message,
      "");
  const BlockMap map = block_map(call.spec());
  std::size_t at = 0;
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::int64_t q_tile = 0; q_tile < 4; ++q_tile) {
        for (std::int64_t kv_tile = 0; kv_tile < 12; ++kv_tile)
          ASSERT_EQ(kinds[at++], static_cast<int>(map.at(q_tile, kv_tile, i, h)));
      }
    }
  }
  EXPECT_GT(map.count().empty, 0);
  EXPECT_GT(map.count().full, 0);
}

TEST(CBlockMap, RunsAreThoseOfTheMap) {
  const MapCall call;
  std::array<std::int64_t, 2> counts{};
  ASSERT_EQ(outcome_of(fovea_mask_runs, &call.args, static_cast<std::int64_t*>(nullptr), 0,
                       static_cast<std::int32_t*>(nullptr), 0, counts.data())
                .message,
            "");
  ASSERT_EQ(counts[0], 2 * 4 * 4);
  std::vector<std::int64_t> row_begin(static_cast<std::size_t>(counts[0]) + 1, -1);
  std::vector<std::int32_t> runs(static_cast<std::size_t>(counts[1]) * 3, -1);
  ASSERT_EQ(outcome_of(fovea_mask_runs, &call.args, row_begin.data(), row_begin.size(), runs.data(),
                       static_cast<std::size_t>(counts[1]), counts.data())
                .message,
            "");
  const BlockMap map = block_map(call.spec());
  std::size_t row = 0, at = 0;
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t h = 0; h < 4; ++h) {
      for (std::int64_t q_tile = 0; q_tile < 4; ++q_tile, ++row) {
        ASSERT_EQ(row_begin[row], static_cast<std::int64_t>(at));
        for (const TileRun& run : map.row(q_tile, i, h)) {
          ASSERT_EQ(runs[3 * at], run.begin);
          ASSERT_EQ(runs[3 * at + 1], run.end);
          ASSERT_EQ(runs[3 * at + 2], static_cast<int>(run.kind));
          ++at;
        }
      }
    }
  }
  EXPECT_EQ(row_begin[row], counts[1]);
}

TEST(CBlockMap, ElementsAreThoseOfTheMask) {
  MapCall call;
  call.args.has_sequence = call.args.has_q_head = 1;
  call.args.sequence = 1;
  call.args.q_head = 2;
  std::vector<std::uint8_t> got(30 * 45, 9), expected(30 * 45);
  std::int64_t shape[] = {1, 1, 30, 45};
  const DLTensor visible{got.data(), {kDLCPU, 0}, 4, {kDLBool, 8, 1}, shape, nullptr, 0};
  ASSERT_EQ(outcome_of(fovea_mask_elements, &call.args, 0, 0, &visible).message, "");
  BlockMapSpec spec = call.spec();
  spec.sequence = 1;
  spec.q_head = 2;
  materialize_mask(spec, view(expected.data(), {1, 1, 30, 45}));
  EXPECT_EQ(got, expected);
}

TEST(CBlockMap, PicturesAreThoseOfTheMap) {
  const MapCall call;
  const BlockMap map = block_map(call.spec());
  char* text = nullptr;
  ASSERT_EQ(outcome_of(fovea_mask_print, &call.args, 0, 0, &text).message, "");
  EXPECT_EQ(text, map.print());
  fovea_string_free(text);

  std::array<std::int32_t, 2> size{};
  ASSERT_EQ(outcome_of(fovea_mask_draw, &call.args, 6, kNoKinds, 0, size.data()).message, "");
  const MaskPicture picture = map.draw(0, 0, 6);
  ASSERT_THAT(size, ElementsAre(picture.height, picture.width));
  std::vector<std::uint8_t> rgb(picture.rgb.size());
  ASSERT_EQ(outcome_of(fovea_mask_draw, &call.args, 6, rgb.data(), rgb.size(), size.data()).message,
            "");
  EXPECT_EQ(rgb, picture.rgb);
}

TEST(CBlockMap, PackedSequencesHaveTheirOwnLengths) {
  MapCall call;
  FloatTensor q({30, 4, 8}), k({45, 2, 8});
  std::int32_t cu_q[] = {0, 10, 30}, cu_kv[] = {0, 40, 45};
  std::vector<std::int32_t> q_ids(30, 0), kv_ids(45, 0);
  q_ids[10] = -1;
  std::int64_t three[] = {3}, rows_q[] = {30}, rows_kv[] = {45};
  const auto list = [](std::int32_t* data, std::int64_t* shape) {
    return DLTensor{data, {kDLCPU, 0}, 1, {kDLInt, 32, 1}, shape, nullptr, 0};
  };
  const DLTensor cu_q_tensor = list(cu_q, three), cu_kv_tensor = list(cu_kv, three);
  const DLTensor q_tensor = list(q_ids.data(), rows_q), kv_tensor = list(kv_ids.data(), rows_kv);
  fovea_attention_forward_args& forward = call.forward;
  forward = {};
  forward.struct_size = sizeof(forward);
  forward.version = FOVEA_ABI_VERSION;
  forward.q = &q.tensor;
  forward.k = &k.tensor;
  forward.cu_seqlens_q = &cu_q_tensor;
  forward.cu_seqlens_kv = &cu_kv_tensor;
  forward.segments_q = &q_tensor;
  forward.segments_kv = &kv_tensor;
  call.args.tile_q = call.args.tile_kv = 1;
  call.args.has_q_head = 1;
  std::array<std::int64_t, 4> shape{};
  ASSERT_EQ(outcome_of(fovea_mask_tiles, &call.args, kNoKinds, 0, shape.data()).message, "");
  ASSERT_THAT(shape, ElementsAre(2, 1, 20, 40));
  std::vector<std::uint8_t> kinds(2 * 20 * 40);
  ASSERT_EQ(
      outcome_of(fovea_mask_tiles, &call.args, kinds.data(), kinds.size(), shape.data()).message,
      "");
  EXPECT_EQ(kinds[9 * 40 + 39], FOVEA_TILE_FULL);
  EXPECT_EQ(kinds[10 * 40], FOVEA_TILE_EMPTY) << "behind the end of the first sequence";
  EXPECT_EQ(kinds[20 * 40], FOVEA_TILE_EMPTY) << "padding";
  EXPECT_EQ(kinds[21 * 40 + 4], FOVEA_TILE_FULL);
  EXPECT_EQ(kinds[21 * 40 + 5], FOVEA_TILE_EMPTY) << "behind the keys of the second";
}

TEST(CBlockMap, RefusalsNameTheArgument) {
  MapCall call;
  std::array<std::int64_t, 4> shape{-7, -7, -7, -7};
  std::uint8_t kind = 9;
  const auto tiles = [&](std::size_t num_kinds) {
    return outcome_of(fovea_mask_tiles, &call.args, &kind, num_kinds, shape.data());
  };
  EXPECT_EQ(tiles(1).message, "fovea_mask_tiles: num_kinds is 1; expected 384");
  EXPECT_EQ(shape[0], -7);
  EXPECT_EQ(kind, 9);
  call.args.has_q_head = 2;
  EXPECT_EQ(tiles(384).message, "fovea_mask_tiles: has_q_head: is 2; expected 0 to 1");
  call.args.has_q_head = 1;
  call.args.q_head = 4;
  EXPECT_EQ(tiles(384).message, "block_map: q_head is 4; expected 0 to 3");
  call.args.q_head = 0;
  call.args.tile_kv = -1;
  EXPECT_THAT(tiles(384).message, HasSubstr("tile_kv is -1"));
  call.args.forward = nullptr;
  EXPECT_THAT(tiles(384).message, HasSubstr("fovea_mask_tiles: forward: the struct is NULL"));
  MapCall other;
  other.k.shape[0] = 3;
  EXPECT_THAT(outcome_of(fovea_mask_tiles, &other.args, kNoKinds, 0, shape.data()).message,
              HasSubstr("forward: k has batch 3 but q has 2"));
  other.forward.q = nullptr;
  EXPECT_THAT(outcome_of(fovea_mask_tiles, &other.args, kNoKinds, 0, shape.data()).message,
              HasSubstr("forward: q: is NULL"));
}

TEST(CTileTable, ListsBecomeTheTable) {
  IndexTensor indptr({4}, {0, 2, 2, 3}), indices({3}, {0, 3, 1});
  std::vector<std::uint8_t> got(12, 9);
  std::int64_t shape[] = {3, 4};
  const DLTensor table{got.data(), {kDLCPU, 0}, 2, {kDLBool, 8, 1}, shape, nullptr, 0};
  fovea_tile_lists_args args{};
  args.struct_size = sizeof(args);
  args.version = FOVEA_ABI_VERSION;
  args.indptr = &indptr.tensor;
  args.indices = &indices.tensor;
  args.table = &table;
  ASSERT_EQ(outcome_of(fovea_tile_table, &args).message, "");
  EXPECT_THAT(got, ElementsAre(1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0));
  indices.values[1] = 4;
  EXPECT_THAT(outcome_of(fovea_tile_table, &args).message,
              HasSubstr("tile_table: indices[1] is 4, in row 0; expected 0 to 3"));
  args.table = nullptr;
  EXPECT_THAT(outcome_of(fovea_tile_table, &args).message, HasSubstr("table is missing"));
}

}  // namespace
}  // namespace fovea::testing
