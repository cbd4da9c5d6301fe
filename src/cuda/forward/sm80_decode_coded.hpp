// sm80/decode_coded on the host: few rows over a cache of codes. Read sm80_coded.hpp for what it shares with the kernel
// that takes all other calls, device/sm80/decode_coded.cuh for the kernel.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda/device/shared/decode_coded.h"
#include "cuda/forward/sm80_coded.hpp"

namespace fovea::cuda {

template <>
struct SpecText<CodedDecodeSpec> {
  static constexpr std::string_view kName = "CodedDecodeSpec";
  using Base = ForwardSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(CodedDecodeSpec, k_codes),
                                       FOVEA_SPEC_MEMBER(CodedDecodeSpec, v_codes)};
};

/// A row of the table of candidates.
struct Sm80DecodeCoded {
  using Spec = CodedDecodeSpec;
  static constexpr std::string_view kName = "cuda/sm80/decode_coded";
  static constexpr std::string_view kHeader = "sm80/decode_coded.cuh";
  static constexpr std::string_view kEntry = "sm80::decode_coded";
  static constexpr std::string_view kParams = "CodedParams";
  static constexpr bool kMultipliesByWgmma = false;
  static constexpr bool kIsChained = false;
  static constexpr bool kReadsNumbersOfCodes = false;

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  static bool reads(const AttentionForward& args, const GrownCache* cache);
  static constexpr decltype(Candidate::reads) kReads = reads;
  static std::size_t shared_bytes(const Spec& spec);
  static std::size_t scratch_bytes(const Spec& spec, const ForwardProblem& problem);
  static CodedLaunch prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                             const AttentionForward& args, const GrownCache* cache, void* workspace,
                             const TensorMapEncoder& encode);
};

}  // namespace fovea::cuda
