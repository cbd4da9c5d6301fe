// What the arguments of a call must satisfy beside the plan's problem, before anything is written.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "problem/forward.hpp"

namespace fovea {
namespace {

struct Expected {
  std::string_view name;
  const TensorView& view;
  bool is_output = false;
};

class Checker {
 public:
  Checker(const ForwardProblem& problem, const AttentionForward& args, std::string_view where)
      : f_(problem), args_(args), where_(where) {}

  void check() {
    check_tensors();
    check_programs();
    check_features();
    check_sequences();
    check_overlap();
  }

 private:
  [[noreturn]] void refuse(const std::string& message) const { invalid(where_, message); }

  void check_tensor(const Expected& e, Dtype dtype, std::vector<std::int64_t> shape) const {
    const TensorSpec& spec = e.view.spec();
    const std::span got(spec.shape.data(), static_cast<std::size_t>(spec.rank));
    if (spec.dtype != dtype || !std::ranges::equal(got, shape)) {
      refuse(fmt::format("{} is {}; expected {}", e.name,
                         spec.rank == 0 ? "missing" : to_string(spec),
                         to_string(make_spec(dtype, shape))));
    }
    check_memory(e);
  }

  void check_memory(const Expected& e) const {
    const TensorSpec& spec = e.view.spec();
    if (spec.device != Device::cpu()) {
      refuse(fmt::format("{} lives on cuda:{}; expected host memory for a plan on the cpu", e.name,
                         spec.device.index));
    }
    if (spec.num_elements() == 0) return;
    if (e.view.data() == nullptr) refuse(fmt::format("{} has no data; expected a pointer", e.name));
    if (reinterpret_cast<std::uintptr_t>(e.view.data()) % size_bytes(spec.dtype) != 0) {
      refuse(fmt::format("{} is not aligned to its elements of {} bytes", e.name,
                         size_bytes(spec.dtype)));
    }
    if (e.is_output && !e.view.is_mutable())
      refuse(fmt::format("{} is read-only; expected a view of writable memory", e.name));
    if (e.is_output) check_distinct_elements(e);
  }

  /// An output whose strides let two indices meet would be written twice.
  void check_distinct_elements(const Expected& e) const {
    const TensorSpec& spec = e.view.spec();
    std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // |stride|, extent
    for (int i = 0; i < spec.rank; ++i) {
      if (e.view.size(i) > 1) dims.emplace_back(std::abs(e.view.stride(i)), e.view.size(i));
    }
    std::ranges::sort(dims);
    std::int64_t reach = 0;
    for (const auto& [stride, extent] : dims) {
      if (stride <= reach) {
        refuse(fmt::format("{} is {}; expected strides that give every element its own place",
                           e.name, to_string(spec)));
      }
      reach += stride * (extent - 1);
    }
  }

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
    check_tensor({"q", args_.q}, p.q.dtype,
                 rows(f_.total_q, seqlen_q_, f_.num_heads_q, f_.head_dim_qk));
    check_tensor({"k", args_.k}, p.k.dtype,
                 rows(total_kv, seqlen_kv_, f_.num_heads_kv, f_.head_dim_qk));
    check_tensor({"v", args_.v}, p.v.dtype,
                 rows(total_kv, seqlen_kv_, f_.num_heads_kv, f_.head_dim_v));
    check_tensor({"out", args_.out, true}, p.out.dtype,
                 rows(f_.total_q, seqlen_q_, f_.num_heads_q, f_.head_dim_v));
    const std::vector<std::int64_t> row_shape =
        f_.is_varlen ? std::vector{f_.num_heads_q, f_.total_q}
                     : std::vector{f_.num_sequences, f_.num_heads_q, seqlen_q_};
    check_optional({"lse", args_.lse, true}, p.wants_lse, Dtype::f32, row_shape);
    check_optional({"row_max", args_.row_max, true}, p.wants_row_max, Dtype::f32, row_shape);
    check_optional({"sinks", args_.sinks}, p.has_sinks, Dtype::f32, {f_.num_heads_q});
  }

  void check_optional(const Expected& e, bool is_planned, Dtype dtype,
                      const std::vector<std::int64_t>& shape) const {
    if (static_cast<bool>(e.view) != is_planned) {
      refuse(fmt::format("{} is {}; the plan was made {} it", e.name, e.view ? "given" : "missing",
                         is_planned ? "with" : "without"));
    }
    if (e.view) check_tensor(e, dtype, shape);
  }

  void check_programs() const {
    if (!(args_.score == f_.problem.score)) {
      refuse(fmt::format("score is '{}'; expected the plan's '{}'", args_.score.to_string(),
                         f_.problem.score.to_string()));
    }
    if (!(args_.mask == f_.problem.mask)) {
      refuse(fmt::format("mask is '{}'; expected the plan's '{}'", args_.mask.to_string(),
                         f_.problem.mask.to_string()));
    }
    for (const Program* program :
         {static_cast<const Program*>(&args_.score), static_cast<const Program*>(&args_.mask)}) {
      for (const CapturedTensor& tensor : program->captures().tensors)
        check_memory({tensor.name, tensor.view});
    }
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
    if (args_.softmax_scale != p.softmax_scale) {
      refuse("softmax_scale differs from the plan's; expected the same, or make another plan");
    }
  }

  void check_cu_seqlens(std::string_view name, const TensorView& cu, std::int64_t total,
                        std::int64_t bound, std::string_view bound_name) const {
    const Dtype dtype = cu.dtype();
    if (!cu || (dtype != Dtype::i32 && dtype != Dtype::i64) || cu.rank() != 1 ||
        cu.size(0) != f_.num_sequences + 1) {
      refuse(fmt::format("{} is {}; expected i32 or i64 [{}]", name,
                         cu ? to_string(cu.spec()) : "missing", f_.num_sequences + 1));
    }
    check_memory({name, cu});
    std::int64_t before = cu_seqlen(cu, 0);
    if (before != 0) refuse(fmt::format("{} starts at {}; expected 0", name, before));
    for (std::int64_t i = 1; i <= f_.num_sequences; ++i) {
      const std::int64_t end = cu_seqlen(cu, i);
      if (end < before) {
        refuse(fmt::format("{}[{}] is {} after {}; expected offsets that never decrease", name, i,
                           end, before));
      }
      if (end - before > bound) {
        refuse(
            fmt::format("{} gives sequence {} a length of {}; expected at most {}, the plan's {}",
                        name, i - 1, end - before, bound, bound_name));
      }
      before = end;
    }
    if (before > total)
      refuse(
          fmt::format("{} ends at {}; expected at most {}, the packed rows", name, before, total));
  }

  void check_sequences() const {
    if (!f_.is_varlen) {
      if (args_.cu_seqlens_q || args_.cu_seqlens_kv) {
        refuse(fmt::format("{} is given; the plan was made without num_sequences",
                           args_.cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_kv"));
      }
      return;
    }
    check_cu_seqlens("cu_seqlens_q", args_.cu_seqlens_q, f_.total_q, f_.seqlen_q, "seqlen_q");
    check_cu_seqlens("cu_seqlens_kv", args_.cu_seqlens_kv, f_.problem.k.shape[0], f_.seqlen_kv,
                     "seqlen_kv");
  }

  struct Range {
    std::string_view name;
    const std::byte* begin;
    const std::byte* end;
  };

  static void add_range(std::vector<Range>& ranges, std::string_view name, const TensorView& view) {
    if (!view || view.spec().num_elements() == 0) return;
    const auto element = static_cast<std::int64_t>(size_bytes(view.dtype()));
    std::int64_t low = 0;
    std::int64_t high = 0;
    for (int i = 0; i < view.rank(); ++i) {
      const std::int64_t reach = view.stride(i) * (view.size(i) - 1) * element;
      (reach < 0 ? low : high) += reach;
    }
    const auto* data = static_cast<const std::byte*>(view.data());
    ranges.push_back({name, data + low, data + high + element});
  }

  void check_overlap() const {
    std::vector<Range> inputs;
    std::vector<Range> outputs;
    for (const auto& [name, view] : {std::pair{"q", &args_.q},
                                     {"k", &args_.k},
                                     {"v", &args_.v},
                                     {"sinks", &args_.sinks},
                                     {"cu_seqlens_q", &args_.cu_seqlens_q},
                                     {"cu_seqlens_kv", &args_.cu_seqlens_kv}}) {
      add_range(inputs, name, *view);
    }
    for (const Program* program :
         {static_cast<const Program*>(&args_.score), static_cast<const Program*>(&args_.mask)}) {
      for (const CapturedTensor& tensor : program->captures().tensors)
        add_range(inputs, tensor.name, tensor.view);
    }
    for (const auto& [name, view] :
         {std::pair{"out", &args_.out}, {"lse", &args_.lse}, {"row_max", &args_.row_max}}) {
      add_range(outputs, name, *view);
    }
    if (!args_.workspace.empty()) {
      outputs.push_back(
          {"workspace", args_.workspace.data(), args_.workspace.data() + args_.workspace.size()});
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      for (const Range& input : inputs) refuse_overlap(outputs[i], input);
      for (std::size_t j = 0; j < i; ++j) refuse_overlap(outputs[i], outputs[j]);
    }
  }

  void refuse_overlap(const Range& a, const Range& b) const {
    if (a.begin < b.end && b.begin < a.end) {
      refuse(fmt::format("{} overlaps {}; expected memory of its own", a.name, b.name));
    }
  }

  const ForwardProblem& f_;
  const AttentionForward& args_;
  std::string where_;
  std::int64_t seqlen_q_ = 0, seqlen_kv_ = 0;
};

}  // namespace

std::int64_t cu_seqlen(const TensorView& cu_seqlens, std::int64_t index) {
  const std::int64_t at = index * cu_seqlens.stride(0);
  if (cu_seqlens.dtype() == Dtype::i64)
    return static_cast<const std::int64_t*>(cu_seqlens.data())[at];
  return static_cast<const std::int32_t*>(cu_seqlens.data())[at];
}

void validate_arguments(const ForwardProblem& problem, const AttentionForward& args,
                        std::string_view where) {
  Checker(problem, args, where).check();
}

}  // namespace fovea
