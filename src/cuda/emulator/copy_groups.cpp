#include "cuda/emulator/copy_groups.hpp"

#include <utility>

namespace fovea::cuda::emulator {

void add_to_open_group(CopyGroups& groups, const Thread& thread, Actor& actor) {
  if (groups.agent == 0) groups.agent = machine().new_agent(&thread, groups.what);
  actor.agent = groups.agent;
  actor.time = groups.open_time();
  actor.is_async = true;
}

void commit_group(CopyGroups& groups) {
  groups.committed.push_back(std::exchange(groups.open, {}));
}

void wait_for_groups(CopyGroups& groups, Thread& thread, std::uint32_t pending) {
  while (groups.committed.size() > pending) {
    for (const OperationRef& operation : groups.committed.front()) machine().land(*operation);
    groups.committed.pop_front();
    ++groups.first_time;
  }
  if (groups.agent == 0 || thread.clock.of(groups.agent) + 1 >= groups.first_time) return;
  machine().tick(thread);
  thread.clock.raise(groups.agent, groups.first_time - 1);
}

}  // namespace fovea::cuda::emulator
