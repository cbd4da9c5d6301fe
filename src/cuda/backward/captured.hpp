// Gradients of what a score program captures, on the host: steps of their own beside those of whichever candidate
// computes dq, dk and dv. device/sm80/captured_gradients.cuh has the kernels.
//
//   captured_deltas    delta summed again, where its rounding would show
//   clear_sums, captured_sums, write_sums    gradients that have a sum for each element
//   captured_tiles     that of a dense bias; or, where dS is that and the kernel of dq, dk and dv leaves it
//                      (PairTiles), tiles of it that sum_pairs found not finite
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fovea/backward.hpp"

#include "cuda/device/shared/captured_params.h"
#include "cuda/device_traits.hpp"
#include "cuda/kernel_set.hpp"
#include "expr/print_cuda.hpp"
#include "problem/backward.hpp"

namespace fovea::cuda {

/// A gradient that has an element for each (q_idx, kv_idx), and where its axes lie among its dimensions.
struct DenseBias {
  std::size_t gradient = 0;  // of GradientProblem::captured, as below
  std::optional<std::size_t> batch, head;
  std::size_t q = 0, kv = 0;
  bool is_of_kv_heads = false;
};

/// Parts of the workspace that are theirs.
struct CapturedMemory {
  std::size_t deltas_at = 0;
  std::size_t sums_at = 0;
  std::size_t pairs_at = 0;  // tiles of PairTiles
  std::size_t bytes = 0;
};

struct CapturedPlan {
  CapturedSpec spec, dense_spec;  // of walks along lines of a tile, and of captured_tiles
  bool sums_deltas = false;
  std::vector<std::size_t> summed;
  std::vector<std::int64_t> first_sum;  // of each of them
  std::int64_t num_sums = 0;
  std::optional<DenseBias> dense;
  bool sums_pairs = false;  // of dense: captured_tiles computes again what was not finite
  // With the places that read those gradients; null where no place does.
  std::shared_ptr<const expr::CudaProgram> sums_program, dense_program;
  CapturedMemory memory;

  bool is_empty() const { return summed.empty() && !dense; }
  /// Walks over all pairs, each with two products.
  int num_walks() const;
};

/// Why no kernel takes these gradients; empty: they do.
std::optional<std::string> captured_refusal(const GradientProblem& problem);

/// The dense bias whose gradient is dS as products of 16 bits take it, if its tiles for all sequences and heads fit.
std::optional<DenseBias> bias_of_pairs(const GradientProblem& problem);
/// Tiles of PairTiles; of captured_tiles for that bias.
std::int64_t num_pair_tiles(const GradientProblem& problem);
std::int64_t num_pair_sum_tiles(const GradientProblem& problem);

/// sums_pairs: a kernel leaves the pairs of bias_of_pairs.
CapturedPlan plan_captured(const GradientProblem& problem, const DeviceTraits& device,
                           bool sums_pairs);

/// What computes which, and in how much workspace, for explain: "sm80/captured_sums of 'table' in 3328 bytes".
std::string describe(const GradientProblem& problem, const CapturedPlan& plan);

/// Their kernels, behind those that are there.
void add_captured_kernels(const CapturedPlan& plan, PlannedKernels& kernels);

/// Threads of a CTA and its dynamic shared memory.
struct CtaShape {
  std::uint32_t num_threads = 0, shared_bytes = 0;

  static CtaShape of(const CapturedSpec& spec);
};

/// Parameters and grids of their launches.
struct CapturedLaunch {
  CapturedParams params;
  SumsParams sums;
  std::uint32_t num_delta_ctas = 0, num_sum_ctas = 0, num_dense_ctas = 0;
  std::uint32_t num_element_ctas = 0;  // of clear_sums and write_sums
  std::uint32_t num_dense_tiles = 0;   // of captured_tiles
  CtaShape walk, dense;

  void add(KernelLaunches& all) const;
};

/// `call`: what the other steps take; `workspace`: plan.memory.bytes, aligned to 256.
CapturedLaunch captured_launch(const GradientProblem& problem, const CapturedPlan& plan,
                               const AttentionBackward& args, const BackwardParams& call,
                               void* workspace);

}  // namespace fovea::cuda
