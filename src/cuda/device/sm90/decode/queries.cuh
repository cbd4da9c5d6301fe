// Queries of warpgroups that take unit after unit, on the way into shared memory. TMA and memory take requests in
// order, and keys are asked for 128 KB ahead: behind them queries would come some 4,000 clocks late. So those of the
// first unit are asked for ahead of its keys, by who asks for these; those of the next one by a warp of their own, into
// L2 ahead of its keys, and from there as soon as both groups have multiplied the ones before. Read compute.cuh next.
#pragma once

#include "common/ring.cuh"
#include "common/sequence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/decode/cta.cuh"

namespace fovea::cuda::sm90::decoding {

/// Of a row tile.
template <Sm90DecodeSpec spec>
class QueryBoxes {
  using L = Layout<spec>;
  using T = typename L::T;
  using Tile = typename L::QTile;

 public:
  FOVEA_DEVICE_MEMBER QueryBoxes(const Cta<spec>& cta, const Work& work) : cta_(cta), work_(work) {}

  /// By one lane, when the buffer is free.
  FOVEA_DEVICE_MEMBER void load() const {
    const SharedAddress full = cta_.barrier(L::kAt.queries_full, 0);
    ptx::mbarrier_arrive_expect_tx(full, kUsedRows * Tile::kPanels * Tile::kRowPitch);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      ptx::cp_async_bulk_tensor_load<4>(cta_.queries().panel(panel), tensor_map(cta_.p.q),
                                        place_of(panel).at, full, ptx::CachePolicy::evict_first);
    }
  }

  FOVEA_DEVICE_MEMBER void prefetch() const {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      ptx::cp_async_bulk_prefetch_tensor<4>(tensor_map(cta_.p.q), place_of(panel).at);
    }
  }

  /// Rows that no box has, of all units, are zeros. By a warp.
  FOVEA_DEVICE_MEMBER static void clear_rest(const Cta<spec>& cta) {
    constexpr int kChunks = (spec.tile_q - kUsedRows) * Tile::kChunks;
    if constexpr (kChunks > 0) {
#pragma unroll 1
      for (int i = cta.lane; i < kChunks; i += 32)
        ptx::st_shared(cta.queries().chunk(kUsedRows + i / Tile::kChunks, i % Tile::kChunks),
                       ptx::U32x4{});
      ptx::fence_proxy_async_shared_cta();
    }
  }

 private:
  static constexpr int kUsedRows = spec.tile_q / spec.heads_per_tile * spec.heads_per_tile;

  /// In the tensor map: element, head, row, batch.
  struct Place {
    std::int32_t at[4];
  };
  FOVEA_DEVICE_MEMBER Place place_of(int panel) const {
    const std::int32_t row = static_cast<std::int32_t>(work_.sequence.q_row) + work_.q_begin;
    const std::int32_t batch =
        spec.has_packed_q ? 0 : static_cast<std::int32_t>(work_.sequence.q_batch);
    return {{T::kElement.of_panel * panel, work_.q_head, row, batch}};
  }

  const Cta<spec>& cta_;
  const Work& work_;
};

/// The warp that brings those of all units but the first.
template <Sm90DecodeSpec spec>
struct LoadQueries {
  using L = Layout<spec>;
  const Cta<spec>& cta;

  FOVEA_DEVICE_MEMBER explicit LoadQueries(const Cta<spec>& of_cta) : cta(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() const {
    Ring<L::kRecords> records{0};
    Ring<1> queries{0};
    if (cta.take(records).work.is_nothing) return;
#pragma unroll 1
    for (;;) {
      const Posted split = cta.take(records);
      if (split.work.is_nothing) return;
      if (!begins_unit(split.work, split.unit)) continue;
      const QueryBoxes<spec> boxes(cta, split.work);
      if (ptx::elect_one()) boxes.prefetch();
      cta.await(cta.barrier(L::kAt.queries_empty, 0), queries.parity);
      queries.advance();
      if (ptx::elect_one()) boxes.load();
    }
  }
};

}  // namespace fovea::cuda::sm90::decoding
