// Kernels and tiles that gradients can be computed by on a device, and what was measured of them: forward/choices.hpp
// and forward/tuning.hpp for backward. Where several kernels share the work, a choice has a tile for each.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cuda/backward/candidates.hpp"
#include "cuda/forward/tuning.hpp"

namespace fovea::cuda {

struct BackwardChoice {
  const BackwardCandidate* candidate = nullptr;  // of the table
  std::vector<BackwardStep> steps;
};

/// Its name and tiles, as files and people know them: no times.
Winner winner_of(const BackwardChoice& choice);

/// All that can run the problem, each once: the table's choice, its kernel's other tiles, then what other kernels have.
/// Empty where every kernel refuses, or where none of dq, dk and dv is wanted.
std::vector<BackwardChoice> choices_of(const GradientProblem& problem, const DeviceTraits& device);

/// As that of forward: "gradients of q k v: bf16 to bf16 head_dim ...".
std::string problem_class(const GradientProblem& problem);

/// The measured choice for a problem, as that of forward.
struct TunedBackwardChoice {
  std::optional<BackwardChoice> choice;
  std::string words;
};
TunedBackwardChoice tuned_choice(const GradientProblem& problem, const DeviceTraits& device,
                                 const TuningFile& file);

/// As choose_backward of the table; what the file has for the problem is taken before.
BackwardPlan choose_backward(const GradientProblem& problem, const DeviceTraits& device,
                             const TuningFile& tuning);
/// The plan of one of choices_of.
BackwardPlan plan_choice(const GradientProblem& problem, const DeviceTraits& device,
                         const BackwardChoice& choice);

}  // namespace fovea::cuda
