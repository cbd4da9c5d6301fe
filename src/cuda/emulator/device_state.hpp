// What a Device owns. Read machine.hpp next.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "cuda/emulator/block.hpp"
#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/fiber.hpp"

namespace fovea::cuda::emulator {

struct Buffer {
  std::shared_ptr<void> memory;  // empty: the caller's
  std::unique_ptr<Block> block;
};

struct Device::State {
  explicit State(std::size_t stack_bytes) : fibers(stack_bytes) {}

  FiberPool fibers;
  std::map<std::uint64_t, Buffer> buffers;  // by address
};

}  // namespace fovea::cuda::emulator
