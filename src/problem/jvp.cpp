#include "problem/jvp.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/shape.hpp"
#include "problem/captured_floats.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

class Checker {
 public:
  Checker(const AttentionJvp& args, std::string_view where) : args_(args), door_(where) {}

  void check() const {
    const AttentionForward& f = args_.forward;
    check_tangent("q_tangent", args_.q_tangent, f.q);
    check_tangent("k_tangent", args_.k_tangent, f.k);
    check_tangent("v_tangent", args_.v_tangent, f.v);
    check_sinks_tangent();
    check_captured();
    door_.check_float({"out_tangent", args_.out_tangent, true}, shape_of(f.out));
    if (args_.lse_tangent)
      door_.check({"lse_tangent", args_.lse_tangent, true}, Dtype::f32, lse_shape(f.q));
    check_overlap();
  }

 private:
  void check_tangent(std::string_view name, const TensorView& tangent,
                     const TensorView& like) const {
    if (tangent) door_.check_float({name, tangent}, shape_of(like));
  }

  void check_sinks_tangent() const {
    if (!args_.sinks_tangent) return;
    if (!args_.forward.sinks)
      door_.refuse("sinks_tangent is given without forward.sinks; expected both or neither");
    door_.check({"sinks_tangent", args_.sinks_tangent}, Dtype::f32, shape_of(args_.forward.sinks));
  }

  void check_captured() const {
    std::vector<std::string> names;
    for (const CapturedTensor& tangent : args_.captured_tangents) {
      if (std::ranges::find(names, tangent.name) != names.end()) {
        door_.refuse(fmt::format("captured_tangents names '{}' twice; expected each name once",
                                 tangent.name));
      }
      names.push_back(tangent.name);
      check_captured_float(door_, args_.forward.score.captures(),
                           {"captured_tangents", tangent.name, tangent.view.spec()});
      door_.check_memory({fmt::format("captured_tangents '{}'", tangent.name), tangent.view});
    }
  }

  void check_overlap() const {
    OverlapCheck overlap;
    const AttentionForward& f = args_.forward;
    overlap.add_inputs(f);
    for (const auto& [name, view] : {std::pair{"q_tangent", &args_.q_tangent},
                                     {"k_tangent", &args_.k_tangent},
                                     {"v_tangent", &args_.v_tangent},
                                     {"sinks_tangent", &args_.sinks_tangent}}) {
      overlap.add_input(name, *view);
    }
    for (const CapturedTensor& tangent : args_.captured_tangents)
      overlap.add_input(tangent.name, tangent.view);
    for (const auto& [name, view] : {std::pair{"out", &f.out},
                                     {"lse", &f.lse},
                                     {"out_tangent", &args_.out_tangent},
                                     {"lse_tangent", &args_.lse_tangent}}) {
      overlap.add_output(name, *view);
    }
    overlap.refuse_overlap(door_);
  }

  const AttentionJvp& args_;
  TensorChecks door_;
};

}  // namespace

void validate_arguments(const ForwardProblem& problem, const AttentionJvp& args,
                        std::string_view where) {
  validate_arguments(problem, args.forward, where);
  Checker(args, where).check();
}

}  // namespace fovea
