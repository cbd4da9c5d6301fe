// Problems of several kernels, by another than the table's first.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>

#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/choices.hpp"

namespace fovea::testing {

/// The plan that the table would have without these candidates. Its kernels are not loaded.
inline cuda::ForwardPlan plan_without(std::initializer_list<std::string_view> candidates,
                                      const ForwardProblem& problem,
                                      const cuda::DeviceTraits& device) {
  for (const cuda::Choice& choice : cuda::choices_of(problem, device)) {
    if (std::ranges::find(candidates, choice.candidate->name) == candidates.end())
      return cuda::plan_choice(problem, device, choice);
  }
  throw std::logic_error("no kernel but those that are left out");
}

}  // namespace fovea::testing
