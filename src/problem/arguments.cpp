// What the arguments of a call must satisfy beside the plan's problem, before anything is written.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "expr/print.hpp"
#include "problem/backward.hpp"
#include "problem/captured_tensors.hpp"
#include "problem/forward.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

/// Of scales that a call gives: reciprocals and products with codes are finite then.
constexpr float kLeastScale = 0x1p-126F;
constexpr float kMostScale = 0x1p118F;

class Checker {
 public:
  Checker(const ForwardProblem& problem, const AttentionForward& args, std::string_view where,
          bool is_written)
      : f_(problem), args_(args), door_(where, problem.device()), is_written_(is_written) {}

  void check() {
    check_tensors();
    check_programs();
    check_features();
    check_quantization();
    check_sequences();
    if (is_written_) check_overlap();
  }

 private:
  [[noreturn]] void refuse(const std::string& message) const { door_.refuse(message); }

  std::int64_t length(const std::optional<UpTo>& bound, const TensorView& view,
                      std::string_view name, std::int64_t planned) const {
    if (f_.is_varlen || view.rank() != 4) return planned;
    if (bound && view.size(1) > bound->value) {
      refuse(fmt::format("{} has length {}; expected at most {}, the bound of the plan", name,
                         view.size(1), bound->value));
    }
    return bound ? view.size(1) : planned;
  }

  void check_tensors() {
    const Problem& p = f_.problem;
    seqlen_q_ = length(p.seqlen_q, args_.q, "q", f_.seqlen_q);
    seqlen_kv_ = length(p.seqlen_kv, args_.k, "k", f_.seqlen_kv);
    const std::int64_t total_kv = p.k.shape[0];
    const auto rows = [this](std::int64_t total, std::int64_t seqlen, std::int64_t heads,
                             std::int64_t head_dim) {
      return f_.is_varlen ? std::vector{total, heads, head_dim}
                          : std::vector{f_.num_sequences, seqlen, heads, head_dim};
    };
    door_.check({"q", args_.q}, p.q.dtype,
                rows(f_.total_q, seqlen_q_, f_.num_heads_q, f_.head_dim_qk));
    door_.check({"k", args_.k}, p.k.dtype,
                rows(total_kv, seqlen_kv_, f_.num_heads_kv, f_.head_dim_qk));
    door_.check({"v", args_.v}, p.v.dtype,
                rows(total_kv, seqlen_kv_, f_.num_heads_kv, f_.head_dim_v));
    door_.check({"out", args_.out, is_written_}, p.out.dtype,
                rows(f_.total_q, seqlen_q_, f_.num_heads_q, f_.head_dim_v));
    const std::vector<std::int64_t> row_shape =
        f_.is_varlen ? std::vector{f_.num_heads_q, f_.total_q}
                     : std::vector{f_.num_sequences, f_.num_heads_q, seqlen_q_};
    check_optional({"lse", args_.lse, is_written_}, p.wants_lse, Dtype::f32, row_shape);
    if (is_written_)
      check_optional({"row_max", args_.row_max, true}, p.wants_row_max, Dtype::f32, row_shape);
    check_optional({"sinks", args_.sinks}, p.has_sinks, Dtype::f32, {f_.num_heads_q});
    for (const auto& [name, view] : {NamedView{"dropout_seed", &args_.dropout_seed},
                                     {"dropout_offset", &args_.dropout_offset}}) {
      check_optional({name, *view}, p.reads_dropout_seed, Dtype::i64, {1});
    }
    check_dropout_places();
  }

  void check_dropout_places() const {
    const TensorView& places = args_.dropout_places;
    check_optional({"dropout_places", places}, f_.problem.has_dropout_places, Dtype::i32,
                   {f_.num_sequences + f_.num_heads_q + seqlen_q_ + seqlen_kv_});
    if (places && places.size(0) > 1 && places.stride(0) != 1)
      refuse(fmt::format("dropout_places has stride {}; expected 1", places.stride(0)));
  }

  void check_optional(const NamedTensor& e, bool is_planned, Dtype dtype,
                      const std::vector<std::int64_t>& shape) const {
    if (static_cast<bool>(e.view) != is_planned) {
      refuse(fmt::format("{} is {}; the plan was made {} it", e.name, e.view ? "given" : "missing",
                         is_planned ? "with" : "without"));
    }
    if (e.view) door_.check(e, dtype, shape);
  }

  template <typename P>
  void check_program(std::string_view name, const P& given, const P& planned) const {
    if (given == planned) return;
    constexpr std::size_t kMostShown = 256;  // bytes of a formula in a message
    refuse(fmt::format("{} is '{}'; expected the plan's '{}'", name,
                       expr::print_up_to(given.formula().node(), kMostShown),
                       expr::print_up_to(planned.formula().node(), kMostShown)));
  }

  void check_programs() const {
    check_program("score", args_.score, f_.problem.score);
    check_program("mask", args_.mask, f_.problem.mask);
    IndexCounts counts = index_counts(f_);
    if (!f_.is_varlen) {
      counts.seqlen_q = seqlen_q_;
      counts.seqlen_kv = seqlen_kv_;
    }
    check_captured_tensors(f_, args_.score, args_.mask, counts, door_);
  }

  void check_features() const {
    const Problem& p = f_.problem;
    if ((args_.dropout.p > 0) != (p.dropout.p > 0) ||
        !(args_.dropout.p >= 0 && args_.dropout.p <= 1)) {
      refuse(
          fmt::format("dropout.p is {}; the plan was made with {}", args_.dropout.p, p.dropout.p));
    }
    if (args_.cpu_target != CpuTarget::automatic && args_.cpu_target != p.cpu_target) {
      refuse(fmt::format("cpu_target is {}; the plan was made with {}", name(args_.cpu_target),
                         name(p.cpu_target)));
    }
    if (args_.compute_dtype != ComputeDtype::automatic && args_.compute_dtype != p.compute_dtype) {
      refuse("compute_dtype differs from the plan's; expected the same, or make another plan");
    }
    if (args_.sm_margin != 0 && args_.sm_margin != p.sm_margin) {
      refuse(fmt::format("sm_margin is {}; the plan was made with {}, expected that or 0",
                         args_.sm_margin, p.sm_margin));
    }
    if (args_.softmax_scale != p.softmax_scale) {
      refuse("softmax_scale differs from the plan's; expected the same, or make another plan");
    }
  }

  void check_quantization() const {
    const Quantization& quant = f_.problem.quant;
    if (!args_.quant.is_none() && args_.quant != quant)
      refuse(fmt::format("quant is {}; the plan was made with {}, expected that or none",
                         print(args_.quant), print(quant)));
    const bool are_given = quant.scales == ScaleSource::given;
    const bool has_qk = are_given && quant.qk != QuantFormat::none;
    check_scale("q_scale", args_.q_scale, has_qk);
    check_scale("k_scale", args_.k_scale, has_qk);
    check_scale("v_scale", args_.v_scale, are_given && quant.pv != QuantFormat::none);
  }

  void check_scale(std::string_view name, const TensorView& scale, bool is_expected) const {
    const Quantization& quant = f_.problem.quant;
    const std::vector<std::int64_t> shape{f_.num_sequences, f_.num_heads_kv};
    if (static_cast<bool>(scale) != is_expected) {
      refuse(fmt::format(
          "{} is {} and quant is {}; expected {}", name, scale ? "given" : "missing", print(quant),
          is_expected ? fmt::format("f32 [{}]: its scales are given", fmt::join(shape, ", "))
                      : "none: only recipes with scales=given read it"));
    }
    if (!scale) return;
    door_.check({name, scale}, Dtype::f32, shape);
    if (door_.is_host()) check_scale_values(name, scale);
  }

  void check_scale_values(std::string_view name, const TensorView& scale) const {
    for (std::int64_t sequence = 0; sequence < scale.size(0); ++sequence) {
      for (std::int64_t head = 0; head < scale.size(1); ++head) {
        const float value = scale_at(scale, sequence, head);
        if (value >= kLeastScale && value <= kMostScale) continue;
        refuse(fmt::format("{}[{}, {}] is {}; expected a number from {} to {}", name, sequence,
                           head, value, kLeastScale, kMostScale));
      }
    }
  }

  void check_sequences() const {
    if (!f_.is_varlen) {
      if (args_.cu_seqlens_q || args_.cu_seqlens_kv) {
        refuse(fmt::format("{} is given; the plan was made without num_sequences",
                           args_.cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_kv"));
      }
      return;
    }
    check_packed_offsets({.name = "cu_seqlens_q",
                          .cu_seqlens = args_.cu_seqlens_q,
                          .batch = f_.num_sequences,
                          .total = f_.total_q,
                          .longest = f_.seqlen_q,
                          .longest_name = "the plan's seqlen_q"},
                         door_);
    check_packed_offsets({.name = "cu_seqlens_kv",
                          .cu_seqlens = args_.cu_seqlens_kv,
                          .batch = f_.num_sequences,
                          .total = f_.problem.k.shape[0],
                          .longest = f_.seqlen_kv,
                          .longest_name = "the plan's seqlen_kv"},
                         door_);
  }

  void check_overlap() const {
    OverlapCheck overlap;
    overlap.add_inputs(args_);
    for (const auto& [name, view] :
         {NamedView{"out", &args_.out}, {"lse", &args_.lse}, {"row_max", &args_.row_max}}) {
      overlap.add_output(name, *view);
    }
    overlap.add_output("workspace", args_.workspace);
    overlap.refuse_overlap(door_);
  }

  const ForwardProblem& f_;
  const AttentionForward& args_;
  TensorChecks door_;
  bool is_written_;  // out, lse and row_max: by this call, or by an earlier one
  std::int64_t seqlen_q_ = 0, seqlen_kv_ = 0;
};

}  // namespace

Dropout dropout_of(const AttentionForward& args) {
  const auto number = [](const TensorView& tensor) {
    return tensor ? *static_cast<const std::uint64_t*>(tensor.data()) : 0;
  };
  return {.p = args.dropout.p,
          .seed = args.dropout.seed + number(args.dropout_seed),
          .offset = args.dropout.offset + number(args.dropout_offset)};
}

philox::Places dropout_places_of(const AttentionForward& args) {
  if (!args.dropout_places) return {};
  const auto* const batch = static_cast<const std::int32_t*>(args.dropout_places.data());
  const std::int32_t* const q_head = batch + args.q.size(0);
  const std::int32_t* const q = q_head + args.q.size(2);
  return {.batch = batch, .q_head = q_head, .q = q, .kv = q + args.q.size(1)};
}

float scale_at(const TensorView& scale, std::int64_t sequence, std::int64_t kv_head) {
  return static_cast<const float*>(
      scale.data())[sequence * scale.stride(0) + kv_head * scale.stride(1)];
}

std::int64_t cu_seqlen(const TensorView& cu_seqlens, std::int64_t index) {
  const std::int64_t at = index * cu_seqlens.stride(0);
  if (cu_seqlens.dtype() == Dtype::i64)
    return static_cast<const std::int64_t*>(cu_seqlens.data())[at];
  return static_cast<const std::int32_t*>(cu_seqlens.data())[at];
}

void validate_arguments(const ForwardProblem& problem, const AttentionForward& args,
                        std::string_view where) {
  Checker(problem, args, where, /*is_written=*/true).check();
}

void validate_past_arguments(const ForwardProblem& problem, const AttentionForward& args,
                             std::string_view where) {
  Checker(problem, args, where, /*is_written=*/false).check();
}

}  // namespace fovea
