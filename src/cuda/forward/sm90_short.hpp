// Short sequences on Hopper by wgmma: all keys of a sequence in shared memory, several CTAs on an SM. Read
// candidates.hpp for the table that it is a row of, device/sm90/attention_forward_short.cuh for the kernel.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda/device/shared/forward_params_sm90.h"
#include "cuda/forward/candidates.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/params/tensor_maps.hpp"
#include "cuda/spec_text.hpp"

namespace fovea::cuda {

template <>
struct SpecText<Sm90ShortSpec> {
  static constexpr std::string_view kName = "Sm90ShortSpec";
  using Base = ForwardSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(Sm90ShortSpec, q_stages),
                                       FOVEA_SPEC_MEMBER(Sm90ShortSpec, is_persistent),
                                       FOVEA_SPEC_MEMBER(Sm90ShortSpec, takes_last_first),
                                       FOVEA_SPEC_MEMBER(Sm90ShortSpec, keeps_queries),
                                       FOVEA_SPEC_MEMBER(Sm90ShortSpec, runs_ahead),
                                       FOVEA_SPEC_MEMBER(Sm90ShortSpec, kv_buffers)};
};

/// A call's parameters and its grid; where it runs is not known here.
struct Sm90ShortLaunch {
  Sm90ShortParams params{};
  ForwardLaunch common{};

  KernelLaunches launches(const ForwardPlan& plan) const;
};

/// A row of the table of candidates.
struct Sm90ForwardShort {
  using Spec = Sm90ShortSpec;
  static constexpr std::string_view kName = "cuda/sm90/attention_forward_short";
  static constexpr std::string_view kHeader = "sm90/attention_forward_short.cuh";
  static constexpr std::string_view kEntry = "sm90::attention_forward_short";
  static constexpr std::string_view kParams = "Sm90ShortParams";
  static constexpr bool kMultipliesByWgmma = true;
  static constexpr bool kIsChained = false;
  static constexpr bool kReadsNumbersOfCodes = false;

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  static bool reads(const AttentionForward& args, const GrownCache* cache);
  static constexpr decltype(Candidate::reads) kReads = reads;
  static std::size_t shared_bytes(const Spec& spec);
  static std::size_t scratch_bytes(const Spec& spec, const ForwardProblem& problem);
  /// Of tensors that it reads.
  static Sm90ShortLaunch prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                                 const AttentionForward& args, const GrownCache* cache,
                                 void* workspace, const TensorMapEncoder& encode);
};

}  // namespace fovea::cuda
