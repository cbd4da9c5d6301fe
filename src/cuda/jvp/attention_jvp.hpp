// Forward mode on an NVIDIA GPU: what is chosen once, and a call. Read candidates.hpp for the choice, launch.hpp for a
// call and device/sm80/attention_jvp.cuh for the kernel.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fovea/jvp.hpp"

#include "cuda/device/shared/jvp_spec.h"
#include "cuda/kernel_set.hpp"
#include "cuda/params/captures.hpp"
#include "cuda/params/range_tables.hpp"
#include "cuda/plan_ladder.hpp"
#include "expr/print_cuda.hpp"
#include "problem/jvp.hpp"

namespace fovea::cuda {

/// What a call needs beyond its arguments, found once. Its workspace holds range tables and nothing else.
struct JvpPlan : KernelPlan {
  JvpSpec spec;
  int num_launches = 1;  // of as many columns of V as the spec has
  std::shared_ptr<const expr::CudaProgram> program;
  CaptureSlots capture_slots;
  std::vector<std::string>
      tangent_slots;  // for each captured tangent, the name that the program reads it by
  RangeTables range_tables;
};

/// All that is compiled for a plan.
PlannedKernels planned_kernels(const JvpPlan& plan);

/// Asks each candidate in order and loads what it chose into device.index. Throws Unsupported with every reason.
JvpPlan plan_jvp(const TangentProblem& problem, Device device);

/// What plan_jvp would choose, without compiling or loading it. Where nothing can run candidate is empty and refused
/// holds every reason.
JvpPlan try_plan_jvp(const TangentProblem& problem, Device device);

/// The choice alone, for a device that need not be here: nothing is compiled or loaded.
JvpPlan choose_jvp(const TangentProblem& problem, const DeviceTraits& device);

/// Loads what a plan that was made without a device was chosen to run.
void load(jit::Loader& loader, const driver::DeviceContext& context, JvpPlan& plan);

/// Enqueues on `stream` (CUstream; null: the legacy default stream) and returns: no allocation, no synchronisation, no
/// compilation. Arguments have been validated and lie in the memory of the plan's device, workspace too
/// (plan.workspace_bytes, aligned to 256).
void attention_jvp(const TangentProblem& problem, const JvpPlan& plan, const AttentionJvp& args,
                   void* workspace, void* stream);

}  // namespace fovea::cuda
