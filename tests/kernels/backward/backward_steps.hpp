// The steps of a call of gradients under the emulator, around the kernels of a case: what all of them share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fovea/backward.hpp"

#include "cuda/backward/launch.hpp"
#include "cuda/backward/redo.hpp"
#include "cuda/backward/sm90.hpp"
#include "cuda/device/shared/backward_spec.h"
#include "cuda/emulator/tensor_map.hpp"
#include "kernels/backward/emulated_backward.hpp"
#include "problem/backward.hpp"
#include "support/launch_memory.hpp"

namespace fovea::testing {

void register_tensors(const AttentionBackward& args, Emulation& emulation);

/// In memory of their own, so that no access to them strays into the rest of the workspace; and built.
void build_tables(const cuda::BackwardPlan& plan, cuda::BackwardLaunch& call, Emulation& emulation);

void run_sinks(const cuda::BackwardPlan& plan, const cuda::BackwardLaunch& call,
               Emulation& emulation);
void run_captured(const cuda::EmulatedCaptured& kernels, const cuda::BackwardLaunch& call,
                  Emulation& emulation);
void run_redo(const cuda::BackwardStep& step, const cuda::RedoLaunch& redo,
              void (*kernel)(const cuda::BackwardParams&), Emulation& emulation);

/// The launch of a kernel around which others run, over a workspace of garbage; what is known of rows has been found.
template <class Kernel, class Kernels>
auto prepared(const GradientProblem& problem, const cuda::BackwardPlan& plan,
              const AttentionBackward& args, const Kernels& kernels, Emulation& emulation) {
  register_tensors(args, emulation);
  constexpr unsigned char kGarbage = 0xFF;  // NaN
  auto* const workspace = emulation.device.buffer(
      "workspace", std::vector<unsigned char>(plan.memory.tables_at, kGarbage));
  const auto encode = [](const cuda::driver::TensorMapSpec& spec, const void* address) {
    return cuda::emulator::encode_tensor_map<cuda::TensorMapParam>(spec, address);
  };
  auto call = [&] {
    if constexpr (requires { Kernel::prepare(problem, plan, args, workspace, encode); })
      return Kernel::prepare(problem, plan, args, workspace, encode);
    else
      return Kernel::prepare(problem, plan, args, workspace);
  }();
  build_tables(plan, call.common, emulation);
  call.params.common.forward.captures = call.common.params.forward.captures;
  call.prepare_redo(plan);
  emulation.launch({.x = call.common.num_delta_ctas}, cuda::kDeltaThreads, 0,
                   [&] { kernels.delta(call.common.params); });
  return call;
}

/// The plan of Hopper's kernel or of Blackwell's, so many CTAs at once.
void run_key_walk(const GradientProblem& problem, const cuda::BackwardPlan& plan,
                  const AttentionBackward& args, const cuda::EmulatedHopperBackward& kernels,
                  int ctas_at_once, Emulation& emulation);

}  // namespace fovea::testing
