#include <fmt/format.h>

#include "cuda/emulator/instructions.hpp"
#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {
namespace {

/// What a thread brings to a barrier, and takes from it.
enum class Orders : std::uint8_t {
  all,  // that it did, and then all that the others did
  fenced,  // what it did before its last fence that releases; for the next fence of its own that acquires
};

struct Arrival {
  std::int32_t id, threads;
  Orders orders = Orders::all;
};

/// The barrier, or null where the call itself is wrong.
NamedBarrier* barrier_of(Thread& self, Arrival arrival, Instruction what) {
  if (arrival.id < 0 || arrival.id > 15) {
    machine().report(
        Fault::barrier_count, &self,
        fmt::format("calls {} with barrier {}; there are 0 to 15", what.name, arrival.id),
        what.site);
    return nullptr;
  }
  if (arrival.threads <= 0 ||
      arrival.threads % static_cast<std::int32_t>(machine().warp_lanes()) != 0) {
    machine().report(Fault::barrier_count, &self,
                     fmt::format("calls {} for {} threads; expected a multiple of {}", what.name,
                                 arrival.threads, machine().warp_lanes()),
                     what.site);
    return nullptr;
  }
  return &self.cta->barriers[static_cast<std::size_t>(arrival.id)];
}

void complete(NamedBarrier& barrier) {
  VectorClock& passed = barrier.passed[barrier.generation % 2];
  passed = barrier.clock;
  barrier.clock.clear();
  barrier.arrived = barrier.expected = 0;
  ++barrier.generation;
  machine().wake(&barrier);
}

/// One warp comes; barriers count whole warps.
void come(Warp& warp, NamedBarrier& barrier, Arrival arrival, Instruction what) {
  const auto threads = static_cast<std::uint32_t>(arrival.threads);
  if (barrier.arrived == 0) {
    barrier.expected = threads;
    barrier.site = what.site;
  } else if (barrier.expected != threads) {
    machine().report(Fault::barrier_count, &warp.first_alive(),
                     fmt::format("comes to barrier {} for {} threads; the first of this round came "
                                 "for {}",
                                 arrival.id, threads, barrier.expected),
                     what.site, barrier.site);
  }
  for (Thread* lane : warp.lanes) {
    if (lane == nullptr || lane->is_done) continue;
    barrier.clock.join(arrival.orders == Orders::all ? lane->clock : lane->released_to_workgroup);
    machine().tick(*lane);
  }
  barrier.arrived += machine().warp_lanes();
  if (barrier.arrived > barrier.expected) {
    machine().report(Fault::barrier_count, &warp.first_alive(),
                     fmt::format("is one warp too many at barrier {}, which expects {} threads",
                                 arrival.id, barrier.expected),
                     what.site, barrier.site);
  }
  if (barrier.arrived >= barrier.expected) complete(barrier);
}

/// The generation that the calling warp came to.
std::uint64_t arrive(NamedBarrier& barrier, Arrival arrival, Instruction what) {
  std::uint64_t generation = 0;
  machine().meet(
      what.name, &generation, what.site,
      [&](Warp& warp, const Arguments& arguments) {
        const std::uint64_t now = barrier.generation;
        come(warp, barrier, arrival, what);
        for (const Thread* lane : warp.lanes) {
          if (lane == nullptr || lane->is_done) continue;
          *static_cast<std::uint64_t*>(arguments[lane->lane]) = now;
        }
      },
      true);
  return generation;
}

Arrival whole(Arrival arrival) {
  const Dim3 block = machine().config().block;
  const std::int32_t threads = block.x * block.y * block.z;
  const auto lanes = static_cast<std::int32_t>(machine().warp_lanes());
  if (arrival.threads == 0) arrival.threads = (threads + lanes - 1) / lanes * lanes;
  return arrival;
}

void come_and_wait(Arrival wanted, Instruction what) {
  Thread& self = machine().thread();
  const Arrival arrival = whole(wanted);
  NamedBarrier* barrier = barrier_of(self, arrival, what);
  if (barrier == nullptr) return;
  const std::uint64_t generation = arrive(*barrier, arrival, what);
  const auto details = [=] {
    return fmt::format("barrier {}, {} of {} threads have come", arrival.id, barrier->arrived,
                       barrier->expected);
  };
  const Wait wait{.what = what.name, .object = barrier, .details = details, .site = what.site};
  machine().wait_until(wait, [&] { return barrier->generation > generation; });
  const VectorClock& passed = barrier->passed[generation % 2];
  if (arrival.orders == Orders::all) {
    machine().join(self, passed);
  } else {
    self.to_acquire_of_workgroup.join(passed);
  }
}

}  // namespace

void bar_sync(std::int32_t id, std::int32_t threads, Instruction what) {
  come_and_wait({id, threads}, what);
}

void barrier_alone(Instruction what) { come_and_wait({0, 0, Orders::fenced}, what); }

void fence_release_workgroup(Instruction) {
  Thread& self = machine().thread();
  self.released_to_workgroup = self.clock;
  machine().tick(self);
}

void fence_acquire_workgroup(Instruction) {
  Thread& self = machine().thread();
  machine().join(self, self.to_acquire_of_workgroup);
}

void bar_arrive(std::int32_t id, std::int32_t threads, Instruction what) {
  const Arrival arrival = whole({id, threads});
  NamedBarrier* barrier = barrier_of(machine().thread(), arrival, what);
  if (barrier != nullptr) arrive(*barrier, arrival, what);
}

}  // namespace fovea::cuda::emulator
