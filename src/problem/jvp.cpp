#include "problem/jvp.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/shape.hpp"
#include "problem/captured_floats.hpp"
#include "problem/compile_mode.hpp"
#include "problem/quant.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

void check_captured_specs(const TensorChecks& checks, const JvpProblem& problem) {
  std::vector<std::string_view> names;
  for (const JvpProblem::Captured& tangent : problem.captured_tangents) {
    if (std::ranges::find(names, tangent.name) != names.end()) {
      checks.refuse(
          fmt::format("captured_tangents names '{}' twice; expected each name once", tangent.name));
    }
    names.emplace_back(tangent.name);
    check_captured_float(checks, problem.forward.score.captures(),
                         {"captured_tangents", tangent.name, tangent.spec});
  }
}

/// The arguments of one call.
class Checker {
 public:
  Checker(const TangentProblem& problem, const AttentionJvp& args, std::string_view where)
      : posed_(problem.posed), args_(args), door_(where, problem.forward.device()) {}

  void check() const {
    const AttentionForward& f = args_.forward;
    check_tangent("q_tangent", args_.q_tangent, posed_.q_tangent, f.q);
    check_tangent("k_tangent", args_.k_tangent, posed_.k_tangent, f.k);
    check_tangent("v_tangent", args_.v_tangent, posed_.v_tangent, f.v);
    check_given("sinks_tangent", args_.sinks_tangent, posed_.has_sinks_tangent);
    if (args_.sinks_tangent)
      door_.check({"sinks_tangent", args_.sinks_tangent}, Dtype::f32, shape_of(f.sinks));
    check_captured();
    door_.check({"out_tangent", args_.out_tangent, true}, posed_.out_tangent.dtype,
                shape_of(f.out));
    check_given("lse_tangent", args_.lse_tangent, posed_.wants_lse_tangent);
    if (args_.lse_tangent)
      door_.check({"lse_tangent", args_.lse_tangent, true}, Dtype::f32, lse_shape(f.q));
    check_overlap();
  }

 private:
  void check_given(std::string_view name, const TensorView& view, bool is_planned) const {
    if (static_cast<bool>(view) == is_planned) return;
    door_.refuse(fmt::format("{} is {}; the plan was made {} it", name, view ? "given" : "missing",
                             is_planned ? "with" : "without"));
  }

  void check_tangent(std::string_view name, const TensorView& tangent, const TensorSpec& planned,
                     const TensorView& like) const {
    check_given(name, tangent, planned.rank != 0);
    if (tangent) door_.check({name, tangent}, planned.dtype, shape_of(like));
  }

  void check_captured() const {
    const auto& given = args_.captured_tangents;
    if (!std::ranges::equal(given, posed_.captured_tangents, {}, &CapturedTensor::name,
                            &JvpProblem::Captured::name)) {
      door_.refuse(
          "captured_tangents has other names than the plan; expected the same in the same order");
    }
    for (const CapturedTensor& tangent : given) {
      check_captured_float(door_, args_.forward.score.captures(),
                           {"captured_tangents", tangent.name, tangent.view.spec()});
      door_.check_memory({fmt::format("captured_tangents '{}'", tangent.name), tangent.view});
    }
  }

  void check_overlap() const {
    OverlapCheck overlap;
    const AttentionForward& f = args_.forward;
    overlap.add_inputs(f);
    for (const auto& [name, view] : {NamedView{"q_tangent", &args_.q_tangent},
                                     {"k_tangent", &args_.k_tangent},
                                     {"v_tangent", &args_.v_tangent},
                                     {"sinks_tangent", &args_.sinks_tangent}}) {
      overlap.add_input(name, *view);
    }
    for (const CapturedTensor& tangent : args_.captured_tangents)
      overlap.add_input(tangent.name, tangent.view);
    for (const auto& [name, view] : {NamedView{"out", &f.out},
                                     {"lse", &f.lse},
                                     {"out_tangent", &args_.out_tangent},
                                     {"lse_tangent", &args_.lse_tangent}}) {
      overlap.add_output(name, *view);
    }
    overlap.add_output("workspace", args_.workspace);
    overlap.refuse_overlap(door_);
  }

  const JvpProblem& posed_;
  const AttentionJvp& args_;
  TensorChecks door_;
};

}  // namespace

TangentProblem validate(const JvpProblem& problem, std::string_view where) {
  const TensorChecks checks(where);
  refuse_quantization(checks, problem.forward, "tangents");
  refuse_stages(checks, problem.forward, "tangents");
  if (problem.forward.wants_row_max)
    checks.refuse("row_max is given; expected none, it has no tangent");
  TangentProblem result{.forward = validate(problem.forward, where), .posed = problem};
  const Problem& f = result.forward.problem;
  for (const auto& [name, spec, like] : {std::tuple{"q_tangent", &problem.q_tangent, &f.q},
                                         {"k_tangent", &problem.k_tangent, &f.k},
                                         {"v_tangent", &problem.v_tangent, &f.v}}) {
    if (spec->rank != 0) checks.check_float_spec(name, *spec, *like);
  }
  if (problem.has_sinks_tangent && !f.has_sinks)
    checks.refuse("sinks_tangent is given without forward.sinks; expected both or neither");
  check_captured_specs(checks, problem);
  checks.check_float_spec("out_tangent", problem.out_tangent, f.out);
  return result;
}

void validate_arguments(const TangentProblem& problem, const AttentionJvp& args,
                        std::string_view where) {
  validate_arguments(problem.forward, args.forward, where);
  Checker(problem, args, where).check();
}

std::vector<CapturedTensor> captured_tangents_of(const JvpProblem& problem) {
  std::vector<CapturedTensor> tangents;
  for (const JvpProblem::Captured& each : problem.captured_tangents)
    tangents.push_back({each.name, TensorView(static_cast<const void*>(nullptr), each.spec)});
  return tangents;
}

Captures captures_with_tangents(const ScoreMod& score, const std::vector<std::string>& slots,
                                const std::vector<CapturedTensor>& tangents) {
  Captures captures = score.captures();
  for (std::size_t i = 0; i < slots.size(); ++i)
    captures.tensors.push_back({slots[i], tangents[i].view});
  return captures;
}

std::string describe(const TangentProblem& problem) {
  std::string text = describe(problem.forward) + ", along";
  const auto add = [&](bool moves, std::string_view name) {
    if (moves) text += fmt::format(" {}", name);
  };
  const JvpProblem& p = problem.posed;
  add(p.q_tangent.rank != 0, "q");
  add(p.k_tangent.rank != 0, "k");
  add(p.v_tangent.rank != 0, "v");
  add(p.has_sinks_tangent, "sinks");
  for (const JvpProblem::Captured& captured : p.captured_tangents) add(true, captured.name);
  return text;
}

}  // namespace fovea
