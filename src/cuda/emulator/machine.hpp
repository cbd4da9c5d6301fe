// The state of a launch: threads, warps and CTAs of the wave that runs, work in flight, findings; and the loop that
// gives fibers their turns. Instructions (instructions.hpp) act on it from the running thread's fiber. Read block.hpp
// before.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/emulator/block.hpp"
#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/fiber.hpp"
#include "cuda/emulator/function_ref.hpp"
#include "cuda/emulator/mbarrier.hpp"
#include "cuda/emulator/random.hpp"
#include "cuda/emulator/tensor_state.hpp"
#include "cuda/emulator/vector_clock.hpp"
#include "cuda/emulator/wgmma_state.hpp"

namespace fovea::cuda::emulator {

struct Cta;
struct Instruction;
struct Warp;

/// Lanes of a warp that multiplies matrices; others have as many as the launch says.
inline constexpr std::uint32_t kWarpLanes = 32;
inline constexpr std::uint32_t kMostLanes = 64;
using LaneMask = std::uint64_t;
/// What each lane of a warp brings to a collective instruction.
using Arguments = std::array<void*, kMostLanes>;
/// The system's share of shared memory lies below.
inline constexpr std::uint32_t kSharedBase = 1024;
/// Addresses of the CTA of rank r in its cluster start at r << kRankShift.
inline constexpr std::uint32_t kRankShift = 24;

/// Work that was issued and may land at any time until somebody waits for it.
struct Operation {
  virtual ~Operation() = default;
  virtual void land(Machine& machine) = 0;
  bool has_landed = false;
};
using OperationRef = std::shared_ptr<Operation>;

/// Why a thread does not run.
struct Wait {
  const char* what = "";                 // the instruction
  const void* object = nullptr;          // the barrier or meeting; wake() names it
  std::function<std::string()> details;  // of what it waits for, as things stand
  Site site;
};

/// Groups of asynchronous copies of one thread, oldest first: cp.async, or bulk stores.
struct CopyGroups {
  const char* what = "";
  AgentId agent = 0, writer = 0;  // who reads and writes; who writes, for stores; 0: none yet
  std::vector<OperationRef> open;
  std::deque<std::vector<OperationRef>> committed;
  std::uint32_t first_time = 1;  // of committed.front()
  Site last_site;

  std::uint32_t open_time() const {
    return first_time + static_cast<std::uint32_t>(committed.size());
  }
};

/// What a thread wrote by ordinary stores and did not yet publish to the async proxy.
class UnfencedWrites {
 public:
  struct Write {
    Block* block;
    ByteRange range;
  };

  void push_back(Block* block, ByteRange range) {
    if (!writes_.empty()) {
      Write& last = writes_.back();
      const bool is_next =
          last.block == block && last.range.begin + last.range.bytes == range.begin;
      if (is_next) {
        last.range.bytes += range.bytes;
        return;
      }
    }
    writes_.push_back({block, range});
  }
  std::vector<Write> take() { return std::exchange(writes_, {}); }

 private:
  std::vector<Write> writes_;
};

struct Thread {
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  Dim3 idx;
  std::uint32_t linear = 0, lane = 0;
  AgentId agent = 0;
  const char* role = "";
  std::unique_ptr<Fiber> fiber;
  bool is_done = false;
  const Wait* wait = nullptr;

  VectorClock clock;
  std::shared_ptr<const VectorClock> snapshot;  // of clock, while no access or join came after it
  VectorClock released;                         // at the last fence
  VectorClock to_acquire;                       // from relaxed atomics, until the next fence
  std::set<std::uint32_t> waves_to_acquire;
  bool has_fenced = false;
  // For barriers that order nothing by themselves: at the last fence that released; from barriers, until a fence that
  // acquires.
  VectorClock released_to_workgroup, to_acquire_of_workgroup;

  const void* polled = nullptr;  // the global address of its last access
  int polls = 0;                 // accesses there in a row

  CopyGroups copies, bulk_stores;
  UnfencedWrites unfenced;
  TensorThread tensor;
};

/// Acts for all lanes of a warp, given what each lane brought.
using MeetingBody = FunctionRef<void(Warp&, const Arguments&)>;

/// Lanes of a warp that meet at a collective instruction.
struct Meeting {
  const char* what = nullptr;
  LaneMask arrived = 0;
  Arguments arguments{};
  Site site;
};

struct Warp {
  Cta* cta = nullptr;
  std::uint32_t idx = 0;
  std::array<Thread*, kMostLanes> lanes{};
  LaneMask existing = 0, alive = 0, ready = 0;
  Meeting meeting;
  std::uint64_t meetings_held = 0;
  std::uint32_t priority = 0;
  std::uint32_t elected = 0;    // lane
  std::uint32_t registers = 0;  // per thread, as setmaxnreg left them
  WgmmaState wgmma;
  TensorWarp tensor;
  std::uint64_t cluster_arrivals = 0, cluster_waits = 0, cluster_generation = 0;

  Thread& first_alive() const;
};

struct NamedBarrier {
  std::uint32_t expected = 0, arrived = 0;
  std::uint64_t generation = 0;
  Site site;
  VectorClock clock;                  // of those who came to this generation
  std::array<VectorClock, 2> passed;  // of completed generations, by parity
};

struct RemoteAccess {
  std::uint32_t time = 0;
  const Thread* thread = nullptr;
  Site site;
};

struct Cta {
  Dim3 idx;
  std::uint32_t rank = 0;  // in its cluster
  std::uint32_t cluster = 0;
  std::unique_ptr<std::byte[]> heap;
  std::unique_ptr<Block> shared;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<std::unique_ptr<Warp>> warps;
  std::uint32_t alive = 0;
  std::array<NamedBarrier, 16> barriers;
  std::map<std::uint32_t, std::unique_ptr<Mbarrier>> mbarriers;  // by offset
  std::uint32_t free_registers = 0;                              // given back by setmaxnreg.dec
  // by warpgroup, what its warps issue in step
  std::vector<std::vector<WgmmaState::Issued>> issued;
  std::map<AgentId, RemoteAccess> remote_accesses;  // the last of each thread of other CTAs
  VectorClock ended;                                // of threads that ended
  TensorCta tensor;
};

/// What all threads of a cluster come to.
struct ClusterBarrier {
  std::uint64_t generation = 0;
  std::uint32_t arrived = 0;  // lanes
  VectorClock clock;
  std::array<VectorClock, 2> passed;
};

/// What atomics on one address carried from releasers to acquirers.
struct AtomicSync {
  VectorClock clock;
  std::uint32_t wave = 0;
  std::set<std::uint32_t> waves;
};

/// Thrown on a fiber to unwind it when the launch ends early; never leaves the fiber.
struct LaunchEnded {};

class Machine {
 public:
  Machine(Device::State& device, const LaunchConfig& config, const Options& options,
          const std::function<void()>& kernel);
  ~Machine();

  Report run();

  // ---- the running thread ----
  Thread& thread() { return *running_; }
  Actor actor(const char* what, Site site);
  std::shared_ptr<const VectorClock> snapshot(Thread& thread);
  void join(Thread& thread, const VectorClock& clock);
  /// A new moment of the thread: what it does next is not covered by what it released before.
  void tick(Thread& thread);
  /// Sleeps until is_over() holds; looks again after each wake() of the wait's object.
  void wait_until(const Wait& wait, FunctionRef<bool()> is_over);
  void wake(const void* object);
  /// Gives others a turn, sometimes.
  void maybe_yield();
  /// Gives others a turn, from a loop that polls memory.
  void spin(const char* what, Site site);

  /// Meets the other lanes; the last to come runs `body` for all, given each lane's argument.
  void meet(const char* what, void* argument, Site site, MeetingBody body, bool must_be_one_line);

  // ---- memory ----
  struct Place {
    Block* block = nullptr;
    ByteRange range{};
    Cta* cta = nullptr;  // of shared memory
  };
  /// Null block when the access is out of bounds or misaligned; then it was reported.
  Place shared_place(std::uint32_t address, std::uint32_t bytes, std::uint32_t alignment,
                     const char* what, const Actor& actor);
  Place global_place(std::uint64_t address, std::uint64_t bytes, std::uint32_t alignment,
                     const char* what, const Actor& actor);
  AtomicSync& atomic_sync(std::uint64_t address);
  bool has_acquired_wave(std::uint32_t wave) const { return acquired_waves_.contains(wave); }
  bool has_acquired_any_wave() const { return !acquired_waves_.empty(); }
  void acquire_waves(const std::set<std::uint32_t>& waves);
  /// Of the grid before, which a dependent one does not wait for by itself.
  bool is_of_grid_before(std::uint32_t wave) const { return wave <= last_wave_before_; }
  bool knows_grid_before(const VectorClock& seen) const { return seen.of(kGridBefore) > 0; }
  void join_grid_before(Thread& thread);
  std::uint32_t wave() const { return wave_; }

  // ---- asynchronous work ----
  AgentId new_agent(const Thread* owner, const char* what);
  void issue(const OperationRef& operation);
  void land(Operation& operation);
  /// A moment chosen by the seed between issue and wait; for work that is not an Operation.
  Random& random() { return random_; }
  const Options& options() const { return options_; }
  const LaunchConfig& config() const { return config_; }
  std::uint32_t warp_lanes() const { return config_.warp_lanes; }

  // ---- findings ----
  SiteId intern(Site site);
  Site site(SiteId id) const { return sites_[id]; }
  void report(Fault fault, const Thread* who, const std::string& text, Site site, Site other = {});
  void report_race(const Actor& actor, AccessKind kind, const Block& block, ByteRange range,
                   const Stamp& other, AccessKind other_kind);
  void report_race_between_ctas(const Actor& actor, AccessKind kind, const Block& block,
                                ByteRange range);
  void report_uninitialised(const Actor& actor, const Block& block, ByteRange range);
  void report_non_coherent(const Actor& actor, const Block& block, ByteRange range,
                           const Stamp& written);
  void report_unfenced(const Actor& actor, const Block& block, ByteRange range,
                       const Stamp& written);
  std::string describe(const Thread& thread) const;
  std::string describe(const Block& block, ByteRange range) const;
  std::string describe_agent(const Stamp& stamp) const;
  const Thread* thread_of(AgentId agent) const { return agents_[agent].thread; }
  [[noreturn]] void end_launch();

  Cta* cta_of_rank(const Cta& cta, std::uint32_t rank);
  std::vector<std::unique_ptr<Cta>>& ctas() { return ctas_; }
  ClusterBarrier& cluster_barrier(const Cta& cta) { return cluster_barriers_[cta.cluster]; }

 private:
  static constexpr AgentId kGridBefore = 0;

  struct Agent {
    const Thread* thread;
    const char* what;  // empty: the thread itself
  };

  void run_wave(std::uint32_t first_cluster, std::uint32_t clusters);
  void set_up_cta(std::uint32_t cluster, std::uint32_t rank);
  std::shared_ptr<TensorMemory> tensor_memory_of(std::uint32_t rank) const;
  void run_threads();
  Thread* pick();
  bool land_something();
  void check_remote_access(const Actor& actor, Cta& cta);
  /// Does the actor come after the other access, but for fences of tcgen05?
  bool is_tensor_fence_missing(const Actor& actor, const Stamp& other) const;
  void check_cta_at_exit(Cta& cta);
  void thread_ended(Thread& thread);
  void report_deadlock();
  void hold_meeting(Warp& warp, Meeting& meeting, MeetingBody body);
  void sleep(const Wait& wait);
  void suspend();
  static void thread_body(void* thread);

  Device::State& device_;
  const LaunchConfig& config_;
  const Options& options_;
  const std::function<void()>& kernel_;
  Random random_;
  Report report_;
  std::vector<Agent> agents_;
  std::vector<Site> sites_{Site{}};
  std::unordered_map<std::uint64_t, SiteId> site_ids_;
  struct SiteCacheEntry {
    std::uint64_t key = 0;
    SiteId id = 0;
  };
  std::array<SiteCacheEntry, 1024> site_cache_{};
  std::vector<std::unique_ptr<Cta>> ctas_;
  std::map<std::uint32_t, ClusterBarrier> cluster_barriers_;
  std::vector<Warp*> warps_;
  std::vector<OperationRef> in_flight_, held_back_;  // land any time; only when asked
  std::map<std::uint64_t, AtomicSync> atomics_;
  std::set<std::uint32_t> acquired_waves_;
  std::uint32_t wave_ = 0, last_wave_before_ = 0;
  std::uint32_t alive_ = 0;
  std::uint64_t spins_ = 0;  // since something else happened
  Thread* running_ = nullptr;
  Warp* last_warp_ = nullptr;
  std::uint32_t rotation_ = 0;  // where the search for the next warp begins without a seed
  std::uint32_t policy_ = 0;
  bool takes_high_lanes_first_ = false;
  bool is_ending_ = false;
};

/// Warps of a warpgroup that setmaxnreg left unequal.
void check_registers_at_exit(Machine& machine, const Cta& cta);
/// Tensor memory that was not given back, work of the tensor core that nobody waited for.
void check_tensor_at_exit(Machine& machine, const Warp& warp);
void check_tensor_at_exit(Machine& machine, const Cta& cta);
/// A thread that ended no longer keeps the cluster's barrier waiting.
void thread_left_cluster(const Cta& cta);

/// An instruction of AMD's, in a size that gfx950 was the first to have.
void check_gfx950(const Warp& warp, Instruction what);

/// The launch that runs; kernels run nowhere else.
Machine& machine();

}  // namespace fovea::cuda::emulator
