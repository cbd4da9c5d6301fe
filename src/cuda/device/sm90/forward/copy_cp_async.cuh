// Q, K and V into shared memory by cp.async, where TMA cannot read them: strides that it does not have, pages of any
// size that keys may begin inside of. Rows lie at multiples of 16 bytes. Read load.cuh for the order.
//
// Two warps copy blocks of 32 rows in turn. Each lane knows where one row of a block begins; eight lanes copy 128 bytes
// of a row. What does not exist becomes zeros, whatever lies there. Wgmma reads by the async proxy what threads have
// written, so not the copies arrive at a barrier but the warp: it waits for them, fences, arrives. It does so for a
// tile when the copies of the next one are under way; and before it waits for anything else, since those it waits for
// may be waiting for that tile.
//
// Pages are looked up a kv tile ahead, by cp.async too: each lane copies the entries of its rows.
#pragma once

#include "common/row_addresses.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm90/forward/cta.cuh"
#include "sm90/values_of_pass.cuh"

namespace fovea::cuda::sm90 {

template <auto spec>
class CpAsyncCopies {
 public:
  using T = Traits<spec>;
  static_assert(spec.heads_per_tile == 1, "rows of a tile are one head's");

  FOVEA_DEVICE_MEMBER explicit CpAsyncCopies(const Cta<spec>& of_cta)
      : cta_(of_cta), loader_(of_cta.loader()) {}

  FOVEA_DEVICE_MEMBER void clear_unused_rows() const {}

  FOVEA_DEVICE_MEMBER void before_wait(SharedAddress barrier, std::uint32_t parity) {
    if (ptx::vote_any(!ptx::mbarrier_test_wait_parity(barrier, parity))) finish();
  }

  /// All copies have landed, and their barriers know.
  FOVEA_DEVICE_MEMBER void finish() {
    if (under_way_ == kNothing) return;
    ptx::cp_async_wait_group<0>();
    announce(under_way_);
    under_way_ = kNothing;
  }

  /// Of pages there are three sets of words, which follow each other: this is the number of one. They come with the
  /// copies that are asked for next.
  FOVEA_DEVICE_MEMBER std::int32_t look_up(const SequencePlace& place, std::int32_t batch,
                                           VisitedTile tile) {
    if constexpr (!spec.is_paged) return 0;
    const ForwardParams& c = cta_.p.common;
    pages_ = pages_ == 2 ? 0 : pages_ + 1;
    const std::int64_t bytes = c.page_table.is_wide != 0 ? 8 : 4;  // of an i64 the low word
    const char* const table =
        static_cast<const char*>(c.page_table.data) + batch * c.page_table_row_stride * bytes;
#pragma unroll
    for (int block = 0; block < spec.tile_kv / 32; ++block) {
      const std::int32_t row = 32 * block + cta_.lane;
      const std::int32_t key = tile.idx * spec.tile_kv + row;
      if (block % kLoaders != loader_ || key >= place.seqlen_kv) continue;
      ptx::cp_async_4(page_word_at(pages_, row),
                      table + entry_of_row(c, place.kv_row + key) * c.page_table.stride * bytes, 4);
    }
    return pages_;
  }

  FOVEA_DEVICE_MEMBER void queries(int stage, const RowTile& rows, const SequencePlace& place,
                                   int group) {
    const BshdParam& q = cta_.p.common.q;
    const std::int32_t first = rows.idx * spec.tile_q + 64 * group;
    const std::int64_t head = cta_.map_batch(rows) * q.batch_stride + rows.q_head * q.head_stride;
    copy_rows<typename T::QTile>(
        cta_.q_at(stage, group), q, cta_.p.common.head_dim_qk, place.seqlen_q - first,
        [&](int row) { return head + (place.q_row + first + row) * q.row_stride; });
    commit(cta_.barrier(T::kAt.q_full, stage * T::kGroups + group));
    has_pages_ = false;
  }

  /// `posted`: words of this kv tile and the one after it.
  FOVEA_DEVICE_MEMBER void keys(int stage, const KvRows& kv, ptx::U32x2 posted) {
    if (spec.is_paged && !has_pages_) finish();
    if (loader_ == 0 && cta_.lane == 0) ptx::st_shared(cta_.kv_tile_at(stage), posted);
    copy_kv<typename T::KTile>(cta_.k_at(stage), cta_.p.common.k, kv, cta_.p.common.head_dim_qk);
    commit(cta_.barrier(T::kAt.k_full, stage));
    has_pages_ = false;
  }

  FOVEA_DEVICE_MEMBER void values(int stage, const KvRows& kv, Pass pass) {
    copy_kv<typename T::VTile>(cta_.v_at(stage), cta_.p.common.v, kv, cta_.p.common.head_dim_v);
    commit(cta_.barrier(T::kAt.v_full, stage));
    has_pages_ = true;
    if (pass == Pass::all) return;
    ptx::cp_async_wait_group<0>();
    ptx::sync_warp();
    rewrite(typename T::VTile{cta_.v_at(stage)}, pass);
    finish();
  }

  /// What this warp has copied.
  FOVEA_DEVICE_MEMBER void rewrite(const typename T::VTile& values, Pass pass) const {
    constexpr int kBlockBytes = 32 * T::VTile::kSpan;
#pragma unroll 1
    for (int block = loader_; block < spec.tile_kv / 32; block += kLoaders) {
#pragma unroll 1
      for (int panel = 0; panel < T::VTile::kPanels; ++panel)
        rewrite_values<spec.element, kBlockBytes>(values.panel(panel) + block * kBlockBytes,
                                                  cta_.lane, pass);
    }
  }

 private:
  static constexpr int kLoaders = T::kLoaders;
  static constexpr SharedAddress kNothing = 0xffffffffU;

  /// The copies since the last group are one, which this barrier waits for. Those of the group before are announced.
  FOVEA_DEVICE_MEMBER void commit(SharedAddress full) {
    ptx::cp_async_commit_group();
    if (under_way_ != kNothing) {
      ptx::cp_async_wait_group<1>();
      announce(under_way_);
    }
    under_way_ = full;
  }

  FOVEA_DEVICE_MEMBER void announce(SharedAddress full) const {
    ptx::fence_proxy_async_shared_cta();
    cta_.release(full);
  }

  // ---- pages ----

  FOVEA_DEVICE_MEMBER SharedAddress page_word_at(std::int32_t pages, int row) const {
    return cta_.smem + T::kAt.pages + 4 * (pages * spec.tile_kv + row);
  }

  // ---- rows ----

  template <class Tile>
  FOVEA_DEVICE_MEMBER void copy_kv(SharedAddress to, const BshdParam& t, const KvRows& kv,
                                   std::int32_t width) const {
    const ForwardParams& c = cta_.p.common;
    const std::int32_t first = kv.first_row + kv.idx * spec.tile_kv;
    const std::int64_t head = kv.kv_head * t.head_stride;
    copy_rows<Tile>(to, t, width, kv.num_keys, [&](int row) {
      if constexpr (!spec.is_paged)
        return head + kv.batch * t.batch_stride + (first + row) * t.row_stride;
      const auto word = ptx::ld_shared<std::uint32_t>(page_word_at(kv.batch, row));
      const std::int32_t entry = entry_of_row(c, first + row);
      return head + one_of(word, c.num_slots) * t.batch_stride +
             (first + row - entry * c.page_size) * t.row_stride;
    });
  }

  /// The first num_rows of a tile's rows, zeros behind them; element_of(row): where the row begins in the tensor. This
  /// warp's blocks of 32.
  template <class Tile, class ElementOf>
  FOVEA_DEVICE_MEMBER void copy_rows(SharedAddress to, const BshdParam& t, std::int32_t width,
                                     std::int32_t num_rows, ElementOf&& element_of) const {
    const Tile tile{to};
    static_assert(Tile::kRows % 32 == 0, "a lane knows one row of a block");
#pragma unroll 1
    for (int block = loader_; block < Tile::kRows / 32; block += kLoaders) {
      const int mine = 32 * block + cta_.lane;
      const char* from = static_cast<const char*>(t.data);
      if (mine < num_rows) from += T::kElement.bytes * element_of(mine);
      const RowAddresses rows(from, mine < num_rows);
      copy_block(tile, block, rows, width);
    }
  }

  template <class Tile>
  FOVEA_DEVICE_MEMBER void copy_block(const Tile& tile, int block, const RowAddresses& rows,
                                      std::int32_t width) const {
    const int first = cta_.lane / 8;
    const int chunk = cta_.lane % 8;
    SharedAddress at = tile.chunk(32 * block + first, chunk);
    // Shuffles of several rows at once: one by one, their latencies are half of the time. Wide rows have no registers
    // for it.
    constexpr int kAtOnce = T::kIsWide ? 1 : 8;
#pragma unroll kAtOnce
    for (int step = 0; step < 8; ++step) {
      const int row = 4 * step + first;
      const char* const from = rows.at(row) + 16 * chunk;
      const bool exists = rows.exists(row);
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        ptx::cp_async_16_or_zero(
            at + panel * Tile::kPanelBytes, from + 128 * panel,
            exists && T::kElement.of_panel * panel + T::kElement.of_chunk * chunk < width);
      }
      at = (at + 4 * Tile::kSpan) ^ 64U;  // four rows on the swizzle has exchanged chunks 4 apart
    }
  }

  const Cta<spec>& cta_;
  const int loader_;
  // the barrier of the newest group of copies, where it is not announced
  SharedAddress under_way_ = kNothing;
  std::int32_t pages_ = 0;
  bool has_pages_ = false;  // what was looked up before the last kv tile's keys has landed
};

}  // namespace fovea::cuda::sm90
