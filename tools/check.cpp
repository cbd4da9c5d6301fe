#include "check.hpp"

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
  const double norm = compared.expected_norm > 0 ? compared.expected_norm : 1;
  return {.max_error = compared.largest_error,
          .allowed = tolerance.allowed(expected[compared.largest]),
          .relative_l2 = compared.norm / norm,
          .allowed_relative_l2 = tolerance.norm / norm,
          .num_wrong = compared.num_wrong,
          .num_beyond_f32 = tolerance.num_beyond_f32};
}

}  // namespace

std::int64_t CheckResult::num_beyond_f32() const {
  std::int64_t count = out.num_beyond_f32 + lse.num_beyond_f32;
  for (const auto& [name, difference] : gradients) count += difference.num_beyond_f32;
  return count;
}

CheckResult check_forward(const AttentionForward& args, const reference::Products& products) {
  const reference::ForwardResult expected = reference::attention_forward(args);
  const reference::Tolerances allowed = reference::tolerances(args, expected, products);
  return {.out = difference(args.out, expected.out, allowed.out),
          .lse = difference(args.lse, expected.lse, allowed.lse)};
}

std::vector<std::pair<std::string, Difference>> check_backward(
    const AttentionBackward& args, const reference::Products& products) {
  const reference::BackwardResult expected = reference::attention_backward(args);
  const reference::GradientTolerances allowed = reference::tolerances(args, expected, products);
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
