// Hopper's forward kernel over numbers that a launch before it makes of a cache's codes. Read sm90.hpp for all else,
// numbers_of_codes.hpp for that launch.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include "cuda/forward/sm90.hpp"

namespace fovea::cuda {

/// A row of the table of candidates: many rows of each head, where workspace has room for the numbers.
struct Sm90ForwardConverted : Sm90Forward {
  static constexpr std::string_view kName = "cuda/sm90/attention_converted";
  static constexpr bool kReadsNumbersOfCodes = true;

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  static bool reads(const AttentionForward& args, const GrownCache* cache);
  static constexpr decltype(Candidate::reads) kReads = reads;
  /// That of Sm90Forward, then numbers of K and V.
  static std::size_t scratch_bytes(const Spec& spec, const ForwardProblem& problem);
  static Sm90Launch prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                            const AttentionForward& args, const GrownCache* cache, void* workspace,
                            const TensorMapEncoder& encode);
};

}  // namespace fovea::cuda
