// Forward mode on the CPU. The meaning stands in fovea/jvp.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cpu/attention_forward.hpp"
#include "cpu/bound_tape.hpp"
#include "mask/block_map.hpp"
#include "problem/jvp.hpp"

namespace fovea::cpu {

/// What a call needs beyond its arguments, found once.
struct JvpPlan {
  ForwardPlan forward;      // its candidate is forward mode's; scratch and workspace are not
  BoundTape by_score{};     // derivative of the score program by its score; empty: 1
  BoundTape by_captured{};  // what captured tangents add; empty: nothing
  std::vector<std::string> tangent_slots{};   // of by_captured, for each captured tangent
  std::optional<mask::BlockMapper> mapper{};  // where positions and constants alone decide
  std::size_t program_bytes = 0;              // scratch of the programs
  std::size_t workspace_bytes = 0;
};

/// Asks each candidate in order. Throws Unsupported with every reason.
JvpPlan plan_jvp(const TangentProblem& problem, int num_threads);

/// As plan_jvp, but where nothing can run the plan's candidate is empty and refused holds every reason.
JvpPlan try_plan_jvp(const TangentProblem& problem, int num_threads);

/// What its products take.
Dtype jvp_product(const JvpPlan& plan);

/// Arguments have been validated. `workspace` holds plan.workspace_bytes, aligned to 64.
void attention_jvp(const TangentProblem& problem, const JvpPlan& plan, const AttentionJvp& args,
                   std::byte* workspace, Executor& executor);

}  // namespace fovea::cpu
