// A call that a kernel of forward_cases.hpp is run on: a case's, or of a cache.
#pragma once

#include <cstdint>
#include <string>

#include "cuda/device_traits.hpp"
#include "kernels/emulated_device.hpp"
#include "kernels/forward_cases.hpp"
#include "problem/cache.hpp"
#include "problem/forward.hpp"
#include "support/cache_case.hpp"

namespace fovea::testing {

/// A problem, and whose kernel runs it.
struct Run {
  const std::string& label;
  const ForwardProblem& problem;
  const AttentionForward& args;
  const GrownCache* cache = nullptr;
  cuda::DeviceTraits device = cuda::typical_device(8, 0);
};

using Runner = void (*)(const Run&, Emulation&);

/// These arguments, validated as a caller's are.
void run_args(Runner run, const std::string& label, const AttentionForward& args,
              const cuda::DeviceTraits& device, Emulation& emulation);

/// Attention over the cache of a case, as the kernels take it.
struct CacheCall {
  AttentionForward args;
  ForwardProblem problem;
  Append append;  // with its offsets
  GrownCache cache;

  CacheCall(const CacheCase& each, const AttentionDecode& decode)
      : CacheCall(decode, longest(each)) {}
  /// Planned for so many keys of a sequence.
  CacheCall(const AttentionDecode& decode, std::int64_t most_keys);

  Run on(const std::string& label, const cuda::DeviceTraits& device) const {
    return {.label = label, .problem = problem, .args = args, .cache = &cache, .device = device};
  }
};

/// The call of a case, behind what it appends. `lse_error`: as expect_sequences_equal_oracle has it.
void expect_cache_equals_oracle(const NamedCacheCase& each, Runner run,
                                const cuda::DeviceTraits& device, Emulation& emulation,
                                double lse_error = 0);

}  // namespace fovea::testing
