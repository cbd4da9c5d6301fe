// sm90/decode over a cache of codes. Read sm90_decode.hpp for all that they share.
#pragma once

#include <optional>
#include <string_view>

#include "cuda/forward/sm90_decode.hpp"

namespace fovea::cuda {

/// A row of the table of candidates: the same kernel, and what it multiplies instead.
struct Sm90DecodeCoded : Sm90Decode {
  static constexpr std::string_view kName = "cuda/sm90/decode_coded";

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
};

}  // namespace fovea::cuda
