#include "cuda/emulator/wgmma.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "cuda/emulator/formats.hpp"
#include "cuda/emulator/instructions.hpp"
#include "cuda/emulator/machine.hpp"
#include "cuda/emulator/operand.hpp"

namespace fovea::cuda::emulator {

constexpr std::uint32_t kRows = 16, kMostColumns = 256, kMostDepth = 32, kDepthBytes = 32;
constexpr std::uint32_t kWarpsOfGroup = 4;

using Fragment = std::array<std::uint32_t, 4>;

struct WgmmaProduct final : Operation {
  Wgmma form{};
  Warp* warp = nullptr;
  Actor actor;
  VectorClock seen;
  std::array<const std::uint32_t*, kWarpLanes> a_registers{};
  std::array<Fragment, kWarpLanes> a_at_issue{};
  std::shared_ptr<Accumulator> accumulator;
  std::shared_ptr<WgmmaProduct> before;  // of the same warp: products run in order
  Site site;

  void land(Machine& machine) override;

 private:
  void read_a(Machine& machine, float (&a)[kRows][kMostDepth]) const;
  void read_a_registers(float (&a)[kRows][kMostDepth]) const;
  void read_b(Machine& machine, float (&b)[kMostDepth][kMostColumns]) const;
  void read_chunk(Machine& machine, std::uint32_t address, std::byte (&chunk)[16]) const;
  std::uint32_t depth() const { return kDepthBytes / element_bytes(form.a_format); }
};

namespace {

std::uint32_t element_of(const std::byte* from, std::uint32_t idx, std::uint32_t bytes) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, from + idx * bytes, bytes);
  return bits;
}

/// Of accumulator i of a lane, in the warp's 16 rows.
std::size_t sum_index(std::uint32_t lane, std::uint32_t i, std::uint32_t columns) {
  const std::uint32_t row = lane / 4 + 8 * (i / 2 % 2);
  const std::uint32_t column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
  return row * columns + column;
}

/// The elements of 16 bytes, `step` floats apart.
using DecodeChunk = void (*)(const std::byte (&chunk)[16], float* to, std::size_t step);

template <Format format>
void decode_chunk(const std::byte (&chunk)[16], float* to, std::size_t step) {
  constexpr std::uint32_t kBytes = element_bytes(format);
  for (std::uint32_t i = 0; i < 16 / kBytes; ++i)
    to[i * step] = decode(format, element_of(chunk, i, kBytes));
}

DecodeChunk decoder_of(Format format) {
  switch (format) {
    case Format::f32:
      return decode_chunk<Format::f32>;
    case Format::tf32:
      return decode_chunk<Format::tf32>;
    case Format::f16:
      return decode_chunk<Format::f16>;
    case Format::bf16:
      return decode_chunk<Format::bf16>;
    case Format::e4m3:
      return decode_chunk<Format::e4m3>;
    case Format::e5m2:
      return decode_chunk<Format::e5m2>;
    case Format::s8:
      return decode_chunk<Format::s8>;
    case Format::u8:
      return decode_chunk<Format::u8>;
  }
  return nullptr;
}

double decode_sum(std::uint32_t bits, bool is_integer) {
  return is_integer ? double{static_cast<double>(static_cast<std::int32_t>(bits))}
                    : double{std::bit_cast<float>(bits)};
}

std::uint32_t encode_sum(double sum, bool is_integer) {
  if (!is_integer) return std::bit_cast<std::uint32_t>(static_cast<float>(sum));
  return static_cast<std::uint32_t>(static_cast<std::int64_t>(sum));
}

}  // namespace

void WgmmaProduct::read_chunk(Machine& machine, std::uint32_t address,
                              std::byte (&chunk)[16]) const {
  const std::uint32_t shared = warp->cta->rank << kRankShift | address;
  const Machine::Place place = machine.shared_place(shared, 16, 16, "wgmma", actor);
  if (place.block == nullptr) {
    std::memset(chunk, 0xff, sizeof chunk);
  } else {
    place.block->read_async(machine, actor, place.range, chunk);
  }
}

void WgmmaProduct::read_a_registers(float (&a)[kRows][kMostDepth]) const {
  const std::uint32_t bytes = element_bytes(form.a_format), per_register = 4 / bytes;
  for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    // As late as the seed says: what stands in the registers now.
    const std::uint32_t* registers = a_registers[lane];
    for (std::uint32_t r = 0; r < 4; ++r) {
      const std::uint32_t row = lane / 4 + 8 * (r % 2);
      const std::uint32_t first = depth() / 2 * (r / 2) + per_register * (lane % 4);
      std::byte word[4];
      std::memcpy(word, &registers[r], sizeof word);
      for (std::uint32_t i = 0; i < per_register; ++i) {
        a[row][first + i] = decode(form.a_format, element_of(word, i, bytes));
      }
    }
  }
}

void WgmmaProduct::read_a(Machine& machine, float (&a)[kRows][kMostDepth]) const {
  if (form.a_is_in_registers) return read_a_registers(a);
  const OperandLayout layout(form.a, form.a_is_k_major);
  const std::uint32_t per_chunk = 16 / element_bytes(form.a_format);
  const DecodeChunk decode_to = decoder_of(form.a_format);
  const std::uint32_t first_row = warp->idx % kWarpsOfGroup * kRows;
  std::byte chunk[16];
  if (form.a_is_k_major) {
    for (std::uint32_t row = 0; row < kRows; ++row) {
      for (std::uint32_t c = 0; c < kDepthBytes / 16; ++c) {
        read_chunk(machine, layout.chunk_address(first_row + row, c), chunk);
        decode_to(chunk, &a[row][c * per_chunk], 1);
      }
    }
    return;
  }
  for (std::uint32_t k = 0; k < depth(); ++k) {
    for (std::uint32_t c = 0; c < kRows / per_chunk; ++c) {
      read_chunk(machine, layout.chunk_address(k, first_row / per_chunk + c), chunk);
      decode_to(chunk, &a[c * per_chunk][k], kMostDepth);
    }
  }
}

void WgmmaProduct::read_b(Machine& machine, float (&b)[kMostDepth][kMostColumns]) const {
  const OperandLayout layout(form.b, form.b_is_k_major);
  const std::uint32_t per_chunk = 16 / element_bytes(form.b_format);
  const DecodeChunk decode_to = decoder_of(form.b_format);
  std::byte chunk[16];
  if (form.b_is_k_major) {
    for (std::uint32_t column = 0; column < form.columns; ++column) {
      for (std::uint32_t c = 0; c < kDepthBytes / 16; ++c) {
        read_chunk(machine, layout.chunk_address(column, c), chunk);
        decode_to(chunk, &b[c * per_chunk][column], kMostColumns);
      }
    }
    return;
  }
  for (std::uint32_t k = 0; k < depth(); ++k) {
    for (std::uint32_t c = 0; c < form.columns / per_chunk; ++c) {
      read_chunk(machine, layout.chunk_address(k, c), chunk);
      decode_to(chunk, &b[k][c * per_chunk], 1);
    }
  }
}

void WgmmaProduct::land(Machine& machine) {
  if (before) machine.land(*std::exchange(before, nullptr));
  float a[kRows][kMostDepth];
  static thread_local float b[kMostDepth][kMostColumns];
  read_a(machine, a);
  read_b(machine, b);
  for (std::uint32_t row = 0; row < kRows; ++row) {
    double sums[kMostColumns] = {};
    for (std::uint32_t k = 0; k < depth(); ++k) {
      const double factor = a[row][k];
      for (std::uint32_t column = 0; column < form.columns; ++column)
        sums[column] += factor * double{b[k][column]};
    }
    double* const to = &accumulator->sums[row * std::size_t{form.columns}];
    if (!form.is_accumulating) std::fill_n(to, form.columns, 0.0);
    for (std::uint32_t column = 0; column < form.columns; ++column) {
      const std::uint32_t sum = encode_sum(to[column] + sums[column], form.is_integer);
      to[column] = decode_sum(sum, form.is_integer);
    }
  }
}

namespace {

/// The accumulator that these registers are in flight for, or a new one that takes their values over.
std::shared_ptr<Accumulator> accumulator_for(Warp& warp, const Wgmma& form,
                                             const Arguments& arguments, Site site) {
  for (const std::shared_ptr<Accumulator>& known : warp.wgmma.accumulators) {
    if (known->registers[0] != static_cast<Wgmma*>(arguments[0])->sums) continue;
    if (known->columns != form.columns) {
      machine().report(Fault::accumulator_in_flight, &warp.first_alive(),
                       fmt::format("issues wgmma with {} columns into an accumulator that a wgmma "
                                   "with {} is still writing",
                                   form.columns, known->columns),
                       site, known->site);
      machine().end_launch();
    }
    return known;
  }
  auto made = std::make_shared<Accumulator>();
  made->columns = form.columns;
  made->is_integer = form.is_integer;
  made->site = site;
  made->sums.resize(kRows * std::size_t{form.columns});
  for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    std::uint32_t* registers = static_cast<Wgmma*>(arguments[lane])->sums;
    made->registers[lane] = registers;
    for (std::uint32_t i = 0; i < form.columns / 2; ++i) {
      made->sums[sum_index(lane, i, form.columns)] = decode_sum(registers[i], form.is_integer);
      registers[i] = kInFlight;
    }
  }
  warp.wgmma.accumulators.push_back(made);
  return made;
}

/// The registers get their sums. Whoever wrote to them meanwhile is reported.
void retire(const Warp& warp, const Accumulator& accumulator, Site site) {
  for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    std::uint32_t* registers = accumulator.registers[lane];
    for (std::uint32_t i = 0; i < accumulator.columns / 2; ++i) {
      if (registers[i] != kInFlight) {
        machine().report(Fault::accumulator_in_flight, warp.lanes[lane],
                         fmt::format("wrote to accumulator {} before its wgmma.wait_group", i),
                         site, accumulator.site);
      }
      registers[i] = encode_sum(accumulator.sums[sum_index(lane, i, accumulator.columns)],
                                accumulator.is_integer);
    }
  }
}

void check_a_registers(const WgmmaProduct& product, Site site) {
  if (!product.form.a_is_in_registers) return;
  for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    if (std::memcmp(product.a_registers[lane], product.a_at_issue[lane].data(), sizeof(Fragment)) ==
        0) {
      continue;
    }
    machine().report(Fault::operand_overwritten, product.warp->lanes[lane],
                     "wrote to registers that a wgmma in flight reads as its a", site,
                     product.site);
  }
}

/// The four warps of a warpgroup issue the same products in the same order.
void check_group(Warp& warp, const Wgmma& form, Site site) {
  const std::uint32_t group = warp.idx / kWarpsOfGroup;
  std::vector<std::vector<WgmmaState::Issued>>& groups = warp.cta->issued;
  if (groups.size() <= group) groups.resize(group + 1U);
  if ((group + 1U) * kWarpsOfGroup > warp.cta->warps.size()) {
    machine().report(Fault::divergence, &warp.first_alive(),
                     "issues wgmma, but its warpgroup has fewer than four warps", site);
  }
  std::vector<WgmmaState::Issued>& issued = groups[group];
  const WgmmaState::Issued own{site, form.a_is_in_registers ? 0 : form.a, form.b, form.columns};
  const std::size_t number = warp.wgmma.issued++;
  if (number == issued.size()) {
    issued.push_back(own);
    return;
  }
  const WgmmaState::Issued& other = issued[number];
  if (other.site == own.site && other.a == own.a && other.b == own.b &&
      other.columns == own.columns) {
    return;
  }
  machine().report(Fault::divergence, &warp.first_alive(),
                   "issues another wgmma, or other descriptors, than a warp of its warpgroup", site,
                   other.site);
}

/// Frames that ended may be read here: the stack itself lives on.
__attribute__((no_sanitize("address"))) std::uint64_t digest(const WatchedRegisters& watched) {
  std::uint64_t sum = 0xcbf29ce484222325U;  // FNV-1a
  for (const std::uint32_t* lane : watched.registers) {
    for (std::uint32_t i = 0; i < watched.count; ++i) {
      const std::uint32_t word = *static_cast<const volatile std::uint32_t*>(lane + i);
      sum = (sum ^ word) * 0x100000001b3U;
    }
  }
  return sum;
}

WatchedRegisters* find_watched(WgmmaState& state, const std::uint32_t* first, std::uint32_t count) {
  for (WatchedRegisters& watched : state.watched) {
    if (watched.registers[0] == first && watched.count == count) return &watched;
  }
  return nullptr;
}

bool is_in_flight(const WgmmaState& state, const std::uint32_t* first) {
  return std::any_of(state.accumulators.begin(), state.accumulators.end(),
                     [&](const auto& known) { return known->registers[0] == first; });
}

/// The first time that registers are used, what they held at the last fence is not known.
bool is_fence_missing(WgmmaState& state, const WatchedRegisters& used, bool is_read) {
  WatchedRegisters* known = find_watched(state, used.registers[0], used.count);
  if (known == nullptr) {
    state.watched.push_back(used);
    state.watched.back().digest = digest(used);
    return false;
  }
  known->registers = used.registers;
  known->idle_fences = 0;
  return known->was_waited_for || (is_read && digest(*known) != known->digest);
}

void check_fence(Warp& warp, const Wgmma& form, const Arguments& arguments, Site site) {
  WgmmaState& state = warp.wgmma;
  WatchedRegisters sums{.count = form.columns / 2}, a{.count = 4};
  for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    const auto& own = *static_cast<Wgmma*>(arguments[lane]);
    sums.registers[lane] = own.sums;
    a.registers[lane] = own.a_registers;
  }
  bool is_missing = !state.has_fenced;
  if (!is_in_flight(state, form.sums)) {
    is_missing |= is_fence_missing(state, sums, form.is_accumulating);
  }
  if (form.a_is_in_registers) is_missing |= is_fence_missing(state, a, true);
  if (!is_missing) return;
  machine().report(Fault::wgmma_fence_missing, &warp.first_alive(),
                   "issues wgmma without a wgmma.fence since its thread last had the registers of "
                   "its sums or of its a",
                   site);
}

void pass_fence(WgmmaState& state) {
  constexpr int kForgotten = 16;
  state.has_fenced = true;
  std::erase_if(state.watched,
                [](WatchedRegisters& watched) { return ++watched.idle_fences > kForgotten; });
  for (WatchedRegisters& watched : state.watched) {
    if (is_in_flight(state, watched.registers[0])) continue;
    watched.digest = digest(watched);
    watched.was_waited_for = false;
  }
}

void check_issue(Warp& warp, const Wgmma& form, const Arguments& arguments, Instruction what) {
  check_group(warp, form, what.site);
  check_fence(warp, form, arguments, what.site);
  for (std::uint32_t lane = 1; lane < kWarpLanes; ++lane) {
    const auto& other = *static_cast<Wgmma*>(arguments[lane]);
    const bool is_alike = other.b == form.b && other.is_accumulating == form.is_accumulating &&
                          (form.a_is_in_registers || other.a == form.a);
    if (is_alike) continue;
    machine().report(Fault::divergence, warp.lanes[lane],
                     "gives wgmma other operands than lane 0 of its warp", what.site);
    break;
  }
  const bool has_offset =
      OperandLayout(form.b, true).has_base_offset() ||
      (!form.a_is_in_registers && OperandLayout(form.a, true).has_base_offset());
  if (has_offset) {
    machine().report(Fault::descriptor, &warp.first_alive(),
                     "gives wgmma a descriptor with a base offset (bits 49-51), which is not "
                     "modelled: let tiles begin where the swizzle's pattern begins",
                     what.site);
  }
}

std::shared_ptr<WgmmaProduct> make_product(Warp& warp, const Arguments& arguments,
                                           Instruction what) {
  WgmmaState& state = warp.wgmma;
  auto product = std::make_shared<WgmmaProduct>();
  product->form = *static_cast<Wgmma*>(arguments[0]);
  product->warp = &warp;
  product->site = what.site;
  if (state.agent == 0) state.agent = machine().new_agent(&warp.first_alive(), "wgmma");
  for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    Thread& thread = *warp.lanes[lane];
    product->seen.join(thread.clock);
    machine().tick(thread);
    const auto& own = *static_cast<Wgmma*>(arguments[lane]);
    if (!own.a_is_in_registers) continue;
    product->a_registers[lane] = own.a_registers;
    check_registers(own.a_registers, sizeof(Fragment), what);
    std::copy_n(own.a_registers, 4, product->a_at_issue[lane].begin());
  }
  product->actor = {.agent = state.agent,
                    .time = state.first_time + static_cast<std::uint32_t>(state.committed.size()),
                    .wave = machine().wave(),
                    .site = machine().intern(what.site),
                    .is_async = true,
                    .seen = &product->seen,
                    .thread = &warp.first_alive(),
                    .what = "wgmma"};
  return product;
}

void issue_product(Warp& warp, const Arguments& arguments, Instruction what) {
  const Wgmma& form = *static_cast<Wgmma*>(arguments[0]);
  check_issue(warp, form, arguments, what);
  const std::shared_ptr<WgmmaProduct> product = make_product(warp, arguments, what);
  product->accumulator = accumulator_for(warp, form, arguments, what.site);
  ++product->accumulator->products;
  WgmmaState& state = warp.wgmma;
  if (state.newest && !state.newest->has_landed) product->before = state.newest;
  state.newest = product;
  state.open.push_back(product);
  machine().issue(product);
}

/// Products of the oldest group end; accumulators without any more products come back.
void retire_group(Warp& warp, Site site) {
  WgmmaState& state = warp.wgmma;
  for (const std::shared_ptr<WgmmaProduct>& product : state.committed.front()) {
    machine().land(*product);
    check_a_registers(*product, site);
    --product->accumulator->products;
  }
  state.committed.pop_front();
  ++state.first_time;
  std::erase_if(state.accumulators, [&](const std::shared_ptr<Accumulator>& accumulator) {
    if (accumulator->products != 0) return false;
    retire(warp, *accumulator, site);
    WatchedRegisters* watched =
        find_watched(state, accumulator->registers[0], accumulator->columns / 2);
    if (watched != nullptr) watched->was_waited_for = true;
    return true;
  });
}

void wait_for_groups(Warp& warp, std::uint32_t pending, Site site) {
  WgmmaState& state = warp.wgmma;
  while (state.committed.size() > pending) {
    retire_group(warp, site);
  }
  if (state.agent == 0) return;
  for (Thread* lane : warp.lanes) {
    if (lane == nullptr) continue;
    machine().tick(*lane);
    lane->clock.raise(state.agent, state.first_time - 1);
  }
}

bool is_whole(const Warp& warp, Instruction what) {
  if (warp.alive == ~0U) return true;
  machine().report(Fault::divergence, &warp.first_alive(),
                   fmt::format("calls {}, which needs all 32 lanes of a warp", what.name),
                   what.site);
  return false;
}

template <class Body>
void meet_whole(void* argument, Instruction what, Body body) {
  machine().meet(
      what.name, argument, what.site,
      [&](Warp& warp, const Arguments& arguments) {
        if (is_whole(warp, what)) body(warp, arguments);
      },
      true);
}

}  // namespace

void check_wgmma_at_exit(Machine& machine, const Warp& warp) {
  const WgmmaState& state = warp.wgmma;
  const Thread* lane = warp.lanes[0];
  if (!state.open.empty()) {
    machine.report(Fault::wgmma_not_committed, lane,
                   "ends with a wgmma that no wgmma.commit_group closed", state.open[0]->site);
  }
  const auto pending = std::find_if(state.committed.begin(), state.committed.end(),
                                    [](const auto& group) { return !group.empty(); });
  if (pending != state.committed.end()) {
    machine.report(Fault::wgmma_not_waited, lane,
                   "ends with a wgmma that no wgmma.wait_group waited for", pending->front()->site);
  }
  // Their accumulators are gone with the warp's registers.
  for (const auto& product : state.open) product->has_landed = true;
  for (const auto& group : state.committed) {
    for (const auto& product : group) product->has_landed = true;
  }
}

void wgmma(Wgmma form, Instruction what) {
  require(90, what);
  meet_whole(&form, what,
             [&](Warp& warp, const Arguments& arguments) { issue_product(warp, arguments, what); });
}

void wgmma_fence(Instruction what) {
  meet_whole(nullptr, what, [](Warp& warp, const Arguments&) { pass_fence(warp.wgmma); });
}

void wgmma_commit(Instruction what) {
  meet_whole(nullptr, what, [](Warp& warp, const Arguments&) {
    warp.wgmma.committed.push_back(std::exchange(warp.wgmma.open, {}));
  });
}

void wgmma_wait(std::uint32_t pending, Instruction what) {
  meet_whole(nullptr, what,
             [&](Warp& warp, const Arguments&) { wait_for_groups(warp, pending, what.site); });
}

}  // namespace fovea::cuda::emulator
