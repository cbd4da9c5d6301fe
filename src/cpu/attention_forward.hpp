// Attention forward on the CPU: the loop over tiles. Read kernels/panel.hpp for the steps, candidates.hpp for the
// choice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/attention.hpp"

#include "cpu/bound_tape.hpp"
#include "cpu/candidates.hpp"
#include "mask/block_map.hpp"
#include "problem/cache.hpp"
#include "problem/forward.hpp"

namespace fovea::cpu {

/// What a call needs beyond its arguments, found once.
struct ForwardPlan {
  ForwardSpec spec;
  std::string candidate;
  std::vector<Explanation::Refused> refused;  // better candidates, with their reasons
  BoundTape score, mask;                      // empty where there is nothing to run
  // of the formula; a run puts its tensors and numbers into it
  std::optional<mask::BlockMapper> mapper;
  int num_workers = 1;
  std::size_t program_bytes = 0;  // scratch of the two programs
  std::size_t workspace_bytes = 0;
};

/// A plan's candidate without its target.
inline std::string_view kernel_name(const ForwardPlan& plan) {
  return std::string_view(plan.candidate).substr(0, plan.candidate.find(' '));
}

/// Asks each candidate in order. Throws Unsupported with every reason.
ForwardPlan plan_forward(const ForwardProblem& problem, int num_threads);

/// As plan_forward, but where nothing can run the plan's candidate is empty and refused holds every reason.
ForwardPlan try_plan_forward(const ForwardProblem& problem, int num_threads);

/// Tapes of the programs, their scratch and the block map, for the spec that the plan has.
void prepare_programs(const ForwardProblem& problem, ForwardPlan& plan);

/// Arguments have been validated. `workspace` holds plan.workspace_bytes, aligned to 64. With a cache, its k and v are
/// read in the place of the arguments' and the lengths of sequences are the cache's after the append.
void attention_forward(const ForwardProblem& problem, const ForwardPlan& plan,
                       const AttentionForward& args, std::byte* workspace, Executor& executor,
                       const GrownCache* cache = nullptr);

}  // namespace fovea::cpu
