// What the decoding kernel of sm_90 needs on the host: when it is taken, and its tile. Its parameters and launches are those of every
// split problem (forward_launch.hpp). Read candidates.hpp for the table that it is a row of, device/sm90/decode.cuh for the kernel.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include "cuda/candidates.hpp"

namespace fovea::cuda {

inline constexpr std::string_view kSm90Decode = "cuda/sm90/decode";
/// The same kernel for more rows and wider heads. It stands behind sm80/attention_forward until a GPU has said which is faster.
inline constexpr std::string_view kSm90DecodeWide = "cuda/sm90/decode_wide";

/// Beside what every kernel on tensor cores refuses.
std::optional<Refusal> refuses_decode(const ForwardProblem& problem, const DeviceTraits& device);
std::optional<Refusal> refuses_decode_wide(const ForwardProblem& problem,
                                           const DeviceTraits& device);
ForwardSpec choose_decode(const ForwardProblem& problem, const DeviceTraits& device);
std::vector<ForwardSpec> decode_alternatives(const ForwardProblem& problem,
                                             const DeviceTraits& device);
std::size_t decode_shared_bytes(const ForwardSpec& spec);

}  // namespace fovea::cuda
