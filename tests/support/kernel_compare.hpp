// The comparison with the oracle for kernels that no public function runs: on a GPU, or under the emulator.
#pragma once

#include <functional>

#include "fovea/attention.hpp"

#include "support/cache_case.hpp"
#include "support/case.hpp"

namespace fovea::testing {

/// EXPECTs that `run`, given arguments whose outputs are NaN, leaves what the oracle says and touches nothing else.
/// Tolerances are those of the plain formula with probabilities of 16 bits where inputs have 16; lse may err by
/// lse_error more, for kernels that are known to.
void expect_kernel_equals_oracle(const Case& problem,
                                 const std::function<void(const AttentionForward&)>& run,
                                 double lse_error = 0);

/// EXPECTs of a call that has run: each sequence is what the oracle says of its keys laid out densely, and nothing else
/// was touched. lse_error is as above.
void expect_sequences_equal_oracle(const CacheCase& problem, CacheMemory& memory,
                                   const AttentionDecode& decode, double lse_error = 0);

}  // namespace fovea::testing
