#include "cuda/emulator/tma.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "cuda/emulator/copy_groups.hpp"
#include "cuda/emulator/formats.hpp"
#include "cuda/emulator/instructions.hpp"
#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {
namespace {

constexpr std::uint32_t kChunkBytes = 16, kSharedAlignment = 128;

/// Issued by one thread, which the copy outlives.
struct Issuer {
  Actor actor;
  std::shared_ptr<const VectorClock> seen;
};

Issuer issuer(Instruction what) {
  Actor actor = machine().actor(what.name, what.site);
  std::shared_ptr<const VectorClock> seen = machine().snapshot(machine().thread());
  actor.seen = seen.get();
  actor.is_async = true;
  return {actor, std::move(seen)};
}

/// False, and reported, where the 128 bytes are no tensor map of this rank.
bool decode(const void* map, std::span<const std::int32_t> coordinates, const Actor& actor,
            Box& box) {
  std::memcpy(&box.map, map, sizeof box.map);
  std::copy(coordinates.begin(), coordinates.end(), box.origin.begin());
  const bool is_right = box.map.mark == kTensorMapMark && box.map.rank == coordinates.size();
  if (!is_right) {
    machine().report(Fault::tensor_map, actor.thread,
                     fmt::format("gives {} something that is no tensor map of {} dimensions",
                                 actor.what, coordinates.size()),
                     machine().site(actor.site));
    return false;
  }
  // Hardware takes these for illegal instructions (H200).
  const std::int64_t first_byte = std::int64_t{box.origin[0]} * box.element_bytes();
  if (first_byte % kChunkBytes != 0 || (box.is_store && first_byte < 0)) {
    machine().report(
        Fault::misaligned, actor.thread,
        fmt::format("gives {} {} as first coordinate, byte {}: it needs a multiple of 16 bytes{}",
                    actor.what, box.origin[0], first_byte, box.is_store ? ", not negative" : ""),
        machine().site(actor.site));
    return false;
  }
  return true;
}

/// One box, or a run of bytes without a map.
struct BulkCopy : Operation {
  Issuer by;
  bool is_tensor = false;
  Box box;                    // is_tensor
  std::uint64_t address = 0;  // else
  std::uint32_t run_bytes = 0;
  std::uint32_t shared = 0;

  std::uint32_t bytes() const { return is_tensor ? box.bytes() : run_bytes; }

  void for_chunks(FunctionRef<void(const Box::Chunk&)> visit) const {
    if (is_tensor) return box.for_chunks(visit);
    for (std::uint32_t offset = 0; offset < run_bytes; offset += kChunkBytes) {
      visit({offset, address + offset, 0, kChunkBytes});
    }
  }
  std::uint32_t element_bytes() const { return is_tensor ? box.element_bytes() : 1; }
  std::uint32_t shared_at(std::uint32_t offset) const {
    return is_tensor ? swizzled(shared + offset, box.map.swizzle) : shared + offset;
  }
};

// ---- global to shared ----

struct Load final : BulkCopy {
  std::vector<std::uint32_t> to;        // of each CTA that gets the bytes
  std::vector<std::uint32_t> barriers;  // one for each

  void land(Machine& machine) override {
    for (std::size_t i = 0; i < to.size(); ++i) {
      Mbarrier* barrier = find_mbarrier(machine, barriers[i], by.actor, true);
      if (barrier == nullptr) continue;
      const Actor actor = landing_actor(machine, *barrier, by.actor);
      shared = to[i];
      for_chunks([&](const Box::Chunk& chunk) { land_chunk(machine, actor, chunk); });
      arrive(machine, *barrier, actor, {.landed_bytes = bytes()});
    }
  }

  void land_chunk(Machine& machine, const Actor& actor, const Box::Chunk& chunk) const {
    std::byte data[kChunkBytes] = {};
    const std::uint32_t size = chunk.inside * element_bytes();
    if (size != 0) {
      const Machine::Place from =
          machine.global_place(chunk.address, size, element_bytes(), actor.what, actor);
      std::byte* start = data + chunk.first_inside * element_bytes();
      if (from.block == nullptr) {
        std::memset(start, 0xff, size);
      } else {
        from.block->read_async(machine, actor, from.range, start);
      }
    }
    const Machine::Place at =
        machine.shared_place(shared_at(chunk.offset), kChunkBytes, kChunkBytes, actor.what, actor);
    if (at.block != nullptr) at.block->write_async(machine, actor, at.range, data);
  }
};

void issue_load(const std::shared_ptr<Load>& load, std::uint32_t to, std::uint32_t barrier,
                std::uint32_t cta_mask) {
  const Thread& self = machine().thread();
  if (to % (load->is_tensor ? kSharedAlignment : kChunkBytes) != 0) {
    machine().report(
        Fault::misaligned, &self,
        fmt::format("{} to shared address {:#x} needs a multiple of {}", load->by.actor.what, to,
                    load->is_tensor ? kSharedAlignment : kChunkBytes),
        machine().site(load->by.actor.site));
  }
  if (cta_mask == 0) {
    load->to = {to};
    load->barriers = {barrier};
  }
  const std::uint32_t local = (1U << kRankShift) - 1;
  for (std::uint32_t rank = 0; rank < 16; ++rank) {
    if ((cta_mask >> rank & 1U) == 0) continue;
    load->to.push_back(rank << kRankShift | (to & local));
    load->barriers.push_back(rank << kRankShift | (barrier & local));
  }
  machine().issue(load);
}

// ---- shared to global ----

enum class Sum : std::uint8_t { none, f32, f16, bf16 };

struct Store final : BulkCopy {
  Actor writer;
  Sum sum = Sum::none;

  void land(Machine& machine) override {
    for_chunks([&](const Box::Chunk& chunk) { land_chunk(machine, chunk); });
  }

  void land_chunk(Machine& machine, const Box::Chunk& chunk) const {
    std::byte data[kChunkBytes];
    const Machine::Place from = machine.shared_place(shared_at(chunk.offset), kChunkBytes,
                                                     kChunkBytes, by.actor.what, by.actor);
    if (from.block == nullptr) return;
    const std::uint32_t size = chunk.inside * element_bytes();
    if (size == 0) return;
    const ByteRange wanted{from.range.begin + chunk.first_inside * element_bytes(), size};
    from.block->read_async(machine, by.actor, wanted, data);
    const Machine::Place to =
        machine.global_place(chunk.address, size, element_bytes(), by.actor.what, writer);
    if (to.block == nullptr) return;
    if (sum == Sum::none) {
      to.block->write_async(machine, writer, to.range, data);
    } else {
      to.block->touch_atomically(machine, writer, to.range);
      add(to.block->data() + to.range.begin, data, size);
    }
  }

  void add(std::byte* to, const std::byte* values, std::uint32_t size) const {
    const std::uint32_t step = sum == Sum::f32 ? 4 : 2;
    for (std::uint32_t i = 0; i < size; i += step) {
      std::uint32_t a = 0, b = 0;
      std::memcpy(&a, to + i, step);
      std::memcpy(&b, values + i, step);
      std::uint32_t c = 0;
      if (sum == Sum::f32) {
        c = std::bit_cast<std::uint32_t>(std::bit_cast<float>(a) + std::bit_cast<float>(b));
      } else if (sum == Sum::f16) {
        c = encode_f16(decode_f16(a) + decode_f16(b));
      } else {
        c = encode_bf16(decode_bf16(a) + decode_bf16(b));
      }
      std::memcpy(to + i, &c, step);
    }
  }
};

void issue_store(const std::shared_ptr<Store>& store) {
  Thread& self = machine().thread();
  add_to_open_group(self.bulk_stores, self, store->by.actor);
  store->writer = writing_actor(self.bulk_stores, self, store->by.actor);
  self.bulk_stores.open.push_back(store);
  machine().issue(store);
}

Sum sum_of(const Box& box) {
  switch (static_cast<driver::TensorMapElement>(box.map.element)) {
    case driver::TensorMapElement::f16:
      return Sum::f16;
    case driver::TensorMapElement::bf16:
      return Sum::bf16;
    default:
      return Sum::f32;
  }
}

bool is_run(const Actor& actor, std::uint64_t address, std::uint32_t bytes) {
  if (address % kChunkBytes == 0 && bytes % kChunkBytes == 0) return true;
  machine().report(
      Fault::misaligned, actor.thread,
      fmt::format("{} of {} bytes at {:#x}: both need multiples of 16", actor.what, bytes, address),
      machine().site(actor.site));
  return false;
}

}  // namespace

std::uint32_t Box::bytes() const {
  std::uint32_t count = element_bytes();
  for (std::uint32_t d = 0; d < map.rank; ++d) count *= map.box[d];
  return count;
}

void Box::for_chunks(FunctionRef<void(const Chunk&)> visit) const {
  const std::uint32_t per_chunk = kChunkBytes / element_bytes();
  const std::uint32_t inner_chunks = map.box[0] / per_chunk;
  // Rows of a swizzled box begin a span apart, however narrow they are (H200).
  const std::uint32_t pitch_chunks = map.swizzle == 0 ? inner_chunks : 1U << map.swizzle;
  const std::int64_t end =
      is_store ? (static_cast<std::int64_t>(map.shape[0]) + per_chunk - 1) / per_chunk * per_chunk
               : static_cast<std::int64_t>(map.shape[0]);
  std::array<std::uint32_t, 5> idx{};
  const std::uint32_t rows = bytes() / (inner_chunks * kChunkBytes);
  for (std::uint32_t row = 0; row < rows; ++row) {
    bool is_inside = true;
    std::uint64_t address = map.address;
    for (std::uint32_t d = 1; d < map.rank; ++d) {
      const std::int64_t at = std::int64_t{origin[d]} + idx[d];
      is_inside &= at >= 0 && at < static_cast<std::int64_t>(map.shape[d]);
      address += static_cast<std::uint64_t>(at) * map.stride_bytes[d - 1];
    }
    for (std::uint32_t c = 0; c < inner_chunks; ++c) {
      const std::int64_t begin = std::int64_t{origin[0]} + c * per_chunk;
      const std::int64_t first = std::clamp<std::int64_t>(-begin, 0, per_chunk);
      const std::int64_t last = std::clamp<std::int64_t>(end - begin, first, per_chunk);
      const auto inside = static_cast<std::uint32_t>(is_inside ? last - first : 0);
      visit({(row * pitch_chunks + c) * kChunkBytes,
             address + static_cast<std::uint64_t>(begin + first) * element_bytes(),
             static_cast<std::uint32_t>(first), inside});
    }
    for (std::uint32_t d = 1; d < map.rank; ++d) {
      if (++idx[d] < map.box[d]) break;
      idx[d] = 0;
    }
  }
}

// ---- instructions ----

void tma_load(std::uint32_t to, const void* map, std::span<const std::int32_t> coordinates,
              std::uint32_t barrier, std::uint32_t cta_mask, Instruction what) {
  require(90, what);
  machine().maybe_yield();
  auto load = std::make_shared<Load>();
  load->by = issuer(what);
  load->is_tensor = true;
  if (!decode(map, coordinates, load->by.actor, load->box)) return;
  issue_load(load, to, barrier, cta_mask);
}

void tma_store(const void* map, std::span<const std::int32_t> coordinates, std::uint32_t from,
               bool is_sum, Instruction what) {
  require(90, what);
  auto store = std::make_shared<Store>();
  store->by = issuer(what);
  store->is_tensor = true;
  store->box.is_store = true;
  store->shared = from;
  if (!decode(map, coordinates, store->by.actor, store->box)) return;
  if (from % kSharedAlignment != 0) {
    machine().report(Fault::misaligned, store->by.actor.thread,
                     fmt::format("{} from shared address {:#x} needs a multiple of {}", what.name,
                                 from, kSharedAlignment),
                     what.site);
  }
  if (is_sum) store->sum = sum_of(store->box);
  issue_store(store);
}

void check_tensor_map(const void* map, Instruction what) {
  const Actor actor = machine().actor(what.name, what.site);
  TensorMapFields fields;
  std::memcpy(&fields, map, sizeof fields);
  if (fields.mark == kTensorMapMark) return;
  machine().report(Fault::tensor_map, actor.thread,
                   fmt::format("gives {} something that is no tensor map", what.name), what.site);
}

void bulk_load(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t barrier,
               Instruction what) {
  require(90, what);
  auto load = std::make_shared<Load>();
  load->by = issuer(what);
  load->address = reinterpret_cast<std::uintptr_t>(from);
  load->run_bytes = bytes;
  if (is_run(load->by.actor, load->address, bytes)) issue_load(load, to, barrier, 0);
}

void bulk_store(void* to, std::uint32_t from, std::uint32_t bytes, bool is_sum, Instruction what) {
  require(90, what);
  auto store = std::make_shared<Store>();
  store->by = issuer(what);
  store->address = reinterpret_cast<std::uintptr_t>(to);
  store->run_bytes = bytes;
  store->shared = from;
  if (is_sum) store->sum = Sum::f32;
  if (is_run(store->by.actor, store->address, bytes)) issue_store(store);
}

void bulk_commit(Instruction) { commit_group(machine().thread().bulk_stores); }

void bulk_wait(std::uint32_t pending, bool reads_only, Instruction) {
  Thread& self = machine().thread();
  if (reads_only) {
    wait_for_reads(self.bulk_stores, self, pending);
  } else {
    wait_for_groups(self.bulk_stores, self, pending);
  }
}

}  // namespace fovea::cuda::emulator
