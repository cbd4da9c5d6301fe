// An mbarrier as it stands: arrivals and bytes that its phase waits for, and what waiters of complete phases learn.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cuda/emulator/history.hpp"
#include "cuda/emulator/site.hpp"
#include "cuda/emulator/vector_clock.hpp"

namespace fovea::cuda::emulator {

struct Cta;
class Machine;

struct Mbarrier {
  Cta* cta = nullptr;
  std::uint32_t offset = 0;
  std::uint32_t count = 0;    // arrivals of each phase
  std::uint32_t pending = 0;  // of this phase
  std::int64_t bytes = 0;     // of this phase, expected and not landed
  std::uint64_t phase = 0;
  AgentId copies = 0;  // whoever lands bytes here; its time is the phase, counted from 1

  AgentId maker = 0;
  std::uint32_t made = 0;  // the maker's time
  // the maker's time at fence.mbarrier_init or fence.proxy.async, 0: none yet
  std::uint32_t fenced = 0;
  Site site;

  VectorClock arriving;               // of those who came to this phase
  std::array<VectorClock, 2> passed;  // of complete phases, by parity
  struct Observer {
    AgentId agent;
    std::uint32_t time;
    const Thread* thread;
  };
  std::vector<Observer> observers;  // who saw the last complete phase
};

/// Who brings something to an mbarrier: a thread, or bytes that land for it.
struct Progress {
  std::uint32_t arrivals = 0;
  std::int64_t expected_bytes = 0, landed_bytes = 0;
};

/// The barrier at a shared address, reported and null where there is none that `actor` may use. `needs_fence`: by the
/// async proxy, or another CTA.
Mbarrier* find_mbarrier(Machine& machine, std::uint32_t address, const Actor& actor,
                        bool needs_fence);
void arrive(Machine& machine, Mbarrier& barrier, const Actor& actor, Progress progress);
/// The agent for bytes that land on the barrier, and its time if they land now.
Actor landing_actor(Machine& machine, Mbarrier& barrier, const Actor& issuer);
/// What an mbarrier holds when its CTA ends, or when nothing runs any more.
void check_mbarriers(Machine& machine, const Cta& cta);
/// After a fence: the barriers that this thread made are known to the async proxy.
void publish_mbarriers(Machine& machine, Thread& thread);

}  // namespace fovea::cuda::emulator
