// Groups of asynchronous copies that one thread commits and waits for in order: cp.async and bulk stores.
#pragma once

#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {

/// Makes `actor` the stream's, at the moment of the group that is open.
void add_to_open_group(CopyGroups& groups, const Thread& thread, Actor& actor);
/// The same for what bulk stores write: a wait for their reads does not cover it.
Actor writing_actor(CopyGroups& groups, const Thread& thread, const Actor& reader);
void commit_group(CopyGroups& groups);
/// Lands all but the `pending` newest groups; the thread then knows of them.
void wait_for_groups(CopyGroups& groups, Thread& thread, std::uint32_t pending);
/// The same, but the thread knows of their reads alone.
void wait_for_reads(CopyGroups& groups, Thread& thread, std::uint32_t pending);
/// Bulk stores that may still read the shared memory of a CTA that ends.
void check_stores_at_exit(Machine& machine, const Thread& thread);

}  // namespace fovea::cuda::emulator
