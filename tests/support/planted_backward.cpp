#include "support/planted_backward.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "core/philox.hpp"
#include "reference/element.hpp"
#include "support/guarded_tensor.hpp"

namespace fovea::testing {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float bf16_rounded(float value) { return static_cast<float>(bfloat16(value)); }

struct Place {
  std::int64_t batch = 0, row = 0, head = 0;
};

std::int64_t offset(const TensorView& view, const Place& at, std::int64_t dim) {
  return at.batch * view.stride(0) + at.row * view.stride(1) + at.head * view.stride(2) +
         dim * view.stride(3);
}

float read(const TensorView& view, const Place& at, std::int64_t dim) {
  return static_cast<float>(reference::element(view, offset(view, at, dim)));
}

float dot(const TensorView& a, const Place& at_a, const TensorView& b, const Place& at_b) {
  float sum = 0;
  for (std::int64_t dim = 0; dim < a.size(3); ++dim) sum += read(a, at_a, dim) * read(b, at_b, dim);
  return sum;
}

void add(const TensorView& sum, const Place& at, float factor, const TensorView& view,
         const Place& at_view) {
  auto* const values = static_cast<float*>(sum.mutable_data());
  for (std::int64_t dim = 0; dim < sum.size(3); ++dim)
    values[offset(sum, at, dim)] += factor * read(view, at_view, dim);
}

void clear(const TensorView& view) {
  if (!view) return;
  for_each_offset(view.spec(), [&](std::int64_t offset) {
    static_cast<float*>(view.mutable_data())[offset] = 0;
  });
}

class Planted {
 public:
  Planted(const AttentionBackward& args, const PlantedBackwardFeatures& features,
          BackwardFault fault)
      : args_(args),
        forward_(args.forward),
        features_(features),
        fault_(fault),
        seqlen_q_(forward_.q.size(1)),
        seqlen_kv_(forward_.k.size(1)),
        scale_(forward_.softmax_scale.value_or(
            1 / std::sqrt(static_cast<float>(forward_.q.size(3))))) {}

  void run() {
    for (const TensorView& output :
         std::initializer_list<TensorView>{args_.dq, args_.dk, args_.dv, args_.dsinks})
      clear(output);
    for (const CapturedTensor& each : args_.dcaptured) clear(each.view);
    const std::int64_t heads_q = forward_.q.size(2);
    const std::int64_t heads_kv = forward_.k.size(2);
    for (std::int64_t batch = 0; batch < forward_.q.size(0); ++batch) {
      if (has(BackwardFault::bias_gradient_overwritten) && features_.bias)
        clear(args_.dcaptured[0].view);
      for (std::int64_t head = 0; head < heads_q; ++head) {
        const std::int64_t kv_head =
            has(BackwardFault::gqa_head_modulo) ? head % heads_kv : head / (heads_q / heads_kv);
        for (std::int64_t q_idx = 0; q_idx < seqlen_q_; ++q_idx)
          run_row({batch, q_idx, head}, kv_head);
      }
    }
  }

 private:
  bool has(BackwardFault fault) const { return fault_ == fault; }

  void run_row(const Place& q, std::int64_t kv_head) {
    const float delta = delta_of(q);
    std::int64_t num_visible = 0;
    for (std::int64_t kv_idx = 0; kv_idx < seqlen_kv_; ++kv_idx) {
      const bool is_hidden = !is_in_sight(q.row, kv_idx);
      if (!is_hidden) ++num_visible;
      const bool is_read = (is_hidden && has(BackwardFault::hidden_key_read)) ||
                           (lse(q) == -kInfinity && has(BackwardFault::blind_row_read));
      if (!is_hidden || is_read) add_key(q, {q.batch, kv_idx, kv_head}, delta);
    }
    if (forward_.sinks) add_sink(q, num_visible == 0 ? -dlse(q) : delta);
  }

  /// rowsum(dO ∘ O) - dlse
  float delta_of(const Place& q) const {
    float delta = 0;
    if (has(BackwardFault::delta_of_dout_squared)) {
      delta = dot(args_.dout, q, args_.dout, q);
    } else if (!has(BackwardFault::delta_missing)) {
      delta = dot(args_.dout, q, forward_.out, q);
    }
    if (has(BackwardFault::dlse_added)) return delta + dlse(q);
    if (has(BackwardFault::delta_in_bf16)) return bf16_rounded(delta) - dlse(q);
    return has(BackwardFault::dlse_ignored) ? delta : delta - dlse(q);
  }

  void add_key(const Place& q, const Place& kv, float delta) {
    const bool is_hidden = !is_in_sight(q.row, kv.row);
    const float raw = is_hidden ? 0 : dot(forward_.q, q, forward_.k, kv) * scale_;
    const float probability = is_hidden ? 0 : std::exp(score(q, kv, raw) - denominator(q, kv));
    const float kept = keep_factor(q, kv.row);
    const float dp_kept = has(BackwardFault::dropout_missing_in_dp) ? 1 : kept;
    float ds = probability * (dp_kept * dot(args_.dout, q, forward_.v, kv) - delta);
    if (has(BackwardFault::ds_in_bf16)) ds = bf16_rounded(ds);
    if (features_.bias)
      bias_gradient(q, kv.row) += has(BackwardFault::bias_gradient_scaled) ? ds * scale_ : ds;
    if (features_.bias && features_.softcap != 0) softcap_gradient() += ds * slope_by_cap(raw);
    const float dz = ds * slope(raw);
    add_to_dq(q, kv, dz);
    add_to_keys(q, kv, dz, probability * dv_kept(kept));
  }

  void add_to_dq(const Place& q, const Place& kv, float dz) const {
    if (has(BackwardFault::last_key_missing_in_dq) && kv.row == seqlen_kv_ - 1) return;
    const float twice = has(BackwardFault::scale_twice_in_dq) ? scale_ : 1;
    add(args_.dq, q, dz * scale_ * twice, forward_.k, kv);
    if (!has(BackwardFault::dq_sum_in_bf16)) return;
    auto* const sums = static_cast<float*>(args_.dq.mutable_data());
    for (std::int64_t dim = 0; dim < args_.dq.size(3); ++dim) {
      float& sum = sums[offset(args_.dq, q, dim)];
      sum = bf16_rounded(sum);
    }
  }

  void add_to_keys(const Place& q, const Place& kv, float dz, float weight) {
    if (has(BackwardFault::last_query_missing_in_dk) && q.row == seqlen_q_ - 1) return;
    const std::int64_t group = forward_.q.size(2) / forward_.k.size(2);
    const bool is_last_of_group = q.head % group == group - 1;
    if (has(BackwardFault::gqa_last_head_wins) && !is_last_of_group) return;
    add(args_.dk, kv, has(BackwardFault::scale_missing_in_dk) ? dz : dz * scale_, forward_.q, q);
    Place into = kv;
    if (has(BackwardFault::batch_of_neighbour_in_dv))
      into.batch = (kv.batch + 1) % forward_.q.size(0);
    if (has(BackwardFault::weight_in_bf16)) weight = bf16_rounded(weight);
    add(args_.dv, into, weight, args_.dout, q);
  }

  void add_sink(const Place& q, float delta) {
    if (has(BackwardFault::sink_gradient_without_dlse)) delta += dlse(q);
    const auto sink =
        static_cast<float>(reference::element(forward_.sinks, q.head * forward_.sinks.stride(0)));
    const float step = std::exp(sink - lse(q)) * delta;
    static_cast<float*>(args_.dsinks.mutable_data())[q.head * args_.dsinks.stride(0)] +=
        has(BackwardFault::sink_gradient_sign) ? step : -step;
  }

  float score(const Place& q, const Place& kv, float raw) const {
    const float cap = features_.softcap;
    const float capped = cap == 0 ? raw : cap * std::tanh(raw / cap);
    if (!features_.bias) return capped;
    const TensorView& bias = features_.bias;
    return capped +
           static_cast<float>(reference::element(
               bias, q.head * bias.stride(0) + q.row * bias.stride(1) + kv.row * bias.stride(2)));
  }

  float slope(float raw) const {
    if (features_.softcap == 0 || has(BackwardFault::softcap_slope_missing)) return 1;
    const float x = raw / features_.softcap;
    const float t = has(BackwardFault::softcap_slope_at_raw_score) ? x : std::tanh(x);
    return 1 - t * t;
  }

  float slope_by_cap(float raw) const {
    const float x = raw / features_.softcap;
    const float t = std::tanh(x);
    return t - x * (1 - t * t);
  }

  float denominator(const Place& q, const Place& at) const {
    if (!has(BackwardFault::probability_without_sink) || !forward_.sinks) return lse(q);
    float sum = 0;
    for (std::int64_t kv_idx = 0; kv_idx < seqlen_kv_; ++kv_idx) {
      const Place kv{at.batch, kv_idx, at.head};
      if (is_in_sight(q.row, kv_idx))
        sum += std::exp(score(q, kv, dot(forward_.q, q, forward_.k, kv) * scale_));
    }
    return std::log(sum);
  }

  bool is_in_sight(std::int64_t q_idx, std::int64_t kv_idx) const {
    if (kv_idx < features_.num_hidden_keys) return false;
    if (!features_.is_causal) return true;
    std::int64_t diagonal = q_idx + seqlen_kv_ - seqlen_q_;
    if (has(BackwardFault::causal_top_left)) diagonal = q_idx;
    if (has(BackwardFault::causal_off_by_one)) ++diagonal;
    return kv_idx <= diagonal;
  }

  float keep_factor(const Place& q, std::int64_t kv_idx) const {
    const Dropout& dropout = forward_.dropout;
    if (dropout.p == 0) return 1;
    const bool is_transposed = has(BackwardFault::dropout_transposed);
    const philox::Key key = philox::dropout_key(dropout.seed, dropout.offset);
    const std::uint32_t word = philox::random_word(
        key, q.batch, q.head, is_transposed ? kv_idx : q.row, is_transposed ? q.row : kv_idx);
    return word >= philox::drop_threshold(dropout.p) ? 1 / (1 - dropout.p) : 0;
  }

  float dv_kept(float kept) const {
    if (has(BackwardFault::dropout_missing_in_dv)) return 1;
    if (has(BackwardFault::dropout_not_rescaled_in_dv)) return kept > 0 ? 1 : 0;
    return kept;
  }

  float statistic(const TensorView& view, const Place& q) const {
    return static_cast<float>(reference::element(
        view, q.batch * view.stride(0) + q.head * view.stride(1) + q.row * view.stride(2)));
  }
  float lse(const Place& q) const { return statistic(forward_.lse, q); }
  float dlse(const Place& q) const { return args_.dlse ? statistic(args_.dlse, q) : 0; }

  float& bias_gradient(const Place& q, std::int64_t kv_idx) {
    const TensorView& view = args_.dcaptured[0].view;
    return static_cast<float*>(
        view.mutable_data())[q.head * view.stride(0) + q.row * view.stride(1) +
                             kv_idx * view.stride(2)];
  }

  float& softcap_gradient() { return *static_cast<float*>(args_.dcaptured[1].view.mutable_data()); }

  const AttentionBackward& args_;
  const AttentionForward& forward_;
  const PlantedBackwardFeatures& features_;
  BackwardFault fault_;
  std::int64_t seqlen_q_, seqlen_kv_;
  float scale_;
};

}  // namespace

void planted_attention_backward(const AttentionBackward& args,
                                const PlantedBackwardFeatures& features, BackwardFault fault) {
  Planted(args, features, fault).run();
}

}  // namespace fovea::testing
