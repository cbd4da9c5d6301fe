// Attention backward on the CPU: the loop over tiles. Read kernels/gradient.hpp for the steps, attention_backward.cpp
// for how work is cut.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fovea/backward.hpp"

#include "cpu/backward/captured_sums.hpp"
#include "cpu/bound_tape.hpp"
#include "mask/block_map.hpp"
#include "problem/backward.hpp"

namespace fovea::cpu {

/// The chosen kernel and its tiling. Rows are (q_head, q_idx) pairs of one kv head, head-major, as in the forward pass.
struct BackwardSpec {
  CpuTarget target = CpuTarget::scalar;
  std::int64_t lanes = 0;      // rows in a panel
  std::int64_t panels = 1;     // panels that share one walk over the tiles of a chunk
  std::int64_t tile_kv = 128;  // keys in a tile
};

/// Who computes what, in which order. A work item is (sequence, kv head, chunk of keys).
struct BackwardSchedule {
  /// Chunks of one (sequence, kv head) run side by side, each with sums of dq of its own, merged in order. Else they
  /// run one after the other, adding to one sum: the same bits.
  bool is_side_by_side = false;
  /// Items that differ in this may run at the same time; the others form a group, run in order.
  bool by_sequence = true, by_head = true, by_chunk = true;
  std::int64_t max_chunks = 1;  // of one sequence
  std::int64_t num_groups = 0;
  std::int64_t num_tasks = 0;  // task t runs the groups t, t + num_tasks, ...
};

struct RoundedGradients;  // quantized/attention_quantized_backward.hpp

/// What a call needs beyond its arguments, found once.
struct BackwardPlan {
  BackwardSpec spec;
  BackwardSchedule schedule;
  std::string candidate;
  std::vector<Explanation::Refused> refused;  // better candidates, with their reasons
  BoundTape score, mask;                      // empty where there is nothing to run
  BoundTape derivative;                       // of the score program by its score; empty: 1
  bool reads_score = false;                   // a derivative needs the score before the program
  CapturedSumsPlan captured;
  // delta comes from P and dP, one more walk over S and dP: rounded to 16 bits, out would leave rows of dS sums that
  // the factors of captured tensors multiply.
  bool sums_delta = false;
  // of the formula; a run puts its tensors and numbers into it
  std::optional<mask::BlockMapper> mapper;
  int num_workers = 1;
  std::size_t program_bytes = 0;  // scratch of the programs
  std::size_t workspace_bytes = 0;
  std::shared_ptr<const RoundedGradients>
      rounded;  // where the problem has a recipe: what is run in its place
};

/// Keys of one chunk of a sequence: a function of its own length, so that its bits are. At most kMaxChunks chunks.
std::int64_t chunk_keys(const BackwardSpec& spec, std::int64_t seqlen_kv);
inline constexpr std::int64_t kMaxChunks = 8;

/// Asks each candidate in order. Throws Unsupported with every reason.
BackwardPlan plan_backward(const GradientProblem& problem, int num_threads);

/// As plan_backward, but where nothing can run the plan's candidate is empty and refused holds every reason.
BackwardPlan try_plan_backward(const GradientProblem& problem, int num_threads);

/// Arguments have been validated. `workspace` holds plan.workspace_bytes, aligned to 64.
void attention_backward(const GradientProblem& problem, const BackwardPlan& plan,
                        const AttentionBackward& args, std::byte* workspace, Executor& executor);

}  // namespace fovea::cpu
