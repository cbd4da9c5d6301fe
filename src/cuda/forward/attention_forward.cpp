// Fill params, launch. No branch on features: what differs from kernel to kernel stands in the table of candidates.
#include "cuda/forward/attention_forward.hpp"

#include <fmt/format.h>

#include <string_view>

#include "fovea/error.hpp"

#include "core/check.hpp"
#include "cuda/forward/kernels.hpp"
#include "cuda/forward/staged.hpp"

namespace fovea::cuda {

namespace {

/// The plan, or the one beside it for tensors that its kernel does not read.
const ForwardPlan& plan_that_reads(const ForwardProblem& problem, const ForwardPlan& plan,
                                   const AttentionForward& args, const GrownCache* cache) {
  const Candidate& candidate = candidate_named(plan.candidate);
  if (candidate.reads == nullptr || candidate.reads(args, cache)) return plan;
  FOVEA_ASSERT(plan.kernels != nullptr);
  if (plan.unaligned == nullptr) {
    const std::string_view hint = problem.problem.sm_margin > 0
                                      ? "; kernels that do would leave no SM free: sm_margin 0"
                                      : "";
    throw Unsupported(fmt::format(
        "attention_forward: q, k, v or out does not start at a multiple of 16 bytes, as {} reads "
        "them, and no other kernel takes this problem{}",
        plan.candidate, hint));
  }
  return plan.unaligned->loaded(*plan.kernels);
}

/// Returns what took it.
std::string_view enqueue_part(const ForwardProblem& problem, const ForwardPlan& plan,
                              const AttentionForward& args, void* workspace, void* stream,
                              const GrownCache* cache) {
  const ForwardPlan& taken = plan_that_reads(problem, current_stage(plan), args, cache);
  candidate_named(taken.candidate).launch(problem, taken, args, workspace, stream, cache);
  return taken.candidate;
}

}  // namespace

std::string_view attention_forward(const ForwardProblem& problem, const ForwardPlan& plan,
                                   const AttentionForward& args, void* workspace, void* stream,
                                   const GrownCache* cache) {
  if (plan.few == nullptr) return enqueue_part(problem, plan, args, workspace, stream, cache);
  const ForwardPlan::FewQueries& few = *plan.few;
  enqueue_part(few.problem, few.plan, args, static_cast<std::byte*>(workspace) + few.workspace_at,
               stream, cache);
  return enqueue_part(few.rest, plan, args, workspace, stream, cache);
}

}  // namespace fovea::cuda
