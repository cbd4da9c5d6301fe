// What can compute gradients on an NVIDIA GPU: one table, best first. It feeds selection, workspace, explain and the
// text of a refusal. Nothing here needs a GPU: a device is a few numbers.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/backward/attention_backward.hpp"
#include "cuda/device_traits.hpp"
#include "cuda/forward/candidates.hpp"
#include "problem/backward.hpp"

namespace fovea::cuda {

struct BackwardCandidate {
  std::string_view name;    // "cuda/sm80/attention_backward"
  std::string_view header;  // "sm80/attention_backward.cuh"
  std::string_view entry;   // "sm80::attention_backward"
  std::string_view params;  // what the entry takes: "BackwardParams"
  /// Scores less their row's origin, so that a large lse costs no digits.
  bool (*has_origins)(const GradientProblem& problem);
  bool is_chained;  // its kernels start while the one before ends (programmatic dependent launch)
  std::optional<Refusal> (*refuses)(const GradientProblem& problem, const DeviceTraits& device);
  /// Its kernels, one for each part of the gradients that are wanted.
  std::vector<BackwardStep> (*choose)(const GradientProblem& problem, const DeviceTraits& device);
  /// Other tiles of those kernels, for fovea tune; null: none.
  std::vector<std::vector<BackwardStep>> (*alternatives)(const GradientProblem& problem,
                                                         const DeviceTraits& device);
  /// Of workspace, beside statistics of rows and range tables.
  std::size_t (*scratch_bytes)(const std::vector<BackwardStep>& steps,
                               const GradientProblem& problem);
  /// Enqueues a call: cuda::attention_backward says what the arguments are.
  void (*launch)(const GradientProblem& problem, const BackwardPlan& plan,
                 const AttentionBackward& args, void* workspace, void* stream);
};

std::span<const BackwardCandidate> backward_candidates();

/// The row of the table that has this name.
const BackwardCandidate& backward_candidate_named(std::string_view name);

// ---- what several kernels ask of a problem ----

/// What none of them takes; and those on tensor cores.
std::optional<Refusal> refuses_any(const GradientProblem& problem, const DeviceTraits& device);
std::optional<Refusal> refuses_16_bit(const GradientProblem& problem, const DeviceTraits& device);

/// What follows from the problem whatever the kernel and its tile: dtypes, padded head dims, features.
BackwardSpec common_spec(const GradientProblem& problem);

/// Where a row's digits are worth its origin: beside programs, which may add anything.
bool has_program(const GradientProblem& problem);

/// A kernel that owns rows.
enum class Gradients : std::uint8_t { dq, dk, dv, dk_and_dv };
/// The parts of what is wanted: dk and dv together where a kernel can sum both.
std::vector<Gradients> wanted_gradients(const GradientProblem& problem, bool sums_both);
/// role and what is owned and summed.
KernelRole role_of(Gradients gradients);
void set_gradients(Gradients gradients, OwnerSpec& spec);

/// Every way to take one step of each part.
std::vector<std::vector<BackwardStep>> combinations(
    const std::vector<std::vector<BackwardStep>>& steps_of_parts);

/// Tiles of owned rows of all heads; packed: a bound, whatever the lengths of the sequences.
std::int64_t num_owned_tiles(const OwnerSpec& spec, const GradientProblem& problem,
                             const AttentionBackward& args);

}  // namespace fovea::cuda
