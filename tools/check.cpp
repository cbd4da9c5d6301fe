#include "check.hpp"

#include <cmath>

#include "reference/attention_backward.hpp"
#include "reference/attention_forward.hpp"
#include "reference/element.hpp"
#include "reference/tolerance.hpp"

namespace fovea::tools {
namespace {

Difference difference(const TensorView& view, const std::vector<double>& expected,
                      const reference::Tolerance& tolerance) {
  const std::vector<double> got = reference::elements(view);
  if (got.empty()) return {};
  const reference::Comparison compared = reference::compare(got, expected, tolerance);
  const std::size_t at = compared.largest;
  const double norm = compared.expected_norm > 0 ? compared.expected_norm : 1;
  return {.max_error = std::isfinite(got[at]) && std::isfinite(expected[at])
                           ? std::fabs(got[at] - expected[at])
                           : 0,
          .allowed = tolerance.allowed(expected[at]),
          .relative_l2 = compared.norm / norm,
          .allowed_relative_l2 = tolerance.norm / norm,
          .num_wrong = compared.num_wrong};
}

}  // namespace

CheckResult check_forward(const AttentionForward& args, ComputeDtype compute_dtype) {
  const reference::ForwardResult expected = reference::attention_forward(args);
  const reference::Tolerances allowed = reference::tolerances(args, expected, compute_dtype);
  return {.out = difference(args.out, expected.out, allowed.out),
          .lse = difference(args.lse, expected.lse, allowed.lse)};
}

std::vector<std::pair<std::string, Difference>> check_backward(const AttentionBackward& args,
                                                               ComputeDtype compute_dtype) {
  const reference::BackwardResult expected = reference::attention_backward(args);
  const reference::GradientTolerances allowed =
      reference::tolerances(args, expected, compute_dtype);
  std::vector<std::pair<std::string, Difference>> differences;
  const auto check = [&](const std::string& name, const TensorView& got,
                         const std::vector<double>& oracle, const reference::Tolerance& tolerance) {
    if (got) differences.emplace_back(name, difference(got, oracle, tolerance));
  };
  check("dq", args.dq, expected.dq, allowed.dq);
  check("dk", args.dk, expected.dk, allowed.dk);
  check("dv", args.dv, expected.dv, allowed.dv);
  check("sinks", args.dsinks, expected.dsinks, allowed.dsinks);
  for (const CapturedTensor& each : args.dcaptured) {
    check(each.name, each.view, expected.dcaptured.at(each.name), allowed.dcaptured.at(each.name));
  }
  return differences;
}

}  // namespace fovea::tools
