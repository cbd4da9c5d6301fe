// sm80/attention_jvp on the host: what it takes, its tiles. Read candidates.hpp for the table that it is a row of,
// device/sm80/attention_jvp.cuh for the kernel.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

#include "cuda/jvp/candidates.hpp"

namespace fovea::cuda {

/// A row of the table of candidates.
struct Sm80Jvp {
  static constexpr std::string_view kName = "cuda/sm80/attention_jvp";
  static constexpr std::string_view kHeader = "sm80/attention_jvp.cuh";
  static constexpr std::string_view kEntry = "sm80::attention_jvp";

  static std::optional<Refusal> refuses(const TangentProblem& problem, const DeviceTraits& device);
  static JvpSpec choose(const TangentProblem& problem, const DeviceTraits& device);
  static std::size_t shared_bytes(const JvpSpec& spec);
};

}  // namespace fovea::cuda
