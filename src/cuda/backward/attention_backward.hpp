// Attention backward on an NVIDIA GPU: what is chosen once, and a call. Read candidates.hpp for the choice, launch.hpp
// for the steps of a call and device/sm80/attention_backward.cuh for the kernels.
//
//   range_tables    bounds of what a mask loads, where it loads
//   delta           what is known of each row (RowStatistics)
//   main, values, queries    the gradients, as the candidate divides them among kernels
//   redo_keys, redo_values, redo_queries  tiles of them that were not finite, where the candidate cannot tell why
//   sinks           dsinks, where wanted
//   captured_deltas, ...    gradients of captured data (captured.hpp)
//
// With a recipe all of these follow what rounds q, k and v, and forward at the rounded ones (rounded.hpp).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/backward.hpp"

#include "cuda/backward/captured.hpp"
#include "cuda/backward/spec.hpp"
#include "cuda/kernel_set.hpp"
#include "cuda/params/captures.hpp"
#include "cuda/params/range_tables.hpp"
#include "cuda/plan_ladder.hpp"
#include "expr/print_cuda.hpp"
#include "problem/backward.hpp"

namespace fovea::cuda {

/// One kernel of a candidate.
struct BackwardStep {
  KernelRole role = KernelRole::main;
  AnyBackwardSpec spec;
  std::size_t shared_bytes = 0;  // dynamic
  // What the candidate's row says, where empty.
  std::string_view header{}, entry{}, params{};
  bool multiplies_by_wgmma = false;

  /// Computes what another step found not finite: hardly ever anything.
  bool is_redo() const {
    return role == KernelRole::redo_keys || role == KernelRole::redo_values ||
           role == KernelRole::redo_queries;
  }
  /// Walks over tiles: neither that, nor what prepares and converts.
  bool is_walk() const {
    return role == KernelRole::main || role == KernelRole::values || role == KernelRole::queries;
  }
};

/// Of the workspace: statistics of rows from its start, then what the candidate sums in, what gradients of captured
/// data do, and range tables.
struct BackwardMemory {
  std::size_t scratch_at = 0;
  std::size_t captured_at = 0;
  std::size_t tables_at = 0;
};

struct RoundedGradients;

/// What a call needs beyond its arguments, found once.
struct BackwardPlan : KernelPlan {
  // Of the candidate, in their order; none where only dsinks are wanted.
  std::vector<BackwardStep> steps;
  DeltaSpec delta;
  bool wants_dsinks = false;
  CapturedPlan captured;
  BackwardMemory memory;
  std::shared_ptr<const expr::CudaProgram> program;
  CaptureSlots capture_slots;
  RangeTables range_tables;
  std::shared_ptr<RoundedGradients> rounded;  // where there is a recipe: all else is of its problem
};

/// All that is compiled for a plan, but for forward's kernels where a recipe has out and lse anew.
PlannedKernels planned_kernels(const BackwardPlan& plan);
PlannedKernels planned_forward_kernels(const BackwardPlan& plan);

/// Queries and keys of a tile of the first step; 0 where there is none.
struct BackwardTile {
  std::int64_t q = 0, kv = 0;
};
BackwardTile tile_of(const BackwardPlan& plan);

/// How many products of a score's worth are taken over head_dim_qk, and how many over head_dim_v: what is computed
/// twice counts twice.
struct ProductDepths {
  std::int64_t qk = 0, v = 0;
};
ProductDepths product_depths(const BackwardPlan& plan);

/// In what order gradients are summed and in how much of the workspace, for explain; empty where nothing is summed.
std::string describe_sums(const BackwardPlan& plan);

/// Asks each candidate in order and loads what it chose into device.index. Throws Unsupported with every reason.
BackwardPlan plan_backward(const GradientProblem& problem, Device device);

/// What plan_backward would choose, without compiling or loading it. Where nothing can run candidate is empty and
/// refused holds every reason.
BackwardPlan try_plan_backward(const GradientProblem& problem, Device device);

/// The choice alone, for a device that need not be here: nothing is compiled or loaded.
BackwardPlan choose_backward(const GradientProblem& problem, const DeviceTraits& device);

/// Loads what a plan that was made without a device was chosen to run.
void load(jit::Loader& loader, const driver::DeviceContext& context, BackwardPlan& plan);

/// The plan of one candidate by name, whatever it refuses: what its own tests ask for.
BackwardPlan choose_backward_by(std::string_view candidate, const GradientProblem& problem,
                                const DeviceTraits& device);

/// Enqueues on `stream` (CUstream; null: the legacy default stream) and returns: no allocation, no synchronisation, no
/// compilation. Arguments have been validated and lie in the memory of the plan's device, workspace too
/// (plan.workspace_bytes, aligned to 256).
void attention_backward(const GradientProblem& problem, const BackwardPlan& plan,
                        const AttentionBackward& args, void* workspace, void* stream);

}  // namespace fovea::cuda
