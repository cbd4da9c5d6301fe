#include <algorithm>
#include <cstring>

#include "cuda/emulator/formats.hpp"
#include "cuda/emulator/instructions.hpp"
#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {
namespace {

Machine::Place place_of(const void* address, std::uint32_t bytes, const Actor& actor) {
  return machine().global_place(reinterpret_cast<std::uintptr_t>(address), bytes, bytes, actor.what,
                                actor);
}

/// A thread that looks at one address again and again waits for somebody.
void note_poll(const void* address, const Instruction& what) {
  constexpr int kPolls = 16;
  Thread& self = machine().thread();
  self.polls = self.polled == address ? self.polls + 1 : 0;
  self.polled = address;
  if (self.polls >= kPolls) machine().spin(what.name, what.site);
}

/// What fails to be read is NaN in every type.
void poison(void* to, std::uint32_t bytes) { std::memset(to, 0xff, bytes); }

void release(Thread& self, AtomicSync& sync, const VectorClock& clock) {
  sync.clock.join(clock);
  sync.waves.insert(machine().wave());
  if (machine().has_acquired_any_wave()) {
    for (std::uint32_t wave = 1; wave < machine().wave(); ++wave) {
      if (machine().has_acquired_wave(wave)) sync.waves.insert(wave);
    }
  }
  machine().tick(self);
}

void acquire(Thread& self, const AtomicSync& sync) {
  machine().join(self, sync.clock);
  machine().acquire_waves(sync.waves);
}

/// One word, atomically.
template <typename Word, typename Reduce>
void reduce_word(Word* to, Instruction what, const Reduce& reduce) {
  machine().maybe_yield();
  const Actor actor = machine().actor(what.name, what.site);
  const Machine::Place place = place_of(to, sizeof *to, actor);
  if (place.block == nullptr) return;
  place.block->touch_atomically(machine(), actor, place.range);
  *to = reduce(*to);
}

}  // namespace

void load_global(const void* from, void* to, std::uint32_t bytes, Instruction what) {
  note_poll(from, what);
  const Actor actor = machine().actor(what.name, what.site);
  const Machine::Place place = place_of(from, bytes, actor);
  if (place.block == nullptr) return poison(to, bytes);
  place.block->read(machine(), actor, place.range, to);
}

void load_global_nc(const void* from, void* to, std::uint32_t bytes, Instruction what) {
  const Actor actor = machine().actor(what.name, what.site);
  const Machine::Place place = place_of(from, bytes, actor);
  if (place.block == nullptr) return poison(to, bytes);
  place.block->read_non_coherent(machine(), actor, place.range, to);
}

void store_global(void* to, const void* from, std::uint32_t bytes, Instruction what) {
  const Actor actor = machine().actor(what.name, what.site);
  const Machine::Place place = place_of(to, bytes, actor);
  if (place.block == nullptr) return;
  machine().thread().polled = nullptr;
  place.block->write(machine(), actor, place.range, from);
  machine().thread().unfenced.push_back(place.block, place.range);
}

void load_shared(std::uint32_t from, void* to, std::uint32_t bytes, Instruction what) {
  const Actor actor = machine().actor(what.name, what.site);
  const Machine::Place place = machine().shared_place(from, bytes, bytes, what.name, actor);
  if (place.block == nullptr) return poison(to, bytes);
  place.block->read(machine(), actor, place.range, to);
}

void store_shared(std::uint32_t to, const void* from, std::uint32_t bytes, Instruction what) {
  const Actor actor = machine().actor(what.name, what.site);
  const Machine::Place place = machine().shared_place(to, bytes, bytes, what.name, actor);
  if (place.block == nullptr) return;
  place.block->write(machine(), actor, place.range, from);
  machine().thread().unfenced.push_back(place.block, place.range);
}

void prefetch(const void* from, Instruction what) {
  const Actor actor = machine().actor(what.name, what.site);
  machine().global_place(reinterpret_cast<std::uintptr_t>(from), 1, 1, what.name, actor);
}

std::int32_t atomic_add(std::int32_t* to, std::int32_t value, Order order, Instruction what) {
  machine().maybe_yield();
  note_poll(to, what);
  Thread& self = machine().thread();
  const Actor actor = machine().actor(what.name, what.site);
  const Machine::Place place = place_of(to, sizeof *to, actor);
  if (place.block == nullptr) return -1;
  place.block->touch_atomically(machine(), actor, place.range);
  const std::int32_t old = *to;
  *to = static_cast<std::int32_t>(static_cast<std::uint32_t>(old) +
                                  static_cast<std::uint32_t>(value));
  AtomicSync& sync = machine().atomic_sync(reinterpret_cast<std::uintptr_t>(to));
  if (order == Order::acq_rel) {
    acquire(self, sync);
    release(self, sync, self.clock);
    return old;
  }
  self.to_acquire.join(sync.clock);
  self.waves_to_acquire.insert(sync.waves.begin(), sync.waves.end());
  if (self.has_fenced) release(self, sync, self.released);
  return old;
}

std::uint32_t exchange_shared(std::uint32_t to, std::uint32_t value, Instruction what) {
  machine().maybe_yield();
  const Actor actor = machine().actor(what.name, what.site);
  const Machine::Place place = machine().shared_place(to, 4, 4, what.name, actor);
  if (place.block == nullptr) return 0;
  place.block->touch_atomically(machine(), actor, place.range);
  std::uint32_t old = 0;
  std::memcpy(&old, place.block->data() + place.range.begin, sizeof old);
  std::memcpy(place.block->data() + place.range.begin, &value, sizeof value);
  machine().thread().unfenced.push_back(place.block, place.range);
  return old;
}

void reduce_add(float* to, const float* values, std::uint32_t count, Instruction what) {
  if (count > 1) require(90, what);
  const Actor actor = machine().actor(what.name, what.site);
  const Machine::Place place = place_of(to, count * sizeof(float), actor);
  if (place.block == nullptr) return;
  place.block->touch_atomically(machine(), actor, place.range);
  for (std::uint32_t i = 0; i < count; ++i) to[i] += values[i];
}

void reduce_add(std::uint64_t* to, std::uint64_t value, Instruction what) {
  reduce_word(to, what, [value](std::uint64_t old) { return old + value; });
}

void reduce_or(std::uint32_t* to, std::uint32_t bits, Instruction what) {
  reduce_word(to, what, [bits](std::uint32_t old) { return old | bits; });
}

void reduce_max(std::uint32_t* to, std::uint32_t value, Instruction what) {
  reduce_word(to, what, [value](std::uint32_t old) { return std::max(old, value); });
}

void reduce_add_shared(std::uint32_t to, std::uint32_t value, Instruction what) {
  const Actor actor = machine().actor(what.name, what.site);
  const Machine::Place place = machine().shared_place(to, 4, 4, what.name, actor);
  if (place.block == nullptr) return;
  place.block->touch_atomically(machine(), actor, place.range);
  std::uint32_t sum = 0;
  std::memcpy(&sum, place.block->data() + place.range.begin, sizeof sum);
  sum += value;
  std::memcpy(place.block->data() + place.range.begin, &sum, sizeof sum);
  machine().thread().unfenced.push_back(place.block, place.range);
}

void reduce_add_bf16(void* to, const std::uint32_t* pairs, std::uint32_t count, Instruction what) {
  require(90, what);
  const Actor actor = machine().actor(what.name, what.site);
  const Machine::Place place = place_of(to, count * sizeof(std::uint32_t), actor);
  if (place.block == nullptr) return;
  place.block->touch_atomically(machine(), actor, place.range);
  auto* sums = static_cast<std::uint32_t*>(to);
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto add = [&](std::uint32_t shift) {
      const float sum =
          decode_bf16(sums[i] >> shift & 0xffffU) + decode_bf16(pairs[i] >> shift & 0xffffU);
      return encode_bf16(sum) << shift;
    };
    sums[i] = add(0) | add(16);
  }
}

void fence_acq_rel(Instruction) {
  Thread& self = machine().thread();
  machine().join(self, self.to_acquire);
  machine().acquire_waves(self.waves_to_acquire);
  self.released = self.clock;
  self.has_fenced = true;
  machine().tick(self);
}

void wait_for_grid_before() { machine().join_grid_before(machine().thread()); }

}  // namespace fovea::cuda::emulator
