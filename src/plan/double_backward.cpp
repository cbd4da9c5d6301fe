// The entry point of gradients of gradients: one plain path, so there is nothing to plan.
#include "problem/double_backward.hpp"

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/backward.hpp"

#include "core/float_environment.hpp"
#include "cpu/attention_double_backward.hpp"
#include "cpu/features.hpp"
#include "plan/plan.hpp"
#include "problem/quant.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

Problem posed_problem(const AttentionDoubleBackward& args, std::string_view where) {
  Problem problem = problem_of(args.backward.forward);
  refuse_quantization(TensorChecks(where), problem, "gradients of gradients");
  problem.wants_row_max = false;
  return problem;
}

std::string obstacle_of(const Problem& problem, const AttentionDoubleBackward& args) {
  std::vector<NamedSpec> tensors;
  for (const auto& [name, view] : {std::pair{"dout", &args.backward.dout},
                                   {"ddq", &args.ddq},
                                   {"ddk", &args.ddk},
                                   {"ddv", &args.ddv},
                                   {"grad_dout", &args.grad_dout},
                                   {"grad_q", &args.grad_q},
                                   {"grad_k", &args.grad_k},
                                   {"grad_v", &args.grad_v}}) {
    tensors.push_back({name, view->spec()});
  }
  for (const auto* captured : {&args.ddcaptured, &args.grad_captured}) {
    for (const CapturedTensor& tensor : *captured)
      tensors.push_back({tensor.name, tensor.view.spec()});
  }
  return why_not_cpu(problem, tensors);
}

}  // namespace

void attention_double_backward(const AttentionDoubleBackward& args) {
  const FloatEnvironment environment;
  constexpr std::string_view kWhere = "attention_double_backward";
  const CallLog log(kWhere);
  const AttentionForward& forward = args.backward.forward;
  if (!forward.out)
    TensorChecks(kWhere).refuse("forward.out is missing; expected what attention_forward wrote");
  const Problem posed = posed_problem(args, kWhere);
  if (const std::string obstacle = obstacle_of(posed, args); !obstacle.empty())
    throw Unsupported(fmt::format("{}: {}", kWhere, obstacle));
  const ForwardProblem problem = validate(posed, kWhere);
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
  constexpr std::string_view kWhere = "explain";
  const Problem posed = posed_problem(args, kWhere);
  return explain_double_backward(validate(posed, kWhere), obstacle_of(posed, args));
}

}  // namespace fovea
