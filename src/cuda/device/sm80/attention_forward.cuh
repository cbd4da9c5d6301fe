// Attention forward by mma.sync and cp.async: every tensor-core GPU from sm_80 up. On Hopper and Blackwell it is the fallback
// that runs everything.
//
//   S = Q Kᵀ;  P = exp(mask(program(scale S)) - m);  O = Σ P V / l         Dao 2023 (FlashAttention-2), algorithm 1
//
// One CTA owns tile_q rows (queries of one head, or of several heads of a GQA group) and walks the kv tiles that they can see,
// from left to right. A warp owns 16 or 32 of the rows all along: scores, softmax and sums stay in its registers, the accumulator
// of S is the A operand of P V as it stands, and warps meet only where a stage of shared memory changes hands:
//
//   copies   | K0 V0 | K1 V1 |         | K2 V2 |         | K3 V3 |         cp.async, stages - 1 tiles ahead
//   a warp            wait, barrier | S0  softmax  O |  wait, barrier | S1  softmax  O | ...
//
// One barrier for each tile: a stage is written again only after the barrier that follows its last reader. (With one stage there are
// two: walk_in_place.) While a warp is in its softmax, the other warps of its scheduler (a second CTA too) keep the tensor cores busy.
//
// Bound: tensor cores, at mma.sync's rate. A warp of 32 rows reads each K and V element from shared memory once: 2 (32 keys
// rows) flops for 2 bytes, so that 128 bytes a clock feed 4096 flops a clock, more than mma.sync takes; with 16 rows (head_dim
// above 128) it is half of that, and shared memory is the bound. docs/kernels/attention_forward_sm80.md counts instructions.
//
// NaN and infinity: in Q and K, masked scores are replaced, so keys that a row does not see are harmless. In V they are not
// (0 * NaN). A CTA whose sums are not finite is computed again in passes: with such elements taken out, then once for each sign
// with indicators (1 where V holds it, 1 where a row sees the key), whose products say which sums it reaches. The common path pays
// one fma for each output.
//
// Refused: f32 inputs and head dims above 256 (sm80/attention_forward_f32.cuh).
#pragma once

#include "common/dropout.cuh"
#include "common/online_softmax.cuh"
#include "common/position.cuh"
#include "common/range.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"
#include "tile/swizzled_rows.cuh"

namespace fovea::cuda::sm80 {

using ptx::SharedAddress;
using ptx::U32x4;

/// How often a CTA computes its rows, and of which values: all; then, where sums were not finite, the finite ones, and indicators of
/// the others.
enum class Pass : std::int32_t { all, finite, positive, negative, end };

template <ForwardSpec spec>
struct Traits {
  static_assert(spec.element != Element::f32, "mma.m16n8k16 multiplies 16-bit elements");
  static constexpr int kThreads = spec.num_warps * 32;
  static constexpr int kWarpRows = spec.tile_q / spec.num_warps;
  static_assert(kWarpRows % 16 == 0, "a warp owns whole blocks of 16 rows");
  static constexpr int kRowBlocks = kWarpRows / 16;
  static_assert(spec.tile_kv % 16 == 0, "keys are the second product's k, in steps of 16");
  static constexpr int kKeyBlocks = spec.tile_kv / 8;
  static constexpr int kColBlocks = spec.head_dim_v / 8;
  static constexpr int kQkSteps = spec.head_dim_qk / 16;
  static constexpr int kPvSteps = spec.tile_kv / 16;
  static constexpr int kQueries = spec.tile_q / spec.heads_per_tile;
  /// Else Q is read again for every tile: with two blocks of rows there are no registers for it.
  static constexpr bool kKeepsQueries = spec.keeps_queries;

  using KeyRows = tile::SwizzledRows<spec.head_dim_qk>;
  using ValueRows = tile::SwizzledRows<spec.head_dim_v>;
  using OutRows = ValueRows;

  // Shared memory. Q of each warp, where its part of O is put together at the end; K and V of each stage; a word of each warp; what
  // the CTA works on.
  static constexpr int kQueryWarpBytes =
      2 * kWarpRows * (spec.head_dim_qk > spec.head_dim_v ? spec.head_dim_qk : spec.head_dim_v);
  static constexpr int kStagesAt = kQueryWarpBytes * spec.num_warps;
  static constexpr int kKeyBytes = spec.tile_kv * KeyRows::kRowBytes;
  static constexpr int kStageBytes = kKeyBytes + spec.tile_kv * ValueRows::kRowBytes;
  static constexpr int kVotesAt = kStagesAt + spec.stages * kStageBytes;
  static constexpr int kWorkAt = kVotesAt + sm80_vote_bytes(spec);
  static constexpr int kWorkWords = sizeof(Work) / 4;
  static constexpr int kKeyHeadAt = kWorkAt + (kWorkWords + 1) / 2 * 8;
  static constexpr int kValueHeadAt = kKeyHeadAt + 8;
  static_assert(kValueHeadAt + 8 <= kWorkAt + kSm80WorkBytes,
                "what the CTA works on has its place in shared memory");
  static_assert(kWorkAt + kSm80WorkBytes == sm80_forward_shared_bytes(spec),
                "host and device count the same bytes");
};

/// The walk of a problem without a mask: a counter, which leaves its registers to the sums.
class EveryTile {
 public:
  FOVEA_DEVICE_MEMBER EveryTile(std::int32_t begin, std::int32_t end) : next_(begin), end_(end) {}
  FOVEA_DEVICE_MEMBER bool next(VisitedTile& tile) {
    tile = {next_, true};
    return next_++ < end_;
  }

 private:
  std::int32_t next_, end_;
};

template <class Mods, bool has_mask = Mods::has_mask>
struct WalkOf {
  using Type = TileWalk<Mods>;
};
template <class Mods>
struct WalkOf<Mods, false> {
  using Type = EveryTile;
};

/// Rounds to the tensor cores' element, `lo` in the low half.
template <Element element>
FOVEA_DEVICE std::uint32_t pack(float lo, float hi) {
  if constexpr (element == Element::bf16) return ptx::cvt_bf16x2(lo, hi);
  return ptx::cvt_f16x2(lo, hi);
}

/// Byte that the swizzled chunk `step` (of 16 elements) of a row lies at, given where chunk 0 or 1 of the row lies.
template <class Rows>
FOVEA_DEVICE SharedAddress at_step(SharedAddress row, int step) {
  constexpr int kSteps = Rows::kPeriod / 2;
  return (row ^ static_cast<SharedAddress>(step % kSteps * 2 * tile::kChunkBytes)) +
         static_cast<SharedAddress>(step / kSteps * Rows::kPeriod * tile::kChunkBytes);
}

/// What a CTA computes, warps together; or, with num_warps 1, what a warp computes by itself, its shared memory apart from the others'.
template <ForwardSpec spec, class Mods, class Tiles = typename WalkOf<Mods>::Type>
struct Forward {
  using T = Traits<spec>;

  const ForwardParams& p;
  const Work work;
  const SharedAddress smem;
  const int warp;
  int lane;

  struct WorkWords {
    std::uint32_t word[T::kWorkWords];
  };

  float out[T::kRowBlocks][T::kColBlocks][4];
  std::uint32_t queries[T::kKeepsQueries ? T::kQkSteps : 1][T::kRowBlocks][4];
  RowState rows[T::kRowBlocks][2];
  float row_max[T::kRowBlocks][2];

  FOVEA_DEVICE_MEMBER Forward(const ForwardParams& params, const Work& my_work)
      : Forward(params, my_work, ptx::dynamic_shared(), ptx::warp_idx()) {}

  FOVEA_DEVICE_MEMBER Forward(const ForwardParams& params, const Work& my_work,
                              SharedAddress my_smem, int my_warp)
      : p(params), work(my_work), smem(my_smem), warp(my_warp), lane(ptx::lane_idx()) {}

  /// Of all warps that share this memory.
  FOVEA_DEVICE_MEMBER static void meet() {
    if constexpr (spec.num_warps == 1) {
      ptx::sync_warp();
    } else {
      ptx::sync_threads();
    }
  }

  // ---- which row is which ----------------------------------------------------------------------

  struct Row {
    std::int32_t q_idx, q_head;
    bool exists;
  };

  /// `row` of the tile. Heads of a group are neighbours, so that a tile covers few positions.
  FOVEA_DEVICE_MEMBER static Row row_at(const Work& work, int row) {
    const int query = row / spec.heads_per_tile;
    Row r{work.q_begin + query, work.q_head + row % spec.heads_per_tile, false};
    r.exists = r.q_idx < work.sequence.seqlen_q && query < T::kQueries;
    return r;
  }

  /// Row of the tile that this thread's accumulators of (row block, half) belong to.
  FOVEA_DEVICE_MEMBER int my_row(int block, int half) const {
    return warp * T::kWarpRows + block * 16 + half * 8 + lane / 4;
  }

  FOVEA_DEVICE_MEMBER bool warp_has_rows() const {
    return row_at(work, warp * T::kWarpRows).exists;
  }

  FOVEA_DEVICE_MEMBER TileSpan span() const {
    TileSpan s{};
    s.batch = work.sequence.idx;
    s.q_head_begin = work.q_head;
    s.q_head_end = work.q_head + spec.heads_per_tile;
    s.kv_head = work.kv_head;
    s.q_begin = work.q_begin;
    s.q_end = least(work.q_begin + T::kQueries, work.sequence.seqlen_q);
    s.seqlen_q = work.sequence.seqlen_q;
    s.seqlen_kv = work.sequence.seqlen_kv;
    return s;
  }

  // ---- load ------------------------------------------------------------------------------------

  /// One 16-byte chunk of a row; zeros where the row does not exist and beyond head_dim.
  FOVEA_DEVICE_MEMBER void copy_chunk(SharedAddress to, const char* row, int chunk, bool exists,
                                      int head_dim, const void* somewhere) const {
    const bool is_data =
        exists && (!spec.has_padded_head_dim || chunk * tile::kChunkElements < head_dim);
    ptx::cp_async_16(to, is_data ? row + chunk * tile::kChunkBytes : somewhere,
                     is_data ? tile::kChunkBytes : 0);
  }

  /// The same by elements: any alignment, any stride.
  FOVEA_DEVICE_MEMBER void gather_chunk(SharedAddress to, const char* row, int chunk, bool exists,
                                        int head_dim, std::int64_t col_stride) const {
#pragma unroll 1
    for (int i = 0; i < tile::kChunkElements; ++i) {
      const int col = chunk * tile::kChunkElements + i;
      std::uint16_t bits = 0;
      if (exists && col < head_dim)
        bits = ptx::ld_global_nc(reinterpret_cast<const std::uint16_t*>(row) + col * col_stride);
      ptx::st_shared(to + i * 2, bits);
    }
  }

  /// Where this kv head's row 0 lies; paged: where it would lie in page 0.
  FOVEA_DEVICE_MEMBER static const char* head_of(const Work& work, const BshdParam& t) {
    std::int64_t at = work.kv_head * t.head_stride;
    if constexpr (!spec.is_paged)
      at += work.sequence.kv_batch * t.batch_stride + work.sequence.kv_row * t.row_stride;
    return static_cast<const char*>(t.data) + at * 2;
  }

  FOVEA_DEVICE_MEMBER static const char* kv_row_dense(const BshdParam& t, const char* head,
                                                      std::int32_t row) {
    return head + row * (t.row_stride * 2);
  }

  /// Where row `row` of the sequence's keys (or values) begins.
  FOVEA_DEVICE_MEMBER const char* kv_row(const Work& work, const BshdParam& t, const char* head,
                                         std::int32_t row) const {
    if constexpr (spec.is_paged) {
      const auto idx = static_cast<std::int32_t>(work.sequence.kv_row + row);
      const std::int32_t entry = p.page_shift >= 0 ? idx >> p.page_shift : idx / p.page_size;
      const std::int64_t page = page_at(p, work.sequence.kv_batch, entry);
      return head + (page * t.batch_stride + (idx - entry * p.page_size) * t.row_stride) * 2;
    } else {
      return kv_row_dense(t, head, row);
    }
  }

  /// Rows of a tile that one thread copies, and how far apart they are.
  template <class Rows>
  static constexpr int kRowsAtOnce = T::kThreads / Rows::kPeriod;
  template <class Rows>
  static constexpr int kRowsOfThread = (spec.tile_kv + kRowsAtOnce<Rows> - 1) / kRowsAtOnce<Rows>;

  /// Where those rows lie in pages; nothing where there are none.
  template <class Rows>
  struct Places {
    std::int64_t page[spec.is_paged ? kRowsOfThread<Rows> : 1];
    std::int32_t slot[spec.is_paged ? kRowsOfThread<Rows> : 1];
  };

  /// All look-ups at once, so that they wait for memory together. Rows behind the last key are taken for the last.
  template <class Rows>
  FOVEA_DEVICE_MEMBER Places<Rows> find_places(std::int32_t idx) const {
    Places<Rows> places{};
    if constexpr (spec.is_paged) {
      const int first = idx * spec.tile_kv + (warp * 32 + lane) / Rows::kPeriod;
      std::int32_t row[kRowsOfThread<Rows>];
      std::int32_t entry[kRowsOfThread<Rows>];
#pragma unroll
      for (int i = 0; i < kRowsOfThread<Rows>; ++i) {
        row[i] = static_cast<std::int32_t>(work.sequence.kv_row) +
                 least(first + i * kRowsAtOnce<Rows>, work.kv_end - 1);
      }
      if (p.page_shift >= 0) {
#pragma unroll
        for (int i = 0; i < kRowsOfThread<Rows>; ++i) entry[i] = row[i] >> p.page_shift;
      } else {
#pragma unroll
        for (int i = 0; i < kRowsOfThread<Rows>; ++i) entry[i] = row[i] / p.page_size;
      }
      const std::int64_t table = work.sequence.kv_batch * p.page_table_row_stride;
      if (p.page_table.is_wide != 0) {
        const auto* pages = static_cast<const std::int64_t*>(p.page_table.data);
#pragma unroll
        for (int i = 0; i < kRowsOfThread<Rows>; ++i)
          places.page[i] = ptx::ld_global_nc(pages + table + entry[i] * p.page_table.stride);
      } else {
        const auto* pages = static_cast<const std::int32_t*>(p.page_table.data);
#pragma unroll
        for (int i = 0; i < kRowsOfThread<Rows>; ++i)
          places.page[i] = ptx::ld_global_nc(pages + table + entry[i] * p.page_table.stride);
      }
#pragma unroll
      for (int i = 0; i < kRowsOfThread<Rows>; ++i)
        places.slot[i] = row[i] - entry[i] * p.page_size;
    }
    return places;
  }

  /// Tile `idx` of K or V. Rows behind the last key become zeros, whatever lies there.
  template <class Rows, bool kIsWhole>
  FOVEA_DEVICE_MEMBER void copy_keys(SharedAddress to, const BshdParam& t, const char* head,
                                     const Places<Rows>& places, std::int32_t idx,
                                     int head_dim) const {
    const int first = (warp * 32 + lane) / Rows::kPeriod;
    const int chunk = lane % Rows::kPeriod;
    const std::int32_t begin = idx * spec.tile_kv;
    const char* row = spec.is_paged ? head : kv_row_dense(t, head, begin + first);
#pragma unroll
    for (int i = 0; i < kRowsOfThread<Rows>; ++i) {
      const int mine = first + i * kRowsAtOnce<Rows>;
      if (spec.tile_kv % kRowsAtOnce<Rows> != 0 && mine >= spec.tile_kv) break;
      const bool exists = kIsWhole || begin + mine < work.kv_end;
      if constexpr (spec.is_paged)
        row = head + (places.page[i] * t.batch_stride + places.slot[i] * t.row_stride) * 2;
      const SharedAddress row_smem = to + Rows::offset(mine, chunk);
#pragma unroll
      for (int c = 0; c < Rows::kChunks; c += Rows::kPeriod) {
        const bool is_data =
            exists && (!spec.has_padded_head_dim || (chunk + c) * tile::kChunkElements < head_dim);
        ptx::cp_async_16(row_smem + c * tile::kChunkBytes,
                         is_data ? row + (chunk + c) * tile::kChunkBytes : t.data,
                         is_data ? tile::kChunkBytes : 0);
      }
      if constexpr (!spec.is_paged) row += kRowsAtOnce<Rows> * (t.row_stride * 2);
    }
  }

  /// The same by elements.
  template <class Rows>
  FOVEA_DEVICE_MEMBER void gather_keys(SharedAddress to, const BshdParam& t, std::int32_t idx,
                                       int head_dim) const {
    const Work mine = kept_work();
    const char* head = head_of(mine, t);
#pragma unroll 1
    for (int at = warp * 32 + lane; at < spec.tile_kv * Rows::kChunks; at += T::kThreads) {
      const int row = at / Rows::kChunks;
      const std::int32_t key = idx * spec.tile_kv + row;
      const bool exists = key < mine.kv_end;
      gather_chunk(to + Rows::offset(row, at % Rows::kChunks),
                   kv_row(mine, t, head, exists ? key : 0), at % Rows::kChunks, exists, head_dim,
                   t.col_stride);
    }
  }

  FOVEA_DEVICE_MEMBER SharedAddress stage_at(int stage) const {
    return smem + T::kStagesAt + stage * T::kStageBytes;
  }

  /// K or V of a tile, as a group of copies of its own; an empty group where there is no tile.
  template <class Rows>
  FOVEA_DEVICE_MEMBER void load_rows(SharedAddress to, const BshdParam& t, int head_at,
                                     const Places<Rows>& places, VisitedTile tile,
                                     int head_dim) const {
    if (tile.idx >= 0) {
      const auto head = ptx::bit_cast<const char*>(ptx::ld_shared<std::uint64_t>(smem + head_at));
      if (p.is_kv_aligned == 0) {
        gather_keys<Rows>(to, t, tile.idx, head_dim);
      } else if (!spec.is_paged && (tile.idx + 1) * spec.tile_kv <= work.kv_end) {
        copy_keys<Rows, true>(to, t, head, places, tile.idx, head_dim);
      } else {
        copy_keys<Rows, false>(to, t, head, places, tile.idx, head_dim);
      }
    }
    ptx::cp_async_commit_group();
  }

  using KeyPlaces = Places<typename T::KeyRows>;
  using ValuePlaces = Places<typename T::ValueRows>;

  template <class Rows>
  FOVEA_DEVICE_MEMBER Places<Rows> places_of(VisitedTile tile) const {
    return tile.idx >= 0 ? find_places<Rows>(tile.idx) : Places<Rows>{};
  }

  FOVEA_DEVICE_MEMBER void load_keys(const KeyPlaces& places, VisitedTile tile, int stage) const {
    load_rows<typename T::KeyRows>(stage_at(stage), p.k, T::kKeyHeadAt, places, tile,
                                   p.head_dim_qk);
  }

  FOVEA_DEVICE_MEMBER void load_values(const ValuePlaces& places, VisitedTile tile,
                                       int stage) const {
    load_rows<typename T::ValueRows>(stage_at(stage) + T::kKeyBytes, p.v, T::kValueHeadAt, places,
                                     tile, p.head_dim_v);
  }

  /// Keys, then values, found once where both are copied by the same rows.
  FOVEA_DEVICE_MEMBER void load_tile(VisitedTile tile, int stage) const {
    const KeyPlaces keys = places_of<typename T::KeyRows>(tile);
    load_keys(keys, tile, stage);
    if constexpr (T::KeyRows::kPeriod == T::ValueRows::kPeriod) {
      load_values(ptx::bit_cast<ValuePlaces>(keys), tile, stage);
    } else {
      load_values(places_of<typename T::ValueRows>(tile), tile, stage);
    }
  }

  FOVEA_DEVICE_MEMBER void load_queries() const {
    using Rows = typename T::KeyRows;
    const auto* data = static_cast<const char*>(p.q.data);
#pragma unroll 2
    for (int at = lane; at < T::kWarpRows * Rows::kChunks; at += 32) {
      const int row = at / Rows::kChunks;
      const int chunk = at % Rows::kChunks;
      const Row r = row_at(work, warp * T::kWarpRows + row);
      const std::int64_t begin = work.sequence.q_batch * p.q.batch_stride +
                                 (work.sequence.q_row + r.q_idx) * p.q.row_stride +
                                 r.q_head * p.q.head_stride;
      const SharedAddress to = smem + warp * T::kQueryWarpBytes + Rows::offset(row, chunk);
      if (p.is_q_aligned != 0) {
        copy_chunk(to, data + begin * 2, chunk, r.exists, p.head_dim_qk, data);
      } else {
        gather_chunk(to, data + begin * 2, chunk, r.exists, p.head_dim_qk, p.q.col_stride);
      }
    }
  }

  // ---- compute ---------------------------------------------------------------------------------

  using Scores = float[T::kRowBlocks][T::kKeyBlocks][4];

  /// The A operands of one step of Q Kᵀ.
  FOVEA_DEVICE_MEMBER void load_query_step(std::uint32_t (&q)[T::kRowBlocks][4], int step) const {
    using Rows = typename T::KeyRows;
    const SharedAddress row = smem + warp * T::kQueryWarpBytes + Rows::offset(lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
      const U32x4 a = ptx::ldmatrix_x4(at_step<Rows>(row, step) + i * 16 * Rows::kRowBytes);
      q[i][0] = a.x, q[i][1] = a.y, q[i][2] = a.z, q[i][3] = a.w;
    }
  }

  FOVEA_DEVICE_MEMBER void keep_queries() {
#pragma unroll
    for (int step = 0; step < T::kQkSteps; ++step) load_query_step(queries[step], step);
  }

  /// S = Q Kᵀ.
  FOVEA_DEVICE_MEMBER void multiply_keys(Scores& s, SharedAddress stage) {
    using Rows = typename T::KeyRows;
    const SharedAddress k_row = stage + Rows::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int j = 0; j < T::kKeyBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = 0;
#pragma unroll
    for (int step = 0; step < T::kQkSteps; ++step) {
      if constexpr (!T::kKeepsQueries) load_query_step(queries[0], step);
      const auto& q = queries[T::kKeepsQueries ? step : 0];
#pragma unroll
      for (int j = 0; j < T::kKeyBlocks; j += 2) {
        const U32x4 b = ptx::ldmatrix_x4(at_step<Rows>(k_row, step) + j * 8 * Rows::kRowBytes);
#pragma unroll
        for (int i = 0; i < T::kRowBlocks; ++i) {
          ptx::mma_m16n8k16<spec.element>(s[i][j], q[i], b.x, b.y);
          ptx::mma_m16n8k16<spec.element>(s[i][j + 1], q[i], b.z, b.w);
        }
      }
    }
  }

  /// Scale, score program, mask. What a row does not see becomes -inf, whatever it was.
  FOVEA_DEVICE_MEMBER void apply_mods(Scores& s, VisitedTile tile) const {
    if constexpr (spec.is_prescaled) {
      for_each_score(
          tile,
          [&](float& score, const Position& at) {
            score *= p.softmax_scale;
            if constexpr (Mods::has_score) score = Mods::score(score, at, p.captures);
          },
          s);
    }
    if (tile.is_full) return;
    for_each_score(
        tile,
        [&](float& score, const Position& at) {
          bool is_visible = at.kv_idx < work.kv_end;
          if constexpr (Mods::has_mask) is_visible = is_visible && Mods::mask(at, p.captures);
          if (!is_visible) score = -infinity();
        },
        s);
  }

  template <class Visit>
  FOVEA_DEVICE_MEMBER void for_each_score(VisitedTile tile, Visit&& visit, Scores& s) const {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Row row = row_at(work, my_row(i, half));
        Position at{};
        at.batch = work.sequence.idx;
        at.q_head = row.q_head;
        at.kv_head = work.kv_head;
        at.q_idx = row.q_idx;
        at.seqlen_q = work.sequence.seqlen_q;
        at.seqlen_kv = work.sequence.seqlen_kv;
        const std::int32_t kv_begin = tile.idx * spec.tile_kv + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < T::kKeyBlocks; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            at.kv_idx = kv_begin + j * 8 + e;
            visit(s[i][j][half * 2 + e], at);
          }
        }
      }
    }
  }

  /// s becomes P; moves the rows' origins, and with them what has been summed so far.
  FOVEA_DEVICE_MEMBER void softmax(Scores& s) {
    const float c = spec.is_prescaled ? kLog2E : p.softmax_scale_log2;
    float rescale[T::kRowBlocks][2];
    bool is_rescaled = false;
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float greatest = s[i][0][half * 2];
#pragma unroll
        for (int j = 0; j < T::kKeyBlocks; ++j) {
          greatest = ptx::max_ftz(greatest, s[i][j][half * 2]);
          greatest = ptx::max_ftz(greatest, s[i][j][half * 2 + 1]);
        }
        greatest = ptx::max_ftz(greatest, ptx::shfl_bfly(greatest, 1));
        greatest = ptx::max_ftz(greatest, ptx::shfl_bfly(greatest, 2));
        if constexpr (spec.wants_row_max)
          row_max[i][half] = ptx::max_ftz(row_max[i][half], greatest);
        RowState& row = rows[i][half];
        const OriginStep step = move_origin(row, greatest, c);
        rescale[i][half] = step.rescale;
        is_rescaled = is_rescaled || step.rescale != 1.0F;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < T::kKeyBlocks; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = s[i][j][half * 2 + e];
            score = probability(score, c, step);
            sum += score;
          }
        }
        row.sum += sum;
      }
    }
    if (!ptx::vote_any(is_rescaled)) return;
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[i][j][e] *= rescale[i][e / 2];
  }

  /// Equal scores where a row sees the key, NaN too: the softmax then gives 1 there, relative to an origin of 0.
  FOVEA_DEVICE_MEMBER void level(Scores& s) const {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int j = 0; j < T::kKeyBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = s[i][j][e] == -infinity() ? -infinity() : 0.0F;
  }

  FOVEA_DEVICE_MEMBER void drop(Scores& s, VisitedTile tile) const {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
      const Row row = row_at(work, my_row(i, lane % 2));
#pragma unroll
      for (int j = 0; j < T::kKeyBlocks; ++j) {
        const U32x4 words = fragment_words(p, work.sequence.idx, row.q_head, row.q_idx,
                                           tile.idx * spec.tile_kv + j * 8);
        if (is_dropped(p, words.x)) s[i][j][0] = 0;
        if (is_dropped(p, words.y)) s[i][j][1] = 0;
        if (is_dropped(p, words.z)) s[i][j][2] = 0;
        if (is_dropped(p, words.w)) s[i][j][3] = 0;
      }
    }
  }

  /// O += P V. Two blocks of S side by side are one A operand.
  FOVEA_DEVICE_MEMBER void multiply_values(const Scores& s, SharedAddress values) {
    using Rows = typename T::ValueRows;
    const SharedAddress v_row = values + Rows::offset(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < T::kPvSteps; ++step) {
      std::uint32_t probabilities[T::kRowBlocks][4];
#pragma unroll
      for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float* pair = &s[i][step * 2 + e / 2][e % 2 * 2];
          probabilities[i][e] = pack<spec.element>(pair[0], pair[1]);
        }
      }
#pragma unroll
      for (int j = 0; j < T::kColBlocks; j += 2) {
        const U32x4 b =
            ptx::ldmatrix_x4_trans(at_step<Rows>(v_row, j / 2) + step * 16 * Rows::kRowBytes);
#pragma unroll
        for (int i = 0; i < T::kRowBlocks; ++i) {
          ptx::mma_m16n8k16<spec.element>(out[i][j], probabilities[i], b.x, b.y);
          ptx::mma_m16n8k16<spec.element>(out[i][j + 1], probabilities[i], b.z, b.w);
        }
      }
    }
  }

  /// What follows S of a tile.
  FOVEA_DEVICE_MEMBER void add_tile(Scores& s, VisitedTile tile, SharedAddress values, Pass pass) {
    apply_mods(s, tile);
    if (pass > Pass::finite) level(s);
    softmax(s);
    if constexpr (spec.has_dropout) {
      if (pass <= Pass::finite) drop(s, tile);
    }
    multiply_values(s, values);
  }

  // ---- values that are not finite --------------------------------------------------------------

  /// One element's bits, as this pass wants it.
  FOVEA_DEVICE_MEMBER static std::uint32_t value_of_pass(std::uint32_t bits, Pass pass) {
    constexpr std::uint32_t kInfinityBits = spec.element == Element::bf16 ? 0x7f80U : 0x7c00U;
    constexpr std::uint32_t kOneBits = spec.element == Element::bf16 ? 0x3f80U : 0x3c00U;
    const std::uint32_t magnitude = bits & 0x7fffU;
    if (pass == Pass::finite) return magnitude >= kInfinityBits ? 0 : bits;
    const bool is_negative = (bits & 0x8000U) != 0;
    const bool is_meant = magnitude > kInfinityBits ||
                          (magnitude == kInfinityBits && is_negative == (pass == Pass::negative));
    return is_meant ? kOneBits : 0;
  }

  FOVEA_DEVICE_MEMBER void rewrite_values(SharedAddress values, Pass pass) const {
    constexpr int kBytes = T::kStageBytes - T::kKeyBytes;
#pragma unroll 1
    for (int at = (warp * 32 + lane) * 4; at < kBytes; at += T::kThreads * 4) {
      const auto pair = ptx::ld_shared<std::uint32_t>(values + at);
      ptx::st_shared(values + at,
                     value_of_pass(pair & 0xffffU, pass) | value_of_pass(pair >> 16U, pass) << 16U);
    }
    meet();
  }

  /// The same answer in every thread of the CTA.
  FOVEA_DEVICE_MEMBER bool is_finite() const {
    float zero = 0;
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) zero = ptx::fma_rn(out[i][j][e], 0.0F, zero);
    const bool mine = ptx::vote_all(!is_nan(zero));
    if (lane == 0) ptx::st_shared(smem + T::kVotesAt + warp * 4, static_cast<std::uint32_t>(mine));
    meet();
    bool all = true;
#pragma unroll
    for (int i = 0; i < spec.num_warps; ++i)
      all = all && ptx::ld_shared<std::uint32_t>(smem + T::kVotesAt + i * 4) != 0;
    return all;
  }

  // ---- store -----------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER std::int64_t partial_row(const Work& work, const Row& r) const {
    const std::int64_t row =
        (work.sequence.q_batch * p.num_heads_q + r.q_head) * p.seqlen_q + r.q_idx;
    return row * p.max_splits + work.split;
  }

  /// Elements are f32 where the problem is split.
  static constexpr Element kOutElement = spec.is_split ? Element::f32 : spec.out_element;
  static constexpr int kOutBytes = kOutElement == Element::f32 ? 4 : 2;

  FOVEA_DEVICE_MEMBER std::int64_t out_col_bytes() const {
    return spec.is_split ? kOutBytes : p.out.col_stride * kOutBytes;
  }

  FOVEA_DEVICE_MEMBER char* out_row(const Work& work, const Row& r) const {
    if constexpr (spec.is_split) {
      return reinterpret_cast<char*>(p.partial_out + partial_row(work, r) * spec.head_dim_v);
    }
    const std::int64_t at = work.sequence.q_batch * p.out.batch_stride +
                            (work.sequence.q_row + r.q_idx) * p.out.row_stride +
                            r.q_head * p.out.head_stride;
    return static_cast<char*>(const_cast<void*>(p.out.data)) + at * kOutBytes;
  }

  FOVEA_DEVICE_MEMBER static void store_element(char* to, float value) {
    if constexpr (kOutElement == Element::f32) {
      ptx::st_global(reinterpret_cast<float*>(to), value);
    } else {
      ptx::st_global(reinterpret_cast<std::uint16_t*>(to),
                     static_cast<std::uint16_t>(pack<kOutElement>(value, 0.0F)));
    }
  }

  FOVEA_DEVICE_MEMBER static float load_element(const char* from) {
    if constexpr (kOutElement == Element::f32) {
      return ptx::ld_global(reinterpret_cast<const float*>(from));
    } else {
      const std::uint32_t bits = ptx::ld_global(reinterpret_cast<const std::uint16_t*>(from));
      return kOutElement == Element::bf16 ? ptx::f32_of_bf16_lo(bits) : ptx::f32_of_f16_lo(bits);
    }
  }

  /// Sums of the row's four threads; then O, lse and row_max.
  FOVEA_DEVICE_MEMBER void finish(const Work& work) {
    const float unit = spec.is_prescaled ? 1.0F : p.softmax_scale;
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        RowState row = rows[i][half];
        row.sum += ptx::shfl_bfly(row.sum, 1);
        row.sum += ptx::shfl_bfly(row.sum, 2);
        const Row r = row_at(work, my_row(i, half));
        float sink = -infinity();
        if (!spec.is_split && p.sinks != nullptr && !work.sequence.is_trailing && r.exists)
          sink = ptx::ld_global(p.sinks + r.q_head * p.sinks_stride);
        RowResult result = finish_row(row, unit, sink);
        if constexpr (spec.has_dropout) result.factor *= p.dropout_keep_scale;
#pragma unroll
        for (int j = 0; j < T::kColBlocks; ++j) {
          out[i][j][half * 2] *= result.factor;
          out[i][j][half * 2 + 1] *= result.factor;
        }
        if (r.exists && lane % 4 == 0)
          store_row_values(work, r, result.lse, finish_row_max(row_max[i][half], row.sum, unit));
      }
    }
    if constexpr (kOutElement == Element::f32) {
      store_f32(work);
    } else {
      stage_out<kOutElement>();
      if (p.is_out_aligned != 0) {
        store_chunks(work);
      } else {
        for_each_staged<kOutElement>(work,
                                     [&](char* to, float value) { store_element(to, value); });
      }
    }
  }

  FOVEA_DEVICE_MEMBER void store_row_values(const Work& work, const Row& r, float lse,
                                            float greatest) const {
    if constexpr (spec.is_split) {
      ptx::st_global(p.partial_lse + partial_row(work, r), lse);
      if constexpr (spec.wants_row_max)
        ptx::st_global(p.partial_max + partial_row(work, r), greatest);
    } else {
      const std::int64_t row = work.sequence.q_row + r.q_idx;
      if (p.lse != nullptr) {
        ptx::st_global(p.lse + work.sequence.q_batch * p.lse_batch_stride +
                           r.q_head * p.lse_head_stride + row * p.lse_row_stride,
                       lse);
      }
      if constexpr (spec.wants_row_max) {
        ptx::st_global(p.row_max + work.sequence.q_batch * p.row_max_batch_stride +
                           r.q_head * p.row_max_head_stride + row * p.row_max_row_stride,
                       greatest);
      }
    }
  }

  FOVEA_DEVICE_MEMBER void store_f32(const Work& work) const {
    const std::int64_t step = out_col_bytes();
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Row r = row_at(work, my_row(i, half));
        if (!r.exists) continue;
        char* to = out_row(work, r) + lane % 4 * 2 * step;
#pragma unroll
        for (int j = 0; j < T::kColBlocks; ++j, to += 8 * step) {
          const int col = j * 8 + lane % 4 * 2;
          if (spec.is_split || col < p.head_dim_v) store_element(to, out[i][j][half * 2]);
          if (spec.is_split || col + 1 < p.head_dim_v)
            store_element(to + step, out[i][j][half * 2 + 1]);
        }
      }
    }
  }

  /// The warp's part of O into its part of shared memory, where Q was. The lanes find each other's elements there.
  template <Element element>
  FOVEA_DEVICE_MEMBER void stage_out() const {
    using Rows = typename T::OutRows;
    const SharedAddress mine = smem + warp * T::kQueryWarpBytes;
    ptx::sync_warp();
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < T::kColBlocks; ++j)
          ptx::st_shared(mine + Rows::offset(i * 16 + half * 8 + lane / 4, j) + lane % 4 * 4,
                         pack<element>(out[i][j][half * 2], out[i][j][half * 2 + 1]));
    ptx::sync_warp();
  }

  FOVEA_DEVICE_MEMBER void store_chunks(const Work& work) const {
    using Rows = typename T::OutRows;
#pragma unroll 4
    for (int at = lane; at < T::kWarpRows * Rows::kChunks; at += 32) {
      const int row = at / Rows::kChunks;
      const int chunk = at % Rows::kChunks;
      const Row r = row_at(work, warp * T::kWarpRows + row);
      if (!r.exists) continue;
      if (spec.has_padded_head_dim && chunk * tile::kChunkElements >= p.head_dim_v) continue;
      const auto value =
          ptx::ld_shared<U32x4>(smem + warp * T::kQueryWarpBytes + Rows::offset(row, chunk));
      ptx::st_global(reinterpret_cast<U32x4*>(out_row(work, r) + chunk * tile::kChunkBytes), value);
    }
  }

  /// Every staged element that exists, one by one, with its place in O.
  template <Element element, class Visit>
  FOVEA_DEVICE_MEMBER void for_each_staged(const Work& work, Visit&& visit) const {
    using Rows = typename T::OutRows;
#pragma unroll 1
    for (int row = 0; row < T::kWarpRows; ++row) {
      const Row r = row_at(work, warp * T::kWarpRows + row);
      if (!r.exists) continue;
      char* to = out_row(work, r);
#pragma unroll 1
      for (int col = lane; col < p.head_dim_v; col += 32) {
        const std::uint32_t bits = ptx::ld_shared<std::uint16_t>(
            smem + warp * T::kQueryWarpBytes + Rows::offset(row, col / tile::kChunkElements) +
            col % tile::kChunkElements * 2);
        visit(to + col * out_col_bytes(),
              element == Element::bf16 ? ptx::f32_of_bf16_lo(bits) : ptx::f32_of_f16_lo(bits));
      }
    }
  }

  /// Where an indicator reached a sum, the result is infinite, or NaN where both signs did.
  FOVEA_DEVICE_MEMBER void store_reached(const Work& work, Pass pass) const {
    const float value = pass == Pass::positive ? infinity() : -infinity();
    stage_out<Element::bf16>();
    for_each_staged<Element::bf16>(work, [&](char* to, float count) {
      if (count == 0) return;
      const float so_far = load_element(to);
      if (is_nan(so_far)) return;
      store_element(to, so_far == -value ? quiet_nan() : value);
    });
  }

  // ---- the walk --------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void start_rows() {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[i][half] = empty_row();
        row_max[i][half] = -infinity();
      }
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[i][j][e] = 0;
    }
  }

  /// Full only where all keys exist, too; idx -1: there are no more.
  FOVEA_DEVICE_MEMBER VisitedTile next_tile(Tiles& tiles) const {
    VisitedTile tile;
    if (!tiles.next(tile)) return {-1, false};
    tile.is_full = tile.is_full && (tile.idx + 1) * spec.tile_kv <= work.kv_end;
    return tile;
  }

  /// Every tile that the rows see, with stages - 1 tiles of copies under way.
  FOVEA_DEVICE_MEMBER void walk_ahead(Tiles& tiles, Pass pass) {
    constexpr int kAhead = spec.stages - 1;
    const bool has_rows = warp_has_rows();
    VisitedTile ahead[kAhead];
    int stage = 0;  // that the next tile is copied to
#pragma unroll 1
    for (int round = -kAhead;; ++round) {
      const bool is_filling = round < 0;
      const VisitedTile tile = ahead[0];
      const int reading = stage == kAhead ? 0 : stage + 1;
      const SharedAddress values = stage_at(reading) + T::kKeyBytes;
      if (!is_filling) {
        if (tile.idx < 0) break;
        // The first tile does not wait for its values yet.
        if (round == 0 && pass == Pass::all) {
          ptx::cp_async_wait_group<2 * kAhead - 1>();
        } else {
          ptx::cp_async_wait_group<2 * kAhead - 2>();
        }
        meet();
        if constexpr (T::kKeepsQueries) {
          if (round == 0) keep_queries();
        }
        if (pass != Pass::all) rewrite_values(values, pass);
      }
#pragma unroll
      for (int i = 0; i + 1 < kAhead; ++i) ahead[i] = ahead[i + 1];
      ahead[kAhead - 1] = next_tile(tiles);
      load_tile(ahead[kAhead - 1], stage);
      stage = reading;
      if (is_filling) continue;
      Scores s;
      if (has_rows) multiply_keys(s, stage_at(reading));
      if (round == 0) {
        ptx::cp_async_wait_group<2 * kAhead>();
        meet();
      }
      if (has_rows) add_tile(s, tile, values, pass);
    }
  }

  /// The same with one stage, for heads so wide that two would leave one CTA on an SM: keys are copied beside softmax and P V, values
  /// beside Q Kᵀ; two barriers for each tile.
  FOVEA_DEVICE_MEMBER void walk_in_place(Tiles& tiles, Pass pass) {
    const bool has_rows = warp_has_rows();
    const SharedAddress values = stage_at(0) + T::kKeyBytes;
    VisitedTile tile = next_tile(tiles);
    load_keys(places_of<typename T::KeyRows>(tile), tile, 0);
    bool is_first = true;
#pragma unroll 1
    while (tile.idx >= 0) {
      ptx::cp_async_wait_group<0>();
      meet();
      load_values(places_of<typename T::ValueRows>(tile), tile, 0);
      if constexpr (T::kKeepsQueries) {
        if (is_first) keep_queries();
        is_first = false;
      }
      Scores s;
      if (has_rows) multiply_keys(s, stage_at(0));
      ptx::cp_async_wait_group<0>();
      meet();
      const VisitedTile next = next_tile(tiles);
      load_keys(places_of<typename T::KeyRows>(next), next, 0);
      if (pass != Pass::all) rewrite_values(values, pass);
      if (has_rows) add_tile(s, tile, values, pass);
      tile = next;
    }
  }

  FOVEA_DEVICE_MEMBER Tiles start_tiles(const TileSpan& rows_span) const {
    const std::int32_t begin = work.kv_begin / spec.tile_kv;
    const std::int32_t end = ceil_div(work.kv_end, spec.tile_kv);
    if constexpr (Mods::has_mask) {
      return Tiles(rows_span, TileRange{begin, end, spec.tile_kv}, p.captures);
    } else {
      return Tiles(begin, end);
    }
  }

  FOVEA_DEVICE_MEMBER void walk(Pass pass) {
    const TileSpan rows_span = span();
    Tiles tiles = start_tiles(rows_span);
    start_rows();
    load_queries();
    if constexpr (spec.stages == 1) {
      walk_in_place(tiles, pass);
    } else {
      walk_ahead(tiles, pass);
    }
    ptx::cp_async_wait_group<0>();
  }

  // Note: the walk has no registers left for what only the end needs, so that lies in shared memory meanwhile.

  FOVEA_DEVICE_MEMBER void keep_work() const {
    const auto words = ptx::bit_cast<WorkWords>(work);
    if (warp != 0 || lane != 0) return;
#pragma unroll
    for (int i = 0; i < T::kWorkWords; ++i)
      ptx::st_shared(smem + T::kWorkAt + i * 4, words.word[i]);
    ptx::st_shared(smem + T::kKeyHeadAt, ptx::bit_cast<std::uint64_t>(head_of(work, p.k)));
    ptx::st_shared(smem + T::kValueHeadAt, ptx::bit_cast<std::uint64_t>(head_of(work, p.v)));
  }

  FOVEA_DEVICE_MEMBER Work kept_work() const {
    WorkWords words;
#pragma unroll
    for (int i = 0; i < T::kWorkWords; ++i)
      words.word[i] = ptx::ld_shared<std::uint32_t>(smem + T::kWorkAt + i * 4);
    return ptx::bit_cast<Work>(words);
  }

  FOVEA_DEVICE_MEMBER void run() {
    keep_work();
    ptx::sync_threads();
#pragma unroll 1
    for (Pass pass = Pass::all; pass != Pass::end;
         pass = static_cast<Pass>(static_cast<std::int32_t>(pass) + 1)) {
      walk(pass);
      const bool is_done = is_finite() || pass >= Pass::finite;
      const Work kept = kept_work();
      // The compiler takes this for news, and computes addresses of the end there, not before the walk.
      lane = ptx::shfl_idx(lane, lane);
      if (pass > Pass::finite) {
        store_reached(kept, pass);
      } else if (is_done) {
        finish(kept);
        if (pass == Pass::all) return;
      }
      ptx::sync_threads();
    }
  }
};

/// The 64 rows of a head that a word of is_suspect tells of.
template <ForwardSpec spec>
FOVEA_DEVICE Work work_of_unit(const ForwardParams& p, std::int32_t unit) {
  const std::int32_t parts = p.suspect_tile_q / 64;
  const std::int32_t tile = unit / parts;
  Work work{};
  if constexpr (spec.is_varlen) {
    PackedCursor cursor;
    work = packed_work(p, tile / p.num_heads_q, p.suspect_tile_q, cursor);
    work.q_head = tile % p.num_heads_q;
  } else {
    const std::int32_t pair = tile / p.num_q_tiles;
    work.sequence = dense_sequence(p, pair / p.num_heads_q);
    work.q_begin = (tile - pair * p.num_q_tiles) * p.suspect_tile_q;
    work.q_head = pair % p.num_heads_q;
  }
  work.q_begin += unit % parts * 64;
  work.is_nothing = work.is_nothing || work.q_begin >= work.sequence.seqlen_q;
  work.kv_head = work.q_head / p.group;
  work.kv_end = work.sequence.seqlen_kv;
  return work;
}

/// Words of is_suspect that were written.
template <ForwardSpec spec>
FOVEA_DEVICE std::int32_t count_suspects(const ForwardParams& p) {
  if constexpr (!spec.is_varlen) return p.num_suspects;
  const std::int64_t tiles =
      static_cast<std::int64_t>(ptx::ld_global(p.num_packed_tiles)) * p.num_heads_q;
  const std::int64_t words = tiles * (p.suspect_tile_q / 64);
  return words < p.num_suspects ? static_cast<std::int32_t>(words) : p.num_suspects;
}

/// Computes the rows again that another kernel found suspect. Nearly always there are none, so a few CTAs look at 32 words at a time.
template <ForwardSpec spec, class Mods>
FOVEA_DEVICE void redo(const ForwardParams& p) {
  static_assert(spec.tile_q == 64 && spec.heads_per_tile == 1);
  ptx::griddepcontrol_wait();  // the kernel whose rows these are may still run
  const std::int32_t num_suspects = count_suspects<spec>(p);
  for (std::int32_t first = 32 * ptx::block_idx().x; first < num_suspects;
       first += 32 * ptx::grid_dim().x) {
    const std::int32_t mine = first + ptx::lane_idx();
    std::uint32_t suspects =
        ptx::ballot(mine < num_suspects && ptx::ld_global(p.is_suspect + mine) != 0);
    for (; suspects != 0; suspects &= suspects - 1) {
      const Work work = work_of_unit<spec>(p, first + lowest_bit(suspects));
      if (work.is_nothing) continue;
      Forward<spec, Mods>(p, work).run();
      ptx::sync_threads();
    }
  }
}

template <ForwardSpec spec, class Mods>
FOVEA_DEVICE void attention_forward(const ForwardParams& p) {
  if constexpr (spec.is_redo) {
    redo<spec, Mods>(p);
  } else {
    const Work work = find_work<spec>(p);
    if (work.is_nothing) return;
    Forward<spec, Mods>(p, work).run();
  }
}

}  // namespace fovea::cuda::sm80
