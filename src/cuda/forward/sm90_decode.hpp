// What the decoding kernel of sm_90 needs on the host: when it is taken, its tile, its launches. Read candidates.hpp
// for the table that it is a row of, device/sm90/decode.cuh for the kernel.
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
struct SpecText<Sm90DecodeSpec> {
  static constexpr std::string_view kName = "Sm90DecodeSpec";
  using Base = ForwardSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(Sm90DecodeSpec, slices_of_box),
                                       FOVEA_SPEC_MEMBER(Sm90DecodeSpec, has_groups),
                                       FOVEA_SPEC_MEMBER(Sm90DecodeSpec, takes_groups),
                                       FOVEA_SPEC_MEMBER(Sm90DecodeSpec, ctas_of_cluster),
                                       FOVEA_SPEC_MEMBER(Sm90DecodeSpec, k_codes),
                                       FOVEA_SPEC_MEMBER(Sm90DecodeSpec, v_codes)};
};

/// A call's parameters and grids; where they run is not known here.
struct DecodeLaunch {
  Sm90DecodeParams params{};
  ForwardLaunch common{};  // range tables, and the combine kernel
  std::uint32_t num_ctas = 0;

  /// Range tables, the kernel, the combine kernel, which starts while the one before ends; none where clusters fold all
  /// splits.
  KernelLaunches launches(const ForwardPlan& plan) const;
};

/// Why keys of neither kind, elements or codes, can be streamed for a call.
std::optional<Refusal> refuses_stream(const ForwardProblem& problem, const DeviceTraits& device);

/// A row of the table of candidates.
struct Sm90Decode {
  using Spec = Sm90DecodeSpec;
  static constexpr std::string_view kName = "cuda/sm90/decode";
  static constexpr std::string_view kHeader = "sm90/decode.cuh";
  static constexpr std::string_view kEntry = "sm90::decode";
  static constexpr std::string_view kParams = "Sm90DecodeParams";
  static constexpr bool kMultipliesByWgmma = false;
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
  static DecodeLaunch prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                              const AttentionForward& args, const GrownCache* cache,
                              void* workspace, const TensorMapEncoder& encode);
};

}  // namespace fovea::cuda
