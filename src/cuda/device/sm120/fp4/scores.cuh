// Scores of a tile by products of four bits. Chapter 2 of sm120/attention_fp4.cuh; read sums.cuh next.
#pragma once

#include "common/given_product.cuh"
#include "common/position.cuh"
#include "common/score.cuh"
#include "common/tile_walk.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/mma_scaled.cuh"
#include "ptx/warp.cuh"
#include "shared/fp4.h"
#include "team/team.cuh"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::sm120 {

using ptx::F32x4;
using ptx::SharedAddress;
using ptx::U32x4;

template <Fp4ForwardSpec spec>
inline constexpr ptx::GroupScales kScales =
    spec.group == 16 ? ptx::GroupScales::ue4m3_of_16 : ptx::GroupScales::ue8m0_of_32;

/// d += a b, with scales out of these lanes of each four. Lanes are constants once the caller's loops are unrolled.
template <ptx::GroupScales scales>
FOVEA_DEVICE void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                           std::uint32_t b1, std::uint32_t a_scales, std::uint32_t b_scales,
                           int a_thread, int b_thread) {
  const std::uint32_t b[2] = {b0, b1};
  switch (4 * a_thread + b_thread) {
    case 0:
      return ptx::mma_m16n8k64_e2m1<scales, 0, 0>(d, a, b, a_scales, b_scales);
    case 1:
      return ptx::mma_m16n8k64_e2m1<scales, 0, 1>(d, a, b, a_scales, b_scales);
    case 2:
      return ptx::mma_m16n8k64_e2m1<scales, 0, 2>(d, a, b, a_scales, b_scales);
    case 3:
      return ptx::mma_m16n8k64_e2m1<scales, 0, 3>(d, a, b, a_scales, b_scales);
    case 4:
      return ptx::mma_m16n8k64_e2m1<scales, 1, 0>(d, a, b, a_scales, b_scales);
    case 5:
      return ptx::mma_m16n8k64_e2m1<scales, 1, 1>(d, a, b, a_scales, b_scales);
    case 6:
      return ptx::mma_m16n8k64_e2m1<scales, 1, 2>(d, a, b, a_scales, b_scales);
    default:
      return ptx::mma_m16n8k64_e2m1<scales, 1, 3>(d, a, b, a_scales, b_scales);
  }
}

/// Words of a lane's scales of 32 rows of a record, one for each step of depth.
template <int steps>
struct ScaleWords {
  std::uint32_t step[steps];
};
template <int steps>
FOVEA_DEVICE ScaleWords<steps> scale_words(SharedAddress scales, int lane, int rows) {
  const SharedAddress at = scales + 4 * fp4_scale_word(rows, 0, steps) + 4 * steps * lane;
  if constexpr (steps == 1) {
    return {{ptx::ld_shared<std::uint32_t>(at)}};
  } else {
    const auto both = ptx::ld_shared<ptx::U32x2>(at);
    return {{both.x, both.y}};
  }
}

/// A thread's part of S of its warp's 16 rows: accumulators of blocks of 8 keys of a record.
using Scores = float[kQuantizedTile / 8][4];

/// The key of a tile that accumulator e of block `block` belongs to.
FOVEA_DEVICE int key_of(int lane, int block, int e) {
  return block / 4 * 32 + lane % 4 * 8 + block % 4 * 2 + e % 2;
}

/// What a thread knows of its rows' queries.
template <Fp4ForwardSpec spec, class Mods>
struct Fp4Queries {
  static constexpr TeamSpec kTeam = fp4_team_spec(spec);
  static constexpr int kHeadDim = spec.head_dim_qk;
  static constexpr int kSteps = kHeadDim / kFp4Depth;
  static_assert(kSteps == 1 || kSteps == 2, "scales of a row are in two lanes of each four");
  using Tile = JoinedTile<kQuantizedTile, kHeadDim / 2>;

  std::uint32_t codes[kSteps][4];
  std::uint32_t scales;  // of row lane / 4 + 8 (lane % 2), step lane / 2 % 2
  float of_mean[2];      // q · μ
  bool has_unrounded;    // some row of the warp

  // ---- before the walk -------------------------------------------------------------------------

  /// `record`: of the block of queries that the rows begin in; null: no row is anybody's. `first`: this warp's first
  /// row of it.
  FOVEA_DEVICE_MEMBER void load(const char* record, int first, int lane) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[step][i] = 0;
    scales = 0;
    of_mean[0] = of_mean[1] = 0;
    bool is_unrounded = false;
    if (record != nullptr) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          codes[step][i] = word_at(record, first + lane / 4 + i % 2 * 8,
                                   step * kFp4StepBytes + i / 2 * 16 + lane % 4 * 4);
      const int row = first + lane / 4 + lane % 2 * 8, step = kSteps == 1 ? 0 : lane / 2 % 2;
      scales = ptx::ld_global(
          reinterpret_cast<const std::uint32_t*>(record + fp4_codes_bytes(kHeadDim)) +
          row * kSteps + step);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const QuantizedRow beside = beside_row(record, first + lane / 4 + half * 8);
        of_mean[half] = beside.of_mean;
        is_unrounded = is_unrounded || beside.scale == 0.0F;
      }
    }
    has_unrounded = ptx::vote_any(is_unrounded);
  }

  // ---- of a tile -------------------------------------------------------------------------------

  /// S, which begins as the scores of the block's mean.
  FOVEA_DEVICE_MEMBER void multiply_keys(Scores& s, SharedAddress keys, SharedAddress block_scores,
                                         int lane) const {
    const Tile tile{keys};
    const SharedAddress k_row = tile.chunk(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int block = 0; block < kQuantizedTile / 8; block += 4) {
      start(s, block, block_scores, lane);
      const auto words = scale_words<kSteps>(keys + fp4_codes_bytes(kHeadDim), lane, block * 8);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const U32x4 b = ptx::ldmatrix_x4(Tile::chunk_ahead(k_row, 2 * step) +
                                           (block + j) * 8 * Tile::kRowPitch);
          multiply<kScales<spec>>(s[block + j], codes[step], b.x, b.y, scales, words.step[step],
                                  step, j);
          multiply<kScales<spec>>(s[block + j + 1], codes[step], b.z, b.w, scales, words.step[step],
                                  step, j + 1);
        }
      }
    }
  }

  /// Scores of rows and keys that are not rounded: they are infinite or NaN.
  FOVEA_DEVICE_MEMBER void restore_unrounded(const team::Team<kTeam>& team, Scores& s,
                                             VisitedTile tile, const U32x4& marks,
                                             const char* record, int first) const {
    if (!has_unrounded && (marks.x | marks.y | marks.z | marks.w) == 0) return;
    const std::uint32_t words[4] = {marks.x, marks.y, marks.z, marks.w};
    const Work work = team.kept_work();
    // Rare, so it may take long: a product of given numbers for each pair of which one is not rounded. All lanes go the
    // same way.
#pragma unroll 1
    for (int at = 0; at < kQuantizedTile / 2; ++at) {
      const int block = at / 4, half = at / 2 % 2;
      const int key = key_of(team.lane, block, at % 2);
      const std::uint32_t word = block < 4    ? words[0]
                                 : block < 8  ? words[1]
                                 : block < 12 ? words[2]
                                              : words[3];
      const bool is_mine = (word >> key % 32 & 1U) != 0 ||
                           (has_unrounded && record != nullptr &&
                            beside_row(record, first + team.lane / 4 + half * 8).scale == 0.0F);
      if (!ptx::vote_any(is_mine)) continue;
      const RowView<kTeam> row(team.p, work, team.my_row(0, half));
      const float product = given_product(row, tile.idx * kQuantizedTile + key, team.p.q, team.p.k,
                                          team.p.head_dim_qk);
      const int mine = is_mine ? at : -1;
#pragma unroll
      for (int i = 0; i < kQuantizedTile / 2; ++i)
        s[i / 4][i % 4] = i == mine ? product : s[i / 4][i % 4];
    }
  }

  /// Scale and score program, where scores are scaled one by one.
  FOVEA_DEVICE_MEMBER static void modify(const team::Team<kTeam>& team, Scores& s,
                                         VisitedTile tile) {
    if constexpr (spec.is_prescaled) {
      for_each_score(team, tile, s, [&](float& score, const Position& at) {
        modify_score<Mods>(score, at, team.p);
      });
    }
  }

  /// What a row does not see becomes -inf, whatever it was.
  FOVEA_DEVICE_MEMBER static void mask(const team::Team<kTeam>& team, Scores& s, VisitedTile tile) {
    if (tile.is_full) return;
    for_each_score(team, tile, s, [&](float& score, const Position& at) {
      mask_score<Mods>(score, at, team.work.kv_end, team.p.captures);
    });
  }

 private:
  FOVEA_DEVICE std::uint32_t word_at(const char* record, int row, int byte) {
    return ptx::ld_global(
        reinterpret_cast<const std::uint32_t*>(record + row * (kHeadDim / 2) + byte));
  }
  FOVEA_DEVICE QuantizedRow beside_row(const char* record, int row) {
    return ptx::ld_global(reinterpret_cast<const QuantizedRow*>(record + fp4_rows_at(kHeadDim)) +
                          row);
  }

  /// What products are added to: of 32 keys this lane's eight are neighbours. Programs read whole scores.
  FOVEA_DEVICE_MEMBER void start(Scores& s, int block, SharedAddress block_scores, int lane) const {
    const SharedAddress at = block_scores + 4 * (block * 8 + lane % 4 * 8);
    const auto low = ptx::ld_shared<F32x4>(at), high = ptx::ld_shared<F32x4>(at + 16);
    const float of_keys[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float of_key = of_keys[2 * j + e % 2];
        s[block + j][e] = spec.is_prescaled ? of_key + of_mean[e / 2] : of_key;
      }
  }

  /// visit(score, position) for every score of this thread.
  template <class Visit>
  FOVEA_DEVICE_MEMBER static void for_each_score(const team::Team<kTeam>& team, VisitedTile tile,
                                                 Scores& s, Visit&& visit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Position at = team.row_at(team.my_row(0, half)).position();
#pragma unroll
      for (int i = 0; i < kQuantizedTile / 4; ++i) {
        at.kv_idx = tile.idx * kQuantizedTile + key_of(team.lane, i / 2, i % 2);
        visit(s[i / 2][half * 2 + i % 2], at);
      }
    }
  }
};

}  // namespace fovea::cuda::sm120
