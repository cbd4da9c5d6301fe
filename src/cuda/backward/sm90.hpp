// What Hopper's backward kernel needs on the host: its choice, its tensor maps, its launches. Read candidates.hpp for
// the table that it is a row of, device/sm90/attention_backward.cuh for the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "cuda/backward/candidates.hpp"
#include "cuda/backward/launch.hpp"
#include "cuda/backward/redo.hpp"
#include "cuda/device/shared/backward_params_sm90.h"
#include "cuda/params/tensor_maps.hpp"

namespace fovea::cuda {

/// A call's parameters and grids; where they run is not known here.
struct Sm90BackwardLaunch {
  BackwardLaunch common{};
  Sm90BackwardParams params{};
  PrepareRowsParams prepare{};
  std::uint32_t num_prepare_ctas = 0;
  std::uint32_t num_ctas = 0;  // 0: there are no keys
  std::uint32_t num_finish_ctas =
      0;  // 0: dq has no rows, is not wanted, or is written by the kernel
  RedoLaunch redo_keys{}, redo_queries{};
  SumPairsParams sum_pairs{};
  std::uint32_t num_sum_ctas = 0;  // of sum_pairs

  /// Statistics of rows, prepare_rows, the kernel, finish_queries where it is wanted, tiles again, sum_pairs where it
  /// is wanted, captured data, dsinks.
  KernelLaunches launches(const BackwardPlan& plan) const;

  /// What computes tiles again. After all else of params.
  void prepare_redo(const BackwardPlan& plan);

 private:
  friend struct Sm90Backward;
  /// After params.pairs. `redo_words`: one for all tiles of the gradient, and one for each.
  void prepare_pairs(const BackwardPlan& plan, std::int32_t* redo_words);
};

/// What Hopper's kernel and Blackwell's ask of a problem, whose CTAs own keys and sum dq in memory.
std::optional<Refusal> refuses_key_walk(const GradientProblem& problem);
/// What follows from the problem whatever the kernel and its tile; and, behind tile_q, from that.
Sm90BackwardSpec key_walk_spec(const GradientProblem& problem);
void set_walks(const GradientProblem& problem, Sm90BackwardSpec& spec);
/// The kernel, and all that its spec asks for around it, which is Hopper's.
std::vector<BackwardStep> with_steps_around(const BackwardStep& main,
                                            const GradientProblem& problem,
                                            const DeviceTraits& device);

/// A row of the table of candidates.
struct Sm90Backward {
  static constexpr std::string_view kName = "cuda/sm90/attention_backward";
  static constexpr std::string_view kHeader = "sm90/attention_backward.cuh";
  static constexpr std::string_view kEntry = "sm90::attention_backward";
  static constexpr std::string_view kParams = "Sm90BackwardParams";
  static constexpr bool kIsChained = true;

  static bool has_origins(const GradientProblem& problem) { return has_program(problem); }
  static std::optional<Refusal> refuses(const GradientProblem& problem, const DeviceTraits& device);
  /// The kernel, prepare_rows, finish_queries unless the kernel writes dq, what computes tiles again that NaN or
  /// infinity in hidden or dropped pairs may have reached, where there are such, and sum_pairs where the kernel leaves
  /// pairs; none where no gradient of q, k or v is wanted.
  static std::vector<BackwardStep> choose(const GradientProblem& problem,
                                          const DeviceTraits& device);
  /// What is prepared of rows, f32 sums of dq, progress, tiles to be computed again.
  static std::size_t scratch_bytes(const std::vector<BackwardStep>& steps,
                                   const GradientProblem& problem);
  /// Of tensors that TMA reads. `workspace` holds plan.workspace_bytes.
  static Sm90BackwardLaunch prepare(const GradientProblem& problem, const BackwardPlan& plan,
                                    const AttentionBackward& args, void* workspace,
                                    const TensorMapEncoder& encode);
};

}  // namespace fovea::cuda
