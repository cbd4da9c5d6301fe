// Attention backward by plain f32 multiply-adds: f32 inputs in full precision, mixed dtypes, and the head dims
// that the tensor-core kernel has no registers for. The same two walks as sm80/attention_backward.cuh; right first.
//
//   owns keys      dV = Σ Pᵀ dO,  dK = scale Σ dSᵀ Q     over the queries of all heads of the group that see them
//   owns queries   dQ = scale Σ dS K                     over the keys that they see
//
// A CTA owns up to 32 rows of one side; four neighbouring threads share a row. They divide the rows of a walked tile
// among them for S and dP, and the columns for the sums; between them P and dS of a row lie in shared memory. Heads
// so wide that both sums leave no registers are walked twice, for dV and for dK.
//
// Bound: shared memory, 2 words for each multiply-add: 16 multiply-adds a clock of an SM, an eighth of its rate.
//
// NaN and infinity: a row of the other side is multiplied only where the pair is visible, so that what nobody sees has
// no effect.
#pragma once

#include "common/backward_pair.cuh"
#include "common/backward_work.cuh"
#include "common/dropout.cuh"
#include "common/element.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/backward_params.h"
#include "shared/backward_spec.h"

namespace fovea::cuda::sm80 {

template <PlainBackwardSpec spec, class Mods>
struct PlainBackward {
  static constexpr int kThreads = spec.num_warps * 32;
  static constexpr int kRowThreads = 4;
  static_assert(kThreads == spec.tile_owned * kRowThreads, "four threads share a row");
  static constexpr int kPairs = spec.tile_walked / kRowThreads;  // of a thread and walked tile
  static constexpr int kQkCols = spec.sums_scores ? spec.head_dim_qk / kRowThreads : 1;
  static constexpr int kVCols = spec.sums_values ? spec.head_dim_v / kRowThreads : 1;
  static constexpr float kHidden = -1.0F;  // no weight

  // Shared memory, in words: rows of the owned side (q and dout, or k and v), of the walked side, P, dS; log_sum, delta
  // and origin of the queries.
  static constexpr int kQkPitch = spec.head_dim_qk + 1;
  static constexpr int kVPitch = spec.head_dim_v + 1;
  static constexpr int kPairPitch = spec.tile_walked + 1;
  static constexpr int kOwnedVAt = spec.tile_owned * kQkPitch;
  static constexpr int kWalkedQkAt = kOwnedVAt + spec.tile_owned * kVPitch;
  static constexpr int kWalkedVAt = kWalkedQkAt + spec.tile_walked * kQkPitch;
  static constexpr int kWeightsAt = kWalkedVAt + spec.tile_walked * kVPitch;
  static constexpr int kGradientsAt = kWeightsAt + spec.tile_owned * kPairPitch;
  static constexpr int kRowsAt = kGradientsAt + spec.tile_owned * kPairPitch;
  static constexpr int kQueries = spec.owns_keys ? spec.tile_walked : spec.tile_owned;
  static_assert(4 * (kRowsAt + 3 * kQueries) == plain_backward_shared_bytes(spec),
                "host and device count the same bytes");

  const BackwardParams& b;
  const ForwardParams& p;
  const OwnedTile owned;
  const std::int32_t kv_head;
  const ptx::SharedAddress smem;
  const int thread, row, part;  // row of the tile, and which of its four threads

  float by_score[kQkCols];  // dk or dq
  float by_value[kVCols];   // dv

  FOVEA_DEVICE_MEMBER PlainBackward(const BackwardParams& params, const OwnedTile& tile)
      : b(params),
        p(params.forward),
        owned(tile),
        kv_head(spec.owns_keys ? tile.head : tile.head / params.forward.group),
        smem(ptx::dynamic_shared()),
        thread(ptx::thread_idx().x),
        row(thread / kRowThreads),
        part(thread % kRowThreads) {}

  FOVEA_DEVICE_MEMBER float load_word(int word) const {
    return ptx::ld_shared<float>(smem + word * 4);
  }
  FOVEA_DEVICE_MEMBER void store_word(int word, float value) const {
    ptx::st_shared(smem + word * 4, value);
  }

  // ---- rows on their way in --------------------------------------------------------------------

  struct Rows {
    const BshdParam& tensor;
    Element element;
    std::int64_t first;  // element offset of row 0
    std::int32_t length, head_dim;
  };

  FOVEA_DEVICE_MEMBER Rows query_rows(const BshdParam& t, Element element, std::int32_t q_head,
                                      std::int32_t head_dim) const {
    const Sequence& s = owned.sequence;
    return {t, element,
            s.q_batch * t.batch_stride + s.q_row * t.row_stride + q_head * t.head_stride,
            s.seqlen_q, head_dim};
  }
  FOVEA_DEVICE_MEMBER Rows key_rows(const BshdParam& t, std::int32_t head_dim) const {
    const Sequence& s = owned.sequence;
    return {t, spec.element,
            s.kv_batch * t.batch_stride + s.kv_row * t.row_stride + kv_head * t.head_stride,
            s.seqlen_kv, head_dim};
  }

  /// A row of each warp at a time; zeros where there is nothing.
  FOVEA_DEVICE_MEMBER void load_rows(const Rows& rows, std::int32_t begin, int count,
                                     int first_word, int pitch) const {
#pragma unroll 1
    for (int i = thread / 32; i < count; i += spec.num_warps) {
      const bool exists = begin + i < rows.length;
      const std::int64_t at = rows.first + (exists ? begin + i : 0) * rows.tensor.row_stride;
#pragma unroll 1
      for (int col = thread % 32; col < pitch - 1; col += 32) {
        float value = 0;
        if (exists && col < rows.head_dim)
          value = load_element(rows.tensor.data, rows.element, at + col * rows.tensor.col_stride);
        store_word(first_word + i * pitch + col, value);
      }
    }
  }

  FOVEA_DEVICE_MEMBER void load_queries(std::int32_t q_head, std::int32_t begin, int qk_at,
                                        int v_at) const {
    load_rows(query_rows(p.q, spec.element, q_head, p.head_dim_qk), begin, kQueries, qk_at,
              kQkPitch);
    load_rows(query_rows(b.dout, spec.dout_element, q_head, p.head_dim_v), begin, kQueries, v_at,
              kVPitch);
    const std::int64_t at = statistics_at<spec.is_varlen>(b.rows, owned.sequence, q_head) + begin;
    // Statistics are padded by whole tiles.
#pragma unroll 1
    for (int i = thread; i < kQueries; i += kThreads) {
      store_word(kRowsAt + i, ptx::ld_global(b.rows.log_sum + at + i));
      store_word(kRowsAt + kQueries + i, ptx::ld_global(b.rows.delta + at + i));
      store_word(kRowsAt + 2 * kQueries + i, ptx::ld_global(b.rows.origin + at + i));
    }
  }

  FOVEA_DEVICE_MEMBER void load_keys(std::int32_t begin, int count, int qk_at, int v_at) const {
    load_rows(key_rows(p.k, p.head_dim_qk), begin, count, qk_at, kQkPitch);
    load_rows(key_rows(p.v, p.head_dim_v), begin, count, v_at, kVPitch);
  }

  FOVEA_DEVICE_MEMBER void load_owned() const {
    if constexpr (spec.owns_keys) {
      load_keys(owned.begin, spec.tile_owned, 0, kOwnedVAt);
    } else {
      load_queries(owned.head, owned.begin, 0, kOwnedVAt);
    }
  }
  FOVEA_DEVICE_MEMBER void load_walked(const WalkedTile& tile) const {
    const std::int32_t begin = tile.idx * spec.tile_walked;
    if constexpr (spec.owns_keys) {
      load_queries(tile.q_head, begin, kWalkedQkAt, kWalkedVAt);
    } else {
      load_keys(begin, spec.tile_walked, kWalkedQkAt, kWalkedVAt);
    }
  }

  // ---- a tile ----------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER Position position(const WalkedTile& tile, int walked) const {
    const Sequence& s = owned.sequence;
    const std::int32_t mine = owned.begin + row;
    const std::int32_t theirs = tile.idx * spec.tile_walked + walked;
    return {s.idx,
            tile.q_head,
            kv_head,
            spec.owns_keys ? theirs : mine,
            spec.owns_keys ? mine : theirs,
            s.seqlen_q,
            s.seqlen_kv};
  }

  FOVEA_DEVICE_MEMBER bool is_visible(const WalkedTile& tile, const Position& at) const {
    if (at.q_idx >= at.seqlen_q || at.kv_idx >= at.seqlen_kv) return false;
    if constexpr (Mods::has_mask) return tile.is_full || Mods::mask(at, p.captures);
    return true;
  }

  FOVEA_DEVICE_MEMBER bool is_kept(const Position& at) const {
    return !is_dropped(p, dropout_key<spec>(p), at.batch, at.q_head, at.q_idx, at.kv_idx);
  }

  /// product: q·k; dweight: dout·v.
  FOVEA_DEVICE_MEMBER Pair find_pair(const WalkedTile& tile, int walked, float product,
                                     float dweight) const {
    const Position at = position(tile, walked);
    const Score score = score_of<Mods>(product * p.softmax_scale, at, p.captures);
    if (!is_visible(tile, at) || score.value == -infinity()) return {kHidden, 0};
    const int query = spec.owns_keys ? walked : row;
    const RowStatistic of_row{load_word(kRowsAt + query), load_word(kRowsAt + kQueries + query),
                              load_word(kRowsAt + 2 * kQueries + query)};
    const float weight = weight_of<true>(score.value, of_row, kLog2E);
    Pair pair{weight, 0};
    if constexpr (spec.has_dropout) {
      const bool is_there = is_kept(at);
      pair.weight = is_there ? weight : 0.0F;
      dweight = is_there ? dweight * p.dropout_keep_scale : 0.0F;
    }
    pair.gradient = through_slope(weight * (dweight - of_row.delta), score.slope);
    return pair;
  }

  /// Leaves P and dS in shared memory.
  FOVEA_DEVICE_MEMBER void find_pairs(const WalkedTile& tile) const {
    float product[kPairs], dweight[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) product[i] = dweight[i] = 0;
#pragma unroll 4
    for (int col = 0; col < spec.head_dim_qk; ++col) {
      const float x = load_word(row * kQkPitch + col);
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
        product[i] = ptx::fma_rn(
            x, load_word(kWalkedQkAt + (part + i * kRowThreads) * kQkPitch + col), product[i]);
    }
    if constexpr (spec.sums_scores) {
#pragma unroll 4
      for (int col = 0; col < spec.head_dim_v; ++col) {
        const float x = load_word(kOwnedVAt + row * kVPitch + col);
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
          dweight[i] = ptx::fma_rn(
              x, load_word(kWalkedVAt + (part + i * kRowThreads) * kVPitch + col), dweight[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int walked = part + i * kRowThreads;
      const Pair pair = find_pair(tile, walked, product[i], dweight[i]);
      store_word(kWeightsAt + row * kPairPitch + walked, pair.weight);
      store_word(kGradientsAt + row * kPairPitch + walked, pair.gradient);
    }
    ptx::sync_warp();  // the four threads of a row are lanes of one warp
  }

  FOVEA_DEVICE_MEMBER void add_pairs() {
#pragma unroll 1
    for (int walked = 0; walked < spec.tile_walked; ++walked) {
      const float weight = load_word(kWeightsAt + row * kPairPitch + walked);
      if (weight == kHidden) continue;
      if constexpr (spec.sums_values) {
#pragma unroll
        for (int i = 0; i < kVCols; ++i) {
          const float x = load_word(kWalkedVAt + walked * kVPitch + part + i * kRowThreads);
          by_value[i] = ptx::fma_rn(weight, x, by_value[i]);
        }
      }
      if constexpr (spec.sums_scores) {
        const float gradient = load_word(kGradientsAt + row * kPairPitch + walked);
#pragma unroll
        for (int i = 0; i < kQkCols; ++i) {
          const float x = load_word(kWalkedQkAt + walked * kQkPitch + part + i * kRowThreads);
          by_score[i] = ptx::fma_rn(gradient, x, by_score[i]);
        }
      }
    }
  }

  // ---- the end ---------------------------------------------------------------------------------

  template <int num_cols>
  FOVEA_DEVICE_MEMBER void store(const GradientParam& to, const float (&sums)[num_cols],
                                 float factor, std::int32_t head_dim) const {
    const Sequence& s = owned.sequence;
    const BshdParam& t = to.tensor;
    const std::int64_t batch = spec.owns_keys ? s.kv_batch : s.q_batch;
    const std::int64_t first = spec.owns_keys ? s.kv_row : s.q_row;
    const std::int64_t at = batch * t.batch_stride + (first + owned.begin + row) * t.row_stride +
                            owned.head * t.head_stride;
#pragma unroll
    for (int i = 0; i < num_cols; ++i) {
      const int col = part + i * kRowThreads;
      if (col < head_dim)
        store_element(const_cast<void*>(t.data), to.element, at + col * t.col_stride,
                      sums[i] * factor);
    }
  }

  FOVEA_DEVICE_MEMBER void finish() const {
    const Sequence& s = owned.sequence;
    if (owned.begin + row >= (spec.owns_keys ? s.seqlen_kv : s.seqlen_q)) return;
    if constexpr (spec.sums_scores)
      store(spec.owns_keys ? b.dk : b.dq, by_score, p.softmax_scale, p.head_dim_qk);
    if constexpr (spec.sums_values)
      store(b.dv, by_value, spec.has_dropout ? p.dropout_keep_scale : 1.0F, p.head_dim_v);
  }

  FOVEA_DEVICE_MEMBER void run() {
#pragma unroll
    for (int i = 0; i < kQkCols; ++i) by_score[i] = 0;
#pragma unroll
    for (int i = 0; i < kVCols; ++i) by_value[i] = 0;
    OwnerWalk<Mods, spec.owns_keys> tiles(p, owned, spec.tile_owned, spec.tile_walked);
    load_owned();
    for (WalkedTile tile = tiles.next(); tile.idx >= 0; tile = tiles.next()) {
      ptx::sync_threads();
      load_walked(tile);
      ptx::sync_threads();
      find_pairs(tile);
      add_pairs();
    }
    finish();
  }
};

template <PlainBackwardSpec spec, class Mods>
FOVEA_DEVICE void attention_backward_f32(const BackwardParams& b) {
  const OwnedTile tile =
      find_tile<spec.is_varlen, spec.owns_keys>(b, ptx::block_idx().x, spec.tile_owned);
  if (tile.is_nothing) return;
  PlainBackward<spec, Mods>(b, tile).run();
}

}  // namespace fovea::cuda::sm80
