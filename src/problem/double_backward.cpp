#include "problem/double_backward.hpp"

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/shape.hpp"
#include "problem/backward.hpp"
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
    check_optional({"grad_dout", args_.grad_dout, true}, f.out);
    check_row_values({"grad_dlse", args_.grad_dlse, true});
    check_optional({"grad_q", args_.grad_q, true}, f.q);
    check_optional({"grad_k", args_.grad_k, true}, f.k);
    check_optional({"grad_v", args_.grad_v, true}, f.v);
    check_overlap();
  }

 private:
  void check_optional(const NamedTensor& tensor, const TensorView& like) const {
    if (tensor.view) door_.check_float(tensor, shape_of(like));
  }

  void check_row_values(const NamedTensor& tensor) const {
    if (tensor.view) door_.check(tensor, Dtype::f32, lse_shape(args_.backward.forward.q));
  }

  void check_overlap() const {
    OverlapCheck overlap;
    overlap.add_inputs(args_.backward.forward);
    for (const auto& [name, view] : {std::pair{"dout", &args_.backward.dout},
                                     {"dlse", &args_.backward.dlse},
                                     {"ddq", &args_.ddq},
                                     {"ddk", &args_.ddk},
                                     {"ddv", &args_.ddv}}) {
      overlap.add_input(name, *view);
    }
    for (const auto& [name, view] : {std::pair{"grad_dout", &args_.grad_dout},
                                     {"grad_dlse", &args_.grad_dlse},
                                     {"grad_q", &args_.grad_q},
                                     {"grad_k", &args_.grad_k},
                                     {"grad_v", &args_.grad_v}}) {
      overlap.add_output(name, *view);
    }
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
