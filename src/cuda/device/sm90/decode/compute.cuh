// Scores, softmax and products of the slices of one warp, and what all warps' sums together are. Read ../decode.cuh for
// the picture.
#pragma once

#include "common/careful_row.cuh"
#include "common/codes_of_row.cuh"
#include "common/online_softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm90/decode/box_walk.cuh"
#include "sm90/decode/codes.cuh"
#include "sm90/decode/cta.cuh"
#include "sm90/decode/group.cuh"
#include "team/compute.cuh"
#include "team/join.cuh"
#include "team/scores.cuh"
#include "team/store.cuh"
#include "team/team.cuh"
#include "team/walk.cuh"

namespace fovea::cuda::sm90::decoding {

/// A warp that computes: of the slices of a split every so-manieth.
template <Sm90DecodeSpec spec, class Mods>
struct Reader {
  using L = Layout<spec>;
  using T = typename L::T;
  using Team = team::Team<L::kWarpSpec>;
  using Row = RowView<L::kWarpSpec>;
  using Scores = team::Scores<L::kWarpSpec, Mods>;
  using Sums = team::Sums<L::kWarpSpec, Mods>;
  using Products = typename ProductsOf<spec, Mods>::Type;
  const Cta<spec>& cta;
  Ring<L::kStages> boxes{0};
  Ring<L::kRecords> records{0};
  Products products{};
  Group<spec, Mods> group{};  // where the CTA takes groups

  FOVEA_DEVICE_MEMBER explicit Reader(const Cta<spec>& of_cta) : cta(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() {
    if constexpr (spec.has_codes()) ask_for_queries(Work{.is_nothing = true});
#pragma unroll 1
    for (;;) {
      const Work work = cta.take_work(records);
      if (work.is_nothing) return;
      compute(work);
      if constexpr (spec.has_codes()) ask_for_queries(work);
      meet();
      join(work);
      meet();  // what was left for the others is read
    }
  }

 private:
  /// Those of the split behind `work`. Codes come so fast that nobody may wait for them: they are asked for before the
  /// join of the split ahead, and stay where it is of the same rows.
  FOVEA_DEVICE_MEMBER void ask_for_queries(const Work& work) {
    const Work next = cta.look_at_work(records);
    if (next.is_nothing) return;
    if (!work.is_nothing && next.sequence.idx == work.sequence.idx && next.q_head == work.q_head)
      return;
    products.ask_for_queries(Team{cta.p.common, next, cta.smem, 0, cta.lane});
  }

  FOVEA_DEVICE_MEMBER static void meet() { ptx::bar_sync(1, 32 * L::kReaders); }

  // ---- slices ------------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void compute(const Work& work) {
    const Team team{cta.p.common, work, cta.smem, 0, cta.lane};
    Sums sums;
    if constexpr (spec.has_codes()) {
      products.start();
    } else {
      read_queries(team, sums.scores);
    }
    sums.start();
    const TileSpan rows = span_of<L::kWarpSpec>(work);
    BoxWalk<spec, Mods> walk(cta, work, rows);
    const int part = first_slot_from(boxes.stage * L::kSlices);
#pragma unroll 1
    for (VisitedBox box; walk.next(box); boxes.advance()) {
      const int mine = first_slot_from(boxes.stage * L::kSlices);
      if (mine >= L::kSlices) continue;
      ptx::mbarrier_wait_parity(cta.barrier(L::kAt.full, boxes.stage), boxes.parity);
      if (box.sees(mine)) add_slice(team, sums, mine, {box.first + mine, box.is_full(mine)});
      cta.release(cta.barrier(L::kAt.empty, boxes.stage));
    }
    put_rows(team, sums, part);
  }

  /// Slots belong to warps in turn: how many behind this one is the first of this warp. From a split's first slot on it
  /// is the warp's part of the split, so that the order of the parts' sum does not depend on what came before it.
  FOVEA_DEVICE_MEMBER int first_slot_from(int slot) const {
    return (cta.warp + L::kReaders - slot % L::kReaders) % L::kReaders;
  }

  /// A operands of Q Kᵀ, straight from memory: two elements of a row at a time. Rows that do not exist are the first
  /// one: nobody asks for what becomes of them.
  FOVEA_DEVICE_MEMBER void read_queries(const Team& team, Scores& scores) const {
    const ForwardParams& p = cta.p.common;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int mine = team.my_row(0, half);
      const Row row = team.row_at(team.row_at(mine).exists ? mine : 0);
      const char* from = static_cast<const char*>(p.q.data) + row.query_at() * T::kElement.bytes +
                         team.lane % 4 * 4;
#pragma unroll
      for (int chunk = 0; chunk < 2 * T::kQkSteps; ++chunk) {
        const bool exists =
            !spec.has_padded_head_dim || chunk * T::kElement.of_chunk < p.head_dim_qk;
        scores.queries[chunk / 2][0][half + chunk % 2 * 2] =
            exists ? ptx::ld_global_nc(reinterpret_cast<const std::uint32_t*>(from + chunk * 16))
                   : 0;
      }
    }
  }

  /// Of the box that has arrived its slice `at`.
  FOVEA_DEVICE_MEMBER void add_slice(const Team& team, Sums& sums, int at, VisitedTile slice) {
    const auto values = cta.slice_of(cta.values_at(boxes.stage), at);
    const int num_keys = team.work.kv_end - slice.idx * spec.tile_kv;
    const bool is_cut = num_keys < spec.tile_kv;
    if (is_cut) clear_behind_keys(values, num_keys);
    slice.is_full = slice.is_full && !is_cut;
    typename Scores::Fragments s;
    const auto keys = cta.slice_of(cta.keys_at(boxes.stage), at);
    if constexpr (spec.has_codes()) {
      products.multiply_keys(team, s, keys, cta.key_scales_at(boxes.stage, at * spec.tile_kv));
    } else {
      sums.scores.multiply_keys(team, s, keys);
    }
    sums.scores.modify(team, s, slice);
    sums.scores.mask(team, s, slice);
    sums.softmax(team, s);
    if constexpr (spec.has_dropout) sums.drop(team, s, slice);
    if constexpr (spec.has_codes()) {
      products.multiply_values(team, sums, s, values,
                               cta.value_scales_at(boxes.stage, at * spec.tile_kv));
    } else {
      sums.multiply_values(team, s, values);
    }
    if (is_cut) ptx::fence_proxy_async_shared_cta();
  }

  /// Where the sequence ends inside the slice there may be NaN behind it, and 0 * NaN is not 0.
  FOVEA_DEVICE_MEMBER void clear_behind_keys(const typename L::VTile& values, int num_keys) const {
    using Tile = typename L::VTile;
#pragma unroll 1
    for (int at = cta.lane; at < (spec.tile_kv - num_keys) * Tile::kChunks; at += 32) {
      ptx::st_shared(values.chunk(num_keys + at / Tile::kChunks, at % Tile::kChunks), ptx::U32x4{});
    }
    ptx::sync_warp();
  }

  // ---- join --------------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void put_rows(const Team& team, const Sums& sums, int part) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowState row = sums.rows[0][half];
      row.sum += ptx::shfl_bfly(row.sum, 1);
      row.sum += ptx::shfl_bfly(row.sum, 2);
      const SharedAddress to = cta.parts().at(part, team.my_row(0, half));
      if (cta.lane % 4 == 0) {
        const float row_max = spec.wants_row_max ? sums.row_max[0][half] : 0.0F;
        cta.parts().put_state(part, team.my_row(0, half), row, row_max);
      }
      if constexpr (spec.has_codes()) {
        products.put_columns(to, sums, half);
      } else {
#pragma unroll
        for (int j = 0; j < T::kColBlocks; ++j) {
          ptx::st_shared(to + (j * 8 + cta.lane % 4 * 2) * 4,
                         ptx::F32x2{sums.out[0][j][half * 2], sums.out[0][j][half * 2 + 1]});
        }
      }
    }
  }

  FOVEA_DEVICE_MEMBER void join(const Work& work) {
    const Team team{cta.p.common, work, cta.smem, 0, cta.lane};
    const team::Join<L::kWarpSpec, Mods, typename L::Parts> rows{team, cta.parts()};
    const auto careful = [this](const Row& row) { compute_carefully(row); };
    if constexpr (spec.takes_groups)
      return group.add(cta.warp, rows, cta.policy_of_sums(), careful);
    rows.run(cta.warp, L::kReaders, careful);
  }

  FOVEA_DEVICE_MEMBER void compute_carefully(const Row& row) const {
    if constexpr (spec.has_codes()) {
      using Rows = CodesOfRow<spec.k_codes, spec.v_codes>;
      CarefulRow<L::kWarpSpec, Mods, Rows>(row, Rows{row.p, cta.p.k_scale, cta.p.v_scale, row.work})
          .run();
    } else {
      CarefulRow<L::kWarpSpec, Mods>(row).run();
    }
  }
};

}  // namespace fovea::cuda::sm90::decoding
