// Attention forward by plain f32 multiply-adds: f32 inputs in full precision, and the head dims of 16-bit inputs that
// the tensor-core kernel has no registers for. The same recurrence and the same rules as sm80/attention_forward.cuh;
// right first.
//
// A CTA owns 32 rows; four neighbouring threads share a row. They divide the 32 keys of a tile among them for S = Q Kᵀ,
// and the columns of V for O = P V, and meet by shuffles. Wide heads have smaller tiles, as shared memory has room:
// keys of 576 and values of 512 half as many keys on sm_80, 16 rows and 8 keys on sm_86. Rows in shared memory are a
// word longer than a multiple of 32, so that the 8 rows of a warp lie in different banks.
//
// Bound: shared memory, 2 words for each multiply-add: 16 multiply-adds a clock of an SM, an eighth of its rate.
// Register tiles would lift that; no case asks for it yet.
//
// NaN and infinity in V: values are added key by key, to the rows that see them, so nothing needs to be computed twice
// (common/passes.cuh).
#pragma once

#include "common/dropout.cuh"
#include "common/element.cuh"
#include "common/online_softmax.cuh"
#include "common/passes.cuh"
#include "common/range.cuh"
#include "common/row_view.cuh"
#include "common/score.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"

namespace fovea::cuda::sm80 {

template <PlainSpec spec, class Mods>
struct PlainForward {
  static constexpr int kThreads = spec.num_warps * ptx::kWarpLanes;
  static constexpr int kRowThreads = kThreads / spec.tile_q;
  static_assert(kRowThreads == 4, "four threads share a row");
  static constexpr int kKeys = spec.tile_kv / kRowThreads;
  static constexpr int kCols = spec.head_dim_v / kRowThreads;
  static constexpr int kInputBytes = spec.element == Element::f32 ? 4 : 2;

  static constexpr PlainLayout kAt = sm80_plain_layout(spec);

  const ForwardParams& p;
  const Work& work;
  const ptx::SharedAddress smem;
  const int thread;
  const int row, part;  // of this thread: a row of the tile, and which of its four threads
  const RowView<spec> view;

  float out[kCols];
  RowState state;
  float row_max;

  FOVEA_DEVICE_MEMBER PlainForward(const ForwardParams& params, const Work& my_work)
      : p(params),
        work(my_work),
        smem(ptx::dynamic_shared()),
        thread(ptx::thread_idx().x),
        row(thread / kRowThreads),
        part(thread % kRowThreads),
        view(params, my_work, row) {}

  FOVEA_DEVICE_MEMBER float load_word(int word) const {
    return ptx::ld_shared<float>(smem + word * 4);
  }
  FOVEA_DEVICE_MEMBER void store_word(int word, float value) const {
    ptx::st_shared(smem + word * 4, value);
  }

  FOVEA_DEVICE_MEMBER static float load_input(const void* data, std::int64_t at) {
    return load_element(data, spec.element, at);
  }

  FOVEA_DEVICE_MEMBER void load_queries() const {
#pragma unroll 1
    for (int col = part; col < spec.head_dim_qk; col += kRowThreads) {
      const std::int64_t at = work.sequence.q_batch * p.q.batch_stride +
                              (work.sequence.q_row + view.q_idx) * p.q.row_stride +
                              view.q_head * p.q.head_stride + col * p.q.col_stride;
      const bool is_data = view.exists && col < p.head_dim_qk;
      store_word(row * kAt.qk_pitch + col, is_data ? load_input(p.q.data, at) : 0.0F);
    }
  }

  /// A row of each warp at a time.
  FOVEA_DEVICE_MEMBER void load_rows(const BshdParam& t, std::int32_t begin, int first_word,
                                     int pitch, int width, int head_dim) const {
#pragma unroll 1
    for (int key = thread / ptx::kWarpLanes; key < spec.tile_kv; key += spec.num_warps) {
      const bool is_key = begin + key < work.kv_end;
      const std::int64_t at =
          is_key ? place_of_key<spec>(p, work.sequence, begin + key).in(t, work.kv_head) : 0;
#pragma unroll 1
      for (int col = thread % ptx::kWarpLanes; col < width; col += ptx::kWarpLanes) {
        const bool is_data = is_key && col < head_dim;
        store_word(first_word + key * pitch + col,
                   is_data ? load_input(t.data, at + col * t.col_stride) : 0.0F);
      }
    }
  }

  /// S of keys part, part + 4, ... of the tile; -inf where the row does not see the key.
  FOVEA_DEVICE_MEMBER void find_scores(float (&s)[kKeys], const VisitedTile& tile) const {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) s[i] = 0;
#pragma unroll 4
    for (int col = 0; col < spec.head_dim_qk; ++col) {
      const float q = load_word(row * kAt.qk_pitch + col);
#pragma unroll
      for (int i = 0; i < kKeys; ++i)
        s[i] =
            ptx::fma_rn(q, load_word(kAt.k + (part + i * kRowThreads) * kAt.qk_pitch + col), s[i]);
    }
    Position at = view.position();
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      at.kv_idx = tile.idx * spec.tile_kv + part + i * kRowThreads;
      modify_score<Mods>(s[i], at, p);
      bool is_visible = at.kv_idx < work.kv_end;
      if constexpr (Mods::has_mask)
        is_visible = is_visible && (tile.is_full || Mods::mask(at, p.captures));
      if (!is_visible) s[i] = -infinity();
    }
  }

  /// Leaves P in shared memory; a key that the row does not see has -1 there.
  FOVEA_DEVICE_MEMBER void softmax(float (&s)[kKeys], const VisitedTile& tile) {
    float greatest = s[0];
#pragma unroll
    for (int i = 1; i < kKeys; ++i) greatest = ptx::max_ftz(greatest, s[i]);
    greatest = ptx::max_ftz(greatest, ptx::shfl_bfly(greatest, 1));
    greatest = ptx::max_ftz(greatest, ptx::shfl_bfly(greatest, 2));
    row_max = ptx::max_ftz(row_max, greatest);
    const OriginStep step = move_origin<Mods::has_score>(state, greatest, kLog2E);
    rescale(step.rescale);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = part + i * kRowThreads;
      float weight = probability(s[i], step);
      state.sum += weight;
      if constexpr (spec.has_dropout) {
        const std::int32_t kv_idx = tile.idx * spec.tile_kv + key;
        if (is_dropped(p, dropout_key<spec>(p), work.sequence.idx, view.q_head, view.q_idx, kv_idx))
          weight = 0;
      }
      store_word(kAt.p + row * kAt.p_pitch + key, s[i] == -infinity() ? -1.0F : weight);
    }
    ptx::sync_warp();  // the four threads of a row are lanes of one warp
  }

  FOVEA_DEVICE_MEMBER void rescale(float factor) {
    if (factor == 0) {  // hardly ever but for a row's first tile: elsewhere one product a column
#pragma unroll
      for (int i = 0; i < kCols; ++i) out[i] = scaled_sum(out[i], 0.0F);
    } else {
#pragma unroll
      for (int i = 0; i < kCols; ++i) out[i] *= factor;
    }
  }

  FOVEA_DEVICE_MEMBER void add_values() {
#pragma unroll 1
    for (int key = 0; key < spec.tile_kv; ++key) {
      const float weight = load_word(kAt.p + row * kAt.p_pitch + key);
      if (weight == -1.0F) continue;
#pragma unroll
      for (int i = 0; i < kCols; ++i) {
        const float value = load_word(kAt.v + key * kAt.v_pitch + part + i * kRowThreads);
        out[i] = sum_with_seen(out[i], weight, value);
      }
    }
    ptx::sync_warp();
  }

  FOVEA_DEVICE_MEMBER void store_out(int col, float value) const {
    if constexpr (spec.is_split) {
      ptx::st_global(view.out_f32() + col, value);
    } else {
      store_element(const_cast<void*>(p.out.data), spec.out_element,
                    view.out_at() + col * p.out.col_stride, value);
    }
  }

  FOVEA_DEVICE_MEMBER void finish() {
    state.sum += ptx::shfl_bfly(state.sum, 1);
    state.sum += ptx::shfl_bfly(state.sum, 2);
    if (!view.exists) return;
    float sink = -infinity();
    if (!spec.is_split && p.sinks != nullptr && !work.sequence.is_trailing)
      sink = ptx::ld_global(p.sinks + view.q_head * p.sinks_stride);
    RowResult result = finish_row(state, 1.0F, sink);
    if constexpr (spec.has_dropout) result.factor *= p.dropout_keep_scale;
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
      const int col = part + i * kRowThreads;
      if (spec.is_split || col < p.head_dim_v) store_out(col, scaled_sum(out[i], result.factor));
    }
    if (part == 0)
      view.store_values(result.lse, state.sum, finish_row_max(row_max, state.sum, 1.0F));
  }

  FOVEA_DEVICE_MEMBER void run() {
    const TileSpan rows = span_of<spec>(work);
    TileWalk<Mods> tiles(
        rows, {work.kv_begin / spec.tile_kv, ceil_div(work.kv_end, spec.tile_kv), spec.tile_kv},
        p.captures);
#pragma unroll
    for (int i = 0; i < kCols; ++i) out[i] = 0;
    state = empty_row();
    row_max = -infinity();
    load_queries();
    for (VisitedTile tile; tiles.next(tile);) {
      ptx::sync_threads();
      load_rows(p.k, tile.idx * spec.tile_kv, kAt.k, kAt.qk_pitch, spec.head_dim_qk, p.head_dim_qk);
      load_rows(p.v, tile.idx * spec.tile_kv, kAt.v, kAt.v_pitch, spec.head_dim_v, p.head_dim_v);
      ptx::sync_threads();
      float s[kKeys];
      find_scores(s, tile);
      softmax(s, tile);
      add_values();
    }
    finish();
  }
};

template <PlainSpec spec, class Mods>
FOVEA_DEVICE void attention_forward_f32(const ForwardParams& p) {
  const Work work = find_work<spec>(p);
  if (work.is_nothing) return;
  PlainForward<spec, Mods>(p, work).run();
}

}  // namespace fovea::cuda::sm80
