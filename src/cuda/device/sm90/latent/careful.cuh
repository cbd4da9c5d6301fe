// A row of a unit once more, key by key, where its sums are not finite: NaN and infinity in values may reach only rows
// that see them. One warp, plain arithmetic, keys from memory: hardly ever run, and short. Read ../decode_latent.cuh
// for the picture.
#pragma once

#include "common/online_softmax.cuh"
#include "common/row_view.cuh"
#include "common/score.cuh"
#include "common/sequence.cuh"
#include "common/warp_reduce.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm90/latent/cta.cuh"

namespace fovea::cuda::sm90::latent {

/// Columns 2 lane + 64 i and the next of each row are this lane's.
template <Sm90LatentSpec spec, class Mods>
class CarefulRow {
 public:
  FOVEA_DEVICE_MEMBER explicit CarefulRow(const RowView<spec>& row)
      : p_(row.p), work_(row.work), row_(row) {
    query_ = load_pairs(p_.q, row.query_at());
  }

  FOVEA_DEVICE_MEMBER void run() {
#pragma unroll 1
    for (std::int32_t key = work_.kv_begin; key < work_.kv_end; ++key) {
      Position at = row_.position();
      at.kv_idx = key;
      if constexpr (Mods::has_mask) {
        if (!Mods::mask(at, p_.captures)) continue;
      }
      const Pairs k = load_pairs(p_.k, key_at(key));
      const float score = score_of(k, at);
      if (score != -infinity()) add(score, k);
    }
    store();
  }

 private:
  static constexpr int kPairs = spec.head_dim_qk / 64;
  static constexpr int kValuePairs = spec.head_dim_v / 64;
  struct Pairs {
    float of[2 * kPairs];
  };

  /// This lane's elements of the row at an offset in elements.
  FOVEA_DEVICE_MEMBER static Pairs load_pairs(const BshdParam& t, std::int64_t at) {
    const auto* const row = reinterpret_cast<const std::uint32_t*>(
        static_cast<const std::uint16_t*>(t.data) + at + 2 * ptx::lane_idx());
    Pairs pairs;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const std::uint32_t pair = ptx::ld_global(row + 32 * i);
      constexpr bool kIsBf16 = spec.element == Element::bf16;
      pairs.of[2 * i] = kIsBf16 ? ptx::f32_of_bf16_lo(pair) : ptx::f32_of_f16_lo(pair);
      pairs.of[2 * i + 1] = kIsBf16 ? ptx::f32_of_bf16_hi(pair) : ptx::f32_of_f16_hi(pair);
    }
    return pairs;
  }

  FOVEA_DEVICE_MEMBER std::int64_t key_at(std::int32_t key) const {
    const std::int64_t row = work_.sequence.kv_row + key;
    const std::int64_t head = work_.kv_head * p_.k.head_stride;
    if constexpr (spec.is_paged) {
      const std::int64_t entry = row / p_.page_size;
      const std::int64_t page = page_at(p_, work_.sequence.kv_batch, entry);
      return head + page * p_.k.batch_stride + (row - entry * p_.page_size) * p_.k.row_stride;
    } else {
      return head + work_.sequence.kv_batch * p_.k.batch_stride + row * p_.k.row_stride;
    }
  }

  /// The same in all lanes.
  FOVEA_DEVICE_MEMBER float score_of(const Pairs& k, const Position& at) const {
    float score = 0;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) score = ptx::fma_rn(query_.of[i], k.of[i], score);
    score = warp_sum(score);
    if constexpr (spec.is_prescaled) modify_score<Mods>(score, at, p_);
    return score;
  }

  FOVEA_DEVICE_MEMBER void add(float score, const Pairs& value) {
    const float c = spec.is_prescaled ? kLog2E : p_.softmax_scale_log2;
    greatest_ = ptx::max_ftz(greatest_, score);
    const OriginStep step = move_origin<Mods::has_score>(state_, score, c);
    const float weight = probability(score, step);
    state_.sum += weight;
#pragma unroll
    for (int i = 0; i < 2 * kValuePairs; ++i) {
      const bool is_finite = ptx::fma_rn(value.of[i], 0.0F, 0.0F) == 0.0F;
      sum_[i] = ptx::fma_rn(weight, is_finite ? value.of[i] : 0.0F, sum_[i] * step.rescale);
      if (!is_finite) reached_[i] += value.of[i];
    }
  }

  FOVEA_DEVICE_MEMBER void store() const {
    const float unit = spec.is_prescaled ? 1.0F : p_.softmax_scale;
    const RowResult result = finish_row(state_, unit, -infinity());
    const std::int64_t at = row_.partial_at();
    float* const to = p_.partial_out + at * spec.head_dim_v + 2 * ptx::lane_idx();
#pragma unroll
    for (int i = 0; i < 2 * kValuePairs; i += 2) {
      ptx::st_global(reinterpret_cast<ptx::F32x2*>(to + 32 * i),
                     ptx::F32x2{ptx::fma_rn(sum_[i], result.factor, reached_[i]),
                                ptx::fma_rn(sum_[i + 1], result.factor, reached_[i + 1])});
    }
    if (ptx::lane_idx() == 0) {
      row_.store_values(result.lse, state_.sum, finish_row_max(greatest_, state_.sum, unit));
    }
  }

  const ForwardParams& p_;
  const Work& work_;
  const RowView<spec> row_;
  Pairs query_;
  RowState state_ = empty_row();
  float greatest_ = -infinity();
  float sum_[2 * kValuePairs] = {};
  float reached_[2 * kValuePairs] = {};
};

}  // namespace fovea::cuda::sm90::latent
