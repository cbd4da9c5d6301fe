// The entry point of gradients of gradients: one plain path, so there is nothing to plan.
#include "problem/double_backward.hpp"

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "fovea/backward.hpp"

#include "core/float_environment.hpp"
#include "cpu/attention_double_backward.hpp"
#include "cpu/features.hpp"
#include "plan/plan.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

ForwardProblem validated_problem(const AttentionForward& forward, std::string_view where) {
  Problem problem = problem_of(forward);
  problem.wants_row_max = false;
  if (const std::string obstacle = why_not_cpu(problem); !obstacle.empty())
    throw Unsupported(fmt::format("{}: {}", where, obstacle));
  return validate(problem, where);
}

}  // namespace

void attention_double_backward(const AttentionDoubleBackward& args) {
  const FloatEnvironment environment;
  constexpr std::string_view kWhere = "attention_double_backward";
  const CallLog log(kWhere);
  const AttentionForward& forward = args.backward.forward;
  if (!forward.out)
    TensorChecks(kWhere).refuse("forward.out is missing; expected what attention_forward wrote");
  const ForwardProblem problem = validated_problem(forward, kWhere);
  validate_arguments(problem, args, kWhere);
  cpu::attention_double_backward(
      problem, args,
      args.executor != nullptr ? *args.executor : Runtime::process_default().executor());
  if (log.is_on()) [[unlikely]] {
    log.write(describe(problem), "cpu/attention_double_backward, the plain path",
              name(cpu::best_f32_target()));
  }
}

Explanation explain_double_backward(const AttentionDoubleBackward& args) {
  const FloatEnvironment environment;
  return explain_double_backward(validated_problem(args.backward.forward, "explain"));
}

}  // namespace fovea
