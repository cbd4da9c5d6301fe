#include "support/planted_attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/philox.hpp"
#include "reference/element.hpp"

namespace fovea::testing {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kTileKv = 16;

float bf16_rounded(float value) { return static_cast<float>(bfloat16(value)); }

void store(const TensorView& view, std::int64_t offset, float value) {
  switch (view.dtype()) {
    case Dtype::f16:
      static_cast<float16*>(view.mutable_data())[offset] = float16(value);
      return;
    case Dtype::bf16:
      static_cast<bfloat16*>(view.mutable_data())[offset] = bfloat16(value);
      return;
    default:
      static_cast<float*>(view.mutable_data())[offset] = value;
  }
}

struct RowPosition {
  std::int64_t batch = 0, q_head = 0, kv_head = 0, q_idx = 0;
};

class Planted {
 public:
  Planted(const AttentionForward& args, const PlantedFeatures& features, Fault fault)
      : args_(args),
        features_(features),
        fault_(fault),
        seqlen_q_(args.q.size(1)),
        seqlen_kv_(args.k.size(1)),
        head_dim_v_(args.v.size(3)),
        scale_(args.softmax_scale.value_or(1 / std::sqrt(static_cast<float>(args.q.size(3))))) {}

  void run() {
    const std::int64_t num_heads_q = args_.q.size(2);
    const std::int64_t num_heads_kv = args_.k.size(2);
    for (std::int64_t batch = 0; batch < args_.q.size(0); ++batch) {
      for (std::int64_t q_head = 0; q_head < num_heads_q; ++q_head) {
        const std::int64_t kv_head = has(Fault::gqa_head_modulo)
                                         ? q_head % num_heads_kv
                                         : q_head / (num_heads_q / num_heads_kv);
        for (std::int64_t q_idx = 0; q_idx < seqlen_q_; ++q_idx) {
          run_row({.batch = batch, .q_head = q_head, .kv_head = kv_head, .q_idx = q_idx});
        }
      }
    }
  }

 private:
  bool has(Fault fault) const { return fault_ == fault; }

  void run_row(const RowPosition& at) {
    row_max_ = -kInfinity;
    row_sum_ = 0;
    acc_.assign(static_cast<std::size_t>(head_dim_v_), 0);
    const std::int64_t num_tiles = has(Fault::last_kv_tile_skipped)
                                       ? seqlen_kv_ / kTileKv
                                       : (seqlen_kv_ + kTileKv - 1) / kTileKv;
    for (std::int64_t tile = 0; tile < num_tiles; ++tile) add_tile(at, tile);
    finish_row(at);
  }

  void add_tile(const RowPosition& at, std::int64_t tile) {
    const std::int64_t begin = tile * kTileKv;
    float scores[kTileKv];
    float tile_max = -kInfinity;
    for (std::int64_t i = 0; i < kTileKv; ++i) {
      scores[i] = final_score(at, begin + i);
      tile_max = std::max(tile_max, scores[i]);
    }
    const bool keeps_max = has(Fault::stale_max) && row_max_ != -kInfinity;
    const float new_max = keeps_max ? row_max_ : std::max(row_max_, tile_max);
    if (new_max == -kInfinity) return;
    const float rescale = std::exp(row_max_ - new_max);
    if (!has(Fault::row_sum_missing_rescale)) row_sum_ *= rescale;
    if (!has(Fault::missing_rescale)) {
      for (float& sum : acc_) sum *= rescale;
    }
    row_max_ = new_max;
    for (std::int64_t i = 0; i < kTileKv; ++i) add_key(at, begin + i, scores[i]);
    if (has(Fault::bf16_row_sum)) row_sum_ = bf16_rounded(row_sum_);
    if (has(Fault::bf16_accumulator)) {
      for (float& sum : acc_) sum = bf16_rounded(sum);
    }
  }

  /// Scale, softcap, bias, mask.
  float final_score(const RowPosition& at, std::int64_t kv_idx) const {
    const bool is_visible = kv_idx < seqlen_kv_ && is_in_sight(at, kv_idx);
    const bool is_tail = has(Fault::tail_key_unmasked) && kv_idx == seqlen_kv_;
    if (is_tail) return 0;
    const float hidden = has(Fault::finite_mask) ? -1e30F : -kInfinity;
    if (!is_visible)
      return has(Fault::softcap_after_mask) && kv_idx < seqlen_kv_ ? -features_.softcap : hidden;
    float score = product(at, kv_idx) * scale_;
    if (has(Fault::scale_applied_twice)) score *= scale_;
    const float bias = bias_of(at, kv_idx);
    if (has(Fault::bias_before_softcap)) return capped(score + bias);
    return capped(score) + bias;
  }

  float capped(float score) const {
    if (features_.softcap == 0) return score;
    const float cap =
        has(Fault::scale_before_and_after_cap) ? features_.softcap * scale_ : features_.softcap;
    return cap * std::tanh(score / cap);
  }

  float bias_of(const RowPosition& at, std::int64_t kv_idx) const {
    if (!features_.bias) return 0;
    const std::int64_t head = has(Fault::bias_of_kv_head) ? at.kv_head : at.q_head;
    const TensorView& bias = features_.bias;
    return static_cast<float>(reference::element(
        bias, head * bias.stride(0) + at.q_idx * bias.stride(1) + kv_idx * bias.stride(2)));
  }

  bool is_in_sight(const RowPosition& at, std::int64_t kv_idx) const {
    const std::int64_t diagonal =
        at.q_idx + (has(Fault::top_left_for_bottom_right) ? 0 : seqlen_kv_ - seqlen_q_);
    if (features_.is_causal && kv_idx > diagonal) return false;
    if (!features_.window_left) return true;
    return kv_idx >= diagonal - *features_.window_left + (has(Fault::window_off_by_one) ? 1 : 0);
  }

  float product(const RowPosition& at, std::int64_t kv_idx) const {
    constexpr std::int64_t kTileQ = 16;
    const bool slips = has(Fault::query_of_next_tile) && at.q_idx % kTileQ == kTileQ - 1;
    const std::int64_t q_idx = slips ? std::min(at.q_idx + 1, seqlen_q_ - 1) : at.q_idx;
    float sum = 0;
    for (std::int64_t dim = 0; dim < args_.q.size(3); ++dim) {
      sum += read(args_.q, {at.batch, q_idx, at.q_head}, dim) *
             read(args_.k, {at.batch, kv_idx, at.kv_head}, dim);
    }
    return sum;
  }

  struct RowIndex {
    std::int64_t batch = 0, row = 0, head = 0;
  };
  static float read(const TensorView& view, const RowIndex& at, std::int64_t dim) {
    return static_cast<float>(
        reference::element(view, at.batch * view.stride(0) + at.row * view.stride(1) +
                                     at.head * view.stride(2) + dim * view.stride(3)));
  }

  void add_key(const RowPosition& at, std::int64_t kv_idx, float score) {
    if (score == -kInfinity && !(has(Fault::hidden_value_read) && kv_idx < seqlen_kv_)) return;
    float weight = std::exp(score - row_max_);
    const bool keeps = is_kept(at, kv_idx);
    if (keeps || !has(Fault::dropout_before_row_sum)) {
      row_sum_ += has(Fault::row_sum_of_rounded_weights) ? bf16_rounded(weight) : weight;
    }
    if (!keeps || kv_idx >= seqlen_kv_) return;
    if (!has(Fault::dropout_not_rescaled)) weight /= 1 - args_.dropout.p;
    for (std::int64_t dim = 0; dim < head_dim_v_; ++dim) {
      acc_[static_cast<std::size_t>(dim)] +=
          weight * read(args_.v, {at.batch, kv_idx, at.kv_head}, dim);
    }
  }

  bool is_kept(const RowPosition& at, std::int64_t kv_idx) const {
    if (args_.dropout.p == 0) return true;
    const philox::Key key = philox::dropout_key(args_.dropout.seed, args_.dropout.offset);
    const bool is_transposed = has(Fault::dropout_transposed);
    const std::uint32_t word =
        philox::random_word(key, has(Fault::batch_ignored) ? 0 : at.batch, at.q_head,
                            is_transposed ? kv_idx : at.q_idx, is_transposed ? at.q_idx : kv_idx);
    return word >= philox::drop_threshold(args_.dropout.p);
  }

  void finish_row(const RowPosition& at) {
    const float key_max = row_max_;
    const float key_sum = row_sum_;
    if (args_.sinks) add_sink(at.q_head);
    const std::int64_t out_row = at.batch * args_.out.stride(0) + at.q_idx * args_.out.stride(1) +
                                 at.q_head * args_.out.stride(2);
    for (std::int64_t dim = 0; dim < head_dim_v_; ++dim) {
      const float value = row_sum_ == 0 ? 0 : acc_[static_cast<std::size_t>(dim)] / row_sum_;
      store(args_.out, out_row + dim * args_.out.stride(3), value);
    }
    if (args_.lse) {
      const bool ignores_sink = has(Fault::sink_ignored_by_lse);
      store(args_.lse, statistic_offset(args_.lse, at),
            ignores_sink ? lse(key_max, key_sum) : lse(row_max_, row_sum_));
    }
    if (args_.row_max) store(args_.row_max, statistic_offset(args_.row_max, at), key_max);
  }

  void add_sink(std::int64_t q_head) {
    float sink =
        static_cast<float>(reference::element(args_.sinks, q_head * args_.sinks.stride(0)));
    if (has(Fault::sink_scaled)) sink *= scale_;
    const float new_max = std::max(row_max_, sink);
    if (new_max == -kInfinity) return;
    const float rescale = std::exp(row_max_ - new_max);
    for (float& sum : acc_) sum *= rescale;
    row_sum_ = row_sum_ * rescale +
               (has(Fault::sink_counted_twice) ? 2.F : 1.F) * std::exp(sink - new_max);
    row_max_ = new_max;
  }

  float lse(float row_max, float row_sum) const {
    if (row_max == -kInfinity) return -kInfinity;
    if (has(Fault::lse_in_log2)) return row_max + std::log2(row_sum);
    return (has(Fault::lse_without_max) ? 0 : row_max) + std::log(row_sum);
  }

  static std::int64_t statistic_offset(const TensorView& view, const RowPosition& at) {
    return at.batch * view.stride(0) + at.q_head * view.stride(1) + at.q_idx * view.stride(2);
  }

  const AttentionForward& args_;
  const PlantedFeatures& features_;
  Fault fault_;
  std::int64_t seqlen_q_, seqlen_kv_, head_dim_v_;
  float scale_;
  float row_max_ = 0, row_sum_ = 0;  // of the row at work, as far as its tiles have been seen
  std::vector<float> acc_;
};

}  // namespace

std::string_view name(Fault fault) {
  constexpr std::string_view kNames[] = {"none",
                                         "window_off_by_one",
                                         "top_left_for_bottom_right",
                                         "tail_key_unmasked",
                                         "last_kv_tile_skipped",
                                         "query_of_next_tile",
                                         "scale_applied_twice",
                                         "scale_before_and_after_cap",
                                         "softcap_after_mask",
                                         "bias_of_kv_head",
                                         "bias_before_softcap",
                                         "gqa_head_modulo",
                                         "batch_ignored",
                                         "missing_rescale",
                                         "row_sum_missing_rescale",
                                         "stale_max",
                                         "bf16_accumulator",
                                         "bf16_row_sum",
                                         "row_sum_of_rounded_weights",
                                         "sink_counted_twice",
                                         "sink_ignored_by_lse",
                                         "sink_scaled",
                                         "dropout_transposed",
                                         "dropout_not_rescaled",
                                         "dropout_before_row_sum",
                                         "lse_in_log2",
                                         "lse_without_max",
                                         "finite_mask",
                                         "hidden_value_read"};
  static_assert(std::size(kNames) == kNumFaults);
  return kNames[static_cast<int>(fault)];
}

void planted_attention_forward(const AttentionForward& args, const PlantedFeatures& features,
                               Fault fault) {
  Planted(args, features, fault).run();
}

}  // namespace fovea::testing
