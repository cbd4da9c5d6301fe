// The recurrence of a group: products, softmax between them, and what it leaves free. Read persistent.cuh next.
#pragma once

#include "common/passes.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/short/cta.cuh"
#include "sm90/short/load.cuh"
#include "sm90/short/output.cuh"
#include "sm90/short/softmax.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::sm90::short_keys {

/// What a group computes.
template <Sm90ShortSpec spec, class Mods>
struct Compute {
  using T = Traits<spec>;
  using Probabilities = std::uint32_t[spec.tile_kv / 16][4];
  const Cta<spec>& cta;
  std::uint32_t later_tiles;  // of keys, that are still to be asked for: a bit each

  float s[spec.tile_kv / 2];
  float o[spec.head_dim_v / 2];
  Rows<spec> rows;
  std::uint32_t q_parities = 0, q_refills = 0;  // of buffers of Q, a bit each
  std::uint32_t tile_parity = 0;                // of a persistent CTA's tiles
  bool is_finite = true;

  FOVEA_DEVICE_MEMBER Compute(const Cta<spec>& of_cta, std::uint32_t later)
      : cta(of_cta), later_tiles(later) {}

  /// All row tiles of the group.
  FOVEA_DEVICE_MEMBER void run(Pass pass) {
    Steps<spec, Mods> steps(cta);
    Step step{};
    if (!steps.next(step)) return;
    Probabilities p;
    issue_scores(step);
    for (;;) {
      Step after{};
      const bool has_after = !T::kIsOneStep && steps.next(after);
      ptx::wgmma_wait_group<0>();
      make_probabilities(step, pass, p);
      issue_sums(step, pass, p);
      // Note: each way has its wait. Where they meet before O is read, ptxas takes O for a product's that still runs,
      // and lets one product run at a time. The next queries may take the place of these, where O is left for a moment.
      if (step.is_last) {
        ptx::wgmma_wait_group<0>();
        if (T::kHasNextQueries && has_after) issue_scores(after);
        is_finite = finish(cta, step.row_tile, rows, o, pass) && is_finite;
        if constexpr (T::kRefills) refill(step.row_tile);
        if (!T::kHasNextQueries && has_after) issue_scores(after);
        if (!has_after) return;
      } else {
        issue_scores(after);
      }
      step = after;
    }
  }

  /// The only step of a persistent CTA's tile. As soon as all have read keys, values or queries, those of `after`, its
  /// next tile, are asked for in their place.
  FOVEA_DEVICE_MEMBER void run_before(const Cta<spec>& after, bool has_after,
                                      std::uint32_t parity) {
    tile_parity = parity;
    q_parities = parity << cta.buffer_of(cta.row_tile_of_round(0));
    const Step step = only_step<Mods>(cta);
    Probabilities p;
    issue_scores(step);
    ptx::wgmma_wait_group<0>();
    hand_on(cta.barrier(T::kAt.kv_empty, 0), cta.warp == 0 && has_after,
            [&] { copy_keys(after, 0); });
    make_probabilities(step, Pass::all, p);
    issue_sums(step, Pass::all, p);
    ptx::wgmma_wait_group<0>();
    hand_on(cta.barrier(T::kAt.kv_empty, 1), cta.warp == 0 && has_after,
            [&] { copy_values(after, 0); });
    is_finite = finish(cta, step.row_tile, rows, o, Pass::all);
    ptx::fence_proxy_async_shared_cta();  // O lay where the next queries come
    hand_on(cta.q_empty(step.row_tile), cta.warp % kWarpsOfGroup == 0 && has_after,
            [&] { copy_queries(after, step.row_tile); });
  }

  /// Warp 0 asks for keys and values up to this tile.
  FOVEA_DEVICE_MEMBER void load_up_to(int kv_tile) {
    if (spec.stages == 1 || cta.warp != 0) return;
    const std::uint32_t tiles = later_tiles & up_to_tile(kv_tile);
    later_tiles &= ~tiles;
    if (ptx::elect_one()) copy_tiles(cta, tiles);
    ptx::sync_warp();
  }

 private:
  /// This warp has read what `empty` guards; one that fills it again waits for the others.
  template <class Copy>
  FOVEA_DEVICE_MEMBER void hand_on(SharedAddress empty, bool fills, Copy&& copy) {
    cta.release(empty);
    if (!fills) return;
    cta.await(empty, tile_parity);
    if (ptx::elect_one()) copy();
    ptx::sync_warp();
  }

  /// These queries are multiplied, and O, which lay in their place, is stored: the buffer goes to those that follow.
  FOVEA_DEVICE_MEMBER void refill(int row_tile) {
    const int place = cta.place_of_round(cta.place_of(row_tile) / T::kGroups + spec.q_stages);
    const int next = cta.row_tile_at(place);
    if (place >= T::kRowTiles || !cta.has_rows(next)) return;
    ptx::fence_proxy_async_shared_cta();
    cta.release(cta.q_empty(row_tile));
    if (cta.warp % kWarpsOfGroup != 0) return;
    const int buffer = cta.buffer_of(row_tile);
    cta.await(cta.q_empty(row_tile), q_refills >> buffer & 1U);
    q_refills ^= 1U << buffer;
    if (ptx::elect_one()) copy_queries(cta, next);
    ptx::sync_warp();
  }

  /// S = Q Kᵀ.
  FOVEA_DEVICE_MEMBER void issue_scores(const Step& step) {
    using QTile = typename T::QTile;
    using KTile = typename T::KTile;
    load_up_to(step.kv_tile + kTilesAhead);
    if (step.is_first) {
      const int buffer = cta.buffer_of(step.row_tile);
      ptx::mbarrier_wait_parity(cta.q_full(step.row_tile), q_parities >> buffer & 1U);
      q_parities ^= 1U << buffer;
    }
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.k_full, step.kv_tile), tile_parity);
    const auto a = k_major_descriptor(QTile{cta.q_at(step.row_tile)});
    const auto b = k_major_descriptor(KTile{cta.k_at(step.kv_tile)});
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < spec.head_dim_qk / T::kElement.k_step; ++i) {
      ptx::wgmma_ss<T::kType, T::kType, spec.tile_kv>(s, advanced(a, k_major_offset<QTile>(i)),
                                                      advanced(b, k_major_offset<KTile>(i)), i > 0);
    }
    ptx::wgmma_commit_group();
  }

  /// S becomes P. Where a warp without rows is skipped its P is anything, and so is its O. (Zeros ptxas would move
  /// ahead of the wait for S, and then let one product run at a time.)
  FOVEA_DEVICE_MEMBER void make_probabilities(const Step& step, Pass pass, Probabilities& p) {
    if constexpr (T::kSkipsWarps) {
      if (!cta.warp_has_rows(step.row_tile)) return;
    }
    if (step.is_first) rows.begin();
    if (!step.is_full) mask<Mods>(cta, step, s);
    if (is_indicator(pass)) shrink(s);
    rows.softmax(s, p, cta.p.common.softmax_scale_log2);
    if constexpr (spec.stages > 1) {  // else there is nothing yet
      if (!step.is_first) rows.rescale(o);
    }
  }

  /// O += P V.
  FOVEA_DEVICE_MEMBER void issue_sums(const Step& step, Pass pass, const Probabilities& p) {
    using VTile = typename T::VTile;
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.v_full, step.kv_tile),
                              tile_parity ^ parity_of(pass));
    const auto b = mn_major_descriptor(VTile{cta.v_at(step.kv_tile)});
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < spec.tile_kv / T::kElement.k_step; ++i) {
      ptx::wgmma_rs<T::kType, T::kType, spec.head_dim_v, ptx::Major::mn>(
          o, p[i], advanced(b, mn_major_offset<VTile>(i)), i > 0 || !step.is_first);
    }
    ptx::wgmma_commit_group();
  }
};

}  // namespace fovea::cuda::sm90::short_keys
