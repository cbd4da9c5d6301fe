// What a Device owns. Read machine.hpp next.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "cuda/emulator/block.hpp"
#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/fiber.hpp"
#include "cuda/emulator/site.hpp"

namespace fovea::cuda::emulator {

struct Buffer {
  std::shared_ptr<void> memory;  // empty: the caller's
  std::unique_ptr<Block> block;
};

struct Device::State {
  explicit State(std::size_t stack_bytes) : fibers(stack_bytes) {}

  /// Of the grid that ran last, for one that depends on it.
  struct LastGrid {
    std::uint32_t last_wave = 0;
    std::vector<Site> sites{Site{}};
    std::unordered_map<std::uint64_t, SiteId> site_ids;
  };

  FiberPool fibers;
  LastGrid last_grid;
  std::map<std::uint64_t, Buffer> buffers;  // by address
};

}  // namespace fovea::cuda::emulator
