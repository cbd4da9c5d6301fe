// Fill params, launch. No branch on features: what differs from kernel to kernel stands in the table of candidates.
#include "cuda/attention_forward.hpp"

#include <fmt/format.h>

#include "fovea/error.hpp"

#include "core/check.hpp"
#include "cuda/driver/launch.hpp"
#include "cuda/forward_kernels.hpp"
#include "cuda/forward_launch.hpp"

namespace fovea::cuda {

namespace {

/// The plan, or the one beside it for tensors that its kernel does not read.
const ForwardPlan& plan_that_reads(const ForwardPlan& plan, const AttentionForward& args,
                                   const GrownCache* cache) {
  const Candidate& candidate = candidate_named(plan.candidate);
  if (candidate.reads == nullptr || candidate.reads(args, cache)) return plan;
  FOVEA_ASSERT(plan.kernels != nullptr);
  if (plan.unaligned == nullptr) {
    throw Unsupported(fmt::format(
        "attention_forward: q, k, v or out does not start at a multiple of 16 bytes, as {} reads "
        "them, and no other kernel takes this problem",
        plan.candidate));
  }
  return plan.unaligned->loaded(*plan.kernels);
}

}  // namespace

void attention_forward(const ForwardProblem& problem, const ForwardPlan& plan,
                       const AttentionForward& args, void* workspace, void* stream,
                       const GrownCache* cache) {
  const ForwardPlan& taken = plan_that_reads(plan, args, cache);
  candidate_named(taken.candidate).launch(problem, taken, args, workspace, stream, cache);
}

void launch_sm80(const ForwardProblem& problem, const ForwardPlan& plan,
                 const AttentionForward& args, void* workspace, void* stream,
                 const GrownCache* cache) {
  ForwardLaunch call = forward_launch(problem, plan, args, workspace, cache);
  place_range_tables(plan, workspace, call);
  launch_forward(plan, call, stream);
}

void launch_tables(const ForwardPlan& plan, const ForwardLaunch& call, void* stream) {
  if (call.range_tables.is_empty()) return;
  launch_range_tables(plan.kernels->range_tables->function, call.range_tables,
                      driver::Stream(stream));
}

void launch_forward(const ForwardPlan& plan, const ForwardLaunch& call, void* stream) {
  FOVEA_ASSERT(plan.kernels != nullptr);
  launch_tables(plan, call, stream);
  driver::launch({.grid = {.x = call.grid.x, .y = call.grid.y},
                  .block = {.x = call.num_threads},
                  .shared_bytes = static_cast<unsigned>(plan.shared_bytes),
                  .stream = driver::Stream(stream)},
                 plan.kernels->forward->function, call.params);
  if (plan.spec.is_split) launch_combine(plan, call, stream);
}

void launch_combine(const ForwardPlan& plan, const ForwardLaunch& call, void* stream) {
  const ForwardPlan::Kernels& kernels = *plan.kernels;
  const auto& kernel = call.is_combined_deep ? kernels.deep_combine : kernels.wide_combine;
  driver::launch({.grid = {.x = call.combine_grid.x},
                  .block = {.x = static_cast<unsigned>(call.combine_form().num_warps) * 32},
                  .stream = driver::Stream(stream),
                  .is_pdl = plan.spec.is_chained},
                 kernel->function, call.combine_params);
}

}  // namespace fovea::cuda
