// Q, K and V into shared memory by TMA. Read copy_cp_async.cuh for what TMA cannot read, load.cuh for the order.
//
// Tensors whose rows lie at multiples of 16 bytes. Paged keys come box by box, each in one page, which the lanes look
// up a kv tile ahead.
#pragma once

#include "common/tile_walk.cuh"
#include "ptx/bulk.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "sm90/forward/cta.cuh"
#include "sm90/forward/value_codes.cuh"
#include "sm90/values_of_pass.cuh"

namespace fovea::cuda::sm90 {

template <auto spec>
class TmaCopies {
 public:
  using T = Traits<spec>;

  FOVEA_DEVICE_MEMBER explicit TmaCopies(const Cta<spec>& of_cta) : cta_(of_cta) {}

  /// TMA completes the barriers' transactions itself: nothing is to be done before a wait, nor at the end.
  FOVEA_DEVICE_MEMBER void before_wait(SharedAddress, std::uint32_t) const {}
  FOVEA_DEVICE_MEMBER void finish() const {}

  /// Rows of Q that no box reaches: what lies there would look like NaN in the sums.
  FOVEA_DEVICE_MEMBER void clear_unused_rows() const {
    if constexpr (T::kBoxRows < T::kGroupRows) {
      constexpr int kChunks = spec.head_dim_qk / T::kElement.of_chunk;
      for (int stage = 0; stage < T::kQStages; ++stage) {
        const typename T::QTile queries{cta_.q_at(stage, 0)};
#pragma unroll 1
        for (int at = cta_.lane; at < (T::kGroupRows - T::kBoxRows) * kChunks; at += 32)
          ptx::st_shared(queries.chunk(T::kBoxRows + at / kChunks, at % kChunks), ptx::U32x4{});
      }
      ptx::fence_proxy_async_shared_cta();
      ptx::sync_warp();
    }
  }

  /// The page that this lane's box of a kv tile lies in; -1, which TMA takes for outside: there are no keys.
  FOVEA_DEVICE_MEMBER std::int32_t look_up(const SequencePlace& place, std::int32_t batch,
                                           VisitedTile tile) const {
    if constexpr (!T::kCopiesPages) return 0;
    const ForwardParams& c = cta_.p.common;
    const std::int32_t row = cta_.lane * cta_.p.rows_per_box;
    const std::int32_t key = tile.idx * spec.tile_kv + row;
    if (row >= spec.tile_kv || key >= place.seqlen_kv) return -1;
    const std::int64_t at =
        batch * c.page_table_row_stride + (key >> c.page_shift) * c.page_table.stride;
    // Of an i64 the low word: there are fewer than 2^31 pages.
    return ptx::ld_global(static_cast<const std::int32_t*>(c.page_table.data) +
                          (c.page_table.is_wide != 0 ? 2 * at : at));
  }

  FOVEA_DEVICE_MEMBER void queries(int stage, const RowTile& rows, const SequencePlace& place,
                                   int group) const {
    if (!ptx::elect_one()) return;
    const std::int32_t row =
        place.q_row + rows.idx * T::kQueries + T::kGroupRows / spec.heads_per_tile * group;
    constexpr bool kPacksHeads = spec.heads_per_tile > 1;  // which are neighbours in its box
    if constexpr (spec.multiplies_codes) mean_of_keys(stage, rows, group);
    copy<typename T::GivenQTile, T::kBoxRows>(
        cta_.q_at(stage, group), cta_.p.q, cta_.barrier(T::kAt.q_full, stage * T::kGroups + group),
        {0, kPacksHeads ? rows.q_head : row, kPacksHeads ? row : rows.q_head, cta_.map_batch(rows)},
        ptx::CachePolicy::evict_first);
  }

  /// `posted`: words of this kv tile and the one after it.
  FOVEA_DEVICE_MEMBER void keys(int stage, const KvRows& kv, ptx::U32x2 posted) const {
    if (ptx::elect_one()) {
      ptx::st_shared(cta_.kv_tile_at(stage), posted);
      if constexpr (!T::kCopiesPages) {
        copy<typename T::KTile>(cta_.k_at(stage), cta_.p.k, cta_.barrier(T::kAt.k_full, stage),
                                {0, first_row(kv), kv.kv_head, list_of(kv)},
                                ptx::CachePolicy::evict_last);
      }
    }
    if constexpr (T::kCopiesPages)
      copy_pages<typename T::KTile>(cta_.k_at(stage), cta_.p.k, cta_.barrier(T::kAt.k_full, stage),
                                    kv);
  }

  FOVEA_DEVICE_MEMBER void values(int stage, const KvRows& kv, Pass pass) {
    const SharedAddress full = cta_.barrier(T::kAt.v_full, stage);
    const bool is_cut = T::kClearsValues && kv.num_keys < spec.tile_kv;
    if (is_cut || pass != Pass::all) {
      copy_to_rewrite(stage, kv, full, is_cut, pass);
    } else {
      copy_values(stage, kv, full);
    }
  }

 private:
  /// Before the queries that are to be rounded, whose arrival its bytes belong to. Rows behind the last sequence have
  /// another's.
  FOVEA_DEVICE_MEMBER void mean_of_keys(int stage, const RowTile& rows, int group) const {
    constexpr std::int32_t kBytes = sm90_mean_bytes(spec);
    const ForwardParams& c = cta_.p.common;
    const SharedAddress full = cta_.barrier(T::kAt.q_full, stage * T::kGroups + group);
    const std::int32_t sequence = least(rows.batch, c.num_sequences - 1);
    const std::int32_t pair = sequence * c.num_heads_kv + rows.q_head / c.group;
    ptx::mbarrier_expect_tx(full, kBytes);
    constexpr std::int32_t kApart = key_mean_floats(spec.head_dim_qk, reads_greatest_scale(spec));
    ptx::cp_async_bulk_load(cta_.mean_at(stage, group),
                            cta_.p.quantized.mean + std::int64_t{pair} * kApart, kBytes, full,
                            ptx::CachePolicy::evict_normal);
  }

  FOVEA_DEVICE_MEMBER void copy_values(int stage, const KvRows& kv, SharedAddress full) const {
    if constexpr (T::kCopiesPages) {
      copy_pages<typename T::VTile>(cta_.v_at(stage), cta_.p.v, full, kv);
    } else if constexpr (spec.sums_codes) {
      if (ptx::elect_one()) copy_value_codes(stage, kv, full);
    } else if (ptx::elect_one()) {
      copy<typename T::VTile>(cta_.v_at(stage), cta_.p.v, full,
                              {0, first_row(kv), kv.kv_head, list_of(kv)},
                              ptx::CachePolicy::evict_last);
    }
  }

  /// Where a tile begins in the tensor that is copied, and in which of its lists: what was rounded of a cache lies by
  /// sequences, each from its key 0 on.
  FOVEA_DEVICE std::int32_t first_row(const KvRows& kv) {
    return (T::kHasRoundedCache ? 0 : kv.first_row) + kv.idx * spec.tile_kv;
  }
  FOVEA_DEVICE std::int32_t list_of(const KvRows& kv) {
    return T::kHasRoundedCache ? kv.sequence : kv.batch;
  }

  /// A tile of a sequence without keys lies outside, and arrives as zeros.
  FOVEA_DEVICE_MEMBER void copy_value_codes(int stage, const KvRows& kv, SharedAddress full) const {
    const std::int32_t row =
        kv.num_keys > 0 ? (kv.first_tile + kv.idx) * spec.head_dim_v : -spec.head_dim_v;
    const std::int32_t at[4] = {0, row, kv.kv_head, list_of(kv)};
    ptx::mbarrier_arrive_expect_tx(full, spec.head_dim_v * spec.tile_kv);
    ptx::cp_async_bulk_tensor_load<4>(cta_.v_at(stage), tensor_map(cta_.p.v), at, full,
                                      ptx::CachePolicy::evict_last);
  }

  /// Where the sequence ends inside the tile there may be NaN behind it, and 0 * NaN is not 0; nor is it in a pass over
  /// a row tile that is computed again.
  FOVEA_DEVICE_MEMBER void copy_to_rewrite(int stage, const KvRows& kv, SharedAddress full,
                                           bool is_cut, Pass pass) {
    const SharedAddress landed = cta_.barrier(T::kAt.v_landed, 0);
    copy_values(stage, kv, landed);
    cta_.await(landed, landings_.parity);
    landings_.advance();
    const typename T::VTile values{cta_.v_at(stage)};
    if (is_cut) clear_behind_keys(values, kv.num_keys);
    if (pass != Pass::all) {
      ptx::sync_warp();
      if constexpr (spec.sums_codes)
        rewrite_value_codes(cta_, values, kv, pass);
      else
        rewrite_values<spec.element, T::VTile::kBytes>(values.base, cta_.lane, pass);
    }
    ptx::fence_proxy_async_shared_cta();
    cta_.release(full);
  }

  /// Paged: as far as the box of the last key reaches, those behind it came as zeros.
  FOVEA_DEVICE_MEMBER void clear_behind_keys(const typename T::VTile& values,
                                             std::int32_t num_keys) const {
    constexpr int kChunks = spec.head_dim_v / T::kElement.of_chunk;
    const std::int32_t rows =
        T::kCopiesPages ? -num_keys & (cta_.p.rows_per_box - 1) : spec.tile_kv - num_keys;
#pragma unroll 1
    for (int at = cta_.lane; at < rows * kChunks; at += 32)
      ptx::st_shared(values.chunk(num_keys + at / kChunks, at % kChunks), ptx::U32x4{});
  }

  /// A box for each panel; what lies outside the tensor arrives as zeros.
  template <class Tile, int rows = Tile::kRows>
  FOVEA_DEVICE_MEMBER void copy(SharedAddress to, const TensorMapParam& map, SharedAddress full,
                                const std::int32_t (&at)[4], ptx::CachePolicy policy) const {
    ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes / Tile::kRows * rows);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const std::int32_t coordinates[4] = {T::kPanelElements * panel, at[1], at[2], at[3]};
      ptx::cp_async_bulk_tensor_load<4>(to + panel * Tile::kPanelBytes, tensor_map(map),
                                        coordinates, full, policy);
    }
  }

  /// A box for each panel and each run of rows that lies in one page. Boxes are multiples of 8 rows, as the swizzle's
  /// pattern is.
  template <class Tile>
  FOVEA_DEVICE_MEMBER void copy_pages(SharedAddress to, const TensorMapParam& map,
                                      SharedAddress full, const KvRows& kv) const {
    const SharedAddress pages = cta_.smem + T::kAt.pages;
    if (cta_.lane < sm90_page_words(spec)) ptx::st_shared(pages + 4 * cta_.lane, kv.batch);
    ptx::sync_warp();
    if (!ptx::elect_one()) return;
    ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);
    const std::int32_t key = kv.idx * spec.tile_kv;
#pragma unroll 1
    for (std::int32_t row = 0, box = 0; row < spec.tile_kv; row += cta_.p.rows_per_box, ++box) {
      const auto page = ptx::ld_shared<std::int32_t>(pages + 4 * box);
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        const std::int32_t coordinates[4] = {T::kPanelElements * panel,
                                             (key + row) & (cta_.p.common.page_size - 1),
                                             kv.kv_head, page};
        ptx::cp_async_bulk_tensor_load<4>(to + panel * Tile::kPanelBytes + row * Tile::kSpan,
                                          tensor_map(map), coordinates, full,
                                          ptx::CachePolicy::evict_last);
      }
    }
  }

  const Cta<spec>& cta_;
  Ring<1> landings_{0};
};

}  // namespace fovea::cuda::sm90
