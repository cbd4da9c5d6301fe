// sm90/attention_forward where few rows share a kv head: heads packed into one tile of rows, keys split among CTAs.
// What it takes and its tile; sm90.hpp has the launch. The kernel reads keys at memory's rate where sm80's
// waits for mma.sync.
#pragma once

#include <optional>
#include <vector>

#include "cuda/forward/candidates.hpp"

namespace fovea::cuda {

/// Of a problem with few rows (has_few_rows) that TMA can read.
std::optional<Refusal> refuses_few_rows(const ForwardProblem& problem);

/// `spec` has the problem's dtypes, features and padded head dims.
Sm90ForwardSpec with_few_rows(Sm90ForwardSpec spec, const ForwardProblem& problem,
                              const DeviceTraits& device);
std::vector<Sm90ForwardSpec> few_rows_alternatives(const Sm90ForwardSpec& chosen,
                                                   const DeviceTraits& device);

}  // namespace fovea::cuda
