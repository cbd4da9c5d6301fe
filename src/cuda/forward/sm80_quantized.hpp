// sm_80's forward kernel with Q and K, or P and V too, in eight bits: what of recipes it takes, and its launches. Read
// sm80.hpp for all else, quantize_kv.hpp for the kernels that round.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include "cuda/device/shared/forward_params_sm80.h"
#include "cuda/forward/lost_rows.hpp"
#include "cuda/forward/quantize_kv.hpp"
#include "cuda/forward/sm80.hpp"

namespace fovea::cuda {

/// A call's parameters and grids.
struct Sm80QuantizedLaunch {
  ForwardLaunch common{};
  QuantizeKvLaunch quantize{};
  Sm80QuantizedParams params{};
  LostRowsLaunch lost{};

  /// Range tables, the codes, the kernel, which starts while the one before it ends, what joins splits, rows of very
  /// large scores.
  KernelLaunches launches(const ForwardPlan& plan) const;
};

/// A row of the table of candidates: recipes that round q and k to int8, with p and v in 16 bits, and from 8.9 on those
/// that round p and v as `fast` does, or all as `sage2` and `fp8_static` do.
struct Sm80ForwardQuantized : Sm80Forward {
  static constexpr std::string_view kName = "cuda/sm80/attention_quantized";
  static constexpr std::string_view kHeader = "sm80/attention_quantized.cuh";
  static constexpr std::string_view kEntry = "sm80::attention_quantized";
  static constexpr std::string_view kParams = "Sm80QuantizedParams";

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  /// That of Sm80Forward, then codes with what is beside them.
  static std::size_t scratch_bytes(const Spec& spec, const ForwardProblem& problem);
  static Sm80QuantizedLaunch prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                                     const AttentionForward& args, const GrownCache* cache,
                                     void* workspace, const TensorMapEncoder& encode);
};

}  // namespace fovea::cuda
