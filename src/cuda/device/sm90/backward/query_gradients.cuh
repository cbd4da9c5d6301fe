// dq of a tile of queries, summed in memory: one warpgroup. Read turns.cuh for the order of the sums.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/red.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/backward/cta.cuh"
#include "sm90/backward/load.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::sm90 {

/// dq += dS K, as products of 64 x 64: of panels of K at head_dim 128, of dS where a tile has 128 queries. Sums go to
/// memory as fragments, 16 bytes a lane, so that no shared memory is passed on the way.
template <Sm90BackwardSpec spec, class Mods>
struct QueryGradients {
  using T = BackwardTraits<spec>;
  const BackwardCta<spec>& cta;
  Ring<2> buffers{0};
  Ring<kSm90BackwardTurns> turns{0};
  float sums[32];

  FOVEA_DEVICE_MEMBER explicit QueryGradients(const BackwardCta<spec>& of_cta) : cta(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() {
    if constexpr (T::kHasAside) {
      sum([](int) {});
    } else {
      // One code for the group, as its products ask; the first warp alone loads.
      const bool is_loading = cta.warp % 4 == 0;
      with_load<spec, Mods>(cta, [&](auto& load) {
        if (is_loading) {
          load.begin();
          for (int i = 1; i < T::kStages && load.has_next(); ++i) load.load_next();
        }
        sum([&](int i) {
          if (is_loading && i > 0 && load.has_next()) load.load_next();
        });
      });
    }
  }

 private:
  template <class BeforeTile>
  FOVEA_DEVICE_MEMBER void sum(BeforeTile&& before_tile) {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.k_full, 0), 0);
    if (ptx::vote_any(cta.posted(0).is_none())) return;
    const OwnedKeys keys = cta.owned();
    const std::int64_t lane_at = 4 * (32 * (cta.warp % 4) + cta.lane);
    for (int i = 0;; ++i) {
      before_tile(i);
      ptx::mbarrier_wait_parity(cta.barrier(T::kAt.ds_full, buffers.stage), buffers.parity);
      issue(0);
      const PostedTile tile = cta.posted(i);
      float* const to =
          cta.dq_sums_of(keys, tile.idx()) + lane_at +
          (cta.first_row(keys, tile.q_head) + tile.idx() * spec.tile_q) * spec.head_dim_qk;
      const bool is_first = cta.is_first_sum(keys, tile.idx());
      const bool is_last = ptx::vote_any(tile.is_last());
      if constexpr (spec.is_deterministic)
        ptx::mbarrier_wait_parity(cta.barrier(T::kAt.turn, turns.stage), turns.parity);
      ptx::wgmma_wait_group<0>();
      if constexpr (T::kQueryProducts == 2) {
        add(to, is_first);
        issue(1);
        ptx::wgmma_wait_group<0>();
      }
      cta.release(cta.barrier(T::kAt.ds_empty, buffers.stage));
      buffers.advance();
      add(to + (T::kQueryProducts - 1) * T::kProductSums, is_first);
      if constexpr (spec.is_deterministic) {
        cta.release(cta.barrier(T::kAt.added, turns.stage));
        turns.advance();
      }
      if (is_last) return;
    }
  }

  FOVEA_DEVICE_MEMBER void issue(int half) {
    using DsTile = typename T::DsTile;
    using KTile = typename T::KTile;
    const auto a = mn_major_descriptor(DsTile{cta.ds_at(buffers.stage)});
    const auto b = mn_major_descriptor(KTile{cta.smem + T::kAt.k});
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < T::kKeys / 16; ++i) {
      ptx::wgmma_ss<T::kType, T::kType, 64, ptx::Major::mn, ptx::Major::mn>(
          sums,
          advanced(a, (DsTile::kPanels == 2 ? half * DsTile::kPanelBytes : 0) +
                          mn_major_offset<DsTile>(i)),
          advanced(
              b, (KTile::kPanels == 2 ? half * KTile::kPanelBytes : 0) + mn_major_offset<KTile>(i)),
          i > 0);
    }
    ptx::wgmma_commit_group();
  }

  FOVEA_DEVICE_MEMBER void add(float* to, bool is_first) const {
    const auto four = [this](int j) {
      return ptx::F32x4{sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
    };
    if (is_first) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        ptx::st_global(reinterpret_cast<ptx::F32x4*>(to + 512 * j), four(j));
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) ptx::red_add_global_v4(to + 512 * j, four(j));
    }
  }
};

}  // namespace fovea::cuda::sm90
