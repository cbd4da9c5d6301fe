#include "cuda/emulator/machine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "cuda/emulator/copy_groups.hpp"
#include "cuda/emulator/device_state.hpp"
#include "cuda/emulator/wgmma.hpp"

namespace fovea::cuda::emulator {
namespace {

constexpr std::uint32_t kRegistersOfSm = 65536, kMostRegisters = 255;
constexpr std::uint64_t kSpinLimit = 200'000;
/// So many polls in a row that find nothing: what asynchronous work is held back lands, as it does where all wait.
constexpr std::uint64_t kSpinsToLand = 1'000;

Machine* running_machine = nullptr;

std::uint32_t volume(Dim3 dim) { return static_cast<std::uint32_t>(dim.x * dim.y * dim.z); }

Dim3 unravel(std::uint32_t linear, Dim3 dim) {
  const auto i = static_cast<std::int32_t>(linear);
  return {i % dim.x, i / dim.x % dim.y, i / (dim.x * dim.y)};
}

/// What a launch gives each thread when nobody says: a multiple of 8 that lets all of them fit.
std::uint32_t launch_registers(const LaunchConfig& config) {
  if (config.registers_per_thread != 0) return config.registers_per_thread;
  return std::min(kMostRegisters, kRegistersOfSm / volume(config.block) / 8 * 8);
}

}  // namespace

Machine& machine() { return *running_machine; }

Thread& Warp::first_alive() const {
  return *lanes[static_cast<std::size_t>(std::countr_zero(alive))];
}

Machine::Machine(Device::State& device, const LaunchConfig& config, const Options& options,
                 const std::function<void()>& kernel)
    : device_(device),
      config_(config),
      options_(options),
      kernel_(kernel),
      random_(options.seed),
      report_{.seed = options.seed, .landing = options.landing} {
  if (config.is_dependent) {
    last_wave_before_ = wave_ = device_.last_grid.last_wave;
    sites_ = device_.last_grid.sites;
    site_ids_ = device_.last_grid.site_ids;
  } else {
    for (auto& [address, buffer] : device_.buffers) buffer.block->forget_accesses();
  }
  const bool is_seeded = options.landing == Landing::seeded;
  policy_ = is_seeded ? random_.below(3) : 0;
  takes_high_lanes_first_ = is_seeded && random_.one_in(2);
}

Machine::~Machine() = default;

// ---- setting up and running ----

Report Machine::run() {
  Machine* outer = std::exchange(running_machine, this);
  const std::uint32_t cluster_ctas = volume(config_.cluster);
  const std::uint32_t clusters = volume(config_.grid) / cluster_ctas;
  const auto at_once = static_cast<std::uint32_t>(std::max(1, config_.clusters_at_once));
  for (std::uint32_t first = 0; first < clusters && !is_ending_; first += at_once) {
    run_wave(first, std::min(at_once, clusters - first));
  }
  running_machine = outer;
  device_.last_grid = {wave_, sites_, site_ids_};
  return std::move(report_);
}

void Machine::run_wave(std::uint32_t first_cluster, std::uint32_t clusters) {
  ++wave_;
  agents_.clear();
  new_agent(nullptr, "the grid before");  // kGridBefore
  acquired_waves_.clear();
  for (std::uint32_t cluster = 0; cluster < clusters; ++cluster) {
    for (std::uint32_t rank = 0; rank < volume(config_.cluster); ++rank) {
      set_up_cta(first_cluster + cluster, rank);
    }
  }
  run_threads();
  if (!is_ending_) {
    while (land_something()) continue;
    for (const std::unique_ptr<Cta>& cta : ctas_) check_mbarriers(*this, *cta);
  }
  for (const std::unique_ptr<Cta>& cta : ctas_) {
    for (const std::unique_ptr<Thread>& thread : cta->threads) {
      device_.fibers.give_back(std::move(thread->fiber));
    }
  }
  warps_.clear();
  cluster_barriers_.clear();
  in_flight_.clear();
  held_back_.clear();
  ctas_.clear();
  last_warp_ = nullptr;
}

void Machine::set_up_cta(std::uint32_t cluster, std::uint32_t rank) {
  auto cta = std::make_unique<Cta>();
  const Dim3 clusters_of_grid{config_.grid.x / config_.cluster.x,
                              config_.grid.y / config_.cluster.y,
                              config_.grid.z / config_.cluster.z};
  const Dim3 base = unravel(cluster, clusters_of_grid), within = unravel(rank, config_.cluster);
  cta->idx = {base.x * config_.cluster.x + within.x, base.y * config_.cluster.y + within.y,
              base.z * config_.cluster.z + within.z};
  cta->rank = rank;
  cta->cluster = cluster;
  cta->heap = std::make_unique<std::byte[]>(config_.shared_bytes);
  std::memset(cta->heap.get(), 0xff, config_.shared_bytes);
  cta->shared = std::make_unique<Block>(Block::Spec{
      .name = "shared", .data = cta->heap.get(), .bytes = config_.shared_bytes, .is_shared = true});
  cta->tensor.memory = tensor_memory_of(rank);
  const std::uint32_t threads = volume(config_.block);
  for (std::uint32_t i = 0; i < threads; ++i) {
    if (i % warp_lanes() == 0) {
      cta->warps.push_back(std::make_unique<Warp>());
      Warp& warp = *cta->warps.back();
      warp.cta = cta.get();
      warp.idx = i / warp_lanes();
      warp.priority = random_.below(1U << 16);
      warp.elected = options_.landing == Landing::seeded ? random_.below(warp_lanes()) : 0;
      warp.registers = launch_registers(config_);
      warps_.push_back(&warp);
    }
    Warp& warp = *cta->warps.back();
    auto thread = std::make_unique<Thread>();
    thread->cta = cta.get();
    thread->warp = &warp;
    thread->idx = unravel(i, config_.block);
    thread->linear = i;
    thread->lane = i % warp_lanes();
    thread->agent = new_agent(thread.get(), "");
    thread->clock.set(thread->agent, 1);
    thread->copies.what = warp_lanes() == kWarpLanes ? "cp.async" : "a copy to LDS";
    thread->bulk_stores.what = "cp.async.bulk";
    thread->fiber = device_.fibers.take();
    thread->fiber->start(thread_body, thread.get());
    warp.lanes[thread->lane] = thread.get();
    warp.existing |= LaneMask{1} << thread->lane;
    cta->threads.push_back(std::move(thread));
  }
  for (const std::unique_ptr<Warp>& warp : cta->warps) warp->alive = warp->ready = warp->existing;
  cta->alive = threads;
  alive_ += threads;
  ctas_.push_back(std::move(cta));
}

/// CTAs of one rank fill the SMs one after the other.
std::shared_ptr<TensorMemory> Machine::tensor_memory_of(std::uint32_t rank) const {
  int of_rank = 0;
  std::shared_ptr<TensorMemory> newest;
  for (const std::unique_ptr<Cta>& other : ctas_) {
    if (other->rank != rank) continue;
    ++of_rank;
    newest = other->tensor.memory;
  }
  return of_rank % config_.ctas_per_sm == 0 ? std::make_shared<TensorMemory>() : newest;
}

void Machine::thread_body(void* argument) {
  auto* thread = static_cast<Thread*>(argument);
  Machine& self = machine();
  try {
    if (!self.is_ending_) self.kernel_();
  } catch (const LaunchEnded&) {
  }
  self.thread_ended(*thread);
}

void Machine::thread_ended(Thread& thread) {
  thread.is_done = true;
  Warp& warp = *thread.warp;
  warp.alive &= ~(LaneMask{1} << thread.lane);
  warp.ready &= ~(LaneMask{1} << thread.lane);
  --thread.cta->alive;
  --alive_;
  spins_ = 0;
  if (is_ending_) return;
  check_stores_at_exit(*this, thread);
  if (warp.alive == 0) {
    check_wgmma_at_exit(*this, warp);
    check_tensor_at_exit(*this, warp);
  }
  thread.cta->ended.join(thread.clock);
  if (thread.cta->alive == 0) check_cta_at_exit(*thread.cta);
  thread_left_cluster(*thread.cta);
  wake(&warp);  // lanes that wait for this one
}

void Machine::check_cta_at_exit(Cta& cta) {
  check_registers_at_exit(*this, cta);
  check_tensor_at_exit(*this, cta);
  for (const auto& [agent, access] : cta.remote_accesses) {
    if (cta.ended.of(agent) >= access.time) continue;
    report(Fault::cluster_lifetime, access.thread,
           "reaches into another CTA, which may have ended: no cluster barrier after it",
           access.site);
  }
}

void Machine::check_remote_access(const Actor& actor, Cta& cta) {
  if (actor.seen->of(cta.threads[0]->agent) == 0) {
    report(Fault::cluster_lifetime, actor.thread,
           fmt::format("reaches by {} into CTA {} of its cluster, which may not have started: no "
                       "cluster barrier before it",
                       actor.what, cta.rank),
           site(actor.site));
  }
  if (cta.alive == 0) {
    report(Fault::cluster_lifetime, actor.thread,
           fmt::format("reaches by {} into CTA {} of its cluster, which has ended", actor.what,
                       cta.rank),
           site(actor.site));
  }
  if (!actor.is_async)
    cta.remote_accesses[actor.agent] = {actor.time, actor.thread, site(actor.site)};
}

void Machine::run_threads() {
  while (alive_ > 0) {
    if (!in_flight_.empty() && random_.one_in(4)) {
      const std::uint32_t chosen = random_.below(static_cast<std::uint32_t>(in_flight_.size()));
      const OperationRef operation = in_flight_[chosen];
      in_flight_[chosen] = in_flight_.back();
      in_flight_.pop_back();
      land(*operation);
    }
    if (spins_ >= kSpinsToLand) land_something();
    Thread* next = pick();
    if (next == nullptr) {
      if (!is_ending_ && land_something()) continue;
      if (is_ending_) {
        // A fiber that sleeps is woken to unwind.
        for (Warp* warp : warps_) warp->ready = warp->alive;
        continue;
      }
      report_deadlock();
      is_ending_ = true;
      continue;
    }
    if (++report_.switches == options_.max_switches) {
      report(Fault::livelock, nullptr,
             fmt::format("{} turns of threads, and there is no end", report_.switches), {});
      is_ending_ = true;
    }
    running_ = next;
    next->fiber->resume();
    running_ = nullptr;
  }
}

Thread* Machine::pick() {
  Warp* chosen = nullptr;
  if (policy_ == 0 && last_warp_ != nullptr && last_warp_->ready != 0) chosen = last_warp_;
  if (chosen == nullptr && policy_ <= 1) {
    const auto count = static_cast<std::uint32_t>(warps_.size());
    const bool is_seeded = options_.landing == Landing::seeded;
    const std::uint32_t start = is_seeded ? random_.below(count) : rotation_;
    for (std::uint32_t i = 0; i < count && chosen == nullptr; ++i) {
      Warp* warp = warps_[(start + i) % count];
      if (warp->ready != 0) chosen = warp;
    }
  }
  if (policy_ == 2) {
    // Priorities with rare changes starve some warps for long (Burckhardt et al. 2010).
    if (random_.one_in(256)) {
      warps_[random_.below(static_cast<std::uint32_t>(warps_.size()))]->priority =
          random_.below(1U << 16);
    }
    for (Warp* warp : warps_) {
      if (warp->ready == 0) continue;
      if (chosen == nullptr || warp->priority > chosen->priority) chosen = warp;
    }
  }
  if (chosen == nullptr) return nullptr;
  last_warp_ = chosen;
  const int lane = takes_high_lanes_first_ ? 63 - std::countl_zero(chosen->ready)
                                           : std::countr_zero(chosen->ready);
  return chosen->lanes[static_cast<std::size_t>(lane)];
}

// ---- turns ----

void Machine::suspend() {
  Thread& self = *running_;
  self.fiber->suspend();
  self.wait = nullptr;
  if (is_ending_) throw LaunchEnded{};
}

void Machine::sleep(const Wait& wait) {
  Thread& self = *running_;
  self.wait = &wait;
  self.warp->ready &= ~(LaneMask{1} << self.lane);
  suspend();
}

void Machine::wait_until(const Wait& wait, FunctionRef<bool()> is_over) {
  while (!is_over()) sleep(wait);
  spins_ = 0;
}

void Machine::wake(const void* object) {
  for (const Warp* warp : warps_) {
    if (warp->ready == warp->alive) continue;
    for (Thread* thread : warp->lanes) {
      if (thread == nullptr || thread->wait == nullptr || thread->wait->object != object) continue;
      thread->warp->ready |= LaneMask{1} << thread->lane;
    }
  }
}

void Machine::maybe_yield() {
  if (options_.landing == Landing::seeded && random_.one_in(4)) suspend();
}

void Machine::spin(const char* what, Site site) {
  if (++spins_ > kSpinLimit) {
    report(Fault::livelock, running_,
           fmt::format("polls by {} although nothing else happens any more", what), site);
    end_launch();
  }
  running_->warp->priority = 0;
  last_warp_ = nullptr;
  ++rotation_;
  suspend();
}

void Machine::end_launch() {
  is_ending_ = true;
  throw LaunchEnded{};
}

// ---- clocks ----

Actor Machine::actor(const char* what, Site site) {
  Thread& self = *running_;
  if (self.snapshot) tick(self);
  return {.agent = self.agent,
          .time = self.clock.of(self.agent),
          .wave = wave_,
          .site = intern(site),
          .seen = &self.clock,
          .thread = &self,
          .what = what};
}

void Machine::tick(Thread& thread) {
  thread.snapshot.reset();
  thread.clock.set(thread.agent, thread.clock.of(thread.agent) + 1);
}

std::shared_ptr<const VectorClock> Machine::snapshot(Thread& thread) {
  if (!thread.snapshot) thread.snapshot = std::make_shared<VectorClock>(thread.clock);
  return thread.snapshot;
}

void Machine::join(Thread& thread, const VectorClock& clock) {
  if (thread.snapshot) tick(thread);
  thread.clock.join(clock);
}

void Machine::join_grid_before(Thread& thread) {
  if (thread.snapshot) tick(thread);
  thread.clock.set(kGridBefore, 1);
}

AgentId Machine::new_agent(const Thread* owner, const char* what) {
  agents_.push_back({owner, what});
  return static_cast<AgentId>(agents_.size() - 1);
}

AtomicSync& Machine::atomic_sync(std::uint64_t address) {
  AtomicSync& sync = atomics_[address];
  if (sync.wave != wave_) {
    sync.clock.clear();
    sync.wave = wave_;
  }
  return sync;
}

void Machine::acquire_waves(const std::set<std::uint32_t>& waves) {
  acquired_waves_.insert(waves.begin(), waves.end());
}

// ---- asynchronous work ----

void Machine::issue(const OperationRef& operation) {
  const std::uint32_t fate = random_.below(3);
  if (options_.landing == Landing::earliest || (options_.landing == Landing::seeded && fate == 0)) {
    land(*operation);
  } else if (options_.landing == Landing::seeded && fate == 1) {
    in_flight_.push_back(operation);
  } else {
    held_back_.push_back(operation);
  }
}

void Machine::land(Operation& operation) {
  if (std::exchange(operation.has_landed, true)) return;
  operation.land(*this);
  spins_ = 0;
}

bool Machine::land_something() {
  std::vector<OperationRef>& list = in_flight_.empty() ? held_back_ : in_flight_;
  std::erase_if(list, [](const OperationRef& operation) { return operation->has_landed; });
  if (list.empty()) return !held_back_.empty() && &list != &held_back_;
  std::size_t chosen = random_.below(static_cast<std::uint32_t>(list.size()));
  if (options_.landing == Landing::latest) chosen = options_.seed % 2 == 0 ? 0 : list.size() - 1;
  const OperationRef operation = list[chosen];
  list.erase(list.begin() + static_cast<std::ptrdiff_t>(chosen));
  land(*operation);
  return true;
}

// ---- meetings of a warp ----

void Machine::meet(const char* what, void* argument, Site site, MeetingBody body,
                   bool must_be_one_line) {
  Thread& self = *running_;
  Warp& warp = *self.warp;
  Meeting& meeting = warp.meeting;
  if (meeting.arrived == 0) {
    meeting.what = what;
    meeting.site = site;
  } else if (std::strcmp(meeting.what, what) != 0 || (must_be_one_line && meeting.site != site)) {
    report(Fault::divergence, &self,
           fmt::format("is at {} while lanes {:#010x} of its warp wait at {}", what,
                       meeting.arrived, meeting.what),
           site, meeting.site);
    end_launch();
  }
  meeting.arguments[self.lane] = argument;
  meeting.arrived |= LaneMask{1} << self.lane;
  const std::uint64_t number = warp.meetings_held;
  const auto hold_if_complete = [&] {
    if (warp.meetings_held != number) return true;
    if ((meeting.arrived & warp.alive) != warp.alive) return false;
    hold_meeting(warp, meeting, body);
    return true;
  };
  if (hold_if_complete()) return;
  const Wait wait{
      .what = what,
      .object = &warp,
      .details =
          [&] { return fmt::format("lanes {:#010x} of its warp are there", meeting.arrived); },
      .site = site};
  wait_until(wait, hold_if_complete);
}

void Machine::hold_meeting(Warp& warp, Meeting& meeting, MeetingBody body) {
  const Arguments arguments = meeting.arguments;
  meeting.arrived = 0;
  ++warp.meetings_held;
  spins_ = 0;
  body(warp, arguments);
  for (Thread* lane : warp.lanes) {
    if (lane != nullptr && lane->wait != nullptr && lane->wait->object == &warp) {
      warp.ready |= LaneMask{1} << lane->lane;
    }
  }
}

// ---- addresses ----

Machine::Place Machine::shared_place(std::uint32_t address, std::uint32_t bytes,
                                     std::uint32_t alignment, const char* what,
                                     const Actor& actor) {
  const std::uint32_t rank = address >> kRankShift;
  const std::uint32_t local = address & ((1U << kRankShift) - 1);
  Cta* cta = cta_of_rank(*actor.thread->cta, rank);
  const std::uint64_t end = std::uint64_t{local} + bytes;
  if (cta == nullptr || local < kSharedBase || end > kSharedBase + cta->shared->bytes()) {
    report(
        Fault::out_of_bounds, actor.thread,
        fmt::format("{} touches {} bytes at shared address {:#x} = shared+{:#x}; the CTA has {} "
                    "bytes from {:#x}",
                    what, bytes, address, local - kSharedBase, config_.shared_bytes, kSharedBase),
        site(actor.site));
    return {};
  }
  if (address % alignment != 0) {
    report(Fault::misaligned, actor.thread,
           fmt::format("{} at shared+{:#x} needs a multiple of {}", what, local - kSharedBase,
                       alignment),
           site(actor.site));
    return {};
  }
  if (cta != actor.thread->cta) check_remote_access(actor, *cta);
  return {cta->shared.get(), {local - kSharedBase, bytes}, cta};
}

Machine::Place Machine::global_place(std::uint64_t address, std::uint64_t bytes,
                                     std::uint32_t alignment, const char* what,
                                     const Actor& actor) {
  auto after = device_.buffers.upper_bound(address);
  Block* block = after == device_.buffers.begin() ? nullptr : std::prev(after)->second.block.get();
  const std::uint64_t begin = block == nullptr ? 0 : address - std::prev(after)->first;
  if (block == nullptr || begin + bytes > block->bytes()) {
    const std::string where =
        block == nullptr ? fmt::format("address {:#x}, below every buffer", address)
                         : fmt::format("{}+{} of {} bytes", block->name(), begin, block->bytes());
    report(Fault::out_of_bounds, actor.thread,
           fmt::format("{} touches {} bytes at {}", what, bytes, where), site(actor.site));
    return {};
  }
  if (address % alignment != 0) {
    report(Fault::misaligned, actor.thread,
           fmt::format("{} at {}+{} needs a multiple of {}", what, block->name(), begin, alignment),
           site(actor.site));
    return {};
  }
  return {block, {begin, bytes}, nullptr};
}

Cta* Machine::cta_of_rank(const Cta& cta, std::uint32_t rank) {
  for (const std::unique_ptr<Cta>& other : ctas_) {
    if (other->cluster == cta.cluster && other->rank == rank) return other.get();
  }
  return nullptr;
}

}  // namespace fovea::cuda::emulator
