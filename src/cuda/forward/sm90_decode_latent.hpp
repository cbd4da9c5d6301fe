// What the latent kernel of sm_90 needs on the host: when it is taken, its tile, its launches. Read candidates.hpp for
// the table that it is a row of, device/sm90/decode_latent.cuh for the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda/device/shared/forward_params_sm90.h"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/candidates.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/params/tensor_maps.hpp"
#include "cuda/spec_text.hpp"

namespace fovea::cuda {

template <>
struct SpecText<Sm90LatentSpec> {
  static constexpr std::string_view kName = "Sm90LatentSpec";
  using Base = ForwardSpec;
  static constexpr std::tuple<> kMembers{};
};

/// A call's parameters and grids; where they run is not known here.
struct LatentLaunch {
  Sm90LatentParams params{};
  ForwardLaunch common{};  // range tables, and the combine kernel
  std::uint32_t num_ctas = 0;

  /// Range tables, the kernel, the combine kernel, which starts while the one before ends.
  KernelLaunches launches(const ForwardPlan& plan) const;
};

/// A row of the table of candidates.
struct Sm90DecodeLatent {
  using Spec = Sm90LatentSpec;
  static constexpr std::string_view kName = "cuda/sm90/decode_latent";
  static constexpr std::string_view kHeader = "sm90/decode_latent.cuh";
  static constexpr std::string_view kEntry = "sm90::decode_latent";
  static constexpr std::string_view kParams = "Sm90LatentParams";
  static constexpr bool kMultipliesByWgmma = true;
  static constexpr bool kIsChained = true;
  static constexpr bool kReadsNumbersOfCodes = false;

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  static bool reads(const AttentionForward& args, const GrownCache* cache);
  static constexpr decltype(Candidate::reads) kReads = reads;
  static std::size_t shared_bytes(const Spec& spec);
  static std::size_t scratch_bytes(const Spec& spec, const ForwardProblem& problem);
  /// Of tensors that it reads. `workspace` holds plan.workspace_bytes.
  static LatentLaunch prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                              const AttentionForward& args, const GrownCache* cache,
                              void* workspace, const TensorMapEncoder& encode);
};

}  // namespace fovea::cuda
