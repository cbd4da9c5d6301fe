// What threads, warps and CTAs have in tensor memory, and who knows of it. Read tensor_memory.cpp next, then
// tensor_product.cpp.
//
// An access to tensor memory comes after another one where a thread knows of it in `TensorThread::seen`, which is not
// the clock that barriers carry: fence::before_thread_sync puts what this thread did into its clock, and
// fence::after_thread_sync takes what the clock knows over into `seen`. Under TensorOrder::pipe fences say nothing new.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "cuda/emulator/block.hpp"
#include "cuda/emulator/history.hpp"
#include "cuda/emulator/site.hpp"
#include "cuda/emulator/vector_clock.hpp"

namespace fovea::cuda::emulator {

struct Cta;
struct Operation;
struct TensorLoad;
struct TensorStore;

inline constexpr std::uint32_t kTensorLanes = 128, kTensorColumns = 512, kTensorUnit = 32;

struct TensorPlace {
  std::uint32_t lane, column;
};

/// As an address of tensor memory says it.
inline TensorPlace tensor_place(std::uint32_t address) {
  return {address >> 16, address & 0xffffU};
}

/// The tensor memory of one SM, which CTAs that are there together share.
struct TensorMemory {
  struct Allocation {
    const Cta* cta;
    std::uint32_t column, columns;
    int cta_group;
    Site site;
  };

  TensorMemory();
  ByteRange range(TensorPlace place, std::uint32_t columns) const {
    return {(std::uint64_t{place.lane} * kTensorColumns + place.column) * 4, columns * 4ULL};
  }

  std::unique_ptr<std::byte[]> heap;
  Block cells;  // lane after lane
  std::vector<Allocation> allocations;
};

/// Products that go into one accumulator with one shape, or copies of a CTA: what the ISA keeps in order, or knows as
/// issued. `issued` is an agent of its own: whoever knows its time t comes behind operation t in the tensor core.
struct TensorStream {
  AgentId agent = 0, issued = 0;
  std::uint32_t time = 0;  // of the newest
  std::shared_ptr<Operation> newest;
  const struct Thread* issuer = nullptr;  // of the newest
  Site site;
};

struct TensorThread {
  VectorClock seen;  // whatever its next access to tensor memory comes after
  VectorClock done;  // of its own, what the next fence::before_thread_sync releases
  AgentId loads = 0, stores = 0;
  std::uint32_t load_time = 0, store_time = 0;  // of the newest
  std::uint32_t done_at = 0;                    // the thread's time when `done` last grew
  VectorClock issued;                           // its products and copies, by stream
  std::vector<std::shared_ptr<Operation>> in_flight;
  bool has_open = false;  // since its last commit
  Site last_site;
};

struct TensorWarp {
  std::vector<std::shared_ptr<TensorLoad>> loads;  // not waited for, or not named
  std::vector<std::shared_ptr<TensorStore>> stores;
  bool has_loaded = false;
};

/// A warp that asks for columns.
struct TensorRequest {
  std::uint32_t columns = 0;
  int cta_group = 1;
  bool is_granted = false;
  std::uint32_t column = 0;
  Site site;
};

struct TensorCta {
  std::shared_ptr<TensorMemory> memory;
  int cta_group = 0;  // of the first instruction; 0: none yet
  Site group_site;
  AgentId allocator = 0;
  std::uint32_t allocations_made = 0, smallest = kTensorColumns;
  bool has_relinquished = false;
  std::shared_ptr<TensorRequest> request;
  // by accumulator, shape and kind; of a pair in its even CTA
  std::map<std::tuple<std::uint32_t, std::uint32_t, int>, TensorStream> streams;
  std::shared_ptr<Operation> newest;
  std::vector<std::shared_ptr<Operation>> copies;  // that may be in flight
};

}  // namespace fovea::cuda::emulator
