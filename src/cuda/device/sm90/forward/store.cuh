// Finished tiles to memory: one warp, by TMA where that can write them and all rows of a group are the sequence's. It
// notes which rows are lost (common/lost_rows.cuh).
#pragma once

#include "common/code_units.cuh"
#include "common/lost_row_notes.cuh"
#include "common/row_view.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/forward/cta.cuh"
#include "sm90/values_of_pass.cuh"

namespace fovea::cuda::sm90 {

/// Sends finished tiles from where their Q lay, then gives the buffer back.
template <Sm90ForwardSpec spec>
struct Store {
  using T = Traits<spec>;
  const Cta<spec>& cta;
  Ring<T::kQStages> q{0};
  Ring<T::kSlots> slots{0};

  FOVEA_DEVICE_MEMBER explicit Store(const Cta<spec>& of_cta) : cta(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() {
    for (;;) {
      const RowTile rows = cta.next_row_tile(slots);
      if (rows.is_end()) return;
      const Pass pass = cta.pass();
      if (rows.is_any_end()) {
        if (ptx::elect_one()) ptx::cp_async_bulk_wait_group<0>();
        ptx::sync_warp();
        if (!cta.end_round(pass)) return;
        continue;
      }
      const SequencePlace place = cta.place_of(rows);
      [[maybe_unused]] Work work;
      if constexpr (kNotesLostRows) work = cta.work_of(rows);
      cta.done_with(rows);
      for (int group = 0; group < T::kGroups; ++group) {
        const int i = q.stage * T::kGroups + group;
        cta.await(cta.barrier(T::kAt.o_full, i), q.parity);
        if constexpr (kNotesLostRows) note_lost_rows(work, group);
        if constexpr (kLeavesRowScales) {
          if (ptx::elect_one()) leave_row_scales(rows, place, group);
          ptx::sync_warp();
        }
        if constexpr (!T::kWritesSums) {  // else by those who compute them
          const std::int32_t left = place.seqlen_q - rows.idx * spec.tile_q - 64 * group;
          if (is_indicator(pass)) {
            add_infinities(rows, place, group, left < 64 ? left : 64, pass);
          } else if (spec.loads_by_cp_async || (spec.is_varlen && left < 64)) {
            store_rows(rows, place, group, left < 64 ? left : 64);
          } else {
            if (ptx::elect_one()) store(rows, place, group, i);
            continue;
          }
        }
        cta.release(cta.barrier(T::kAt.q_empty, i));
      }
      q.advance();
    }
  }

 private:
  /// Beside programs references say which rows are lost. Elsewhere scales do, and the kernel behind this one compares
  /// them: whatever else this warp does with memory, ptxas has another order of exponentials in the loops of those who
  /// compute.
  static constexpr bool kNotesLostRows = knows_lost_by_reference(spec);
  static constexpr bool kLeavesRowScales = knows_lost_by_scale(spec);
  static_assert(!kLeavesRowScales || spec.tile_q == kQuantizedTile);

  /// Of a group, by one lane.
  FOVEA_DEVICE_MEMBER void leave_row_scales(const RowTile& rows, const SequencePlace& place,
                                            int group) const {
    const std::int32_t first = rows.idx * spec.tile_q + 64 * group;
    const std::int64_t at =
        place_of_row_scale<spec>(cta.p.common, rows.batch, place.q_row, rows.q_head, first);
    ptx::cp_async_bulk_store(cta.p.notes + at, cta.size_of_row_at(q.stage, 64 * group), 64 * 4);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<0>();
  }

  FOVEA_DEVICE_MEMBER void note_lost_rows(const Work& work, int group) const {
#pragma unroll 1
    for (int row = 64 * group + cta.lane; row < 64 * group + 64; row += 32) {
      if (is_lost(row)) note_lost_row(cta.p.notes, RowView<spec>(cta.p.common, work, row));
    }
    ptx::sync_warp();  // whoever gives the buffer back speaks for all lanes
  }

  /// What a row's scores have in common counts as well: codes are made of what is above it.
  FOVEA_DEVICE_MEMBER bool is_lost(int row) const {
    const auto reference = ptx::ld_shared<float>(cta.size_of_row_at(q.stage, row));
    const auto of_mean = ptx::ld_shared<float>(cta.of_mean_at(q.stage, row));
    return is_far_reference<spec.sums_codes>(reference) ||
           is_far_reference<spec.sums_codes>(of_mean * cta.p.common.softmax_scale_log2);
  }

  FOVEA_DEVICE_MEMBER void store(const RowTile& rows, const SequencePlace& place, int group,
                                 int i) const {
    const typename T::OTile out{cta.q_at(q.stage, group)};
#pragma unroll
    for (int panel = 0; panel < T::OTile::kPanels; ++panel) {
      const std::int32_t at[4] = {T::kPanelElements * panel,
                                  place.q_row + rows.idx * spec.tile_q + 64 * group, rows.q_head,
                                  cta.map_batch(rows)};
      ptx::cp_async_bulk_tensor_store<4>(tensor_map(cta.p.out), at, out.panel(panel));
    }
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<0>();
    ptx::mbarrier_arrive(cta.barrier(T::kAt.q_empty, i));
  }

  /// Only the first `left` rows of a group: those behind them are another sequence's, or nobody's.
  FOVEA_DEVICE_MEMBER void store_rows(const RowTile& rows, const SequencePlace& place, int group,
                                      std::int32_t left) const {
    for_each_chunk(rows, place, group, left,
                   [](ptx::U32x4* to, const ptx::U32x4& sums) { ptx::st_global(to, sums); });
  }

  /// Of a pass of indicators: what is not 0 names the elements of O that infinity reaches. NaN where both signs do.
  FOVEA_DEVICE_MEMBER void add_infinities(const RowTile& rows, const SequencePlace& place,
                                          int group, std::int32_t left, Pass pass) const {
    for_each_chunk(rows, place, group, left, [&](ptx::U32x4* to, const ptx::U32x4& reached) {
      if ((reached.x | reached.y | reached.z | reached.w) == 0) return;
      ptx::st_global(to, with_infinities<spec.out_element>(ptx::ld_global(to), reached, pass));
    });
  }

  /// visit(place in memory, what was left for it) for 8 elements of a row at a time.
  template <class Visit>
  FOVEA_DEVICE_MEMBER void for_each_chunk(const RowTile& rows, const SequencePlace& place,
                                          int group, std::int32_t left, Visit&& visit) const {
    constexpr int kChunks = spec.head_dim_v / 8;
    const ForwardParams& c = cta.p.common;
    const typename T::OTile out{cta.q_at(q.stage, group)};
    const std::int64_t first = place.q_row + rows.idx * spec.tile_q + 64 * group;
    auto* const to = static_cast<std::uint16_t*>(const_cast<void*>(c.out.data)) +
                     cta.map_batch(rows) * c.out.batch_stride + first * c.out.row_stride +
                     rows.q_head * c.out.head_stride;
#pragma unroll 1
    for (int at = cta.lane; at < left * kChunks; at += 32) {
      const int row = at / kChunks;
      const int chunk = at % kChunks;
      if (8 * chunk >= c.head_dim_v) continue;
      visit(reinterpret_cast<ptx::U32x4*>(to + row * c.out.row_stride + 8 * chunk),
            ptx::ld_shared<ptx::U32x4>(out.chunk(row, chunk)));
    }
  }
};

}  // namespace fovea::cuda::sm90
