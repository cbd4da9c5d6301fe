// What comes around a forward kernel under the emulator: the memory it may touch, range tables before it, what joins
// its splits behind it.
#pragma once

#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/launch.hpp"
#include "kernels/run.hpp"

namespace fovea::testing {

/// The GPU, and all that a kernel may touch but its workspace.
void start(const Run& run, Emulation& emulation);

/// In memory of their own, so that no access to them strays into the rest of the workspace; and built.
void build_tables(const cuda::ForwardPlan& plan, cuda::ForwardLaunch& call, Emulation& emulation);

void clear_rows(const cuda::ForwardLaunch& call, Emulation& emulation);

/// In either form: the bits are the same. The host launches one of them.
void join_splits(const Run& run, const cuda::ForwardPlan& plan, const cuda::ForwardLaunch& call,
                 Emulation& emulation);

/// A call of one kernel that takes ForwardParams, of the name of the run's label, and all around it.
void launch_forward(const Run& run, const cuda::ForwardPlan& plan, cuda::ForwardLaunch& call,
                    Emulation& emulation);

}  // namespace fovea::testing
