// A grid that starts before the one ahead of it in the stream has ended (programmatic dependent launch;
// Synchronization: griddepcontrol; sm_90). Without the launch attribute both do nothing.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

/// griddepcontrol.wait: until the grids ahead have ended and what they wrote is seen. Before any read of their output,
/// and before any write that they might read.
FOVEA_DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// griddepcontrol.launch_dependents: the next grid may start once every CTA has said so or exited.
FOVEA_DEVICE void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace fovea::cuda::ptx
