// The kernels of backward_cases.hpp, compiled by the host compiler, by name; and a call by them under the emulator.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "fovea/backward.hpp"

#include "cuda/backward/attention_backward.hpp"
#include "cuda/device/shared/backward_params.h"
#include "cuda/device/shared/backward_params_sm80.h"
#include "cuda/device/shared/backward_params_sm90.h"
#include "cuda/device/shared/backward_params_sm90_wide.h"
#include "kernels/emulated_device.hpp"

namespace fovea::cuda {

/// Of captured data; null where the plan has no such kernel.
struct EmulatedCaptured {
  void (*deltas)(const CapturedParams& params);
  void (*sums)(const CapturedParams& params);
  void (*tiles)(const CapturedParams& params);
};

struct EmulatedBackward {
  std::string_view name;
  void (*delta)(const BackwardParams& params);
  void (*steps[3])(const BackwardParams& params);
  EmulatedCaptured captured;
};

/// sm90/attention_backward, or sm100/attention_backward, and what runs around it.
struct EmulatedHopperBackward {
  std::string_view name;
  void (*delta)(const BackwardParams& params);
  void (*main)(const Sm90BackwardParams& params);
  void (*prepare)(const PrepareRowsParams& params);
  void (*finish)(const Sm90BackwardParams& params);  // null where the kernel finishes queries
  void (*redo_keys)(const BackwardParams& params);   // null where no key is hidden
  void (*redo_queries)(const BackwardParams& params);
  void (*sum_pairs)(const SumPairsParams& params);  // null where the kernel leaves no pairs
  EmulatedCaptured captured;
};

/// sm90/attention_backward_wide and what runs around it.
struct EmulatedWideBackward {
  std::string_view name;
  void (*delta)(const BackwardParams& params);
  void (*keys)(const Sm90WideBackwardParams& params);
  void (*queries)(const Sm90WideBackwardParams& params);
  void (*clear)(const ClearWordsParams& params);  // null, as what follows, where nothing is hidden
  void (*redo[3])(const BackwardParams& params);  // in the order of the plan's steps
};

/// sm80/attention_backward_one_walk and what runs around it.
struct EmulatedOneWalk {
  std::string_view name;
  void (*delta)(const BackwardParams& params);
  void (*main)(const Sm80OneWalkParams& params);
  void (*clear)(const ClearSumsParams& params);
  void (*finish)(const Sm80OneWalkParams& params);
  void (*redo[3])(const BackwardParams&
                      params);  // in the order of the plan's steps; null where nothing is hidden
};

const EmulatedHopperBackward& hopper_backward_named(std::string_view name);
const EmulatedHopperBackward& blackwell_backward_named(std::string_view name);
const EmulatedWideBackward& wide_backward_named(std::string_view name);
const EmulatedOneWalk& one_walk_named(std::string_view name);
std::span<const EmulatedBackward> half_of_backwards();
std::span<const EmulatedBackward> other_half_of_backwards();
/// Of captured_cases().
std::span<const EmulatedBackward> captured_backwards();

}  // namespace fovea::cuda

namespace fovea::testing {

/// The call as the host launches it on a device, by the kernels of this case.
void run_backward(const std::string& label, const AttentionBackward& args, Emulation& emulation);
/// The same on Hopper, by sm90/attention_backward, so many CTAs at once.
void run_hopper_backward(const std::string& label, const AttentionBackward& args, int ctas_at_once,
                         Emulation& emulation);
/// The same on Blackwell, by sm100/attention_backward.
void run_blackwell_backward(const std::string& label, const AttentionBackward& args,
                            int ctas_at_once, Emulation& emulation);
/// And by sm90/attention_backward_wide.
void run_wide_backward(const std::string& label, const AttentionBackward& args,
                       Emulation& emulation);

/// And by sm80/attention_backward_one_walk, so many CTAs at once.
void run_one_walk(const std::string& label, const AttentionBackward& args, int ctas_at_once,
                  Emulation& emulation);

}  // namespace fovea::testing
