// Validation: what a Problem must satisfy by itself. Arguments at run time are arguments.cpp's business.
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <string>

#include "core/check.hpp"
#include "expr/interval.hpp"
#include "expr/passes.hpp"
#include "problem/captured_tensors.hpp"
#include "problem/forward.hpp"
#include "problem/input_codes.hpp"
#include "problem/strided_overlap.hpp"
#include "quant/check.hpp"
#include "quant/row_codes.hpp"

namespace fovea {
namespace {

constexpr int kMaxThreads = 4096;
constexpr std::int64_t kMaxSeqlen =
    std::numeric_limits<std::int32_t>::max();   // positions are 32-bit in programs
constexpr std::int64_t kMaxIndex = kMaxSeqlen;  // so are the numbers of sequences and heads
/// Of q and of out, lengths at their bounds: more than addresses of 48 bits reach. Below it no product of sizes after
/// validation overflows, a workspace neither.
constexpr std::int64_t kMaxElements = std::int64_t{1} << 48;

std::int64_t dim(const TensorSpec& spec, int index) {
  return spec.shape[static_cast<std::size_t>(index)];
}

struct ProblemChecks {
  std::string where;
  [[noreturn]] void refuse(const std::string& message) const { invalid(where, message); }

  void check_rank(std::string_view name, const TensorSpec& spec, bool is_varlen) const {
    const int expected = is_varlen ? 3 : 4;
    if (spec.rank == expected) return;
    refuse(fmt::format("{} is {}; expected rank {}: {}", name,
                       spec.rank == 0 ? "missing" : to_string(spec), expected,
                       is_varlen ? "[total, heads, head_dim] (packed: cu_seqlens are given)"
                                 : "[batch, seqlen, heads, head_dim]"));
  }

  /// Specs are plain structs, so a caller can fill in what make_spec would refuse.
  void check_extents(std::string_view name, const TensorSpec& spec) const {
    std::int64_t num_elements = 1;
    for (int i = 0; i < spec.rank; ++i) {
      const std::int64_t extent = dim(spec, i);
      if (extent < 0) {
        refuse(fmt::format("{} has extent {} in dimension {}; expected >= 0", name, extent, i));
      }
      if (extent > 0 && __builtin_mul_overflow(num_elements, extent, &num_elements)) {
        refuse(fmt::format("{} has more than 2^63 elements", name));
      }
    }
    if (!byte_reach(spec)) {
      refuse(
          fmt::format("{} is {}; expected strides that keep every element within 2^60 bytes of "
                      "the first",
                      name, to_string(spec)));
    }
  }

  void check_index(std::string_view name, std::int64_t count) const {
    if (count > kMaxIndex)
      refuse(fmt::format("{} is {}; expected at most {}", name, count, kMaxIndex));
  }

  void check_equal(std::string_view what, std::string_view a, std::int64_t got, std::string_view b,
                   std::int64_t expected, std::string_view hint) const {
    if (got != expected) {
      refuse(fmt::format("{} has {} {} but {} has {}; expected equal{}", a, what, got, b, expected,
                         hint));
    }
  }

  void check_dtypes(const Problem& p, KvDtypes kv_dtypes) const {
    const Dtype dtype = p.q.dtype;
    const bool may_be_codes = kv_dtypes == KvDtypes::of_q;
    if (!is_float(dtype) && !(may_be_codes && are_codes(dtype))) {
      refuse(fmt::format("q is {}; expected f32, f16 or bf16{}", name(dtype),
                         may_be_codes ? ", or e4m3 by quant fp8_static" : ""));
    }
    for (const auto& [label, spec] : {std::pair{"k", &p.k}, std::pair{"v", &p.v}}) {
      if (kv_dtypes == KvDtypes::of_cache) {
        if (!is_float(spec->dtype) && !quant::is_code(spec->dtype)) {
          refuse(fmt::format("{} is {}; expected f32, f16 or bf16, or codes: i8 or e4m3", label,
                             name(spec->dtype)));
        }
      } else if (spec->dtype != dtype) {
        refuse(fmt::format("{} is {} but q is {}; expected equal dtypes", label, name(spec->dtype),
                           name(dtype)));
      }
    }
  }

  /// Codes are a recipe's, by scales of the call, of what nothing was subtracted from.
  void check_recipe_of_codes(const Problem& p) const {
    if (!are_codes(p.q.dtype)) return;
    const Quantization& quant = p.quant;
    const bool has_codes = quant.qk == QuantFormat::e4m3 && quant.pv == QuantFormat::e4m3 &&
                           quant.scales == ScaleSource::given;
    const bool is_smoothed = quant.smooth_q != Smoothing::none ||
                             quant.smooth_k != Smoothing::none ||
                             quant.smooth_v != Smoothing::none || quant.hadamard;
    if (has_codes && !is_smoothed) return;
    refuse(
        fmt::format("q, k and v are {} and quant is {}; expected fp8_static, or what differs from "
                    "it in how probabilities are rounded: codes are multiplied as they are, by "
                    "scales that the call gives",
                    name(p.q.dtype), print(quant)));
  }

  void check_device(std::string_view name, const TensorSpec& spec, const TensorSpec& q) const {
    if (spec.device == q.device) return;
    refuse(fmt::format("{} lives on {} but q on {}; expected one device", name,
                       to_string(spec.device), to_string(q.device)));
  }

  void check_scalars(const Problem& p) const {
    if (p.softmax_scale && !std::isfinite(*p.softmax_scale)) {
      refuse(fmt::format("softmax_scale is {}; expected a finite number", *p.softmax_scale));
    }
    if (!(p.dropout.p >= 0 && p.dropout.p <= 1)) {
      refuse(fmt::format("dropout.p is {}; expected a probability in [0, 1]", p.dropout.p));
    }
    if (p.has_dropout_places && p.num_sequences) {
      refuse(
          "dropout_places is given for packed sequences; expected none: dropout draws for each "
          "of them alone");
    }
    if (p.num_threads < 0 || p.num_threads > kMaxThreads) {
      refuse(fmt::format("num_threads is {}; expected 0 to {}, 0 for automatic", p.num_threads,
                         kMaxThreads));
    }
    if (p.sm_margin < 0)
      refuse(fmt::format("sm_margin is {}; expected >= 0, the SMs to leave free", p.sm_margin));
    for (const auto& [label, bound] :
         {std::pair{"seqlen_q", &p.seqlen_q}, std::pair{"seqlen_kv", &p.seqlen_kv}}) {
      if (*bound && ((*bound)->value < 0 || (*bound)->value > kMaxSeqlen)) {
        refuse(
            fmt::format("{} is up_to({}); expected 0 to {}", label, (*bound)->value, kMaxSeqlen));
      }
    }
  }
};

void check_output(const ProblemChecks& checks, const ForwardProblem& f) {
  const TensorSpec& out = f.problem.out;
  const int rank = f.is_varlen ? 3 : 4;
  if (!is_float(out.dtype))
    checks.refuse(fmt::format("out is {}; expected f32, f16 or bf16", name(out.dtype)));
  checks.check_rank("out", out, f.is_varlen);
  checks.check_extents("out", out);
  checks.check_device("out", out, f.problem.q);
  TensorSpec expected = f.problem.q;
  expected.shape[static_cast<std::size_t>(rank - 1)] = f.head_dim_v;
  for (int i = 0; i < rank; ++i) {
    if (dim(out, i) != dim(expected, i)) {
      const std::span shape(expected.shape.data(), static_cast<std::size_t>(rank));
      checks.refuse(fmt::format("out is {}; expected {}", to_string(out),
                                to_string(make_spec(out.dtype, shape))));
    }
  }
}

/// Bounds of every variable of a program, for the check of its loads. What scalars and tensors hold proves nothing: it
/// changes from call to call of one plan, and no call is refused for what another one held.
expr::Box position_bounds(const ForwardProblem& f) {
  using expr::Interval;
  using expr::Variable;
  expr::Box box;
  box.are_scalars_known = false;
  const auto set = [&box](Variable variable, std::int64_t lo, std::int64_t hi) {
    box.variables[static_cast<std::size_t>(variable)] =
        Interval{static_cast<double>(lo), static_cast<double>(hi), false};
  };
  const auto last = [](std::int64_t count) { return std::max<std::int64_t>(0, count - 1); };
  const bool is_bounded_q = f.is_varlen || f.problem.seqlen_q.has_value();
  const bool is_bounded_kv = f.is_varlen || f.problem.seqlen_kv.has_value();
  box.variables[static_cast<std::size_t>(Variable::score)] = Interval::whole();
  set(Variable::batch, 0, last(f.num_sequences));
  set(Variable::q_head, 0, last(f.num_heads_q));
  set(Variable::kv_head, 0, last(f.num_heads_kv));
  set(Variable::q_idx, 0, last(f.seqlen_q));
  set(Variable::kv_idx, 0, last(f.seqlen_kv));
  set(Variable::seqlen_q, is_bounded_q ? 0 : f.seqlen_q, f.seqlen_q);
  set(Variable::seqlen_kv, is_bounded_kv ? 0 : f.seqlen_kv, f.seqlen_kv);
  return box;
}

void check_captures(const ProblemChecks& checks, const Program& program, const ForwardProblem& f) {
  const TensorChecks door(checks.where, f.device());
  const IndexCounts counts = index_counts(f);
  for (const CapturedTensor& tensor : program.captures().tensors) {
    checks.check_device(tensor.name, tensor.view.spec(), f.problem.q);
    checks.check_extents(tensor.name, tensor.view.spec());
    if (f.has_positions()) check_extents(tensor, counts, door);
  }
}

void check_programs(const ProblemChecks& checks, const ForwardProblem& f) {
  const expr::Box box = position_bounds(f);
  check_captures(checks, f.problem.score, f);
  check_captures(checks, f.problem.mask, f);
  expr::verify(f.problem.score.expr().node(), "score program as it was given");
  expr::verify(f.problem.mask.expr().node(), "mask program as it was given");
  // A problem without positions evaluates nothing, so nothing can be out of range.
  if (!f.has_positions()) return;
  expr::refuse_out_of_range_loads(f.problem.score.expr().shared(), box, checks.where + ": score");
  expr::refuse_out_of_range_loads(f.problem.mask.expr().shared(), box, checks.where + ": mask");
}

void resolve_heads(const ProblemChecks& checks, ForwardProblem& f) {
  const Problem& p = f.problem;
  const int heads = f.is_varlen ? 1 : 2;
  f.num_heads_q = dim(p.q, heads);
  f.num_heads_kv = dim(p.k, heads);
  f.head_dim_qk = dim(p.q, heads + 1);
  f.head_dim_v = dim(p.v, heads + 1);
  checks.check_equal("head_dim", "k", dim(p.k, heads + 1), "q", f.head_dim_qk,
                     " head_dim_qk (v alone may differ)");
  checks.check_equal("num_heads", "v", dim(p.v, heads), "k", f.num_heads_kv, " num_heads_kv");
  if (f.head_dim_qk == 0 || f.head_dim_v == 0) {
    checks.refuse(fmt::format("head_dim is {} (q, k) and {} (v); expected at least 1",
                              f.head_dim_qk, f.head_dim_v));
  }
  if (f.num_heads_q != 0 && (f.num_heads_kv == 0 || f.num_heads_q % f.num_heads_kv != 0)) {
    checks.refuse(fmt::format(
        "q has {} heads and k has {}; expected num_heads_q to be a multiple of num_heads_kv",
        f.num_heads_q, f.num_heads_kv));
  }
  checks.check_index("num_heads_q", f.num_heads_q);
  checks.check_index("num_heads_kv", f.num_heads_kv);
  f.group = f.num_heads_kv == 0 ? 1 : std::max<std::int64_t>(1, f.num_heads_q / f.num_heads_kv);
}

void resolve_lengths(const ProblemChecks& checks, ForwardProblem& f) {
  const Problem& p = f.problem;
  const std::int64_t rows_q = dim(p.q, f.is_varlen ? 0 : 1);
  const std::int64_t rows_kv = dim(p.k, f.is_varlen ? 0 : 1);
  checks.check_equal(f.is_varlen ? "total" : "seqlen", "v", dim(p.v, f.is_varlen ? 0 : 1), "k",
                     rows_kv, " lengths");
  if (!f.is_varlen) {
    f.num_sequences = dim(p.q, 0);
    checks.check_equal("batch", "k", dim(p.k, 0), "q", f.num_sequences, "");
    checks.check_equal("batch", "v", dim(p.v, 0), "q", f.num_sequences, "");
  } else {
    f.num_sequences = *p.num_sequences;
    if (f.num_sequences < 0) {
      checks.refuse(fmt::format("num_sequences is {}; expected >= 0", f.num_sequences));
    }
  }
  f.seqlen_q = p.seqlen_q ? p.seqlen_q->value : rows_q;
  f.seqlen_kv = p.seqlen_kv ? p.seqlen_kv->value : rows_kv;
  for (const auto& [label, length] :
       {std::pair{"seqlen_q", f.seqlen_q}, std::pair{"seqlen_kv", f.seqlen_kv}}) {
    if (length > kMaxSeqlen)
      checks.refuse(fmt::format("{} is {}; expected at most {}", label, length, kMaxSeqlen));
  }
  checks.check_index(f.is_varlen ? "num_sequences" : "batch", f.num_sequences);
  f.total_q = f.is_varlen ? rows_q : f.num_sequences * f.seqlen_q;
}

/// After heads and lengths: every product of sizes that is taken after validation, and every workspace, then fits 63
/// bits.
void check_sizes(const ProblemChecks& checks, const ForwardProblem& f) {
  const std::int64_t width = std::max(f.head_dim_qk, f.head_dim_v);
  std::int64_t elements = 0;
  const bool is_huge =
      __builtin_mul_overflow(std::max(f.total_q, f.num_sequences), f.num_heads_q, &elements) ||
      __builtin_mul_overflow(elements, width, &elements);
  if (!is_huge && elements <= kMaxElements) return;
  checks.refuse(
      fmt::format("q has {} rows in {} sequences, {} heads and a head_dim of {}; expected at most "
                  "2^48 elements",
                  f.total_q, f.num_sequences, f.num_heads_q, width));
}

}  // namespace

ForwardProblem validate(const Problem& problem, std::string_view where, KvDtypes kv_dtypes) {
  const ProblemChecks checks{std::string(where)};
  ForwardProblem f{.problem = problem, .is_varlen = problem.num_sequences.has_value()};
  checks.check_rank("q", problem.q, f.is_varlen);
  checks.check_rank("k", problem.k, f.is_varlen);
  checks.check_rank("v", problem.v, f.is_varlen);
  checks.check_extents("q", problem.q);
  checks.check_extents("k", problem.k);
  checks.check_extents("v", problem.v);
  checks.check_device("k", problem.k, problem.q);
  checks.check_device("v", problem.v, problem.q);
  checks.check_dtypes(problem, kv_dtypes);
  checks.check_scalars(problem);
  resolve_heads(checks, f);
  resolve_lengths(checks, f);
  check_sizes(checks, f);
  if (const std::string reason = quant::obstacle(problem.quant, f.head_dim_qk); !reason.empty())
    checks.refuse(reason);
  checks.check_recipe_of_codes(problem);
  if (f.problem.out.rank == 0) {
    TensorSpec out = problem.q;
    out.shape[static_cast<std::size_t>(out.rank - 1)] = f.head_dim_v;
    f.problem.out = make_spec(default_out_dtype(out.dtype),
                              {out.shape.data(), static_cast<std::size_t>(out.rank)});
    f.problem.out.device = problem.q.device;
  }
  check_output(checks, f);
  f.softmax_scale =
      problem.softmax_scale.value_or(1.0F / std::sqrt(static_cast<float>(f.head_dim_qk)));
  check_programs(checks, f);
  return f;
}

bool are_first_columns(const TensorView& part, const TensorView& whole) {
  const int last = whole.rank() - 1;
  if (part.data() != whole.data() || part.rank() != whole.rank() || part.dtype() != whole.dtype() ||
      part.size(last) > whole.size(last))
    return false;
  for (int dim = 0; dim <= last; ++dim) {
    if (dim < last && part.size(dim) != whole.size(dim)) return false;
    if (part.size(dim) > 1 && part.stride(dim) != whole.stride(dim)) return false;
  }
  return true;
}

std::string describe(const ForwardProblem& f) {
  const Problem& p = f.problem;
  const auto bounded = [](const std::optional<UpTo>& bound, std::int64_t length) {
    return fmt::format("{}{}", bound ? "<=" : "", length);
  };
  std::string text = fmt::format(
      "{} {} {}, seqlen_q {}, seqlen_kv {}, heads {}/{}, head_dim {}", name(p.q.dtype),
      f.is_varlen ? "packed sequences" : "batch", f.num_sequences, bounded(p.seqlen_q, f.seqlen_q),
      bounded(p.seqlen_kv, f.seqlen_kv), f.num_heads_q, f.num_heads_kv, f.head_dim_qk);
  if (f.head_dim_v != f.head_dim_qk) text += fmt::format("/{}", f.head_dim_v);
  text += fmt::format(", scale {:.6g}", f.softmax_scale);
  if (p.out.dtype != p.q.dtype) text += fmt::format(", out {}", name(p.out.dtype));
  if (p.has_sinks) text += ", sinks";
  if (p.dropout.p > 0) {
    text += fmt::format(", dropout {}", p.dropout.p);
    if (p.reads_dropout_seed) text += " by a seed in memory";
    if (p.has_dropout_places) text += " of a part of the whole";
  }
  if (!p.quant.is_none()) text += fmt::format(", quant {}", print(p.quant));
  if (p.wants_lse) text += ", lse";
  if (p.wants_row_max) text += ", row_max";
  if (p.sm_margin > 0) text += fmt::format(", sm_margin {}", p.sm_margin);
  if (p.compile_mode == CompileMode::staged) text += ", compiled in stages";
  return text;
}

}  // namespace fovea
