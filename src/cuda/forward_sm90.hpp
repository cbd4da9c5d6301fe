// What Hopper's forward kernel needs on the host: its choice, its tensor maps, its launches. Read candidates.hpp for
// the table that it is a row of, device/sm90/attention_forward.cuh for the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "cuda/attention_forward.hpp"
#include "cuda/candidates.hpp"
#include "cuda/device/shared/forward_params_sm90.h"
#include "cuda/forward_launch.hpp"
#include "cuda/tensor_maps.hpp"

namespace fovea::cuda {

inline constexpr std::string_view kSm90Forward = "cuda/sm90/attention_forward";

std::optional<Refusal> refuses_sm90(const ForwardProblem& problem, const DeviceTraits& device);
ForwardSpec choose_sm90(const ForwardProblem& problem, const DeviceTraits& device);
std::vector<ForwardSpec> sm90_alternatives(const ForwardProblem& problem,
                                           const DeviceTraits& device);
bool sm90_reads(const AttentionForward& args, const GrownCache* cache);
std::size_t sm90_shared_bytes(const ForwardSpec& spec);

/// Partial states, the counter of row tiles and a word for each 64 rows of a head.
std::size_t sm90_scratch_bytes(const ForwardSpec& spec, const ForwardProblem& problem);

/// A call's parameters and grids; where they run is not known here.
struct Sm90Launch {
  Sm90ForwardParams params{};
  ForwardLaunch common{};      // range tables, and the combine kernel's where the spec is split
  std::uint32_t num_ctas = 0;  // 0: there are no rows
  bool has_counter = false;    // params.next_tile is read, and must be cleared
};

/// `workspace` holds plan.workspace_bytes. Of tensors that sm90_reads.
Sm90Launch sm90_launch(const ForwardProblem& problem, const ForwardPlan& plan,
                       const AttentionForward& args, const GrownCache* cache, void* workspace,
                       const TensorMapEncoder& encode);

/// Candidate::launch: range tables and the counter of row tiles, where there are any, the kernel, then the combine
/// kernel of splits. The kernel starts while the counter's ends, and so does the combine kernel.
void launch_sm90(const ForwardProblem& problem, const ForwardPlan& plan,
                 const AttentionForward& args, void* workspace, void* stream,
                 const GrownCache* cache);

}  // namespace fovea::cuda
