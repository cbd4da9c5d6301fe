// What can compute tangents on an NVIDIA GPU: one table, best first. It feeds selection, workspace, explain and the
// text of a refusal. Nothing here needs a GPU: a device is a few numbers.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cuda/device/shared/jvp_spec.h"
#include "cuda/device_traits.hpp"
#include "cuda/forward/candidates.hpp"
#include "problem/jvp.hpp"

namespace fovea::cuda {

struct JvpCandidate {
  std::string_view name;    // "cuda/sm80/attention_jvp"
  std::string_view header;  // "sm80/attention_jvp.cuh"
  std::string_view entry;   // "sm80::attention_jvp"
  std::optional<Refusal> (*refuses)(const TangentProblem& problem, const DeviceTraits& device);
  JvpSpec (*choose)(const TangentProblem& problem, const DeviceTraits& device);
  std::size_t (*shared_bytes)(const JvpSpec& spec);
};

std::span<const JvpCandidate> jvp_candidates();

/// The row of the table that has this name.
const JvpCandidate& jvp_candidate_named(std::string_view name);

/// "bf16 d128 tile 64x32": for labels and explain.
std::string describe(const JvpSpec& spec);
/// The definition of a constant of this name, for a generated unit.
std::string print_jvp_spec(const JvpSpec& spec, std::string_view name = "spec");

// ---- what both kernels ask of a problem ----

/// What neither takes.
std::optional<Refusal> refuses_any(const TangentProblem& problem, const DeviceTraits& device);

/// What follows from the problem whatever the kernel and its tile. Columns of V are divided among launches where a CTA
/// has no registers for more than `most_columns` of O and T.
JvpSpec common_spec(const TangentProblem& problem, std::int32_t most_columns);

}  // namespace fovea::cuda
