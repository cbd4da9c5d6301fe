// A row of a split once more, key by key, where its sums are not finite (common/passes.cuh says why that may be): one
// warp, plain arithmetic, everything from memory. For kernels that stream a cache and whose warps have no time for the
// passes of others: hardly ever run, and short.
#pragma once

#include "common/dropout.cuh"
#include "common/online_softmax.cuh"
#include "common/passes.cuh"
#include "common/row_view.cuh"
#include "common/score.cuh"
#include "common/sequence.cuh"
#include "common/warp_reduce.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"

namespace fovea::cuda {

/// Elements of 16 bits, rows aligned to pairs: those of the lane, columns 2 lane + 64 i and the next.
template <auto spec>
struct PairsOfRow {
  const ForwardParams& p;
  const Work& work;

  template <int count>
  FOVEA_DEVICE_MEMBER void load_key(float (&elements)[count], const KvPlace& place) const {
    load(elements, p.k, place.in(p.k, work.kv_head), p.head_dim_qk);
  }
  template <int count>
  FOVEA_DEVICE_MEMBER void load_value(float (&elements)[count], const KvPlace& place) const {
    load(elements, p.v, place.in(p.v, work.kv_head), p.head_dim_v);
  }

  /// Of a row, given its offset in elements; zeros beyond its width.
  template <int count>
  FOVEA_DEVICE_MEMBER static void load(float (&elements)[count], const BshdParam& t,
                                       std::int64_t at, std::int32_t width) {
    constexpr bool kIsBf16 = spec.element == Element::bf16;
    const auto* const row = static_cast<const std::uint16_t*>(t.data) + at;
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
      const int col = 64 * i + 2 * ptx::lane_idx();
      const bool exists = !spec.has_padded_head_dim || col < width;
      const std::uint32_t pair =
          exists ? ptx::ld_global(reinterpret_cast<const std::uint32_t*>(row + col)) : 0;
      elements[2 * i] = kIsBf16 ? ptx::f32_of_bf16_lo(pair) : ptx::f32_of_f16_lo(pair);
      elements[2 * i + 1] = kIsBf16 ? ptx::f32_of_bf16_hi(pair) : ptx::f32_of_f16_hi(pair);
    }
  }
};

/// Columns 2 lane + 64 i and the next of each row are this lane's. `Rows` reads keys and values.
template <auto spec, class Mods, class Rows = PairsOfRow<spec>>
class CarefulRow {
 public:
  FOVEA_DEVICE_MEMBER explicit CarefulRow(const RowView<spec>& row)
      : CarefulRow(row, Rows{row.p, row.work}) {}
  FOVEA_DEVICE_MEMBER CarefulRow(const RowView<spec>& row, const Rows& rows)
      : p_(row.p), work_(row.work), row_(row), rows_(rows) {
    PairsOfRow<spec>::load(query_, p_.q, row.query_at(), p_.head_dim_qk);
  }

  /// Leaves the row's partial state.
  FOVEA_DEVICE_MEMBER void run() {
#pragma unroll 1
    for (std::int32_t key = work_.kv_begin; key < work_.kv_end; ++key) {
      Position at = row_.position();
      at.kv_idx = key;
      if constexpr (Mods::has_mask) {
        if (!Mods::mask(at, p_.captures)) continue;
      }
      const KvPlace place = place_of_key<spec>(p_, work_.sequence, key);
      const float score = score_of(at, place);
      if (score != -infinity()) add_value(at, place, score);
    }
    store();
  }

 private:
  static constexpr int kPairs = spec.head_dim_qk / 64, kValuePairs = spec.head_dim_v / 64;
  static_assert(spec.is_split && spec.head_dim_qk % 64 == 0 && spec.head_dim_v % 64 == 0);

  /// The same in all lanes.
  FOVEA_DEVICE_MEMBER float score_of(const Position& at, const KvPlace& place) const {
    float key[2 * kPairs];
    rows_.load_key(key, place);
    float score = 0;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) score = ptx::fma_rn(query_[i], key[i], score);
    score = warp_sum(score);
    if constexpr (spec.is_prescaled) modify_score<Mods>(score, at, p_);
    return score;
  }

  FOVEA_DEVICE_MEMBER void add_value(const Position& at, const KvPlace& place, float score) {
    float value[2 * kValuePairs];
    rows_.load_value(value, place);
    const float c = spec.is_prescaled ? kLog2E : p_.softmax_scale_log2;
    row_max_ = ptx::max_ftz(row_max_, score);
    const OriginStep step = move_origin<Mods::has_score>(state_, score, c);
    float weight = probability(score, step);
    state_.sum += weight;
    if (is_dropped_at(at)) weight = 0;
#pragma unroll
    for (int i = 0; i < 2 * kValuePairs; ++i)
      sum_[i] = sum_with_seen(scaled_sum(sum_[i], step.rescale), weight, value[i]);
  }

  FOVEA_DEVICE_MEMBER bool is_dropped_at(const Position& at) const {
    if constexpr (!spec.has_dropout) return false;
    return is_dropped(p_, dropout_key<spec>(p_), at.batch, at.q_head, at.q_idx, at.kv_idx);
  }

  FOVEA_DEVICE_MEMBER void store() const {
    const float unit = spec.is_prescaled ? 1.0F : p_.softmax_scale;
    RowResult result = finish_row(state_, unit, -infinity());
    if constexpr (spec.has_dropout) result.factor *= p_.dropout_keep_scale;
    float* const to = row_.out_f32() + 2 * ptx::lane_idx();
#pragma unroll
    for (int i = 0; i < kValuePairs; ++i) {
      ptx::st_global(reinterpret_cast<ptx::F32x2*>(to + 64 * i),
                     ptx::F32x2{scaled_sum(sum_[2 * i], result.factor),
                                scaled_sum(sum_[2 * i + 1], result.factor)});
    }
    if (ptx::lane_idx() == 0)
      row_.store_values(result.lse, state_.sum, finish_row_max(row_max_, state_.sum, unit));
  }

  const ForwardParams& p_;
  const Work& work_;
  const RowView<spec> row_;
  const Rows rows_;
  float query_[2 * kPairs];
  RowState state_ = empty_row();
  float row_max_ = -infinity();
  float sum_[2 * kValuePairs] = {};
};

}  // namespace fovea::cuda
