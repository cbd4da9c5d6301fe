#include "plan/decode_plan.hpp"

#include <algorithm>
#include <memory>
#include <utility>
#include <variant>

#include "plan/runtime.hpp"

namespace fovea {
namespace {

Plan make_plan(const Problem& problem, const CacheLayout& cache, std::string_view where) {
  auto impl = std::make_shared<Plan::Impl>();
  impl->problem = validate_decode_problem(problem, cache, where);
  if (is_cpu(impl->problem.device())) {
    impl->backend = cpu::plan_forward(impl->problem, problem.num_threads);
  } else {
    impl->backend = cuda::plan_forward(impl->problem, impl->problem.device());
  }
  return Plan(std::move(impl));
}

std::string_view run_on(const cpu::ForwardPlan& plan, const ForwardProblem& problem,
                        const AttentionDecode& args, const AttentionForward& forward,
                        std::byte* workspace, const GrownCache& grown) {
  cpu::attention_forward(problem, plan, forward, workspace, *args.executor, &grown);
  return cpu::kernel_name(plan);
}

std::string_view run_on(const cuda::ForwardPlan& plan, const ForwardProblem& problem,
                        const AttentionDecode& args, const AttentionForward& forward,
                        std::byte* workspace, const GrownCache& grown) {
  return cuda::attention_forward(problem, plan, forward, workspace, args.stream, &grown);
}

}  // namespace

std::int64_t planned_keys(std::int64_t seqlen_kv, std::int64_t capacity) {
  std::int64_t bound = kLeastPlannedKeys;
  while (bound < seqlen_kv) bound *= 2;
  return std::max(seqlen_kv, std::min(bound, capacity));
}

std::int64_t planned_keys(const AttentionDecode& args, std::int64_t longest) {
  const bool is_known = is_cpu(args.q.spec().device);
  return planned_keys(longest, is_known ? cache_capacity(args.cache) : cuda::kMostOfSequence);
}

int num_threads_of(const AttentionDecode& args) {
  return args.executor != nullptr ? args.executor->concurrency() : 0;
}

Plan find_decode_plan(const AttentionDecode& args, std::int64_t max_seqlen_kv, Runtime& runtime,
                      CallLog& log, std::string_view where) {
  const Problem problem = decode_problem(args, max_seqlen_kv, num_threads_of(args), where);
  const CacheLayout cache = cache_layout(args);
  return runtime.impl().find_or_make(decode_key(problem, cache), [&] {
    return log.timed_plan([&] { return make_plan(problem, cache, where); });
  });
}

Explanation explain_decode(const AttentionDecode& args, std::int64_t max_seqlen_kv,
                           std::string_view where) {
  const int num_threads = num_threads_of(args);
  const ForwardProblem f = validate_decode_problem(
      decode_problem(args, max_seqlen_kv, num_threads, where), cache_layout(args), where);
  if (!is_cpu(f.device()))
    return explain_forward(f, cuda::try_plan_forward(f, f.device()), MaskData::gone);
  return explain_forward(f, cpu::try_plan_forward(f, num_threads), MaskData::gone);
}

std::size_t aligned_bytes_of(const Plan& plan) {
  return std::visit([](const auto& backend) { return backend.workspace_bytes; },
                    plan.impl().backend);
}

std::string_view attend(const Plan& plan, const AttentionDecode& args,
                        const AttentionForward& forward, std::byte* workspace) {
  const GrownCache grown = grown_cache(args.cache, args.append);
  return std::visit(
      [&](const auto& backend) {
        return run_on(backend, plan.impl().problem, args, forward, workspace, grown);
      },
      plan.impl().backend);
}

}  // namespace fovea
