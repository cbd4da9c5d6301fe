// The entry point of forward mode. Nothing is kept between calls: a plan costs little beside five products.
#include "fovea/jvp.hpp"

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "core/float_environment.hpp"
#include "cpu/attention_jvp.hpp"
#include "plan/plan.hpp"
#include "problem/jvp.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

constexpr std::string_view kWhere = "attention_jvp";

bool asks_for_bf16(CpuTarget target) {
  return target == CpuTarget::avx512_bf16 || target == CpuTarget::amx_bf16;
}

ForwardProblem validated_problem(const AttentionForward& forward) {
  const TensorChecks checks(kWhere);
  if (!forward.out)
    checks.refuse(
        "out is missing; expected a view of writable memory shaped like q with head_dim_v");
  if (forward.row_max) checks.refuse("row_max is given; expected none, it has no tangent");
  Problem problem = problem_of(forward);
  if (const std::string obstacle = why_not_cpu(problem); !obstacle.empty())
    throw Unsupported(fmt::format("{}: {}", kWhere, obstacle));
  // Rounding P (S' - r) costs out' more than rounding P costs out: only where somebody asks.
  if (problem.compute_dtype == ComputeDtype::automatic && !asks_for_bf16(problem.cpu_target))
    problem.compute_dtype = ComputeDtype::f32;
  return validate(problem, kWhere);
}

}  // namespace

void attention_jvp(const AttentionJvp& args) {
  const FloatEnvironment environment;
  const ForwardProblem problem = validated_problem(args.forward);
  validate_arguments(problem, args, kWhere);
  Executor* const executor = args.forward.executor;
  cpu::attention_jvp(problem, args,
                     executor != nullptr ? *executor : Runtime::process_default().executor());
}

}  // namespace fovea
