// A walk visits the tiles that are not empty, each once and in order, and asks about few of them on the way.
#include "common/tile_walk.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/range.cuh"
#include "cuda/emulator/emulator.hpp"
#include "ptx/memory.cuh"

namespace fovea::cuda {
namespace {

constexpr std::int32_t kTileKv = 64;

/// Steps of walks: each asks every lane of a warp at most once.
int num_questions = 0;

struct Causal {
  static TileKind tile_kind(const TileSpan& tile, const Captures&) {
    ++num_questions;
    if (tile.kv_end - 1 <= tile.q_begin) return TileKind::full;
    return tile.kv_begin > tile.q_end - 1 ? TileKind::empty : TileKind::partial;
  }
};

/// Keys from q - 1000 to q.
struct Window {
  static TileKind tile_kind(const TileSpan& tile, const Captures&) {
    ++num_questions;
    const bool is_after = tile.kv_begin > tile.q_end - 1;
    const bool is_before = tile.kv_end - 1 < tile.q_begin - 1000;
    if (is_after || is_before) return TileKind::empty;
    const bool is_inside =
        tile.kv_end - 1 <= tile.q_begin && tile.kv_begin >= tile.q_end - 1 - 1000;
    return is_inside ? TileKind::full : TileKind::partial;
  }
};

/// Every third tile is empty, every third full; nothing is known of more than one tile.
struct Striped {
  static TileKind tile_kind(const TileSpan& tile, const Captures&) {
    ++num_questions;
    if (tile.kv_end - tile.kv_begin > kTileKv) return TileKind::partial;
    const std::int32_t stripe = tile.kv_begin / kTileKv % 3;
    return stripe == 0 ? TileKind::empty : stripe == 1 ? TileKind::full : TileKind::partial;
  }
};

struct AllVisible {
  static TileKind tile_kind(const TileSpan&, const Captures&) {
    ++num_questions;
    return TileKind::full;
  }
};

/// The answer about tile `idx` alone.
template <class Mods>
TileKind kind_at(TileSpan rows, std::int32_t idx) {
  rows.kv_begin = idx * kTileKv;
  rows.kv_end = std::min(rows.kv_begin + kTileKv, rows.seqlen_kv);
  return Mods::tile_kind(rows, Captures{});
}

struct Visit {
  std::int32_t idx;
  bool is_full;
  bool operator==(const Visit&) const = default;
};

template <class Mods>
std::vector<Visit> all_visits(const TileSpan& rows, const TileRange& tiles) {
  std::vector<Visit> visits;
  const std::int32_t end = std::min(tiles.end, (rows.seqlen_kv + kTileKv - 1) / kTileKv);
  for (std::int32_t idx = tiles.begin; idx < end; ++idx) {
    const TileKind kind = kind_at<Mods>(rows, idx);
    if (kind != TileKind::empty) visits.push_back({idx, kind == TileKind::full});
  }
  return visits;
}

template <class Mods, WalkOrder order>
std::vector<Visit> walked(const TileSpan& rows, const TileRange& tiles) {
  emulator::Device device;
  std::vector<Visit> visits;
  const Captures captures{};
  const emulator::Report report = device.launch({.block = {32, 1, 1}}, {}, [&] {
    TileWalk<Mods, order> walk(rows, tiles, captures);
    for (VisitedTile tile{}; walk.next(tile);) {
      if (ptx::lane_idx() == 0) visits.push_back({tile.idx, tile.is_full});
    }
  });
  EXPECT_EQ(report.text(), "");
  return visits;
}

template <class Mods>
void expect_all_visits(const TileSpan& rows, const TileRange& tiles) {
  std::vector<Visit> expected = all_visits<Mods>(rows, tiles);
  EXPECT_EQ((walked<Mods, WalkOrder::rising>(rows, tiles)), expected)
      << rows.seqlen_kv << " keys, tiles [" << tiles.begin << ", " << tiles.end << ")";
  std::ranges::reverse(expected);
  EXPECT_EQ((walked<Mods, WalkOrder::falling>(rows, tiles)), expected)
      << rows.seqlen_kv << " keys, tiles [" << tiles.begin << ", " << tiles.end << "), falling";
}

TileSpan rows_of(std::int32_t q_begin, std::int32_t num_rows, std::int32_t seqlen_kv) {
  TileSpan rows{};
  rows.q_head_end = 1;
  rows.q_begin = q_begin;
  rows.q_end = q_begin + num_rows;
  rows.seqlen_q = rows.seqlen_kv = seqlen_kv;
  return rows;
}

TEST(TileWalk, VisitsWhatIsNotEmpty) {
  // None, one key, a tile and its neighbours, a group of 32 tiles and its neighbours, and past the 1024 tiles of one
  // top level.
  for (const std::int32_t seqlen : {0, 1, 63, 64, 65, 2047, 2048, 2049, 5000, 65536 + 100}) {
    const TileRange tiles{0, (seqlen + kTileKv - 1) / kTileKv, kTileKv};
    const TileSpan rows = rows_of(seqlen / 2, 128, seqlen);
    expect_all_visits<Causal>(rows, tiles);
    expect_all_visits<Window>(rows, tiles);
    expect_all_visits<Striped>(rows, tiles);
    expect_all_visits<AllVisible>(rows, tiles);
  }
}

TEST(TileWalk, StaysInItsPartOfTheKeys) {
  const TileSpan rows = rows_of(6000, 128, 10000);
  for (const TileRange tiles : {TileRange{3, 77, kTileKv}, TileRange{90, 157, kTileKv},
                                TileRange{5, 5, kTileKv}, TileRange{100, 4000, kTileKv}}) {
    expect_all_visits<Causal>(rows, tiles);
    expect_all_visits<Striped>(rows, tiles);
  }
}

TEST(TileWalk, OfNoRowsVisitsNothing) {
  EXPECT_TRUE(
      (walked<AllVisible, WalkOrder::rising>(rows_of(10, 0, 1000), {0, 16, kTileKv})).empty());
}

template <class Mods>
int steps_of(std::int32_t q_begin, std::int32_t seqlen) {
  num_questions = 0;
  walked<Mods, WalkOrder::rising>(rows_of(q_begin, 128, seqlen), {0, seqlen / kTileKv, kTileKv});
  return (num_questions + 31) / 32;
}

TEST(TileWalk, TakesFewStepsWhereMasksAreNarrow) {
  constexpr std::int32_t kKeys = 65536;  // 32 steps, one by one
  EXPECT_LE(steps_of<Window>(40000, kKeys), 3);
  EXPECT_LE(steps_of<Causal>(40000, kKeys), 2);
  EXPECT_EQ(steps_of<AllVisible>(40000, kKeys), 1);
}

}  // namespace
}  // namespace fovea::cuda
