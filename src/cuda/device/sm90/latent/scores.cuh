// Scores, programs and softmax of one tile: by the group whose buffer it lies in. Read compute.cuh next.
#pragma once

#include "common/online_softmax.cuh"
#include "common/position.cuh"
#include "common/quad_reduce.cuh"
#include "common/score.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/latent/cta.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::sm90::latent {

/// The state of a thread's two rows: the origin is that of all tiles so far, the sum that of its own group's.
struct Rows {
  RowState state[2];
  float greatest[2];

  FOVEA_DEVICE_MEMBER void start() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state[half] = empty_row();
      greatest[half] = -infinity();
    }
  }
};

/// One thread of a group, with its part of S: rows my_row(0) and my_row(1), 32 scores.
template <Sm90LatentSpec spec, class Mods>
struct Scores {
  using L = Layout<spec>;
  static constexpr int kScores = spec.tile_kv / 2;
  const Cta<spec>& cta;
  const int group;
  float s[kScores];

  FOVEA_DEVICE_MEMBER Scores(const Cta<spec>& of_cta, int of_group)
      : cta(of_cta), group(of_group) {}

  FOVEA_DEVICE_MEMBER int my_row(int half) const {
    return cta.warp % 4 * 16 + half * 8 + cta.lane / 4;
  }

  /// S = Q Kᵀ, of each part of the tile as it comes. Behind it all warps of the group have read the tile.
  FOVEA_DEVICE_MEMBER void multiply_keys(std::uint32_t parity) {
    using QTile = typename L::QTile;
    using KTile = typename L::KTile;
    const auto a = ptx::computed_here(k_major_descriptor(cta.queries()));
    const auto b = ptx::computed_here(k_major_descriptor(cta.keys(group)));
#pragma unroll
    for (int i = 0; i < spec.head_dim_qk / L::kElement.k_step; ++i) {
      constexpr int kStepsOfPart = 4 * L::kPanelsOfPart;
      if (i % kStepsOfPart == 0) {
        ptx::mbarrier_wait_parity(cta.full(group, i / kStepsOfPart), parity);
        ptx::wgmma_fence();
      }
      ptx::wgmma_ss<L::kType, L::kType, spec.tile_kv>(s, advanced(a, k_major_offset<QTile>(i)),
                                                      advanced(b, k_major_offset<KTile>(i)), i > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    meet();
  }

  /// Scale, score program, mask. What a row does not see becomes -inf, whatever it was.
  FOVEA_DEVICE_MEMBER void apply_mods(const Work& work, PostedTile tile) {
    const ForwardParams& p = cta.p.common;
    if constexpr (spec.is_prescaled) {
      for_each(work, tile,
               [&](float& score, const Position& at) { modify_score<Mods>(score, at, p); });
    }
    if (tile.is_full()) return;
    for_each(work, tile, [&](float& score, const Position& at) {
      mask_score<Mods>(score, at, work.kv_end, p.captures);
    });
  }

  /// Where the sequence ends inside the tile there may be NaN behind it, and 0 * NaN is not 0.
  FOVEA_DEVICE_MEMBER void clear_behind_keys(int num_keys) const {
    constexpr int kChunks = 8 * L::kValuePanels;
    const auto tile = cta.keys(group);
#pragma unroll 1
    for (int i = cta.warp % 4 * 32 + cta.lane; i < (spec.tile_kv - num_keys) * kChunks; i += 128)
      ptx::st_shared(tile.chunk(num_keys + i / kChunks, i % kChunks), ptx::U32x4{});
  }

  /// s becomes P; moves the rows' origins. Leaves for both groups P, origins, and what sums are rescaled by.
  FOVEA_DEVICE_MEMBER void softmax(Rows& rows) {
    const float c = spec.is_prescaled ? kLog2E : cta.p.common.softmax_scale_log2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float greatest = s[2 * half];
#pragma unroll
      for (int i = 0; i < kScores; i += 4)
        greatest = ptx::max_ftz(greatest, ptx::max_ftz(s[i + 2 * half], s[i + 2 * half + 1]));
      greatest = quad_max(greatest);
      if constexpr (spec.wants_row_max)
        rows.greatest[half] = ptx::max_ftz(rows.greatest[half], greatest);
      RowState& row = rows.state[half];
      const OriginStep step = move_origin<Mods::has_score>(row, greatest, c);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = s[i + 2 * half + e];
          score = probability(score, step);
          sum += score;
        }
      }
      row.sum += sum;
      if (cta.lane % 4 == 0)
        ptx::st_shared(cta.stats_at(group, my_row(half)), ptx::F32x2{row.origin, step.rescale});
    }
    leave_probabilities();
  }

 private:
  /// Of the group.
  FOVEA_DEVICE_MEMBER void meet() const {
    if (group == 0) {
      ptx::bar_sync(1, 128);
    } else {
      ptx::bar_sync(2, 128);
    }
  }

  template <class Visit>
  FOVEA_DEVICE_MEMBER void for_each(const Work& work, PostedTile tile, Visit&& visit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Position at = RowView<spec>(cta.p.common, work, my_row(half)).position();
      const std::int32_t kv_begin = tile.idx() * spec.tile_kv + cta.lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          at.kv_idx = kv_begin + 2 * i + e;
          visit(s[i + 2 * half + e], at);
        }
      }
    }
  }

  FOVEA_DEVICE_MEMBER static std::uint32_t pack(float lo, float hi) {
    if constexpr (spec.element == Element::bf16) return ptx::cvt_bf16x2(lo, hi);
    return ptx::cvt_f16x2(lo, hi);
  }

  /// Rounded, in the columns of the tile that are no values.
  FOVEA_DEVICE_MEMBER void leave_probabilities() const {
    const auto tile = cta.probabilities(group);
    // Lanes 0 to 15 name the rows of the left halves of 16 columns, the others those of the right.
    const SharedAddress first = tile.chunk(cta.warp % 4 * 16 + cta.lane % 16, cta.lane / 16);
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {
      ptx::stmatrix_x4(L::PTile::chunk_ahead(first, i / 4),
                       ptx::U32x4{pack(s[i], s[i + 1]), pack(s[i + 2], s[i + 3]),
                                  pack(s[i + 4], s[i + 5]), pack(s[i + 6], s[i + 7])});
    }
  }
};

}  // namespace fovea::cuda::sm90::latent
