// A row of a tile: which query of which head it is, and where that lies in all that a kernel reads and writes. Read
// tile_walk.cuh for the keys that it sees.
#pragma once

#include "common/online_softmax.cuh"
#include "common/position.cuh"
#include "common/sequence.cuh"
#include "ptx/memory.cuh"
#include "shared/element.h"
#include "shared/forward_params.h"

namespace fovea::cuda {

/// Of each head that a tile packs.
template <auto spec>
inline constexpr int kQueriesOfTile = spec.tile_q / spec.heads_per_tile;

/// All rows of the tile that `work` is, up to the end of its sequence; no keys.
template <auto spec>
FOVEA_DEVICE TileSpan span_of(const Work& work) {
  TileSpan s{};
  s.batch = work.sequence.idx;
  s.q_head_begin = work.q_head;
  s.q_head_end = work.q_head + spec.heads_per_tile;
  s.kv_head = work.kv_head;
  s.q_begin = work.q_begin;
  s.q_end = least(work.q_begin + kQueriesOfTile<spec>, work.sequence.seqlen_q);
  s.seqlen_q = work.sequence.seqlen_q;
  s.seqlen_kv = work.sequence.seqlen_kv;
  return s;
}

/// Row `row` of the tile that `work` is: a query of one head. Heads of a group are neighbours, so that a tile covers
/// few positions. `work` outlives it.
template <auto spec>
struct RowView {
  const ForwardParams& p;
  const Work& work;
  std::int32_t q_idx, q_head;
  bool exists;  // in the sequence; where heads do not fill the tile, some rows are nobody's

  /// Elements of what is written: f32 where the problem is split.
  static constexpr Element kOutElement = spec.is_split ? Element::f32 : spec.out_element;
  static constexpr int kOutBytes = element_bytes(kOutElement);

  FOVEA_DEVICE_MEMBER RowView(const ForwardParams& params, const Work& of_work, int row)
      : p(params),
        work(of_work),
        q_idx(of_work.q_begin + row / spec.heads_per_tile),
        q_head(of_work.q_head + row % spec.heads_per_tile),
        exists(q_idx < of_work.sequence.seqlen_q &&
               (spec.tile_q % spec.heads_per_tile == 0 ||
                row / spec.heads_per_tile < kQueriesOfTile<spec>)) {}

  /// The same row, as another spec has it.
  template <auto other>
  FOVEA_DEVICE_MEMBER RowView<other> as() const {
    static_assert(other.tile_q == spec.tile_q && other.heads_per_tile == spec.heads_per_tile);
    return {p, work, (q_idx - work.q_begin) * spec.heads_per_tile + q_head - work.q_head};
  }

  /// Of its score with key 0.
  FOVEA_DEVICE_MEMBER Position position() const {
    Position at{};
    at.batch = work.sequence.idx;
    at.q_head = q_head;
    at.kv_head = work.kv_head;
    at.q_idx = q_idx;
    at.seqlen_q = work.sequence.seqlen_q;
    at.seqlen_kv = work.sequence.seqlen_kv;
    return at;
  }

  // Offsets in elements.

  FOVEA_DEVICE_MEMBER std::int64_t query_at() const {
    std::int64_t at = work.sequence.q_batch * p.q.batch_stride + q_idx * p.q.row_stride +
                      q_head * p.q.head_stride;
    if constexpr (spec.has_packed_q) at += work.sequence.q_row * p.q.row_stride;
    return at;
  }

  FOVEA_DEVICE_MEMBER std::int64_t out_at() const {
    return work.sequence.q_batch * p.out.batch_stride +
           (work.sequence.q_row + q_idx) * p.out.row_stride + q_head * p.out.head_stride;
  }

  /// Of its partial state, where the problem is split: of partial_lse and partial_max.
  FOVEA_DEVICE_MEMBER std::int64_t partial_at() const {
    return ((work.sequence.q_batch * p.num_heads_q + q_head) * p.seqlen_q + q_idx) * p.max_splits +
           work.split;
  }

  /// Where its column 0 goes, in out or among the partial states: elements of kOutElement.
  FOVEA_DEVICE_MEMBER char* out() const {
    if constexpr (spec.is_split) return reinterpret_cast<char*>(out_f32());
    const std::int64_t at = out_at();
    return static_cast<char*>(const_cast<void*>(p.out.data)) + at * kOutBytes;
  }

  /// Where those are f32. (Of a pointer to bytes the compiler keeps other parts of addresses: with three groups of
  /// warps sm90/attention_forward then spills.)
  FOVEA_DEVICE_MEMBER float* out_f32() const {
    static_assert(kOutElement == Element::f32, "elements of out are f32");
    if constexpr (spec.is_split) return p.partial_out + partial_at() * spec.head_dim_v;
    return static_cast<float*>(const_cast<void*>(p.out.data)) + out_at();
  }

  /// lse and row_max, or what stands for them among the partial states. `greatest`: as callers get it.
  FOVEA_DEVICE_MEMBER void store_values(float lse, float sum, float greatest) const {
    if constexpr (spec.is_split) {
      ptx::st_global(p.partial_lse + partial_at(), lse);
      if (spec.wants_row_max || is_huge(lse))
        ptx::st_global(p.partial_max + partial_at(), beside_lse(lse, sum, greatest));
    } else {
      const Sequence& sequence = work.sequence;
      const std::int64_t row = sequence.q_row + q_idx;
      if (p.lse != nullptr) {
        ptx::st_global(p.lse + sequence.q_batch * p.lse_batch_stride + q_head * p.lse_head_stride +
                           row * p.lse_row_stride,
                       lse);
      }
      if constexpr (spec.wants_row_max) {
        ptx::st_global(p.row_max + sequence.q_batch * p.row_max_batch_stride +
                           q_head * p.row_max_head_stride + row * p.row_max_row_stride,
                       greatest);
      }
    }
  }
};

}  // namespace fovea::cuda
