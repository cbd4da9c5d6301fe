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

ForwardProblem validated_problem(const AttentionForward& forward) {
  const TensorChecks checks(kWhere);
  if (!forward.out)
    checks.refuse(
        "out is missing; expected a view of writable memory shaped like q with head_dim_v");
  if (forward.row_max) checks.refuse("row_max is given; expected none, it has no tangent");
  Problem problem = problem_of(forward);
  std::string obstacle = why_not_cpu(problem);
  if (problem.compute_dtype == ComputeDtype::bf16)
    obstacle = "compute_dtype is bf16; products are taken in f32 here";
  if (!obstacle.empty()) throw Unsupported(fmt::format("{}: {}", kWhere, obstacle));
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
