// Hopper's forward kernel with Q and K in eight bits: what of recipes it takes, and its tile. Read sm90.hpp for all
// else, quantize_kv.hpp for the kernels that round.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/forward/sm90.hpp"

namespace fovea::cuda {

/// A row of the table of candidates: recipes that round q and k to int8 as `accurate` does.
struct Sm90ForwardQuantized : Sm90Forward {
  static constexpr std::string_view kName = "cuda/sm90/attention_quantized";

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  /// Why calls that name no recipe (Quantization::accuracy) are faster without this kernel; empty: they are not.
  static std::string why_slower(const ForwardProblem& problem);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  static bool reads(const AttentionForward& args, const GrownCache* cache);
  static constexpr decltype(Candidate::reads) kReads = reads;
  /// That of Sm90Forward, then codes of K, of V where the recipe has such, with what is beside them. Over a cache V is
  /// there in either case.
  static std::size_t scratch_bytes(const Spec& spec, const ForwardProblem& problem);
  static Sm90Launch prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                            const AttentionForward& args, const GrownCache* cache, void* workspace,
                            const TensorMapEncoder& encode);
};

}  // namespace fovea::cuda
