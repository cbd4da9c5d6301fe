#include <fmt/format.h>

#include <cstring>

#include "cuda/emulator/instructions.hpp"
#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {
namespace {

std::uint32_t lanes_of_cluster(const Cta& cta) {
  std::uint32_t lanes = 0;
  for (const std::unique_ptr<Cta>& other : machine().ctas()) {
    if (other->cluster == cta.cluster) lanes += static_cast<std::uint32_t>(other->threads.size());
  }
  return lanes;
}

std::uint32_t ended_lanes(const Cta& cta) {
  std::uint32_t lanes = 0;
  for (const std::unique_ptr<Cta>& other : machine().ctas()) {
    if (other->cluster != cta.cluster) continue;
    lanes += static_cast<std::uint32_t>(other->threads.size()) - other->alive;
  }
  return lanes;
}

void complete_if_all_came(const Cta& cta) {
  ClusterBarrier& barrier = machine().cluster_barrier(cta);
  if (barrier.arrived == 0 || barrier.arrived + ended_lanes(cta) < lanes_of_cluster(cta)) return;
  barrier.passed[barrier.generation % 2] = barrier.clock;
  barrier.clock.clear();
  barrier.arrived = 0;
  ++barrier.generation;
  machine().wake(&barrier);
}

/// Bytes on their way to the shared memory of a CTA of the cluster, from registers or from shared memory.
struct RemoteCopy final : Operation {
  Actor actor;
  std::shared_ptr<const VectorClock> seen;
  std::vector<std::byte> values;  // from registers
  std::uint32_t from = 0, to = 0, bytes = 0, barrier = 0;

  void land(Machine& machine) override {
    Mbarrier* signal = find_mbarrier(machine, barrier, actor, true);
    if (signal == nullptr) return;
    const Actor lander = landing_actor(machine, *signal, actor);
    if (values.empty()) {
      const Machine::Place source = machine.shared_place(from, bytes, 16, actor.what, actor);
      if (source.block == nullptr) return;
      values.resize(bytes);
      source.block->read_async(machine, lander, source.range, values.data());
    }
    const std::uint32_t alignment = std::min(bytes, 16U);
    const Machine::Place place = machine.shared_place(to, bytes, alignment, actor.what, actor);
    if (place.block != nullptr)
      place.block->write_async(machine, lander, place.range, values.data());
    arrive(machine, *signal, lander, {.landed_bytes = bytes});
  }
};

std::shared_ptr<RemoteCopy> make_copy(std::uint32_t to, std::uint32_t bytes, std::uint32_t barrier,
                                      Instruction what) {
  auto copy = std::make_shared<RemoteCopy>();
  copy->actor = machine().actor(what.name, what.site);
  copy->seen = machine().snapshot(machine().thread());
  copy->actor.seen = copy->seen.get();
  copy->actor.is_async = true;
  copy->to = to;
  copy->bytes = bytes;
  copy->barrier = barrier;
  return copy;
}

}  // namespace

std::uint32_t cluster_rank() { return machine().thread().cta->rank; }

std::uint32_t cluster_size() {
  const Dim3 cluster = machine().config().cluster;
  return static_cast<std::uint32_t>(cluster.x * cluster.y * cluster.z);
}

std::uint32_t mapa(std::uint32_t address, std::uint32_t rank) {
  return rank << kRankShift | (address & ((1U << kRankShift) - 1));
}

void cluster_arrive(bool is_release, Instruction what) {
  require(90, what);
  machine().meet(
      what.name, nullptr, what.site,
      [&](Warp& warp, const Arguments&) {
        ClusterBarrier& barrier = machine().cluster_barrier(*warp.cta);
        if (warp.cluster_arrivals != warp.cluster_waits) {
          machine().report(Fault::barrier_count, &warp.first_alive(),
                           "arrives at the cluster's barrier again without a wait", what.site);
        }
        warp.cluster_arrivals = warp.cluster_waits + 1;
        for (Thread* lane : warp.lanes) {
          if (lane == nullptr || lane->is_done) continue;
          if (is_release) barrier.clock.join(lane->clock);
          machine().tick(*lane);
          ++barrier.arrived;
        }
        warp.cluster_generation = barrier.generation;
        complete_if_all_came(*warp.cta);
      },
      true);
}

void cluster_wait(Instruction what) {
  Thread& self = machine().thread();
  ClusterBarrier& barrier = machine().cluster_barrier(*self.cta);
  machine().meet(
      what.name, nullptr, what.site,
      [&](Warp& warp, const Arguments&) {
        if (warp.cluster_arrivals == warp.cluster_waits) {
          machine().report(Fault::barrier_count, &warp.first_alive(),
                           "waits at the cluster's barrier without an arrive", what.site);
        }
        warp.cluster_waits = warp.cluster_arrivals;
      },
      true);
  const std::uint64_t generation = self.warp->cluster_generation;
  const Cta& cta = *self.cta;
  const auto details = [&] {
    return fmt::format("barrier of the cluster, {} of {} threads have come", barrier.arrived,
                       lanes_of_cluster(cta));
  };
  const Wait wait{.what = what.name, .object = &barrier, .details = details, .site = what.site};
  machine().wait_until(wait, [&] { return barrier.generation > generation; });
  machine().join(self, barrier.passed[generation % 2]);
}

void thread_left_cluster(const Cta& cta) { complete_if_all_came(cta); }

void st_async(std::uint32_t to, const void* value, std::uint32_t bytes, std::uint32_t barrier,
              Instruction what) {
  require(90, what);
  const auto copy = make_copy(to, bytes, barrier, what);
  copy->values.resize(bytes);
  std::memcpy(copy->values.data(), value, bytes);
  machine().issue(copy);
}

void bulk_copy_to_cluster(std::uint32_t to, std::uint32_t from, std::uint32_t bytes,
                          std::uint32_t barrier, Instruction what) {
  require(90, what);
  const auto copy = make_copy(to, bytes, barrier, what);
  copy->from = from;
  machine().issue(copy);
}

}  // namespace fovea::cuda::emulator
