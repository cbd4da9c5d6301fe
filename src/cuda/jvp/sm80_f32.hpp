// sm80/attention_jvp_f32 on the host: what it takes, its tiles. Read candidates.hpp for the table that it is a row of,
// device/sm80/attention_jvp_f32.cuh for the kernel.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

#include "cuda/jvp/candidates.hpp"

namespace fovea::cuda {

/// A row of the table of candidates.
struct Sm80JvpF32 {
  static constexpr std::string_view kName = "cuda/sm80/attention_jvp_f32";
  static constexpr std::string_view kHeader = "sm80/attention_jvp_f32.cuh";
  static constexpr std::string_view kEntry = "sm80::attention_jvp_f32";

  static std::optional<Refusal> refuses(const TangentProblem& problem, const DeviceTraits& device);
  static JvpSpec choose(const TangentProblem& problem, const DeviceTraits& device);
  static std::size_t shared_bytes(const JvpSpec& spec);
};

}  // namespace fovea::cuda
