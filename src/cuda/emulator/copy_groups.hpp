// Groups of asynchronous copies that one thread commits and waits for in order: cp.async and bulk stores.
#pragma once

#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {

/// Makes `actor` the stream's, at the moment of the group that is open.
void add_to_open_group(CopyGroups& groups, const Thread& thread, Actor& actor);
void commit_group(CopyGroups& groups);
/// Lands all but the `pending` newest groups; the thread then knows of them.
void wait_for_groups(CopyGroups& groups, Thread& thread, std::uint32_t pending);

}  // namespace fovea::cuda::emulator
