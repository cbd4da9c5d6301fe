// Finished tiles to memory: one warp, by TMA where all rows of a group are the sequence's.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "sm90/forward/cta.cuh"

namespace fovea::cuda::sm90 {

/// Sends finished tiles from where their Q lay, then gives the buffer back.
template <ForwardSpec spec>
struct Store {
  using L = Layout<spec>;
  using T = Traits<spec>;
  const Cta<spec>& cta;
  Ring<T::kQStages> q{0};
  Ring<T::kSlots> slots{0};

  FOVEA_DEVICE_MEMBER explicit Store(const Cta<spec>& of_cta) : cta(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() {
    for (;;) {
      const RowTile rows = cta.next_row_tile(slots);
      if (rows.idx < 0) break;
      const SequencePlace place = cta.place_of(rows);
      cta.done_with(rows);
      for (int group = 0; group < T::kGroups; ++group) {
        const int i = q.stage * T::kGroups + group;
        cta.await(cta.barrier(L::kOFull, i), q.parity);
        if constexpr (spec.is_split) {  // partial states are written by those who compute them
          cta.release(cta.barrier(L::kQEmpty, i));
          continue;
        }
        if constexpr (spec.is_varlen) {
          const std::int32_t left = place.seqlen_q - rows.idx * spec.tile_q - 64 * group;
          if (left < 64) {
            store_rows(rows, place, group, left);
            cta.release(cta.barrier(L::kQEmpty, i));
            continue;
          }
        }
        if (ptx::elect_one()) store(rows, place, group, i);
      }
      q.advance();
    }
    if (ptx::elect_one()) ptx::cp_async_bulk_wait_group<0>();
  }

 private:
  FOVEA_DEVICE_MEMBER void store(const RowTile& rows, const SequencePlace& place, int group,
                                 int i) const {
    const typename T::OTile out{cta.q_at(q.stage, group)};
#pragma unroll
    for (int panel = 0; panel < T::OTile::kPanels; ++panel) {
      const std::int32_t at[4] = {64 * panel, place.q_row + rows.idx * spec.tile_q + 64 * group,
                                  rows.q_head, cta.map_batch(rows)};
      ptx::cp_async_bulk_tensor_store<4>(tensor_map(cta.p.out), at, out.panel(panel));
    }
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<0>();
    ptx::mbarrier_arrive(cta.barrier(L::kQEmpty, i));
  }

  /// Only the first `left` rows of a group: those behind them are another sequence's.
  FOVEA_DEVICE_MEMBER void store_rows(const RowTile& rows, const SequencePlace& place, int group,
                                      std::int32_t left) const {
    constexpr int kChunks = spec.head_dim_v / 8;
    const ForwardParams& c = cta.p.common;
    const typename T::OTile out{cta.q_at(q.stage, group)};
    const std::int64_t first = place.q_row + rows.idx * spec.tile_q + 64 * group;
    char* to = static_cast<char*>(const_cast<void*>(c.out.data)) +
               2 * (first * c.out.row_stride + rows.q_head * c.out.head_stride);
#pragma unroll 1
    for (int at = cta.lane; at < left * kChunks; at += 32) {
      const int row = at / kChunks;
      const int chunk = at % kChunks;
      if (8 * chunk >= c.head_dim_v) continue;
      ptx::st_global(reinterpret_cast<ptx::U32x4*>(to + 2 * (row * c.out.row_stride + 8 * chunk)),
                     ptx::ld_shared<ptx::U32x4>(out.chunk(row, chunk)));
    }
  }
};

}  // namespace fovea::cuda::sm90
