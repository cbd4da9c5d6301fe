#include "problem/double_backward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/shape.hpp"
#include "problem/backward.hpp"
#include "problem/captured_floats.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

class Checker {
 public:
  Checker(const AttentionDoubleBackward& args, std::string_view where)
      : args_(args), where_(where), door_(where) {}

  void check(const ForwardProblem& problem) const {
    const AttentionForward& f = args_.backward.forward;
    validate_past_arguments(problem, f, where_);
    door_.check_float({"dout", args_.backward.dout}, shape_of(f.out));
    check_row_values({"dlse", args_.backward.dlse});
    check_optional({"ddq", args_.ddq}, f.q);
    check_optional({"ddk", args_.ddk}, f.k);
    check_optional({"ddv", args_.ddv}, f.v);
    check_sinks({"ddsinks", args_.ddsinks});
    check_captured("ddcaptured", args_.ddcaptured, /*is_output=*/false);
    check_optional({"grad_dout", args_.grad_dout, true}, f.out);
    check_row_values({"grad_dlse", args_.grad_dlse, true});
    check_optional({"grad_q", args_.grad_q, true}, f.q);
    check_optional({"grad_k", args_.grad_k, true}, f.k);
    check_optional({"grad_v", args_.grad_v, true}, f.v);
    check_sinks({"grad_sinks", args_.grad_sinks, true});
    check_captured("grad_captured", args_.grad_captured, /*is_output=*/true);
    check_overlap();
  }

 private:
  void check_optional(const NamedTensor& tensor, const TensorView& like) const {
    if (tensor.view) door_.check_float(tensor, shape_of(like));
  }

  void check_row_values(const NamedTensor& tensor) const {
    if (tensor.view) door_.check(tensor, Dtype::f32, lse_shape(args_.backward.forward.q));
  }

  void check_sinks(const NamedTensor& tensor) const {
    const TensorView& sinks = args_.backward.forward.sinks;
    if (!tensor.view) return;
    if (!sinks) {
      door_.refuse(
          fmt::format("{} is given without forward.sinks; expected both or neither", tensor.name));
    }
    door_.check(tensor, Dtype::f32, shape_of(sinks));
  }

  void check_captured(std::string_view argument, const std::vector<CapturedTensor>& given,
                      bool is_output) const {
    std::vector<std::string_view> names;
    for (const CapturedTensor& tensor : given) {
      if (std::ranges::find(names, tensor.name) != names.end()) {
        door_.refuse(
            fmt::format("{} names '{}' twice; expected each name once", argument, tensor.name));
      }
      names.push_back(tensor.name);
      check_captured_float(door_, args_.backward.forward.score.captures(),
                           {argument, tensor.name, tensor.view.spec()});
      door_.check_memory({fmt::format("{} '{}'", argument, tensor.name), tensor.view, is_output});
    }
  }

  void check_overlap() const {
    OverlapCheck overlap;
    overlap.add_inputs(args_.backward.forward);
    for (const auto& [name, view] : {NamedView{"dout", &args_.backward.dout},
                                     {"dlse", &args_.backward.dlse},
                                     {"ddq", &args_.ddq},
                                     {"ddk", &args_.ddk},
                                     {"ddv", &args_.ddv},
                                     {"ddsinks", &args_.ddsinks}}) {
      overlap.add_input(name, *view);
    }
    for (const CapturedTensor& tensor : args_.ddcaptured)
      overlap.add_input(tensor.name, tensor.view);
    for (const auto& [name, view] : {NamedView{"grad_dout", &args_.grad_dout},
                                     {"grad_dlse", &args_.grad_dlse},
                                     {"grad_q", &args_.grad_q},
                                     {"grad_k", &args_.grad_k},
                                     {"grad_v", &args_.grad_v},
                                     {"grad_sinks", &args_.grad_sinks}}) {
      overlap.add_output(name, *view);
    }
    for (const CapturedTensor& tensor : args_.grad_captured)
      overlap.add_output(tensor.name, tensor.view);
    overlap.refuse_overlap(door_);
  }

  const AttentionDoubleBackward& args_;
  std::string_view where_;
  TensorChecks door_;
};

}  // namespace

void validate_arguments(const ForwardProblem& problem, const AttentionDoubleBackward& args,
                        std::string_view where) {
  Checker(args, where).check(problem);
}

}  // namespace fovea
