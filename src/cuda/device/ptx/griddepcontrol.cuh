// A grid that starts before the one ahead of it in the stream has ended (programmatic dependent launch;
// Synchronization: griddepcontrol; sm_90). Without the launch attribute both do nothing.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

/// griddepcontrol.wait: until the grids ahead have ended and what they wrote is seen. Before any read of their output,
/// and before any write that they might read. Below sm_90 no grid starts early, and
/// neither has an instruction there.
FOVEA_DEVICE void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// griddepcontrol.launch_dependents: the next grid may start once every CTA has said so or exited.
FOVEA_DEVICE void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace fovea::cuda::ptx
