// Scores of one tile in a warp's registers: the product, the score program, the mask. What follows them, softmax or its
// gradient, is not known here. Chapter 3 of sm80/attention_forward.cuh; read compute.cuh next.
#pragma once

#include "common/code_units.cuh"
#include "common/position.cuh"
#include "common/score.cuh"
#include "common/tile_walk.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"
#include "shared/rounding.h"
#include "team/code_scores.cuh"
#include "team/team.cuh"
#include "tile/product.cuh"

namespace fovea::cuda::team {

/// A thread's part of S, or of P, of its warp's rows: accumulators of [block of rows][block of keys].
template <TeamSpec spec>
using ScoreFragments = float[Traits<spec>::kRowBlocks][Traits<spec>::kKeyBlocks][4];

/// One step of 16 columns of A, whose rows from `row` on (of this lane: lane % 16, chunk lane / 16) are in shared
/// memory.
template <class Tile, int kRowBlocks>
FOVEA_DEVICE void load_a_step(std::uint32_t (&a)[kRowBlocks][4], SharedAddress row, int step) {
#pragma unroll
  for (int i = 0; i < kRowBlocks; ++i) {
    const U32x4 part =
        ptx::ldmatrix_x4(Tile::chunk_ahead(row, 2 * step) + i * 16 * Tile::kRowPitch);
    a[i][0] = part.x, a[i][1] = part.y, a[i][2] = part.z, a[i][3] = part.w;
  }
}

template <TeamSpec spec, class Mods>
struct Scores {
  using T = Traits<spec>;
  using Fragments = ScoreFragments<spec>;

  /// Are they products of codes as they stand, to the softmax? Programs read them multiplied out.
  static constexpr bool kAreCodes = spec.multiplies_codes && !spec.is_prescaled;

  /// A operands of Q Kᵀ: all, where they are kept, else those of one step.
  std::uint32_t queries[T::kKeepsQueries ? T::kQkSteps : 1][T::kRowBlocks][4];
  [[no_unique_address]] CodeScores<spec> codes;

  // ---- the product -----------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER static SharedAddress query_row(const Team<spec>& team) {
    return typename T::QTile{team.warp_smem()}.chunk(team.lane % 16, team.lane / 16);
  }

  FOVEA_DEVICE_MEMBER void keep_queries(const Team<spec>& team) {
#pragma unroll
    for (int step = 0; step < T::kQkSteps; ++step)
      load_a_step<typename T::QTile>(queries[step], query_row(team), step);
  }

  /// S = Q Kᵀ. Of the tile its first tile_kv rows.
  template <class Tile>
  FOVEA_DEVICE_MEMBER void multiply_keys(const Team<spec>& team, Fragments& s, const Tile& keys) {
    constexpr float kZero = spec.multiplies_codes ? sum_origin(qk_codes(spec.rounding)) : 0.0F;
    const SharedAddress k_row = keys.chunk(team.lane % 8 + team.lane / 16 * 8, team.lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int j = 0; j < T::kKeyBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = kZero;
#pragma unroll
    for (int step = 0; step < T::kQkSteps; ++step) {
      if constexpr (!T::kKeepsQueries)
        load_a_step<typename T::QTile>(queries[0], query_row(team), step);
      const auto& q = queries[T::kKeepsQueries ? step : 0];
#pragma unroll
      for (int j = 0; j < T::kKeyBlocks; j += 2) {
        const U32x4 b =
            ptx::ldmatrix_x4(Tile::chunk_ahead(k_row, 2 * step) + j * 8 * Tile::kRowPitch);
#pragma unroll
        for (int i = 0; i < T::kRowBlocks; ++i) {
          multiply(s[i][j], q[i], b.x, b.y);
          multiply(s[i][j + 1], q[i], b.z, b.w);
        }
      }
    }
  }

  /// One step of depth, of 16 elements; or of 32 codes, whose sum is the bits of a float that has its place for 1.
  FOVEA_DEVICE void multiply(float (&s)[4], const std::uint32_t (&q)[4], std::uint32_t k0,
                             std::uint32_t k1) {
    if constexpr (spec.multiplies_codes && qk_codes(spec.rounding) == Codes::e4m3) {
      ptx::mma_m16n8k32_e4m3(s, q, k0, k1);
    } else if constexpr (spec.multiplies_codes) {
      ptx::mma_m16n8k32_s8(s, q, k0, k1);
    } else {
      multiply_add<spec.element, spec.instructions>(s, q, k0, k1);
    }
  }

  // ---- programs --------------------------------------------------------------------------------

  /// Scale and score program, where scores are scaled one by one.
  FOVEA_DEVICE_MEMBER static void modify(const Team<spec>& team, Fragments& s, VisitedTile tile) {
    if constexpr (spec.is_prescaled) {
      for_each_score(team, tile, s, [&](float& score, const Position& at) {
        modify_score<Mods>(score, at, team.p);
      });
    }
  }

  /// What a row does not see becomes -inf, whatever it was.
  FOVEA_DEVICE_MEMBER static void mask(const Team<spec>& team, Fragments& s, VisitedTile tile) {
    if (tile.is_full) return;
    for_each_score(team, tile, s, [&](float& score, const Position& at) {
      mask_score<Mods>(score, at, team.work.kv_end, team.p.captures);
    });
  }

  /// Equal scores where a row sees the key, NaN too: all P are equal then, relative to an origin of 0.
  FOVEA_DEVICE_MEMBER static void shrink(Fragments& s) {
    constexpr float kZero = kAreCodes ? sum_origin(qk_codes(spec.rounding)) : 0.0F;
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int j = 0; j < T::kKeyBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = s[i][j][e] == -infinity() ? -infinity() : kZero;
  }

  /// visit(score, position) for every score of this thread.
  template <class Visit>
  FOVEA_DEVICE_MEMBER static void for_each_score(const Team<spec>& team, VisitedTile tile,
                                                 Fragments& s, Visit&& visit) {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Position at = team.row_at(team.my_row(i, half)).position();
        const std::int32_t kv_begin = tile.idx * spec.tile_kv + team.lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < T::kKeyBlocks; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            at.kv_idx = kv_begin + j * 8 + e;
            visit(s[i][j][half * 2 + e], at);
          }
        }
      }
    }
  }
};

}  // namespace fovea::cuda::team
