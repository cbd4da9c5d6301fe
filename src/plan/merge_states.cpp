// The entry point of merge_states: everything is checked before the first row is written.
#include "cpu/merge_states.hpp"

#include <fmt/format.h>

#include <span>
#include <string>
#include <vector>

#include "fovea/state.hpp"

#include "core/float_environment.hpp"
#include "core/shape.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

void check_shapes(const MergeStates& args, const TensorChecks& checks) {
  if (args.out.rank() != 3 && args.out.rank() != 4) {
    checks.refuse(fmt::format(
        "out is {}; expected [batch, seqlen_q, num_heads_q, head_dim_v], or packed [total_q, "
        "num_heads_q, head_dim_v]",
        args.out ? to_string(args.out.spec()) : "missing"));
  }
  if (args.outs.size() != args.lses.size()) {
    checks.refuse(fmt::format("{} outs and {} lses are given; expected one lse for every out",
                              args.outs.size(), args.lses.size()));
  }
  checks.check_float({"out", args.out, true}, shape_of(args.out));
  if (args.lse) checks.check({"lse", args.lse, true}, Dtype::f32, lse_shape(args.out));
  for (std::size_t i = 0; i < args.outs.size(); ++i) {
    checks.check_float({fmt::format("outs[{}]", i), args.outs[i]}, shape_of(args.out));
    checks.check({fmt::format("lses[{}]", i), args.lses[i]}, Dtype::f32, lse_shape(args.out));
  }
}

/// The first state may be merged in place: every row is read before it is written.
void check_overlap(const MergeStates& args, const TensorChecks& checks) {
  OverlapCheck overlap;
  for (std::size_t i = 0; i < args.outs.size(); ++i) {
    const auto same_place = [i](const TensorView& a, const TensorView& b) {
      return i == 0 && a.data() == b.data() && a.spec() == b.spec();
    };
    if (!same_place(args.outs[i], args.out)) overlap.add_input("a state's out", args.outs[i]);
    if (!same_place(args.lses[i], args.lse)) overlap.add_input("a state's lse", args.lses[i]);
  }
  overlap.add_output("out", args.out);
  overlap.add_output("lse", args.lse);
  overlap.refuse_overlap(checks);
}

}  // namespace

void merge_states(const MergeStates& args) {
  const FloatEnvironment environment;
  const TensorChecks checks("merge_states");
  check_shapes(args, checks);
  check_overlap(args, checks);
  cpu::merge_states(
      args, args.executor != nullptr ? *args.executor : Runtime::process_default().executor());
}

}  // namespace fovea
