// What a warp has in flight of wgmma. Warps of a warpgroup advance alone: each computes its 16 rows, when the seed
// says.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "cuda/emulator/history.hpp"
#include "cuda/emulator/site.hpp"

namespace fovea::cuda::emulator {

struct WgmmaProduct;

/// The accumulator registers of a warp, from the first product into them until all products are waited for. Meanwhile
/// the registers themselves hold NaNs, and the sums are here.
struct Accumulator {
  std::array<std::uint32_t*, 32> registers{};  // of each lane
  std::uint32_t columns = 0;
  bool is_integer = false;
  std::vector<double> sums;  // [16, columns]
  int products = 0;          // in flight
  Site site;
};

/// Registers that products use again and again: a wgmma.fence must stand between an access of their thread and the next
/// product.
struct WatchedRegisters {
  std::array<const std::uint32_t*, 32> registers{};  // of each lane
  std::uint32_t count = 0;                           // of one lane
  std::uint64_t digest = 0;                          // of what they held at the last fence
  bool was_waited_for = false;                       // since the last fence: the thread has them
  int idle_fences = 0;
};

struct WgmmaState {
  /// What each warp of a warpgroup must issue alike.
  struct Issued {
    Site site;
    std::uint64_t a = 0, b = 0;
    std::uint32_t columns = 0;
  };

  AgentId agent = 0;
  bool has_fenced = false;
  std::vector<WatchedRegisters> watched;
  std::vector<std::shared_ptr<WgmmaProduct>> open;
  std::deque<std::vector<std::shared_ptr<WgmmaProduct>>> committed;
  std::uint32_t first_time = 1;  // of committed.front()
  std::vector<std::shared_ptr<Accumulator>> accumulators;
  std::shared_ptr<WgmmaProduct> newest;
  std::size_t issued = 0;
};

}  // namespace fovea::cuda::emulator
