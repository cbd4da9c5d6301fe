// Softmax and O of one tile, in a warp's registers. Chapter 4 of sm80/attention_forward.cuh; read walk.cuh next.
#pragma once

#include "common/code_units.cuh"
#include "common/dropout.cuh"
#include "common/online_softmax.cuh"
#include "common/quad_reduce.cuh"
#include "common/tile_walk.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"
#include "team/scores.cuh"
#include "team/team.cuh"
#include "tile/product.cuh"

namespace fovea::cuda::team {

/// Rounds to the tensor cores' element, `lo` in the low half.
template <Element element>
FOVEA_DEVICE std::uint32_t pack(float lo, float hi) {
  if constexpr (element == Element::bf16) return ptx::cvt_bf16x2(lo, hi);
  return ptx::cvt_f16x2(lo, hi);
}

/// Of a row, among the scores that this thread has.
template <TeamSpec spec>
FOVEA_DEVICE float greatest_of_thread(const ScoreFragments<spec>& s, int i, int half) {
  float greatest = s[i][0][half * 2];
#pragma unroll
  for (int j = 0; j < Traits<spec>::kKeyBlocks; ++j) {
    greatest = ptx::max_ftz(greatest, s[i][j][half * 2]);
    greatest = ptx::max_ftz(greatest, s[i][j][half * 2 + 1]);
  }
  return greatest;
}

template <TeamSpec spec>
FOVEA_DEVICE float greatest_of_row(const ScoreFragments<spec>& s, int i, int half) {
  return quad_max(greatest_of_thread<spec>(s, i, half));
}

/// drop(block of rows, first block of keys, count of such, bits): what is dropped of this thread's scores of a tile, 4
/// bits of each block of keys from the lowest on, those of its fragment in their order. Decisions first: a loop that is
/// not unrolled draws them, and scores need no more than a bit each.
template <TeamSpec spec, class Drop>
FOVEA_DEVICE void for_each_dropped(const Team<spec>& team, VisitedTile tile, Drop&& drop) {
  using T = Traits<spec>;
  constexpr int kAtOnce = T::kKeyBlocks < 8 ? T::kKeyBlocks : 8;
  const std::int32_t first_group = tile.idx * (spec.tile_kv / 4) + team.lane % 4 / 2;
  const DropoutKeyOf<spec> key = dropout_key<spec>(team.p);
#pragma unroll
  for (int first = 0; first < T::kKeyBlocks; first += kAtOnce) {
    DroppedBits bits[T::kRowBlocks];
#pragma unroll 2
    for (int j = first; j < first + kAtOnce; ++j) {
#pragma unroll
      for (int i = 0; i < T::kRowBlocks; ++i) {
        const RowView<spec> row = team.row_at(team.my_row(i, team.lane % 2));
        bits[i].draw(team.p, key, team.work.sequence.idx, row.q_head, row.q_idx,
                     first_group + j * 2);
      }
    }
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
      drop(i, first, kAtOnce, bits[i].exchanged() >> (32 - 4 * kAtOnce));
  }
}

/// What this thread has of its warp's rows: what their scores need, and what has been summed so far. Where P and V are
/// codes: coded_sums.cuh.
template <TeamSpec spec, class Mods>
struct Sums {
  using T = Traits<spec>;
  using Fragments = ScoreFragments<spec>;
  static constexpr bool kAreCodes = Scores<spec, Mods>::kAreCodes;  // are scores?

  float out[T::kRowBlocks][T::kColBlocks][4];
  // Note: here, between the sums. Elsewhere the same PTX numbers its registers otherwise, and ptxas deals them
  // otherwise.
  Scores<spec, Mods> scores;
  RowState rows[T::kRowBlocks][2];
  float row_max[T::kRowBlocks][2];

  FOVEA_DEVICE_MEMBER void start() {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[i][half] = empty_row();
        row_max[i][half] = -infinity();
      }
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[i][j][e] = 0;
    }
  }

  // ---- softmax ---------------------------------------------------------------------------------

  /// s becomes P; moves the rows' origins, and with them what has been summed so far.
  FOVEA_DEVICE_MEMBER void softmax(const Team<spec>& team, Fragments& s) {
    const float c = spec.is_prescaled ? kLog2E : team.p.softmax_scale_log2;
    float rescale[T::kRowBlocks][2];
    bool is_rescaled = false;
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        RowState& row = rows[i][half];
        OriginStep step;
        float greatest = greatest_of_thread<spec>(s, i, half);
        if constexpr (kAreCodes) {
          const float unit = scores.codes.unit(team, i, half);
          greatest = quad_max((greatest - kIntegerOrigin) * unit);
          step = move_origin_of_codes(row, greatest, unit);
        } else {
          greatest = quad_max(greatest);
          step = move_origin<Mods::has_score>(row, greatest, c);
        }
        if constexpr (spec.wants_row_max)
          row_max[i][half] = ptx::max_ftz(row_max[i][half], greatest);
        rescale[i][half] = step.rescale;
        is_rescaled = is_rescaled || step.rescale != 1.0F;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < T::kKeyBlocks; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = s[i][j][half * 2 + e];
            score = probability(score, step);
            sum += score;
          }
        }
        row.sum += sum;
      }
    }
    if (!ptx::vote_any(is_rescaled)) return;
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[i][j][e] *= rescale[i][e / 2];
  }

  FOVEA_DEVICE_MEMBER static void drop(const Team<spec>& team, Fragments& s, VisitedTile tile) {
    for_each_dropped(team, tile, [&](int i, int first, int count, std::uint32_t dropped) {
#pragma unroll
      for (int at = 0; at < 4 * count; ++at)
        if ((dropped >> at & 1U) != 0) s[i][first + at / 4][at % 4] = 0;
    });
  }

  // ---- the second product ----------------------------------------------------------------------

  /// O += P V, V the first tile_kv rows of the tile. Two blocks of S side by side are one A operand.
  template <class Tile>
  FOVEA_DEVICE_MEMBER void multiply_values(const Team<spec>& team, const Fragments& s,
                                           const Tile& values) {
    const SharedAddress v_row = values.chunk(team.lane % 16, team.lane / 16);
#pragma unroll
    for (int step = 0; step < T::kPvSteps; ++step) {
      std::uint32_t probabilities[T::kRowBlocks][4];
#pragma unroll
      for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float* pair = &s[i][step * 2 + e / 2][e % 2 * 2];
          probabilities[i][e] = pack<spec.element>(pair[0], pair[1]);
        }
      }
#pragma unroll
      for (int j = 0; j < T::kColBlocks; j += 2) {
        const U32x4 b =
            ptx::ldmatrix_x4_trans(Tile::chunk_ahead(v_row, j) + step * 16 * Tile::kRowPitch);
#pragma unroll
        for (int i = 0; i < T::kRowBlocks; ++i) {
          multiply_add<spec.element, spec.instructions>(out[i][j], probabilities[i], b.x, b.y);
          multiply_add<spec.element, spec.instructions>(out[i][j + 1], probabilities[i], b.z, b.w);
        }
      }
    }
  }

  // ---- the end ---------------------------------------------------------------------------------

  /// A row of this thread, its sum that of all four.
  FOVEA_DEVICE_MEMBER RowState whole_row(int i, int half) const {
    return {rows[i][half].origin, quad_sum(rows[i][half].sum)};
  }
  FOVEA_DEVICE_MEMBER float greatest(int i, int half) const { return row_max[i][half]; }
};

}  // namespace fovea::cuda::team
