// Who owns which rows, where things lie in shared memory, and how rows come there. Chapter 1 of
// sm80/attention_backward.cuh; read sums.cuh next.
#pragma once

#include "common/backward_work.cuh"
#include "common/copies.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/backward_params.h"
#include "shared/backward_spec.h"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::sm80 {

using ptx::SharedAddress;
using ptx::U32x4;

template <Sm80BackwardSpec spec>
struct BackwardTraits {
  static_assert(spec.element != Element::f32, "mma.m16n8k16 multiplies 16-bit elements");
  static_assert(spec.element == spec.dout_element, "dout is multiplied by v");
  static constexpr int kThreads = spec.num_warps * 32;
  static constexpr int kColumnWarps = spec.column_warps;
  static constexpr int kWarpRows = spec.tile_owned / (spec.num_warps / kColumnWarps);
  static_assert(kWarpRows % 16 == 0, "a warp owns whole blocks of 16 rows");
  static constexpr int kRowBlocks = kWarpRows / 16;
  // Of the walked rows that a warp multiplies by its owned ones, and of the columns that it sums.
  static_assert(spec.tile_walked % (16 * kColumnWarps) == 0,
                "walked rows are the sums' k, in steps of 16");
  static constexpr int kBlocks = spec.tile_walked / kColumnWarps / 8;
  static constexpr int kSteps = spec.tile_walked / kColumnWarps / 16;
  static_assert(spec.head_dim_qk % (16 * kColumnWarps) == 0 &&
                    spec.head_dim_v % (16 * kColumnWarps) == 0,
                "a warp sums whole pairs of blocks of 8 columns");
  static constexpr int kQkSteps = spec.head_dim_qk / 16;
  static constexpr int kQkBlocks = spec.head_dim_qk / kColumnWarps / 8;
  static constexpr int kVSteps = spec.head_dim_v / 16;
  static constexpr int kVBlocks = spec.head_dim_v / kColumnWarps / 8;

  // Of walked rows; owned ones lie the same, as many as there are.
  static constexpr int kElementBytes = element_bytes(spec.element);
  using QkRows = JoinedTile<spec.tile_walked, kElementBytes * spec.head_dim_qk>;
  using VRows = JoinedTile<spec.tile_walked, kElementBytes * spec.head_dim_v>;
  // P or dS of a tile: a row for each owned one.
  using PairRows = JoinedTile<spec.tile_owned, kElementBytes * spec.tile_walked>;

  // Shared memory. Owned rows of q or k, of dout or v; of each stage the same of walked rows, and what is known of them
  // where they are queries; P and dS; a word of each warp.
  static constexpr int kOwnedVAt = kElementBytes * spec.tile_owned * spec.head_dim_qk;
  static constexpr int kStagesAt =
      kOwnedVAt + (spec.sums_scores ? kElementBytes * spec.tile_owned * spec.head_dim_v : 0);
  static constexpr int kWalkedVAt =
      kElementBytes * spec.tile_walked * spec.head_dim_qk;  // of a stage
  static constexpr int kStatisticsAt =
      kWalkedVAt + kElementBytes * spec.tile_walked * spec.head_dim_v;
  static constexpr int kStageBytes = kStatisticsAt + sm80_statistics_bytes(spec);
  static constexpr int kWeightsAt = kStagesAt + spec.stages * kStageBytes;
  static constexpr int kGradientsAt = kWeightsAt + sm80_pairs_bytes(spec) / 2;
  static constexpr int kVotesAt = kWeightsAt + sm80_pairs_bytes(spec);
  static_assert(kVotesAt + 4 * spec.num_warps == sm80_backward_shared_bytes(spec),
                "host and device count the same bytes");
};

/// Rows of one head of one sequence in memory.
struct HeadRows {
  const char* first;  // row 0
  std::int64_t row_stride, col_stride;
  std::int32_t length, head_dim;
  bool is_aligned;
};

template <Sm80BackwardSpec spec>
class WalkedInRegisters;

/// The warps that own a tile, as one thread of them sees it.
template <Sm80BackwardSpec spec>
struct Owner {
  using T = BackwardTraits<spec>;

  const BackwardParams& b;
  const ForwardParams& p;
  const OwnedTile owned;
  const std::int32_t kv_head;
  const SharedAddress smem;
  const int warp, lane;
  const int row_warp, column_warp;  // among those of owned rows, and of walked ones

  FOVEA_DEVICE_MEMBER Owner(const BackwardParams& params, const OwnedTile& tile)
      : b(params),
        p(params.forward),
        owned(tile),
        kv_head(spec.owns_keys ? tile.head : tile.head / params.forward.group),
        smem(ptx::dynamic_shared()),
        warp(ptx::warp_idx()),
        lane(ptx::lane_idx()),
        row_warp(warp / T::kColumnWarps),
        column_warp(warp % T::kColumnWarps) {}

  FOVEA_DEVICE_MEMBER SharedAddress stage_at(int stage) const {
    return smem + T::kStagesAt + stage * T::kStageBytes;
  }

  FOVEA_DEVICE_MEMBER std::int32_t owned_length() const {
    return spec.owns_keys ? owned.sequence.seqlen_kv : owned.sequence.seqlen_q;
  }
  FOVEA_DEVICE_MEMBER std::int32_t walked_length() const {
    return spec.owns_keys ? owned.sequence.seqlen_q : owned.sequence.seqlen_kv;
  }

  /// Of the sequence: the owned row that this thread's accumulators of (row block, half) belong to.
  FOVEA_DEVICE_MEMBER std::int32_t owned_row(int block, int half) const {
    return first_owned_row(block) + half * 8 + lane / 4;
  }
  /// And the walked row of (column block, element).
  FOVEA_DEVICE_MEMBER std::int32_t walked_row(const WalkedTile& tile, int block, int e) const {
    return first_walked_row(tile, block) + lane % 4 * 2 + e;
  }

  /// Of the warp's blocks.
  FOVEA_DEVICE_MEMBER std::int32_t first_owned_row(int block) const {
    return owned.begin + row_warp * T::kWarpRows + block * 16;
  }
  FOVEA_DEVICE_MEMBER std::int32_t first_walked_row(const WalkedTile& tile, int block) const {
    return tile.idx * spec.tile_walked + (column_warp * T::kBlocks + block) * 8;
  }

  /// Where block `block` of the warp's columns of a sum begins: warps side by side take pairs of blocks in turn.
  FOVEA_DEVICE_MEMBER int summed_column(int block) const {
    return (block / 2 * T::kColumnWarps + column_warp) * 16 + block % 2 * 8;
  }

  FOVEA_DEVICE_MEMBER Position position(const WalkedTile& tile, std::int32_t mine,
                                        std::int32_t theirs) const {
    const Sequence& s = owned.sequence;
    return {s.idx,
            tile.q_head,
            kv_head,
            spec.owns_keys ? theirs : mine,
            spec.owns_keys ? mine : theirs,
            s.seqlen_q,
            s.seqlen_kv};
  }

  /// Of an OwnerWalk. Full only where all of its rows and all owned ones exist, too.
  template <class Tiles>
  FOVEA_DEVICE_MEMBER WalkedTile next_tile(Tiles& tiles) const {
    WalkedTile tile = tiles.next();
    tile.is_full = tile.is_full && (tile.idx + 1) * spec.tile_walked <= walked_length() &&
                   owned.begin + spec.tile_owned <= owned_length();
    return tile;
  }

  // ---- rows on their way in --------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER HeadRows query_rows(const BshdParam& t, bool is_aligned, std::int32_t q_head,
                                          std::int32_t head_dim) const {
    const Sequence& s = owned.sequence;
    const std::int64_t at =
        s.q_batch * t.batch_stride + s.q_row * t.row_stride + q_head * t.head_stride;
    return {static_cast<const char*>(t.data) + at * T::kElementBytes,
            t.row_stride,
            t.col_stride,
            s.seqlen_q,
            head_dim,
            is_aligned};
  }
  FOVEA_DEVICE_MEMBER HeadRows key_rows(const BshdParam& t, std::int32_t head_dim) const {
    const Sequence& s = owned.sequence;
    const std::int64_t at =
        s.kv_batch * t.batch_stride + s.kv_row * t.row_stride + kv_head * t.head_stride;
    return {static_cast<const char*>(t.data) + at * T::kElementBytes,
            t.row_stride,
            t.col_stride,
            s.seqlen_kv,
            head_dim,
            p.is_kv_aligned != 0};
  }

  /// `count` rows from `begin` on; zeros where there is nothing. Aligned rows by chunks, others by elements.
  template <class Rows, int count>
  FOVEA_DEVICE_MEMBER void load_rows(SharedAddress to, const HeadRows& rows,
                                     std::int32_t begin) const {
    constexpr int kChunks = count * Rows::kChunks;
    constexpr int kChunkElements = element_traits(spec.element).of_chunk;
    const int thread = warp * 32 + lane;
    const auto visit = [&](int at, auto&& copy) {
      const int row = at / Rows::kChunks, chunk = at % Rows::kChunks;
      const bool exists = begin + row < rows.length;
      const char* const from =
          rows.first + (exists ? begin + row : 0) * (rows.row_stride * T::kElementBytes);
      copy(Rows{to}.chunk(row, chunk), from, chunk, exists);
    };
    if (rows.is_aligned) {
      constexpr int kSteps = (kChunks + T::kThreads - 1) / T::kThreads;
#pragma unroll 4
      for (int step = 0; step < kSteps; ++step) {
        const int at = step * T::kThreads + thread;
        if (kChunks % T::kThreads != 0 && at >= kChunks) break;
        visit(at, [&](SharedAddress at_smem, const char* from, int chunk, bool exists) {
          const bool is_data =
              exists && (!spec.has_padded_head_dim || chunk * kChunkElements < rows.head_dim);
          copy_chunk_or_zero<spec.instructions>(
              at_smem, is_data ? from + chunk * kChunkBytes : rows.first, is_data);
        });
      }
    } else {
#pragma unroll 1
      for (int at = thread; at < kChunks; at += T::kThreads) {
        visit(at, [&](SharedAddress at_smem, const char* from, int chunk, bool exists) {
#pragma unroll 1
          for (int i = 0; i < kChunkElements; ++i) {
            const int col = chunk * kChunkElements + i;
            std::uint16_t bits = 0;
            if (exists && col < rows.head_dim)
              bits = ptx::ld_global_nc(reinterpret_cast<const std::uint16_t*>(from) +
                                       col * rows.col_stride);
            ptx::st_shared(at_smem + i * T::kElementBytes, bits);
          }
        });
      }
    }
  }

  FOVEA_DEVICE_MEMBER HeadRows qk_rows(bool are_keys, std::int32_t q_head) const {
    return are_keys ? key_rows(p.k, p.head_dim_qk)
                    : query_rows(p.q, p.is_q_aligned != 0, q_head, p.head_dim_qk);
  }
  FOVEA_DEVICE_MEMBER HeadRows v_rows(bool are_keys, std::int32_t q_head) const {
    return are_keys ? key_rows(p.v, p.head_dim_v)
                    : query_rows(b.dout, b.is_dout_aligned != 0, q_head, p.head_dim_v);
  }

  FOVEA_DEVICE_MEMBER void load_owned() const {
    load_rows<typename T::QkRows, spec.tile_owned>(smem, qk_rows(spec.owns_keys, owned.head),
                                                   owned.begin);
    if constexpr (spec.sums_scores)
      load_rows<typename T::VRows, spec.tile_owned>(
          smem + T::kOwnedVAt, v_rows(spec.owns_keys, owned.head), owned.begin);
  }

  /// One group of copies; an empty one where there is no tile.
  FOVEA_DEVICE_MEMBER void load_walked(const WalkedTile& tile, int stage) const {
    if (tile.idx >= 0) {
      const SharedAddress to = stage_at(stage);
      const std::int32_t begin = tile.idx * spec.tile_walked;
      load_rows<typename T::QkRows, spec.tile_walked>(to, qk_rows(!spec.owns_keys, tile.q_head),
                                                      begin);
      load_rows<typename T::VRows, spec.tile_walked>(to + T::kWalkedVAt,
                                                     v_rows(!spec.owns_keys, tile.q_head), begin);
      if constexpr (spec.owns_keys) load_statistics(to + T::kStatisticsAt, tile);
    }
    commit_copies<spec.instructions>();
  }

  /// `tile` and all behind it, with where its rows lie, which all warps see. The next one is copied meanwhile, where
  /// there is a second stage for it or registers are that.
  template <class Tiles, class Visit>
  FOVEA_DEVICE_MEMBER void for_each_tile(Tiles& tiles, WalkedTile tile, const Visit& visit) const {
    if constexpr (WalkedInRegisters<spec>::kIsUsed) {
      for_each_tile_through_registers(tiles, tile, visit);
    } else {
      for_each_tile_by_stages(tiles, tile, visit);
    }
  }

  template <class Tiles, class Visit>
  FOVEA_DEVICE_MEMBER void for_each_tile_through_registers(Tiles& tiles, WalkedTile tile,
                                                           const Visit& visit) const {
    static_assert(spec.stages == 1, "registers are the second stage");
    WalkedInRegisters<spec> ahead;
    ahead.fetch(*this, tile);
#pragma unroll 1
    while (tile.idx >= 0) {
      ahead.put(*this, tile);
      ptx::sync_threads();
      const WalkedTile next = next_tile(tiles);
      ahead.fetch(*this, next);
      visit(tile, stage_at(0));
      ptx::sync_threads();
      tile = next;
    }
  }

  /// Of two stages, one is copied meanwhile.
  template <class Tiles, class Visit>
  FOVEA_DEVICE_MEMBER void for_each_tile_by_stages(Tiles& tiles, WalkedTile tile,
                                                   const Visit& visit) const {
    load_walked(tile, 0);
    int stage = 0;
#pragma unroll 1
    while (tile.idx >= 0) {
      wait_for_copies<spec.instructions>();
      ptx::sync_threads();
      const WalkedTile next = next_tile(tiles);
      const int other = spec.stages - 1 - stage;
      if constexpr (spec.stages == 2) load_walked(next, other);
      visit(tile, stage_at(stage));
      if constexpr (spec.stages == 1) {
        ptx::sync_threads();
        load_walked(next, 0);
      }
      tile = next;
      stage = other;
    }
    wait_for_copies<spec.instructions>();
  }

  /// copy(thread, chunk) for the chunk that this thread has of what is known of a tile of queries, if it has one.
  /// Padding makes tiles whole.
  template <class Copy>
  FOVEA_DEVICE_MEMBER void visit_statistics(const WalkedTile& tile, Copy&& copy) const {
    constexpr int kChunks = spec.tile_walked / 4;
    static_assert(3 * kChunks <= T::kThreads, "a thread copies one chunk");
    const int thread = warp * 32 + lane;
    if (thread >= (spec.has_origins ? 3 : 2) * kChunks) return;
    const float* const from = thread < kChunks       ? b.rows.log_sum
                              : thread < 2 * kChunks ? b.rows.delta
                                                     : b.rows.origin;
    const std::int64_t at = statistics_at<spec.is_varlen>(b.rows, owned.sequence, tile.q_head) +
                            tile.idx * spec.tile_walked + thread % kChunks * 4;
    copy(thread, from + at);
  }

  FOVEA_DEVICE_MEMBER void load_statistics(SharedAddress to, const WalkedTile& tile) const {
    visit_statistics(tile, [&](int thread, const float* from) {
      copy_chunk_or_zero<spec.instructions>(to + thread * 16, from, true);
    });
  }
};

/// A walked tile between two moments: `fetch` asks memory for a thread's chunks of it, `put` stores them. Products
/// stand between them and hide the latency. Rows that are not aligned are read by `put`.
template <Sm80BackwardSpec spec>
class WalkedInRegisters {
  using T = BackwardTraits<spec>;
  using Whole = Owner<spec>;

  template <class Rows>
  static constexpr int kSteps = (spec.tile_walked * Rows::kChunks + T::kThreads - 1) / T::kThreads;

  // Of a thread: sums, products of pairs, and the tile that waits.
  static constexpr int kSums =
      T::kRowBlocks *
      ((spec.sums_scores ? T::kQkBlocks : 0) + (spec.sums_values ? T::kVBlocks : 0)) * 4;
  static constexpr int kPairs = T::kRowBlocks * T::kBlocks * (spec.sums_scores ? 8 : 4);
  static constexpr int kWords = 4 * (kSteps<typename T::QkRows> + kSteps<typename T::VRows>);
  static constexpr int kMostRegisters = 150;  // above, ptxas spills

 public:
  /// Else the copies of sm_75 are waited for.
  static constexpr bool kIsUsed =
      spec.instructions == Instructions::sm75 && kSums + kPairs + kWords <= kMostRegisters;

  FOVEA_DEVICE_MEMBER void fetch(const Whole& owner, const WalkedTile& tile) {
    if (tile.idx < 0) return;
    const std::int32_t begin = tile.idx * spec.tile_walked;
    fetch_rows<typename T::QkRows>(owner, qk_, owner.qk_rows(!spec.owns_keys, tile.q_head), begin);
    fetch_rows<typename T::VRows>(owner, v_, owner.v_rows(!spec.owns_keys, tile.q_head), begin);
    if constexpr (spec.owns_keys) {
      owner.visit_statistics(tile, [&](int, const float* from) {
        statistics_ = ptx::ld_global(reinterpret_cast<const U32x4*>(from));
      });
    }
  }

  FOVEA_DEVICE_MEMBER void put(const Whole& owner, const WalkedTile& tile) const {
    const SharedAddress to = owner.stage_at(0);
    const std::int32_t begin = tile.idx * spec.tile_walked;
    put_rows<typename T::QkRows>(owner, to, qk_, owner.qk_rows(!spec.owns_keys, tile.q_head),
                                 begin);
    put_rows<typename T::VRows>(owner, to + T::kWalkedVAt, v_,
                                owner.v_rows(!spec.owns_keys, tile.q_head), begin);
    if constexpr (spec.owns_keys) {
      owner.visit_statistics(tile, [&](int thread, const float*) {
        ptx::st_shared(to + T::kStatisticsAt + thread * 16, statistics_);
      });
    }
  }

 private:
  /// visit(step, chunk) for every chunk of this thread.
  template <class Rows, class Visit>
  FOVEA_DEVICE_MEMBER static void for_each_chunk(const Whole& owner, Visit&& visit) {
    constexpr int kChunks = spec.tile_walked * Rows::kChunks;
#pragma unroll
    for (int step = 0; step < kSteps<Rows>; ++step) {
      const int at = step * T::kThreads + owner.warp * 32 + owner.lane;
      if (kChunks % T::kThreads == 0 || at < kChunks) visit(step, at);
    }
  }

  template <class Rows>
  FOVEA_DEVICE_MEMBER static void fetch_rows(const Whole& owner, U32x4 (&words)[kSteps<Rows>],
                                             const HeadRows& rows, std::int32_t begin) {
    if (!rows.is_aligned) return;
    constexpr int kChunkElements = element_traits(spec.element).of_chunk;
    for_each_chunk<Rows>(owner, [&](int step, int at) {
      const std::int32_t row = begin + at / Rows::kChunks;
      const int chunk = at % Rows::kChunks;
      words[step] = {0, 0, 0, 0};
      if (row >= rows.length) return;
      if (spec.has_padded_head_dim && chunk * kChunkElements >= rows.head_dim) return;
      const char* const from =
          rows.first + row * (rows.row_stride * T::kElementBytes) + chunk * kChunkBytes;
      words[step] = ptx::ld_global(reinterpret_cast<const U32x4*>(from));
    });
  }

  template <class Rows>
  FOVEA_DEVICE_MEMBER static void put_rows(const Whole& owner, SharedAddress to,
                                           const U32x4 (&words)[kSteps<Rows>], const HeadRows& rows,
                                           std::int32_t begin) {
    if (!rows.is_aligned) {
      owner.template load_rows<Rows, spec.tile_walked>(to, rows, begin);
      return;
    }
    for_each_chunk<Rows>(owner, [&](int step, int at) {
      ptx::st_shared(Rows{to}.chunk(at / Rows::kChunks, at % Rows::kChunks), words[step]);
    });
  }

  U32x4 qk_[kSteps<typename T::QkRows>], v_[kSteps<typename T::VRows>], statistics_;
};

/// What a thread knows of queries: of its own rows, or of the columns of a walked tile.
template <Sm80BackwardSpec spec>
class QueryStatistics {
  using T = BackwardTraits<spec>;

 public:
  /// Of owned queries.
  FOVEA_DEVICE_MEMBER explicit QueryStatistics(const Owner<spec>& owner) {
    if constexpr (!spec.owns_keys) {
      const RowStatistics& rows = owner.b.rows;
      const std::int64_t head =
          statistics_at<spec.is_varlen>(rows, owner.owned.sequence, owner.owned.head);
#pragma unroll
      for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::int64_t at = head + owner.owned_row(i, half);
          mine_[i][half].log_sum = ptx::ld_global(rows.log_sum + at);
          mine_[i][half].delta = ptx::ld_global(rows.delta + at);
          mine_[i][half].origin = 0;
          if constexpr (spec.has_origins) mine_[i][half].origin = ptx::ld_global(rows.origin + at);
        }
      }
    }
  }

  FOVEA_DEVICE_MEMBER RowStatistic of_row(int block, int half) const { return mine_[block][half]; }

  /// Of walked queries: two neighbours of a column block.
  struct Pair {
    RowStatistic row[2];
  };
  FOVEA_DEVICE_MEMBER static Pair of_columns(const Owner<spec>& owner, SharedAddress statistics,
                                             int block) {
    const SharedAddress at =
        statistics + ((owner.column_warp * T::kBlocks + block) * 8 + owner.lane % 4 * 2) * 4;
    const auto log_sum = ptx::ld_shared<ptx::F32x2>(at);
    const auto delta = ptx::ld_shared<ptx::F32x2>(at + 4 * spec.tile_walked);
    ptx::F32x2 origin{0, 0};
    if constexpr (spec.has_origins) origin = ptx::ld_shared<ptx::F32x2>(at + 8 * spec.tile_walked);
    return {{{log_sum.x, delta.x, origin.x}, {log_sum.y, delta.y, origin.y}}};
  }

 private:
  RowStatistic mine_[spec.owns_keys ? 1 : T::kRowBlocks][2];
};

}  // namespace fovea::cuda::sm80
