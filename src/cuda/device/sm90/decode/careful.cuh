// A row of a split once more, key by key, where its sums are not finite: NaN and infinity in V may reach only rows that
// see them. One warp, plain arithmetic, keys and values from memory: hardly ever run, and short. Read ../decode.cuh for
// the picture.
#pragma once

#include "common/dropout.cuh"
#include "common/online_softmax.cuh"
#include "common/row_view.cuh"
#include "common/score.cuh"
#include "common/warp_reduce.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm90/decode/cta.cuh"
#include "team/load.cuh"
#include "team/team.cuh"

namespace fovea::cuda::sm90::decoding {

/// Columns 4 lane .. 4 lane + 3 of each row are this lane's.
template <Sm90DecodeSpec spec, class Mods>
class CarefulRow {
 public:
  using L = Layout<spec>;
  using Team = team::Team<L::kWarpSpec>;
  using Row = RowView<L::kWarpSpec>;

  FOVEA_DEVICE_MEMBER CarefulRow(const Team& team, const Row& row)
      : p_(team.p), work_(team.work), row_(row) {
    query_ = load_four(
        static_cast<const char*>(p_.q.data) + row.query_at() * element_bytes(spec.element),
        p_.head_dim_qk);
  }

  FOVEA_DEVICE_MEMBER void run() {
    const char* keys = team::head_of<L::kWarpSpec>(work_, p_.k);
    const char* values = team::head_of<L::kWarpSpec>(work_, p_.v);
#pragma unroll 1
    for (std::int32_t key = work_.kv_begin; key < work_.kv_end; ++key) {
      float score = 0;
      if (!sees(key, team::kv_row<L::kWarpSpec>(p_, work_, p_.k, keys, key), score)) continue;
      const char* value = team::kv_row<L::kWarpSpec>(p_, work_, p_.v, values, key);
      add(key, score, load_four(value, p_.head_dim_v));
    }
  }

  FOVEA_DEVICE_MEMBER RowState row() const { return state_; }
  FOVEA_DEVICE_MEMBER float row_max() const { return row_max_; }
  /// Of finite values.
  FOVEA_DEVICE_MEMBER ptx::F32x4 sum() const { return {sum_[0], sum_[1], sum_[2], sum_[3]}; }
  /// The others, as they are: 0 where there are none.
  FOVEA_DEVICE_MEMBER ptx::F32x4 reached() const {
    return {reached_[0], reached_[1], reached_[2], reached_[3]};
  }

 private:
  struct Four {
    float of[4];
  };

  /// This lane's elements of a row; zeros beyond its end.
  FOVEA_DEVICE_MEMBER static Four load_four(const char* row, std::int32_t width) {
    const int col = 4 * ptx::lane_idx();
    if (col >= width) return {};
    const auto pairs = ptx::ld_global(
        reinterpret_cast<const ptx::U32x2*>(row + element_bytes(spec.element) * col));
    if constexpr (spec.element == Element::bf16) {
      return {{ptx::f32_of_bf16_lo(pairs.x), ptx::f32_of_bf16_hi(pairs.x),
               ptx::f32_of_bf16_lo(pairs.y), ptx::f32_of_bf16_hi(pairs.y)}};
    }
    return {{ptx::f32_of_f16_lo(pairs.x), ptx::f32_of_f16_hi(pairs.x), ptx::f32_of_f16_lo(pairs.y),
             ptx::f32_of_f16_hi(pairs.y)}};
  }

  /// The score, where the row sees the key: the same answer in all lanes.
  FOVEA_DEVICE_MEMBER bool sees(std::int32_t key, const char* from, float& score) const {
    Position at = row_.position();
    at.kv_idx = key;
    if constexpr (Mods::has_mask) {
      if (!Mods::mask(at, p_.captures)) return false;
    }
    const Four k = load_four(from, p_.head_dim_qk);
#pragma unroll
    for (int i = 0; i < 4; ++i) score = ptx::fma_rn(query_.of[i], k.of[i], score);
    score = warp_sum(score);
    if constexpr (spec.is_prescaled) modify_score<Mods>(score, at, p_);
    return score != -infinity();
  }

  FOVEA_DEVICE_MEMBER void add(std::int32_t key, float score, const Four& value) {
    const float c = spec.is_prescaled ? kLog2E : p_.softmax_scale_log2;
    row_max_ = ptx::max_ftz(row_max_, score);
    const OriginStep step = move_origin<Mods::has_score>(state_, score, c);
    const float p = probability(score, step);
    state_.sum += p;
    const float kept = is_dropped_here(key) ? 0.0F : p;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is_finite = ptx::fma_rn(value.of[i], 0.0F, 0.0F) == 0.0F;
      sum_[i] = ptx::fma_rn(kept, is_finite ? value.of[i] : 0.0F, sum_[i] * step.rescale);
      if (!is_finite) reached_[i] += value.of[i];
    }
  }

  FOVEA_DEVICE_MEMBER bool is_dropped_here(std::int32_t key) const {
    if constexpr (!spec.has_dropout) return false;
    return is_dropped(p_, dropout_key<spec.reads_dropout_seed>(p_), work_.sequence.idx, row_.q_head,
                      row_.q_idx, key);
  }

  const ForwardParams& p_;
  const Work& work_;
  const Row row_;
  Four query_;
  RowState state_ = empty_row();
  float row_max_ = -infinity();
  float sum_[4] = {0, 0, 0, 0};
  float reached_[4] = {0, 0, 0, 0};
};

}  // namespace fovea::cuda::sm90::decoding
