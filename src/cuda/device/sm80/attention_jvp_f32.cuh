// Attention and its tangent by plain f32 multiply-adds: f32 inputs in full precision, tangents of other dtypes than
// their tensors, and the head dims that the tensor-core kernel has no room for. What sm80/attention_jvp.cuh computes
// again where its sums were not finite is computed by this text too.
//
//   S = scale Q Kᵀ,  S' = f_s(S) scale (Q' Kᵀ + Q K'ᵀ) + g(S),  S = mask(f(S)),  S' = 0 where S = -inf
//   O += P V,  T += (P (S' - r)) V + P V'                      common/tangent_row.cuh has r and the ends
//
// f is the score program, f_s its derivative by the score, g what tangents of captured data add.
//
// The shape is attention_forward_f32.cuh's: a CTA owns up to 32 rows, four neighbouring threads share a row. They
// divide the keys of a tile among them for the scores, and the columns for O and T, and meet by shuffles.
//
// Bound: shared memory. A column of S and S' reads 2 words of Q and 2 of K for each of 3 multiply-adds; a column of O
// and T 2 words for 3.
//
// NaN and infinity: values and their tangents are added key by key, to the rows that see them.
#pragma once

#include "common/dropout.cuh"
#include "common/element.cuh"
#include "common/passes.cuh"
#include "common/quad_reduce.cuh"
#include "common/range.cuh"
#include "common/row_view.cuh"
#include "common/sequence.cuh"
#include "common/tangent_row.cuh"
#include "common/tile_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/jvp_params.h"
#include "shared/jvp_spec.h"

namespace fovea::cuda::sm80 {

template <JvpSpec spec, class Mods>
struct PlainJvp {
  static constexpr int kThreads = spec.num_warps * 32;
  static constexpr int kRowThreads = kThreads / spec.tile_q;
  static_assert(kRowThreads == 4, "four threads share a row");
  static constexpr int kKeys = spec.tile_kv / kRowThreads;
  static constexpr int kCols = spec.head_dim_v / kRowThreads;
  static constexpr bool kHasProducts = spec.has_q_tangent || spec.has_k_tangent;
  static constexpr float kHidden = -1.0F;  // no probability

  static constexpr PlainJvpLayout kAt = sm80_plain_jvp_layout(spec);

  const JvpParams& params;
  const ForwardParams& p;
  const Work& work;
  const ptx::SharedAddress smem;
  const int thread;
  const int row, part;  // of this thread: a row of the tile, and which of its four threads
  const RowView<spec> view;

  float out[kCols], out_tangent[kCols];
  TangentRow state;

  FOVEA_DEVICE_MEMBER PlainJvp(const JvpParams& of_call, const Work& my_work)
      : params(of_call),
        p(of_call.forward),
        work(my_work),
        smem(ptx::dynamic_shared()),
        thread(ptx::thread_idx().x),
        row(thread / kRowThreads),
        part(thread % kRowThreads),
        view(of_call.forward, my_work, row) {}

  FOVEA_DEVICE_MEMBER float load_word(int word) const {
    return ptx::ld_shared<float>(smem + word * 4);
  }
  FOVEA_DEVICE_MEMBER void store_word(int word, float value) const {
    ptx::st_shared(smem + word * 4, value);
  }

  // ---- rows on their way in --------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void load_query(const BshdParam& t, Element element, int first_word) const {
    const std::int64_t at = work.sequence.q_batch * t.batch_stride +
                            (work.sequence.q_row + view.q_idx) * t.row_stride +
                            view.q_head * t.head_stride;
#pragma unroll 1
    for (int col = part; col < spec.head_dim_qk; col += kRowThreads) {
      const bool is_data = view.exists && col < p.head_dim_qk;
      store_word(first_word + row * kAt.qk_pitch + col,
                 is_data ? load_element(t.data, element, at + col * t.col_stride) : 0.0F);
    }
  }

  struct KeyRows {
    const BshdParam& tensor;
    Element element;
    int first_word, pitch;
    std::int32_t head_dim;  // of the problem
  };

  /// A row of each warp at a time.
  FOVEA_DEVICE_MEMBER void load_rows(const KeyRows& rows, std::int32_t begin) const {
    const BshdParam& t = rows.tensor;
#pragma unroll 1
    for (int key = thread / 32; key < spec.tile_kv; key += spec.num_warps) {
      const bool is_key = begin + key < work.kv_end;
      const std::int64_t at =
          is_key ? place_of_key<spec>(p, work.sequence, begin + key).in(t, work.kv_head) : 0;
#pragma unroll 1
      for (int col = thread % 32; col < rows.pitch - 1; col += 32) {
        const bool is_data = is_key && col < rows.head_dim;
        store_word(rows.first_word + key * rows.pitch + col,
                   is_data ? load_element(t.data, rows.element, at + col * t.col_stride) : 0.0F);
      }
    }
  }

  FOVEA_DEVICE_MEMBER void load_queries() const {
    load_query(p.q, spec.element, kAt.q);
    if constexpr (spec.has_q_tangent)
      load_query(params.tangent.q, spec.q_tangent_element, kAt.q_tangent);
  }

  FOVEA_DEVICE_MEMBER void load_tile(std::int32_t begin) const {
    const ForwardParams& t = params.tangent;
    load_rows({p.k, spec.element, kAt.k, kAt.qk_pitch, p.head_dim_qk}, begin);
    load_rows({p.v, spec.element, kAt.v, kAt.v_pitch, p.head_dim_v}, begin);
    if constexpr (spec.has_k_tangent)
      load_rows({t.k, spec.k_tangent_element, kAt.k_tangent, kAt.qk_pitch, p.head_dim_qk}, begin);
    if constexpr (spec.has_v_tangent)
      load_rows({t.v, spec.v_tangent_element, kAt.v_tangent, kAt.v_pitch, p.head_dim_v}, begin);
  }

  // ---- a tile ----------------------------------------------------------------------------------

  /// S and S' of keys part, part + 4, ... of the tile; -inf and 0 where the row does not see the key.
  FOVEA_DEVICE_MEMBER void find_scores(Dual (&s)[kKeys], const VisitedTile& tile) const {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) s[i] = {0.0F, 0.0F};
#pragma unroll 4
    for (int col = 0; col < spec.head_dim_qk; ++col) {
      const float q = load_word(kAt.q + row * kAt.qk_pitch + col);
      float q_tangent = 0;
      if constexpr (spec.has_q_tangent)
        q_tangent = load_word(kAt.q_tangent + row * kAt.qk_pitch + col);
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const int key_word = (part + i * kRowThreads) * kAt.qk_pitch + col;
        const float k = load_word(kAt.k + key_word);
        s[i].value = ptx::fma_rn(q, k, s[i].value);
        if constexpr (spec.has_q_tangent) s[i].tangent = ptx::fma_rn(q_tangent, k, s[i].tangent);
        if constexpr (spec.has_k_tangent)
          s[i].tangent = ptx::fma_rn(q, load_word(kAt.k_tangent + key_word), s[i].tangent);
      }
    }
    Position at = view.position();
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      at.kv_idx = tile.idx * spec.tile_kv + part + i * kRowThreads;
      s[i] = dual_score<Mods, kHasProducts>(s[i], at, p);
      bool is_visible = at.kv_idx < work.kv_end;
      if constexpr (Mods::has_mask)
        is_visible = is_visible && (tile.is_full || Mods::mask(at, p.captures));
      if (!is_visible || s[i].value == -infinity()) s[i] = {-infinity(), 0.0F};
    }
  }

  /// Leaves P and P (S' - r) in shared memory; a key that the row does not see has kHidden in the place of P.
  FOVEA_DEVICE_MEMBER void softmax(const Dual (&s)[kKeys], const VisitedTile& tile) {
    float greatest = s[0].value;
#pragma unroll
    for (int i = 1; i < kKeys; ++i) greatest = ptx::max_ftz(greatest, s[i].value);
    greatest = ptx::max_ftz(greatest, ptx::shfl_bfly(greatest, 1));
    greatest = ptx::max_ftz(greatest, ptx::shfl_bfly(greatest, 2));
    TangentStep step = begin_tile<Mods::has_score>(state, greatest);
    float weights[kKeys];
    float sum = 0, moments = 0;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      weights[i] = probability(s[i].value, step.origin);
      sum += weights[i];
      moments = ptx::fma_rn(weights[i], s[i].tangent - state.centre, moments);
    }
    move_centre(state, step, quad_sum(sum), quad_sum(moments));
    move_sums(step);
    float rest = 0;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const float moment = weights[i] * (s[i].tangent - state.centre);
      rest += moment;
      const int key = part + i * kRowThreads;
      const bool is_there = is_kept(tile.idx * spec.tile_kv + key);
      const int word = row * kAt.p_pitch + key;
      const float weight = is_there ? weights[i] : 0.0F;
      store_word(kAt.p + word, s[i].value == -infinity() ? kHidden : weight);
      store_word(kAt.w + word, is_there ? moment : 0.0F);
    }
    state.tangent += quad_sum(rest);
    ptx::sync_warp();  // the four threads of a row are lanes of one warp
  }

  FOVEA_DEVICE_MEMBER bool is_kept(std::int32_t kv_idx) const {
    if constexpr (spec.has_dropout)
      return !is_dropped(p, dropout_key<spec>(p), work.sequence.idx, view.q_head, view.q_idx,
                         kv_idx);
    return true;
  }

  FOVEA_DEVICE_MEMBER void move_sums(const TangentStep& step) {
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
      out_tangent[i] = moved(out_tangent[i], out[i], step);
      out[i] = scaled_sum(out[i], step.origin.rescale);
    }
  }

  FOVEA_DEVICE_MEMBER void add_values() {
#pragma unroll 1
    for (int key = 0; key < spec.tile_kv; ++key) {
      const float weight = load_word(kAt.p + row * kAt.p_pitch + key);
      if (weight == kHidden) continue;
      const float moment = load_word(kAt.w + row * kAt.p_pitch + key);
#pragma unroll
      for (int i = 0; i < kCols; ++i) {
        const int word = key * kAt.v_pitch + part + i * kRowThreads;
        const float value = load_word(kAt.v + word);
        out[i] = sum_with_seen(out[i], weight, value);
        out_tangent[i] = ptx::fma_rn(moment, value, out_tangent[i]);
        if constexpr (spec.has_v_tangent)
          out_tangent[i] = sum_with_seen(out_tangent[i], weight, load_word(kAt.v_tangent + word));
      }
    }
    ptx::sync_warp();
  }

  // ---- the end ---------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void finish() const {
    if (!view.exists) return;
    const Dual sink = sink_of(params, view.q_head, work.sequence.is_trailing);
    const TangentResult result =
        finish_tangent_row(state, sink, spec.has_dropout ? p.dropout_keep_scale : 1.0F);
    const RowView<spec> tangents(params.tangent, work, row);
    const std::int64_t at = view.out_at(), tangent_at = tangents.out_at();
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
      const int col = part + i * kRowThreads;
      if (col >= p.head_dim_v) break;
      const Dual column = finish_column(out[i], out_tangent[i], result);
      store_element(const_cast<void*>(p.out.data), spec.out_element, at + col * p.out.col_stride,
                    column.value);
      store_element(const_cast<void*>(params.tangent.out.data), spec.out_tangent_element,
                    tangent_at + col * params.tangent.out.col_stride, column.tangent);
    }
    if (part != 0) return;
    view.store_values(result.lse.value, 0.0F, 0.0F);
    tangents.store_values(result.lse.tangent, 0.0F, 0.0F);
  }

  FOVEA_DEVICE_MEMBER void run() {
    const TileSpan rows = span_of<spec>(work);
    TileWalk<Mods> tiles(rows, {0, ceil_div(work.kv_end, spec.tile_kv), spec.tile_kv}, p.captures);
#pragma unroll
    for (int i = 0; i < kCols; ++i) out[i] = out_tangent[i] = 0;
    state = empty_tangent_row();
    load_queries();
    for (VisitedTile tile; tiles.next(tile);) {
      ptx::sync_threads();
      load_tile(tile.idx * spec.tile_kv);
      ptx::sync_threads();
      Dual s[kKeys];
      find_scores(s, tile);
      softmax(s, tile);
      add_values();
    }
    finish();
  }
};

template <JvpSpec spec, class Mods>
FOVEA_DEVICE void attention_jvp_f32(const JvpParams& p) {
  const Work work = find_work<spec>(p.forward);
  if (work.is_nothing) return;
  PlainJvp<spec, Mods>(p, work).run();
}

}  // namespace fovea::cuda::sm80
