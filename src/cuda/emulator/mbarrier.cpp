#include "cuda/emulator/mbarrier.hpp"

#include <fmt/format.h>

#include <cstring>
#include <memory>

#include "cuda/emulator/instructions.hpp"
#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {
namespace {

constexpr std::uint32_t kMbarrierBytes = 8;
constexpr std::int64_t kMostBytes = (1 << 20) - 1;
/// What the bytes of a live mbarrier hold; anything else was written over them.
constexpr std::uint64_t kMark = 0xfeed'ba77'1e55'0b1eU;

std::string describe(const Mbarrier& barrier) {
  return fmt::format("mbarrier at shared+{:#x}, phase {}: {} of {} arrivals and {} bytes to come",
                     barrier.offset, barrier.phase, barrier.pending, barrier.count, barrier.bytes);
}

void misuse(const Actor& actor, const std::string& text, Site other = {}) {
  machine().report(Fault::mbarrier_misuse, actor.thread, fmt::format("{} by {}", text, actor.what),
                   machine().site(actor.site), other);
}

bool is_overwritten(const Mbarrier& barrier) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, barrier.cta->shared->data() + barrier.offset, sizeof bits);
  return bits != kMark;
}

/// Waiters of the phase before must have seen it when this one completes: after one more, its parity would come again.
void check_observers(Machine& machine, const Mbarrier& barrier, const Actor& actor) {
  for (const Mbarrier::Observer& observer : barrier.observers) {
    if (barrier.arriving.of(observer.agent) >= observer.time) continue;
    machine.report(Fault::parity_aliasing, actor.thread,
                   fmt::format("completes phase {} of the mbarrier at shared+{:#x} by {}, in no "
                               "order with {} seeing phase {}",
                               barrier.phase, barrier.offset, actor.what,
                               machine.describe(*observer.thread), barrier.phase - 1),
                   machine.site(actor.site));
    return;
  }
}

void complete_phase(Machine& machine, Mbarrier& barrier, const Actor& actor) {
  check_observers(machine, barrier, actor);
  barrier.observers.clear();
  barrier.passed[barrier.phase % 2] = barrier.arriving;
  barrier.arriving.clear();
  barrier.pending = barrier.count;
  ++barrier.phase;
  machine.wake(&barrier);
}

/// Has the phase of this parity completed that a waiter would take for the last one?
bool is_complete(const Mbarrier& barrier, std::uint32_t parity) {
  return barrier.phase % 2 != parity;
}

void observe(Mbarrier& barrier, std::uint32_t parity) {
  Thread& self = machine().thread();
  machine().join(self, barrier.passed[parity]);
  if (barrier.phase == 0) return;  // a fresh barrier lets the other parity pass
  machine().tick(self);
  barrier.observers.push_back({self.agent, self.clock.of(self.agent), &self});
}

}  // namespace

Mbarrier* find_mbarrier(Machine& machine, std::uint32_t address, const Actor& actor,
                        bool needs_fence) {
  const Machine::Place place =
      machine.shared_place(address, kMbarrierBytes, kMbarrierBytes, actor.what, actor);
  if (place.block == nullptr) return nullptr;
  const auto offset = static_cast<std::uint32_t>(place.range.begin);
  const auto found = place.cta->mbarriers.find(offset);
  if (found == place.cta->mbarriers.end()) {
    misuse(actor, fmt::format("finds no mbarrier at shared+{:#x}", offset));
    return nullptr;
  }
  Mbarrier& barrier = *found->second;
  if (is_overwritten(barrier)) {
    misuse(actor, fmt::format("finds the mbarrier at shared+{:#x} overwritten", offset),
           barrier.site);
  }
  const bool is_known =
      actor.agent == barrier.maker || actor.seen->of(barrier.maker) >= barrier.made;
  if (!is_known) {
    misuse(actor,
           fmt::format("uses the mbarrier at shared+{:#x}, in no order with its init,", offset),
           barrier.site);
  }
  const bool is_fenced = barrier.fenced != 0 && actor.seen->of(barrier.maker) >= barrier.fenced;
  if (needs_fence && is_known && !is_fenced) {
    misuse(actor,
           fmt::format("uses the mbarrier at shared+{:#x} without a fence.mbarrier_init after its "
                       "init",
                       offset),
           barrier.site);
  }
  return &barrier;
}

void arrive(Machine& machine, Mbarrier& barrier, const Actor& actor, Progress progress) {
  if (progress.arrivals > barrier.pending) {
    misuse(actor,
           fmt::format("arrives once more than the {} times that the mbarrier at shared+{:#x} "
                       "expects",
                       barrier.count, barrier.offset),
           barrier.site);
    return;
  }
  barrier.bytes += progress.expected_bytes - progress.landed_bytes;
  barrier.pending -= progress.arrivals;
  if (barrier.bytes > kMostBytes || barrier.bytes < -kMostBytes) {
    machine.report(Fault::transaction_bytes, actor.thread,
                   fmt::format("leaves {} bytes outstanding on the mbarrier at shared+{:#x}; a "
                               "phase takes at most {}",
                               barrier.bytes, barrier.offset, kMostBytes),
                   machine.site(actor.site));
  }
  barrier.arriving.join(*actor.seen);
  barrier.arriving.raise(actor.agent, actor.time);
  if (barrier.pending != 0) return;
  if (barrier.bytes < 0) {
    machine.report(
        Fault::transaction_bytes, actor.thread,
        fmt::format("lands {} bytes more by {} than the mbarrier at shared+{:#x} was told "
                    "to expect",
                    -barrier.bytes, actor.what, barrier.offset),
        machine.site(actor.site), barrier.site);
    barrier.bytes = 0;
  }
  if (barrier.bytes == 0) complete_phase(machine, barrier, actor);
}

Actor landing_actor(Machine& machine, Mbarrier& barrier, const Actor& issuer) {
  if (barrier.copies == 0) barrier.copies = machine.new_agent(issuer.thread, issuer.what);
  Actor actor = issuer;
  actor.agent = barrier.copies;
  actor.time = static_cast<std::uint32_t>(barrier.phase + 1);
  actor.is_async = true;
  return actor;
}

void check_mbarriers(Machine& machine, const Cta& cta) {
  for (const auto& [offset, barrier] : cta.mbarriers) {
    const bool is_stuck = barrier->pending == 0 || barrier->bytes < 0;
    if (barrier->bytes == 0 || !is_stuck) continue;
    machine.report(Fault::transaction_bytes, nullptr,
                   fmt::format("{} at the end, which no copy brings", describe(*barrier)),
                   barrier->site);
  }
}

void publish_mbarriers(Machine& machine, Thread& thread) {
  for (const std::unique_ptr<Cta>& cta : machine.ctas()) {
    for (auto& [offset, barrier] : cta->mbarriers) {
      if (barrier->maker == thread.agent && barrier->fenced == 0) {
        barrier->fenced = thread.clock.of(thread.agent);
      }
    }
  }
}

// ---- instructions ----

void mbarrier_init(std::uint32_t address, std::uint32_t count, Instruction what) {
  require(80, what);
  const Actor actor = machine().actor(what.name, what.site);
  const Machine::Place place =
      machine().shared_place(address, kMbarrierBytes, kMbarrierBytes, what.name, actor);
  if (place.block == nullptr) return;
  const auto offset = static_cast<std::uint32_t>(place.range.begin);
  if (count == 0 || count > kMostBytes) misuse(actor, fmt::format("expects {} arrivals", count));
  std::unique_ptr<Mbarrier>& barrier = place.cta->mbarriers[offset];
  if (barrier != nullptr) {
    misuse(actor, fmt::format("begins the mbarrier at shared+{:#x} again without inval", offset),
           barrier->site);
  }
  place.block->write(machine(), actor, place.range, &kMark);
  barrier = std::make_unique<Mbarrier>();
  barrier->cta = place.cta;
  barrier->offset = offset;
  barrier->count = barrier->pending = count;
  barrier->maker = actor.agent;
  barrier->made = actor.time;
  barrier->site = what.site;
}

void mbarrier_inval(std::uint32_t address, Instruction what) {
  const Actor actor = machine().actor(what.name, what.site);
  const Mbarrier* barrier = find_mbarrier(machine(), address, actor, false);
  if (barrier != nullptr) barrier->cta->mbarriers.erase(barrier->offset);
}

void mbarrier_arrive(std::uint32_t address, std::uint32_t count, std::uint32_t expected_bytes,
                     Instruction what) {
  machine().maybe_yield();
  Thread& self = machine().thread();
  const Actor actor = machine().actor(what.name, what.site);
  const bool is_remote = address >> kRankShift != self.cta->rank;
  Mbarrier* barrier = find_mbarrier(machine(), address, actor, is_remote);
  if (barrier == nullptr) return;
  arrive(machine(), *barrier, actor, {.arrivals = count, .expected_bytes = expected_bytes});
  machine().tick(self);
}

bool mbarrier_test_wait(std::uint32_t address, std::uint32_t parity, Instruction what) {
  const Actor actor = machine().actor(what.name, what.site);
  Mbarrier* barrier = find_mbarrier(machine(), address, actor, false);
  if (barrier == nullptr) machine().end_launch();
  if (!is_complete(*barrier, parity)) {
    machine().spin(what.name, what.site);
    return false;
  }
  observe(*barrier, parity);
  return true;
}

bool mbarrier_try_wait(std::uint32_t address, std::uint32_t parity, Instruction what) {
  const bool may_fail = machine().options().landing == Landing::seeded;
  if (may_fail && machine().random().one_in(4)) return mbarrier_test_wait(address, parity, what);
  mbarrier_wait(address, parity, what);
  return true;
}

void mbarrier_wait(std::uint32_t address, std::uint32_t parity, Instruction what) {
  machine().maybe_yield();
  const Actor actor = machine().actor(what.name, what.site);
  Mbarrier* barrier = find_mbarrier(machine(), address, actor, false);
  if (barrier == nullptr) machine().end_launch();
  if (is_complete(*barrier, parity)) return observe(*barrier, parity);
  const std::uint64_t wanted = barrier->phase;
  const Wait wait{
      .what = what.name,
      .object = barrier,
      .details = [=] { return fmt::format("parity {} of {}", parity, describe(*barrier)); },
      .site = what.site};
  machine().wait_until(wait, [&] {
    if (barrier->phase >= wanted + 2) {
      machine().report(Fault::parity_aliasing, actor.thread,
                       fmt::format("waits for phase {} of the mbarrier at shared+{:#x}, which is "
                                   "two phases ahead by now",
                                   wanted, barrier->offset),
                       what.site);
    }
    return is_complete(*barrier, parity);
  });
  observe(*barrier, parity);
}

void cp_async_mbarrier_arrive(std::uint32_t address, Instruction what) {
  require(80, what);
  struct Deferred final : Operation {
    std::vector<OperationRef> copies;
    Mbarrier* barrier = nullptr;
    Actor actor;
    std::shared_ptr<const VectorClock> seen;
    std::shared_ptr<VectorClock> known;

    void land(Machine& machine) override {
      for (const OperationRef& copy : copies) machine.land(*copy);
      arrive(machine, *barrier, actor, {.arrivals = 1});
    }
  };
  Thread& self = machine().thread();
  const Actor actor = machine().actor(what.name, what.site);
  auto deferred = std::make_shared<Deferred>();
  deferred->barrier = find_mbarrier(machine(), address, actor, false);
  if (deferred->barrier == nullptr) return;
  for (const auto& group : self.copies.committed) {
    deferred->copies.insert(deferred->copies.end(), group.begin(), group.end());
  }
  deferred->copies.insert(deferred->copies.end(), self.copies.open.begin(), self.copies.open.end());
  deferred->known = std::make_shared<VectorClock>(self.clock);
  if (self.copies.agent != 0) {
    deferred->known->raise(self.copies.agent, self.copies.open_time());
  }
  deferred->actor = actor;
  deferred->actor.seen = deferred->known.get();
  machine().tick(self);
  machine().issue(deferred);
}

}  // namespace fovea::cuda::emulator
