// Tensor memory itself: allocation, fences, loads and stores. Products and copies: tensor_product.cpp.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <optional>
#include <span>
#include <utility>

#include "cuda/emulator/tensor.hpp"

namespace fovea::cuda::emulator {

TensorMemory::TensorMemory()
    : heap(std::make_unique_for_overwrite<std::byte[]>(std::size_t{kTensorLanes} * kTensorColumns *
                                                       4)),
      cells({.name = "tensor memory",
             .data = heap.get(),
             .bytes = std::uint64_t{kTensorLanes} * kTensorColumns * 4,
             .is_tensor = true}) {}

namespace {

/// What each lane of a warp of 32 gave.
using WholeWarp = std::span<void* const, kWarpLanes>;

std::span<Thread* const, kWarpLanes> threads_of(const Warp& warp) {
  return std::span(warp.lanes).first<kWarpLanes>();
}

template <class Body>
void meet_whole(void* argument, Instruction what, Body body) {
  machine().meet(
      what.name, argument, what.site,
      [&](Warp& warp, const Arguments& arguments) {
        if (warp.alive == ~0U) return body(warp, WholeWarp(arguments.data(), kWarpLanes));
        wrong(Fault::divergence, warp.first_alive(),
              "is alone where all 32 lanes of a warp must be", what);
      },
      true);
}

bool is_pipe() { return machine().options().tensor_order == TensorOrder::pipe; }

}  // namespace

void wrong(Fault fault, const Thread& who, const std::string& text, Instruction what, Site other) {
  machine().report(fault, &who, fmt::format("{}, by {}", text, what.name), what.site, other);
}

Cta* tensor_cta(const Cta& cta, int cta_group, std::uint32_t half) {
  return machine().cta_of_rank(cta, cta_group == 1 ? cta.rank : (cta.rank & ~1U) | half);
}

Cta& tensor_leader(Cta& cta, int cta_group) { return *tensor_cta(cta, cta_group, 0); }

bool is_right_group(Thread& self, int cta_group, Instruction what) {
  TensorCta& own = self.cta->tensor;
  if (own.cta_group == 0) {
    own.cta_group = cta_group;
    own.group_site = what.site;
  } else if (own.cta_group != cta_group) {
    wrong(Fault::tensor_issue, self,
          fmt::format("says cta_group::{} where another instruction of the kernel said {}",
                      cta_group, own.cta_group),
          what, own.group_site);
    return false;
  }
  if (cta_group == 1) return true;
  if (tensor_cta(*self.cta, 2, 0) != nullptr && tensor_cta(*self.cta, 2, 1) != nullptr) return true;
  wrong(Fault::tensor_issue, self, "is in a cluster without a pair of CTAs", what);
  return false;
}

bool is_allocated(const Cta& cta, TensorPlace place, std::uint32_t lanes, std::uint32_t columns,
                  const Thread& who, Instruction what) {
  for (const TensorMemory::Allocation& known : cta.tensor.memory->allocations) {
    const bool is_inside = known.cta == &cta && place.column >= known.column &&
                           place.column + columns <= known.column + known.columns;
    if (is_inside && place.lane + lanes <= kTensorLanes) return true;
  }
  wrong(Fault::tensor_address, who,
        fmt::format("touches lanes {}-{}, columns {}-{} of tensor memory, which are not in an "
                    "allocation of its CTA",
                    place.lane, place.lane + lanes - 1, place.column, place.column + columns - 1),
        what);
  return false;
}

// ---- who knows what ----

VectorClock tensor_seen(Thread& self) {
  if (is_pipe()) self.tensor.seen.join(self.clock);
  VectorClock seen = self.tensor.seen;
  // An allocation comes with its address, through an ordinary barrier.
  const std::uint32_t rank = self.cta->rank;
  for (const std::uint32_t other : {rank, rank ^ 1U}) {
    const Cta* cta = machine().cta_of_rank(*self.cta, other);
    if (cta == nullptr || cta->tensor.allocator == 0) continue;
    seen.raise(cta->tensor.allocator, self.clock.of(cta->tensor.allocator));
  }
  return seen;
}

void tensor_complete(Thread& self, AgentId agent, std::uint32_t time) {
  self.tensor.seen.raise(agent, time);
  self.tensor.done.raise(agent, time);
  if (is_pipe()) tensor_release(self);
  machine().tick(self);
  self.tensor.done_at = self.clock.of(self.agent);
}

void tensor_release(Thread& self) {
  machine().tick(self);
  self.clock.join(self.tensor.done);
}

void tensor_fence_before(Instruction) { tensor_release(machine().thread()); }

void tensor_fence_after(Instruction) {
  Thread& self = machine().thread();
  self.tensor.seen.join(self.clock);
}

// ---- allocation ----

namespace {

bool is_free(const TensorMemory& memory, std::uint32_t column, std::uint32_t columns) {
  return std::none_of(memory.allocations.begin(), memory.allocations.end(), [&](const auto& known) {
    return column < known.column + known.columns && known.column < column + columns;
  });
}

/// The first of so many free columns, the same in each of the CTAs; any that fit, for the ISA promises no place.
std::optional<std::uint32_t> free_columns(std::span<Cta* const> ctas, std::uint32_t columns) {
  std::vector<std::uint32_t> fitting;
  for (std::uint32_t column = 0; column + columns <= kTensorColumns; column += kTensorUnit) {
    const bool fits = std::all_of(ctas.begin(), ctas.end(), [&](const Cta* cta) {
      return is_free(*cta->tensor.memory, column, columns);
    });
    if (fits) fitting.push_back(column);
  }
  if (fitting.empty()) return std::nullopt;
  if (machine().options().landing != Landing::seeded) return fitting.back();
  return fitting[machine().random().below(static_cast<std::uint32_t>(fitting.size()))];
}

void grant(Cta& cta, std::shared_ptr<TensorRequest> granted, std::uint32_t column,
           const Thread& who) {
  TensorCta& own = cta.tensor;
  TensorRequest& request = *granted;
  if (own.allocator == 0) own.allocator = machine().new_agent(&who, "tcgen05.alloc");
  own.memory->allocations.push_back(
      {&cta, column, request.columns, request.cta_group, request.site});
  own.smallest = request.columns;
  const Actor actor{.agent = own.allocator,
                    .time = ++own.allocations_made,
                    .wave = machine().wave(),
                    .site = machine().intern(request.site),
                    .thread = &who};
  for (std::uint32_t lane = 0; lane < kTensorLanes; ++lane) {
    own.memory->cells.renew(actor, own.memory->range({lane, column}, request.columns));
  }
  request.column = column;
  request.is_granted = true;
  own.request = nullptr;
  machine().wake(own.memory.get());
}

/// Of a pair both warps must have come.
bool try_to_grant(Cta& cta, TensorRequest& request, const Thread& who) {
  std::vector<Cta*> ctas{&cta};
  if (request.cta_group == 2) {
    Cta* peer = machine().cta_of_rank(cta, cta.rank ^ 1U);
    if (peer->tensor.request == nullptr) return false;
    if (peer->tensor.request->columns != request.columns) {
      wrong(Fault::tensor_allocation, who,
            fmt::format("asks for {} columns where the other CTA of the pair asks for {}",
                        request.columns, peer->tensor.request->columns),
            {"tcgen05.alloc", request.site}, peer->tensor.request->site);
      machine().end_launch();
    }
    ctas.push_back(peer);
  }
  const std::optional<std::uint32_t> column = free_columns(ctas, request.columns);
  if (!column) return false;
  for (Cta* each : ctas) grant(*each, each->tensor.request, *column, who);
  return true;
}

void check_request(Thread& self, std::uint32_t columns, Instruction what) {
  const TensorCta& own = self.cta->tensor;
  const bool is_count =
      std::has_single_bit(columns) && columns >= kTensorUnit && columns <= kTensorColumns;
  if (!is_count) {
    wrong(Fault::tensor_allocation, self,
          fmt::format("asks for {} columns; expected a power of two from 32 to 512", columns),
          what);
    machine().end_launch();
  }
  if (own.has_relinquished) {
    wrong(Fault::tensor_allocation, self,
          "allocates after its CTA gave up the permit (tcgen05.relinquish_alloc_permit)", what);
  }
  if (columns > own.smallest) {
    wrong(Fault::tensor_allocation, self,
          fmt::format("asks for {} columns after its CTA asked for {}: no allocation may be larger "
                      "than an earlier one",
                      columns, own.smallest),
          what);
  }
}

/// The other CTA of a pair must be there before columns of both are taken.
void check_peer_started(Thread& self, Instruction what) {
  const Cta* peer = machine().cta_of_rank(*self.cta, self.cta->rank ^ 1U);
  if (self.clock.of(peer->threads[0]->agent) != 0) return;
  machine().report(
      Fault::cluster_lifetime, &self,
      fmt::format("runs {} for a pair whose other CTA may not have started: no cluster "
                  "barrier before it",
                  what.name),
      what.site);
}

}  // namespace

void tensor_alloc(std::uint32_t to, std::uint32_t columns, int cta_group, Instruction what) {
  Thread& self = machine().thread();
  if (!is_right_group(self, cta_group, what)) machine().end_launch();
  std::shared_ptr<TensorRequest> request;
  meet_whole(&request, what, [&](Warp& warp, WholeWarp arguments) {
    check_request(self, columns, what);
    if (cta_group == 2) check_peer_started(self, what);
    auto made = std::make_shared<TensorRequest>();
    made->columns = columns;
    made->cta_group = cta_group;
    made->site = what.site;
    warp.cta->tensor.request = made;
    for (void* lane : arguments) *static_cast<std::shared_ptr<TensorRequest>*>(lane) = made;
  });
  if (request == nullptr) machine().end_launch();
  const TensorMemory& memory = *self.cta->tensor.memory;
  const Wait wait{.what = what.name,
                  .object = &memory,
                  .details =
                      [&] {
                        std::uint32_t taken = 0;
                        for (const auto& known : memory.allocations) taken += known.columns;
                        return fmt::format("{} columns, of 512 are {} taken", columns, taken);
                      },
                  .site = what.site};
  machine().wait_until(
      wait, [&] { return request->is_granted || try_to_grant(*self.cta, *request, self); });
  machine().tick(self);
  self.clock.raise(self.cta->tensor.allocator, self.cta->tensor.allocations_made);
  if (self.lane == 0) store_shared(to, &request->column, sizeof request->column, what);
  meet_whole(nullptr, what, [](Warp&, WholeWarp) {});
}

void tensor_dealloc(std::uint32_t from, std::uint32_t columns, int cta_group, Instruction what) {
  Thread& self = machine().thread();
  if (!is_right_group(self, cta_group, what)) return;
  meet_whole(nullptr, what, [&](Warp& warp, WholeWarp) {
    TensorMemory& memory = *warp.cta->tensor.memory;
    const TensorPlace place = tensor_place(from);
    const auto known =
        std::find_if(memory.allocations.begin(), memory.allocations.end(), [&](const auto& one) {
          return one.cta == warp.cta && one.column == place.column && one.columns == columns;
        });
    if (known == memory.allocations.end() || place.lane != 0) {
      return wrong(
          Fault::tensor_allocation, self,
          fmt::format("gives back {} columns from column {}, which is no allocation of its "
                      "CTA",
                      columns, place.column),
          what);
    }
    VectorClock seen;
    for (Thread* lane : threads_of(warp)) seen.join(tensor_seen(*lane));
    Actor actor = machine().actor(what.name, what.site);
    actor.seen = &seen;
    actor.known = &self.clock;
    const std::vector<std::byte> poison(columns * 4ULL, std::byte{0xff});
    for (std::uint32_t lane = 0; lane < kTensorLanes; ++lane) {
      memory.cells.write(machine(), actor, memory.range({lane, place.column}, columns),
                         poison.data());
    }
    memory.allocations.erase(known);
    machine().wake(&memory);
  });
}

void tensor_relinquish(int cta_group, Instruction what) {
  Thread& self = machine().thread();
  if (!is_right_group(self, cta_group, what)) return;
  meet_whole(nullptr, what,
             [](Warp& warp, WholeWarp) { warp.cta->tensor.has_relinquished = true; });
}

// ---- loads and stores ----

namespace {

/// Of register i of lane t, where the instruction's address is the origin.
TensorPlace cell_of(const TensorMove& move, std::uint32_t t, std::uint32_t i) {
  switch (move.shape) {
    case TensorShape::l32x32b:
      return {t, i};
    case TensorShape::l16x64b:
      return {8 * (t % 2) + t / 4, t / 2 % 2 + 2 * i};
    case TensorShape::l16x128b:
      return {t / 4 + 8 * (i % 2), t % 4 + 4 * (i / 2)};
    case TensorShape::l16x256b:
      return {t / 4 + 8 * (i / 2 % 2), 2 * (t % 4) + i % 2 + 8 * (i / 4)};
    case TensorShape::l16x32bx2:
      return {t % 16, i + (t < 16 ? 0 : move.split)};
  }
  return {0, 0};
}

std::uint32_t columns_of(const TensorMove& move) {
  switch (move.shape) {
    case TensorShape::l16x64b:
    case TensorShape::l16x128b:
    case TensorShape::l16x256b:
      return 2 * move.count;
    case TensorShape::l32x32b:
      return move.count;
    case TensorShape::l16x32bx2:
      return move.count + move.split;
  }
  return 0;
}

/// Visits the cells of a lane as runs of columns that its registers fill in order.
template <class Visit>
void for_runs(const TensorMove& move, std::uint32_t lane, Visit visit) {
  const TensorPlace origin = tensor_place(move.address);
  for (std::uint32_t first = 0; first < move.count;) {
    const TensorPlace cell = cell_of(move, lane, first);
    std::uint32_t end = first + 1;
    for (; end < move.count; ++end) {
      const TensorPlace next = cell_of(move, lane, end);
      if (next.lane != cell.lane || next.column != cell.column + (end - first)) break;
    }
    visit(TensorPlace{origin.lane + cell.lane, origin.column + cell.column}, first, end - first);
    first = end;
  }
}

/// A lane's access: the stream of its loads, or of its stores.
struct LaneActor {
  Actor actor;
  VectorClock seen, known;
};

LaneActor lane_actor(Thread& lane, AgentId& agent, std::uint32_t& time, Instruction what) {
  if (agent == 0) agent = machine().new_agent(&lane, what.name);
  LaneActor made{.actor = {.agent = agent,
                           .time = ++time,
                           .wave = machine().wave(),
                           .site = machine().intern(what.site),
                           .is_async = true,
                           .thread = &lane,
                           .what = what.name},
                 .seen = tensor_seen(lane),
                 .known = lane.clock};
  return made;
}

/// Checks what all lanes say together. False: it was reported, and nothing can be moved.
bool check_move(const Warp& warp, WholeWarp arguments, Instruction what) {
  const auto& first = *static_cast<TensorMove*>(arguments[0]);
  const Thread& who = *warp.lanes[0];
  for (const void* argument : arguments) {
    if (static_cast<const TensorMove*>(argument)->address == first.address) continue;
    wrong(Fault::tensor_address, who, "gives other addresses in other lanes of its warp", what);
    return false;
  }
  const TensorPlace place = tensor_place(first.address);
  const std::uint32_t lanes = first.shape == TensorShape::l32x32b ? 32 : 16;
  const std::uint32_t quarter = warp.idx % 4 * kWarpLanes;
  const bool is_own = place.lane == quarter || (lanes == 16 && place.lane == quarter + 16);
  if (!is_own) {
    wrong(Fault::tensor_address, who,
          fmt::format(
              "names lane {}; a warp reaches the 32 lanes from {} on, 32 (warp % 4), with its "
              "address at the first of them",
              place.lane, quarter),
          what);
    return false;
  }
  return is_allocated(*warp.cta, place, lanes, columns_of(first), who, what);
}

}  // namespace

/// A load or a store of a warp: each lane touches its cells on its own.
struct LaneMoves : Operation {
  TensorMove form{};
  Warp* warp = nullptr;
  std::array<LaneActor, kWarpLanes> lanes;
  std::array<std::vector<std::uint32_t>, kWarpLanes> values;
  Site site;

  void land(Machine& machine) final {
    TensorMemory& memory = *warp->cta->tensor.memory;
    for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
      LaneActor& by = lanes[lane];
      by.actor.seen = &by.seen;
      by.actor.known = &by.known;
      values[lane].resize(form.count);
      for_runs(form, lane, [&](TensorPlace place, std::uint32_t first, std::uint32_t count) {
        touch(machine, memory, by.actor, memory.range(place, count), &values[lane][first]);
      });
    }
  }
  virtual void touch(Machine& machine, TensorMemory& memory, const Actor& actor, ByteRange range,
                     std::uint32_t* words) = 0;
};

struct TensorLoad final : LaneMoves {
  bool is_waited_for = false;
  std::array<TensorMove, kWarpLanes> moves{};
  std::array<bool, kWarpLanes> is_named{}, greatest_is_named{};  // registers have their values

  void touch(Machine& machine, TensorMemory& memory, const Actor& actor, ByteRange range,
             std::uint32_t* words) override {
    memory.cells.read(machine, actor, range, words);
  }

  bool is_over() const {
    for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
      if (!is_named[lane] || !greatest_is_named[lane]) return false;
    }
    return true;
  }
};

struct TensorStore final : LaneMoves {
  void touch(Machine& machine, TensorMemory& memory, const Actor& actor, ByteRange range,
             std::uint32_t* words) override {
    memory.cells.write(machine, actor, range, words);
  }
};

namespace {

/// The whole warp comes; `begin` does for each lane what is left to do at the issue.
template <class Moves, class Begin>
void issue_moves(TensorMove& move, std::vector<std::shared_ptr<Moves>> TensorWarp::*list,
                 AgentId TensorThread::*agent, std::uint32_t TensorThread::*time, Instruction what,
                 Begin begin) {
  machine().maybe_yield();
  meet_whole(&move, what, [&](Warp& warp, WholeWarp arguments) {
    if (!check_move(warp, arguments, what)) machine().end_launch();
    auto moves = std::make_shared<Moves>();
    moves->form = move;
    moves->warp = &warp;
    moves->site = what.site;
    for (std::uint32_t i = 0; i < kWarpLanes; ++i) {
      Thread& lane = *warp.lanes[i];
      moves->lanes[i] = lane_actor(lane, lane.tensor.*agent, lane.tensor.*time, what);
      begin(*moves, i, *static_cast<TensorMove*>(arguments[i]));
    }
    (warp.tensor.*list).push_back(moves);
    machine().issue(moves);
  });
}

}  // namespace

void tensor_load(TensorMove move, Instruction what) {
  machine().thread().warp->tensor.has_loaded = true;
  issue_moves(move, &TensorWarp::loads, &TensorThread::loads, &TensorThread::load_time, what,
              [](TensorLoad& load, std::uint32_t lane, const TensorMove& own) {
                load.moves[lane] = own;
                std::fill_n(own.registers, own.count, kInFlight);
                load.greatest_is_named[lane] = own.greatest == nullptr;
                if (own.greatest != nullptr) *own.greatest = kInFlight;
              });
}

void tensor_store(TensorMove move, Instruction what) {
  check_registers(move.registers, 4 * move.count, what);
  issue_moves(move, &TensorWarp::stores, &TensorThread::stores, &TensorThread::store_time, what,
              [](TensorStore& store, std::uint32_t lane, const TensorMove& own) {
                store.values[lane].assign(own.registers, own.registers + own.count);
              });
}

void tensor_wait_load(Instruction what) {
  meet_whole(nullptr, what, [&](Warp& warp, WholeWarp) {
    for (const std::shared_ptr<TensorLoad>& load : warp.tensor.loads) {
      machine().land(*load);
      load->is_waited_for = true;
    }
    for (Thread* lane : threads_of(warp)) {
      if (lane->tensor.loads != 0)
        tensor_complete(*lane, lane->tensor.loads, lane->tensor.load_time);
    }
  });
}

void tensor_wait_store(Instruction what) {
  meet_whole(nullptr, what, [&](Warp& warp, WholeWarp) {
    for (const std::shared_ptr<TensorStore>& store : warp.tensor.stores) machine().land(*store);
    warp.tensor.stores.clear();
    for (Thread* lane : threads_of(warp)) {
      if (lane->tensor.stores != 0)
        tensor_complete(*lane, lane->tensor.stores, lane->tensor.store_time);
    }
  });
}

namespace {

void check_untouched(const std::uint32_t* registers, std::uint32_t count, const Thread& who,
                     const TensorLoad& load, Instruction what) {
  for (std::uint32_t i = 0; i < count; ++i) {
    if (registers[i] == kInFlight) continue;
    wrong(Fault::tensor_load_in_flight, who,
          fmt::format("wrote to register {} of a tcgen05.ld before its wait", i), what, load.site);
    return;
  }
}

std::uint32_t greatest_of(const std::vector<std::uint32_t>& values) {
  float greatest = std::bit_cast<float>(values[0]);
  for (const std::uint32_t bits : values) {
    greatest = std::fmax(greatest, std::bit_cast<float>(bits));
  }
  return std::bit_cast<std::uint32_t>(greatest);
}

/// Gives the registers their values, if they are this load's.
bool name_loaded(TensorLoad& load, std::uint32_t* registers, const Thread& self, Instruction what) {
  const std::uint32_t lane = self.lane;
  const TensorMove& move = load.moves[lane];
  const bool is_of_columns = move.registers == registers && !load.is_named[lane];
  const bool is_of_greatest = move.greatest == registers && !load.greatest_is_named[lane];
  if (!is_of_columns && !is_of_greatest) return false;
  if (!load.is_waited_for) {
    wrong(Fault::tensor_load_in_flight, self,
          "names registers before the tcgen05.wait::ld of their load", what, load.site);
    return true;
  }
  check_untouched(registers, is_of_columns ? move.count : 1, self, load, what);
  if (is_of_columns) {
    std::copy(load.values[lane].begin(), load.values[lane].end(), registers);
    load.is_named[lane] = true;
  } else {
    *registers = greatest_of(load.values[lane]);
    load.greatest_is_named[lane] = true;
  }
  return true;
}

}  // namespace

void tensor_name_loaded(std::uint32_t* registers, Instruction what) {
  const Thread& self = machine().thread();
  std::vector<std::shared_ptr<TensorLoad>>& loads = self.warp->tensor.loads;
  // Of two loads into the same registers the later one is what they hold.
  for (auto load = loads.rbegin(); load != loads.rend(); ++load) {
    if (name_loaded(**load, registers, self, what)) break;
  }
  std::erase_if(loads, [](const auto& load) { return load->is_waited_for && load->is_over(); });
}

// ---- ends ----

void check_tensor_at_exit(Machine& machine, const Warp& warp) {
  for (const std::shared_ptr<TensorLoad>& load : warp.tensor.loads) {
    if (load->is_waited_for) {
      machine.report(Fault::tensor_load_in_flight, warp.lanes[0],
                     "ends without naming, at tcgen05.wait::ld or behind it, the registers of a "
                     "tcgen05.ld",
                     load->site);
      continue;
    }
    load->has_landed = true;
    machine.report(Fault::tensor_not_awaited, warp.lanes[0],
                   "ends with a tcgen05.ld that no tcgen05.wait::ld waited for", load->site);
  }
  for (const std::shared_ptr<TensorStore>& store : warp.tensor.stores) {
    machine.report(Fault::tensor_not_awaited, warp.lanes[0],
                   "ends with a tcgen05.st that no tcgen05.wait::st waited for", store->site);
  }
}

void check_tensor_at_exit(Machine& machine, const Cta& cta) {
  for (const TensorMemory::Allocation& known : cta.tensor.memory->allocations) {
    if (known.cta != &cta) continue;
    machine.report(
        Fault::tensor_allocation, cta.threads[0].get(),
        fmt::format("is of a CTA that ends with {} columns of tensor memory not given back",
                    known.columns),
        known.site);
  }
  for (const auto& [key, stream] : cta.tensor.streams) {
    if (cta.ended.of(stream.agent) >= stream.time) continue;
    machine.report(
        Fault::tensor_not_awaited, stream.issuer,
        "is of a CTA that ends before the tensor core is known to have ended: no commit, or "
        "nobody waited for it",
        stream.site);
  }
}

}  // namespace fovea::cuda::emulator
