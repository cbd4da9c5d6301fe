// Problems of several kernels, by another than the table's first.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/choices.hpp"

namespace fovea::testing {

/// The plan that the table would have without this candidate. Its kernels are not loaded.
inline cuda::ForwardPlan plan_without(std::string_view candidate, const ForwardProblem& problem,
                                      const cuda::DeviceTraits& device) {
  for (const cuda::Choice& choice : cuda::choices_of(problem, device))
    if (choice.candidate->name != candidate) return cuda::plan_choice(problem, device, choice);
  throw std::logic_error("no kernel but " + std::string(candidate));
}

}  // namespace fovea::testing
