#include "cuda/emulator/copy_groups.hpp"

#include <algorithm>
#include <utility>

namespace fovea::cuda::emulator {
namespace {

void join_clock(Thread& thread, AgentId agent, std::uint32_t time) {
  if (agent == 0 || thread.clock.of(agent) >= time) return;
  machine().tick(thread);
  thread.clock.raise(agent, time);
}

}  // namespace

void add_to_open_group(CopyGroups& groups, const Thread& thread, Actor& actor) {
  if (groups.agent == 0) groups.agent = machine().new_agent(&thread, groups.what);
  actor.agent = groups.agent;
  actor.time = groups.open_time();
  actor.is_async = true;
  groups.last_site = machine().site(actor.site);
}

Actor writing_actor(CopyGroups& groups, const Thread& thread, const Actor& reader) {
  if (groups.writer == 0) groups.writer = machine().new_agent(&thread, groups.what);
  Actor writer = reader;
  writer.agent = groups.writer;
  return writer;
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
  join_clock(thread, groups.agent, groups.first_time - 1);
  join_clock(thread, groups.writer, groups.first_time - 1);
}

void wait_for_reads(CopyGroups& groups, Thread& thread, std::uint32_t pending) {
  const std::size_t count =
      groups.committed.size() - std::min<std::size_t>(pending, groups.committed.size());
  for (std::size_t i = 0; i < count; ++i) {
    for (const OperationRef& operation : groups.committed[i]) machine().land(*operation);
  }
  join_clock(thread, groups.agent, groups.first_time + static_cast<std::uint32_t>(count) - 1);
}

void check_stores_at_exit(Machine& machine, const Thread& thread) {
  const CopyGroups& groups = thread.bulk_stores;
  const std::uint32_t read = groups.agent == 0 ? 0 : thread.clock.of(groups.agent);
  bool is_reading = !groups.open.empty();
  for (std::size_t i = 0; i < groups.committed.size(); ++i) {
    is_reading |= !groups.committed[i].empty() && groups.first_time + i > read;
  }
  if (!is_reading) return;
  machine.report(Fault::copy_not_waited, &thread,
                 "ends while a bulk store may still read shared memory: no "
                 "cp.async.bulk.wait_group.read after it",
                 groups.last_site);
}

}  // namespace fovea::cuda::emulator
