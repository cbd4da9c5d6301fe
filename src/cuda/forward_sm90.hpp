// What Hopper's forward kernel needs on the host: its choice, its tensor maps, its launches. Read candidates.hpp for the table that
// it is a row of, device/sm90/attention_forward.cuh for the kernel.
#pragma once

#include <cstddef>
#include <optional>

#include "cuda/attention_forward.hpp"
#include "cuda/candidates.hpp"

namespace fovea::cuda {

inline constexpr std::string_view kSm90Forward = "cuda/sm90/attention_forward";
inline constexpr std::string_view kSm80Forward = "cuda/sm80/attention_forward";

std::optional<Refusal> refuses_sm90(const ForwardProblem& problem, const DeviceTraits& device);
ForwardSpec choose_sm90(const ForwardProblem& problem, const DeviceTraits& device);
std::size_t sm90_shared_bytes(const ForwardSpec& spec);

/// The counter of row tiles and a word for each 64 rows of a head, which a call clears.
std::size_t sm90_scratch_bytes(const ForwardSpec& spec, const ForwardProblem& problem);

/// The plan by which rows are computed again whose sums were not finite: the spec of the kernel that can tell what they have seen.
ForwardSpec choose_redo(const ForwardProblem& problem, const DeviceTraits& device);

/// Clears its part of the workspace, then range tables, the kernel, plan.redo.
void launch_sm90(const ForwardProblem& problem, const ForwardPlan& plan,
                 const AttentionForward& args, void* workspace, void* stream);

}  // namespace fovea::cuda
