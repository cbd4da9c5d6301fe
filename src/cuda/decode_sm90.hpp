// What the decoding kernel of sm_90 needs on the host: when it is taken, its tile, its launches. Read candidates.hpp
// for the table that it is a row of, device/sm90/decode.cuh for the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "cuda/attention_forward.hpp"
#include "cuda/candidates.hpp"
#include "cuda/device/shared/forward_params_sm90.h"
#include "cuda/forward_launch.hpp"
#include "cuda/tensor_maps.hpp"

namespace fovea::cuda {

inline constexpr std::string_view kSm90Decode = "cuda/sm90/decode";

/// Beside what every kernel on tensor cores refuses.
std::optional<Refusal> refuses_decode(const ForwardProblem& problem, const DeviceTraits& device);
ForwardSpec choose_decode(const ForwardProblem& problem, const DeviceTraits& device);
std::vector<ForwardSpec> decode_alternatives(const ForwardProblem& problem,
                                             const DeviceTraits& device);
bool decode_reads(const AttentionForward& args, const GrownCache* cache);
std::size_t decode_shared_bytes(const ForwardSpec& spec);

/// A call's parameters and grids; where they run is not known here.
struct DecodeLaunch {
  Sm90DecodeParams params{};
  ForwardLaunch common{};  // range tables, and the combine kernel
  std::uint32_t num_ctas = 0;
};

/// `workspace` holds plan.workspace_bytes. Of tensors that decode_reads.
DecodeLaunch decode_launch(const ForwardProblem& problem, const ForwardPlan& plan,
                           const AttentionForward& args, const GrownCache* cache, void* workspace,
                           const TensorMapEncoder& encode);

/// Candidate::launch: range tables, the kernel, the combine kernel, which starts while the one before ends.
void launch_decode(const ForwardProblem& problem, const ForwardPlan& plan,
                   const AttentionForward& args, void* workspace, void* stream,
                   const GrownCache* cache);

}  // namespace fovea::cuda
