// One fiber runs one GPU thread at a time; fibers and their stacks are used again by later CTAs and launches.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace fovea::cuda::emulator {

class Fiber {
 public:
  explicit Fiber(std::size_t stack_bytes);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Gives the fiber its next body; the one before must have ended.
  void start(void (*body)(void*), void* argument);
  /// Runs the body until it suspends or ends. Called outside every fiber.
  void resume();
  /// Back to whoever resumed this fiber. Called on it.
  void suspend();
  bool is_idle() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

class FiberPool {
 public:
  explicit FiberPool(std::size_t stack_bytes) : stack_bytes_(stack_bytes) {}

  std::unique_ptr<Fiber> take();
  void give_back(std::unique_ptr<Fiber> fiber);

 private:
  std::size_t stack_bytes_;
  std::vector<std::unique_ptr<Fiber>> idle_;
};

}  // namespace fovea::cuda::emulator
