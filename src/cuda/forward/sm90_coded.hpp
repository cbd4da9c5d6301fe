// Hopper's forward kernel over a cache of codes: many rows of each head, prompts and chunks of them. Read sm90.hpp for
// all else, device/sm90/forward/copy_codes.cuh for what becomes of the codes.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "cuda/forward/sm90.hpp"

namespace fovea::cuda {

/// A row of the table of candidates.
struct Sm90ForwardCoded : Sm90Forward {
  static constexpr std::string_view kName = "cuda/sm90/attention_coded";

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  static bool reads(const AttentionForward& args, const GrownCache* cache);
  static constexpr decltype(Candidate::reads) kReads = reads;
  static Sm90Launch prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                            const AttentionForward& args, const GrownCache* cache, void* workspace,
                            const TensorMapEncoder& encode);
};

}  // namespace fovea::cuda
