// The recurrence of a group: products, softmax between them, and what it leaves free. Read last_rows.cuh next.
#pragma once

#include "common/passes.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
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
  /// Are warps without rows spared the softmax? The branch takes registers, which the only product of up to 112 keys
  /// leaves, and one of several row tiles that has no mask to walk.
  static constexpr bool kSkipsWarps = !T::kHasLastRows && spec.stages == 1 &&
                                      (T::kIsOneStep ? spec.tile_kv <= 112 : !Mods::has_mask);
  /// Row tiles one after the other, each with all keys at once: P lies where S did, and O where it pleases.
  static constexpr bool kReusesScores = spec.stages == 1 && !T::kIsOneStep;
  /// Is lse made beside the last sums? Where they are long; others lose a little by it (measured).
  static constexpr bool kFinishesRowsAhead = spec.stages == 1 && !spec.is_persistent;
  const Cta<spec>& cta;
  std::uint32_t later_tiles;  // of keys, that are still to be asked for: a bit each

  float s[spec.tile_kv / 2];
  float o[spec.head_dim_v / 2];
  std::uint32_t queries[spec.keeps_queries ? spec.head_dim_qk / 16 : 1][4];  // of this row tile
  Rows<spec> rows;
  std::uint32_t q_parities = 0, q_refills = 0;  // of buffers of Q, a bit each
  std::uint32_t tile_parity = 0;                // of a persistent CTA's tiles
  std::int32_t first_tile = 0;                  // of a ring: the CTA's first
  bool is_finite = true;

  FOVEA_DEVICE_MEMBER Compute(const Cta<spec>& of_cta, std::uint32_t later)
      : cta(of_cta), later_tiles(later) {}

  /// All row tiles of the group.
  FOVEA_DEVICE_MEMBER void run(Pass pass) {
    Steps<spec, Mods> steps(cta);
    Step step{};
    if (!steps.next(step)) return;
    Probabilities p;
    if constexpr (spec.runs_ahead) return run_ahead(steps, step, pass, p);
    if constexpr (spec.keeps_queries) {
      read_queries(step.row_tile);
      refill(step.row_tile, 1);
    }
    issue_scores(step);
    load_later_queries(pass);
    for (;;) {
      Step after{};
      const bool has_after = !T::kIsOneStep && steps.next(after);
      ptx::wgmma_wait_group<0>();
      make_probabilities(step, pass, p);
      issue_sums(step, pass, p);
      // Note: each way has its wait. Where they meet before O is read, ptxas takes O for a product's that still runs,
      // and lets one product run at a time.
      if (kReusesScores || step.is_last) {
        if (spec.keeps_queries && has_after) read_queries(after.row_tile);
        finish(step.row_tile, pass);
        if constexpr (spec.keeps_queries) {
          leave_kept(step.row_tile);
        } else if constexpr (T::kRefills) {
          refill(step.row_tile, spec.q_stages);
        }
        if (!has_after) return;
      }
      issue_scores(after);
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
            [&] { copy_keys(after, 0, 0); });
    make_probabilities(step, Pass::all, p);
    issue_sums(step, Pass::all, p);
    ptx::wgmma_wait_group<0>();
    hand_on(cta.barrier(T::kAt.kv_empty, 1), cta.warp == 0 && has_after,
            [&] { copy_values(after, 0, 0); });
    float factors[2];
    store(step.row_tile, Pass::all, factors);
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

  /// Where a tile of keys lies, and the parity of its landing there.
  FOVEA_DEVICE_MEMBER int buffer_of_keys(int kv_tile) const {
    return T::kHasRing ? (kv_tile - first_tile) % T::kBuffers : kv_tile;
  }
  FOVEA_DEVICE_MEMBER std::uint32_t turn_of(int kv_tile) const {
    if constexpr (!T::kHasRing) return tile_parity;
    return static_cast<std::uint32_t>((kv_tile - first_tile) / T::kBuffers) & 1U;
  }

  /// Behind the last sums.
  FOVEA_DEVICE_MEMBER void finish(int row_tile, Pass pass) {
    float factors[2];
    if (kFinishesRowsAhead && cta.warp_has_rows(row_tile))
      finish_rows(cta, cta.work_of(row_tile), rows, pass, factors);
    ptx::wgmma_wait_group<0>();
    store(row_tile, pass, factors);
  }

  /// O by way of where the queries lay.
  FOVEA_DEVICE_MEMBER void store(int row_tile, Pass pass, float (&factors)[2]) {
    if (!cta.warp_has_rows(row_tile)) return;
    const Work work = cta.work_of(row_tile);
    if (!kFinishesRowsAhead) finish_rows(cta, work, rows, pass, factors);
    const typename T::OTile tile{cta.q_at(row_tile)};
    is_finite = finish_out(cta, work, tile, o, factors, pass) && is_finite;
  }

  /// This warp has read what `empty` guards; one that fills it again waits for the others.
  template <class Copy>
  FOVEA_DEVICE_MEMBER void hand_on(SharedAddress empty, bool fills, Copy&& copy) {
    cta.release(empty);
    if (!fills) return;
    cta.await(empty, tile_parity);
    if (ptx::elect_one()) copy();
    ptx::sync_warp();
  }

  /// As run, with queries in registers. Of the same rows the next scores are asked for ahead of these sums, which then
  /// run beside the powers of those.
  FOVEA_DEVICE_MEMBER void run_ahead(Steps<spec, Mods>& steps, Step step, Pass pass,
                                     Probabilities& p) {
    float powers[spec.tile_kv / 2];  // P that waits for sums which read the P before
    read_queries(step.row_tile);
    refill(step.row_tile, 1);
    issue_scores(step);
    for (;;) {
      ptx::wgmma_wait_group<0>();
      make_probabilities(step, pass, p);
      Step after{};
      bool has_after;
      while (has_after = steps.next(after), !step.is_last) {
        issue_scores(after);
        issue_sums(step, pass, p);
        ptx::wgmma_wait_group<1>();
        softmax(after, pass, [&](int i, float lo, float hi) {
          powers[2 * i] = lo;
          powers[2 * i + 1] = hi;
        });
        ptx::wgmma_wait_group<0>();
        rows.rescale(o);
#pragma unroll
        for (int i = 0; i < spec.tile_kv / 4; ++i) place(i, powers[2 * i], powers[2 * i + 1], p);
        step = after;
      }
      issue_sums(step, pass, p);
      if (has_after) read_queries(after.row_tile);
      finish(step.row_tile, pass);
      if (!has_after) return;
      leave_kept(step.row_tile);
      issue_scores(after);
      step = after;
    }
  }

  /// Queries of the rounds that have buffers of their own, behind the first scores: a warp that asks for more boxes
  /// than TMA has room for waits there, and its group with it.
  FOVEA_DEVICE_MEMBER void load_later_queries(Pass pass) {
    if (T::kAt.num_queries == T::kGroups || pass != Pass::all || cta.warp != 0) return;
    if (ptx::elect_one()) copy_queries(cta, T::kGroups, T::kAt.num_queries);
    ptx::sync_warp();
  }

  /// The warp's 16 rows as operand a. What lies in their place from here on is O of the rows before, then the next Q.
  FOVEA_DEVICE_MEMBER void read_queries(int row_tile) {
    await_queries(row_tile);
    const typename T::QTile tile{cta.q_at(row_tile)};
    const SharedAddress mine = tile.chunk(cta.first_row_of_warp() + cta.lane % 16, cta.lane / 16);
#pragma unroll
    for (int i = 0; i < spec.head_dim_qk / T::kElement.k_step; ++i) {
      const ptx::U32x4 matrices = ptx::ldmatrix_x4(tile.chunk_ahead(mine, 2 * i));
      queries[i][0] = matrices.x;
      queries[i][1] = matrices.y;
      queries[i][2] = matrices.z;
      queries[i][3] = matrices.w;
    }
    ptx::sync_warp();
  }

  FOVEA_DEVICE_MEMBER void await_queries(int row_tile) {
    const int buffer = cta.buffer_of(row_tile);
    ptx::mbarrier_wait_parity(cta.q_full(row_tile), q_parities >> buffer & 1U);
    q_parities ^= 1U << buffer;
  }

  /// These queries are read, and O, which lay in their place, is stored: the buffer goes to those so many rounds on.
  FOVEA_DEVICE_MEMBER void refill(int row_tile, int rounds) {
    const int place = cta.place_of_round(cta.place_of(row_tile) / T::kGroups + rounds);
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

  /// O of a row tile whose queries were kept is stored: the buffer is the next but one's.
  FOVEA_DEVICE_MEMBER void leave_kept(int row_tile) {
    ptx::sync_warp();  // the next O lies where this one did
    refill(row_tile, 2);
  }

  /// S = Q Kᵀ.
  FOVEA_DEVICE_MEMBER void issue_scores(const Step& step) {
    using QTile = typename T::QTile;
    using KTile = typename T::KTile;
    if constexpr (!T::kHasRing) load_up_to(step.kv_tile + kTilesAhead);
    if (!spec.keeps_queries && step.is_first) await_queries(step.row_tile);
    const int buffer = buffer_of_keys(step.kv_tile);
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.k_full, buffer), turn_of(step.kv_tile));
    const auto a = k_major_descriptor(QTile{cta.q_at(step.row_tile)});
    const auto b = k_major_descriptor(KTile{cta.k_at(buffer)});
    if constexpr (kReusesScores) {
      ptx::wgmma_forget(s);
      ptx::wgmma_forget(o);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < spec.head_dim_qk / T::kElement.k_step; ++i) {
      const auto b_i = advanced(b, k_major_offset<KTile>(i));
      if constexpr (spec.keeps_queries) {
        ptx::wgmma_rs<T::kType, T::kType, spec.tile_kv>(s, queries[i], b_i, i > 0);
      } else {
        ptx::wgmma_ss<T::kType, T::kType, spec.tile_kv>(s, advanced(a, k_major_offset<QTile>(i)),
                                                        b_i, i > 0);
      }
    }
    ptx::wgmma_commit_group();
  }

  /// S becomes P. Where a warp without rows is skipped its P is anything, and so is its O. (Zeros ptxas would move
  /// ahead of the wait for S, and then let one product run at a time.)
  FOVEA_DEVICE_MEMBER void make_probabilities(const Step& step, Pass pass, Probabilities& p) {
    if constexpr (kSkipsWarps) {
      if (!cta.warp_has_rows(step.row_tile)) return;
    }
    softmax(step, pass, [&](int i, float lo, float hi) { place(i, lo, hi, p); });
    if constexpr (spec.stages > 1) {  // else there is nothing yet
      if (!step.is_first) rows.rescale(o);
    }
  }

  template <class Take>
  FOVEA_DEVICE_MEMBER void softmax(const Step& step, Pass pass, Take&& take) {
    if (step.is_first) rows.begin();
    Spans<kLeavesOutSpans<Mods, spec.tile_kv / 2>> spans;
    if (!step.is_full) spans = mask<Mods>(cta, step.row_tile, step.kv_tile * spec.tile_kv, s);
    if (is_indicator(pass)) shrink(s);
    rows.softmax(s, spans, cta.p.common.softmax_scale_log2, take);
  }

  /// Pair i of P, as operand a of the next product.
  FOVEA_DEVICE_MEMBER static void place(int i, float lo, float hi, Probabilities& p) {
    p[i / 4][i % 4] = pack<spec.element>(lo, hi);
  }

  /// O += P V.
  FOVEA_DEVICE_MEMBER void issue_sums(const Step& step, Pass pass, const Probabilities& p) {
    using VTile = typename T::VTile;
    const int buffer = buffer_of_keys(step.kv_tile);
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.v_full, buffer),
                              turn_of(step.kv_tile) ^ (T::kHasRing ? 0U : parity_of(pass)));
    const auto b = mn_major_descriptor(VTile{cta.v_at(buffer)});
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < spec.tile_kv / T::kElement.k_step; ++i) {
      ptx::wgmma_rs<T::kType, T::kType, spec.head_dim_v, ptx::Major::mn>(
          o, p[i], advanced(b, mn_major_offset<VTile>(i)),
          i > 0 || (!kReusesScores && !step.is_first));
    }
    ptx::wgmma_commit_group();
  }
};

}  // namespace fovea::cuda::sm90::short_keys
