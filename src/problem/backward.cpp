// Validation of a gradient: what a BackwardProblem must satisfy by itself, and its arguments beside it.
#include "problem/backward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "core/shape.hpp"
#include "problem/captured_floats.hpp"
#include "problem/compile_mode.hpp"
#include "problem/quant.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

void resolve_all_captured(const TensorChecks& checks, const BackwardProblem& problem,
                          GradientProblem& g) {
  for (const BackwardProblem::Captured& wanted : problem.dcaptured) {
    if (std::ranges::find(g.captured, wanted.name, &CapturedGradient::name) != g.captured.end())
      checks.refuse(
          fmt::format("dcaptured names '{}' twice; expected each name once", wanted.name));
    const bool is_scalar = check_captured_float(checks, problem.forward.score.captures(),
                                                {"dcaptured", wanted.name, wanted.spec});
    checks.check_same_device(fmt::format("dcaptured '{}'", wanted.name), wanted.spec,
                             g.forward.device());
    g.captured.push_back({wanted.name, wanted.spec, is_scalar});
  }
}

/// The arguments of one call.
class Checker {
 public:
  Checker(const GradientProblem& problem, const AttentionBackward& args, std::string_view where)
      : g_(problem), args_(args), where_(where), door_(where, problem.forward.device()) {}

  void check() const {
    const AttentionForward& forward = args_.forward;
    if (!forward.lse)
      door_.refuse("forward.lse is missing; expected what attention_forward wrote with lse given");
    validate_past_arguments(g_.forward, forward, where_);
    check_planned("dout", args_.dout, g_.dout.dtype, forward.out, false);
    check_optional("dlse", args_.dlse, g_.has_dlse, Dtype::f32, forward.lse, false);
    check_optional("dq", args_.dq, g_.wants_dq(), g_.dq.dtype, forward.q, true);
    check_optional("dk", args_.dk, g_.wants_dk(), g_.dk.dtype, forward.k, true);
    check_optional("dv", args_.dv, g_.wants_dv(), g_.dv.dtype, forward.v, true);
    check_optional("dsinks", args_.dsinks, g_.wants_dsinks, Dtype::f32, forward.sinks, true);
    check_captured();
    check_overlap();
  }

 private:
  void check_planned(std::string_view name, const TensorView& view, Dtype dtype,
                     const TensorView& like, bool is_output) const {
    door_.check({name, view, is_output}, dtype, shape_of(like.spec()));
  }

  void check_optional(std::string_view name, const TensorView& view, bool is_planned, Dtype dtype,
                      const TensorView& like, bool is_output) const {
    if (static_cast<bool>(view) != is_planned) {
      door_.refuse(fmt::format("{} is {}; the plan was made {} it", name,
                               view ? "given" : "missing", is_planned ? "with" : "without"));
    }
    if (view) check_planned(name, view, dtype, like, is_output);
  }

  void check_captured() const {
    const auto& given = args_.dcaptured;
    if (!std::ranges::equal(given, g_.captured, {}, &CapturedTensor::name, &CapturedGradient::name))
      door_.refuse("dcaptured has other names than the plan; expected the same in the same order");
    for (std::size_t i = 0; i < given.size(); ++i) {
      const TensorSpec& spec = g_.captured[i].spec;
      const std::string name = fmt::format("dcaptured '{}'", given[i].name);
      door_.check({name, given[i].view, true}, spec.dtype, shape_of(spec));
      check_still_captured(given[i].name, spec);
    }
  }

  /// A plan takes the shape of its gradient for the captured tensor's.
  void check_still_captured(const std::string& name, const TensorSpec& spec) const {
    for (const CapturedTensor& tensor : args_.forward.score.captures().tensors) {
      if (tensor.name != name || tensor.view.rank() == 0) continue;
      const TensorSpec& got = tensor.view.spec();
      if (std::ranges::equal(shape_of(got), shape_of(spec))) return;
      door_.refuse(fmt::format("captured '{}' is {}; expected the shape of its gradient, {}", name,
                               to_string(got), to_string(make_spec(got.dtype, shape_of(spec)))));
    }
  }

  void check_overlap() const {
    OverlapCheck overlap;
    const AttentionForward& f = args_.forward;
    overlap.add_inputs(f);
    for (const auto& [name, view] : {NamedView{"out", &f.out},
                                     {"lse", &f.lse},
                                     {"dout", &args_.dout},
                                     {"dlse", &args_.dlse}}) {
      overlap.add_input(name, *view);
    }
    for (const auto& [name, view] : {NamedView{"dq", &args_.dq},
                                     {"dk", &args_.dk},
                                     {"dv", &args_.dv},
                                     {"dsinks", &args_.dsinks}}) {
      overlap.add_output(name, *view);
    }
    for (const CapturedTensor& tensor : args_.dcaptured)
      overlap.add_output(tensor.name, tensor.view);
    overlap.add_output("workspace", args_.workspace);
    overlap.refuse_overlap(door_);
  }

  const GradientProblem& g_;
  const AttentionBackward& args_;
  std::string_view where_;
  TensorChecks door_;
};

}  // namespace

GradientProblem validate(const BackwardProblem& problem, std::string_view where) {
  const TensorChecks checks(where);
  refuse_codes(checks, problem.forward, "gradients");
  refuse_stages(checks, problem.forward, "gradients");
  Problem forward = problem.forward;
  forward.wants_lse = true;
  forward.wants_row_max = false;
  GradientProblem g{.forward = validate(forward, where),
                    .dout = problem.dout,
                    .dq = problem.dq,
                    .dk = problem.dk,
                    .dv = problem.dv,
                    .has_dlse = problem.has_dlse,
                    .wants_dsinks = problem.wants_dsinks};
  const Problem& f = g.forward.problem;
  checks.check_float_spec("dout", problem.dout, f.out);
  if (g.wants_dq()) checks.check_float_spec("dq", problem.dq, f.q);
  if (g.wants_dk()) checks.check_float_spec("dk", problem.dk, f.k);
  if (g.wants_dv()) checks.check_float_spec("dv", problem.dv, f.v);
  if (g.wants_dsinks && !f.has_sinks)
    checks.refuse("dsinks is given and forward.sinks is not; expected both or neither");
  resolve_all_captured(checks, problem, g);
  return g;
}

void validate_arguments(const GradientProblem& problem, const AttentionBackward& args,
                        std::string_view where) {
  Checker(problem, args, where).check();
}

std::string describe(const GradientProblem& g) {
  std::string text = describe(g.forward) + ", gradients of";
  const auto add = [&](bool is_wanted, std::string_view name) {
    if (is_wanted) text += fmt::format(" {}", name);
  };
  add(g.wants_dq(), "q");
  add(g.wants_dk(), "k");
  add(g.wants_dv(), "v");
  add(g.wants_dsinks, "sinks");
  for (const CapturedGradient& captured : g.captured) add(true, captured.name);
  return text;
}

}  // namespace fovea
