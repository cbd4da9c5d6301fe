// Tasks that may throw, and memory for a call that has no workspace of its caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>

#include "fovea/runtime.hpp"

#include "core/float_environment.hpp"

namespace fovea::cpu {

/// Calls f(worker, index) for every index in [0, count). An Executor's task must not throw: the first exception of f
/// (no memory for a small list) waits here for the caller. Whatever thread computes, it does so in one floating-point
/// environment.
template <typename F>
void run_tasks(Executor& executor, std::int64_t count, const F& f) {
  struct Context {
    const F& f;
    std::once_flag failed;
    std::exception_ptr failure;
  } context{f, {}, {}};
  const auto body = [](void* self, int worker, std::int64_t index) {
    auto& run = *static_cast<Context*>(self);
    const FloatEnvironment environment;
    try {
      run.f(worker, index);
    } catch (...) {
      std::call_once(run.failed, [&run] { run.failure = std::current_exception(); });
    }
  };
  executor.run(count, {body, &context});
  if (context.failure) std::rethrow_exception(context.failure);
}

/// Zeros on a boundary of 64 bytes.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  explicit AlignedBytes(std::size_t count)
      : bytes_(std::make_unique<std::byte[]>(count + kAlignment)), space_(count + kAlignment) {}

  std::byte* data() const {
    void* start = bytes_.get();
    std::size_t space = space_;
    return static_cast<std::byte*>(std::align(kAlignment, 1, start, space));
  }

 private:
  static constexpr std::size_t kAlignment = 64;
  std::unique_ptr<std::byte[]> bytes_;
  std::size_t space_ = 0;
};

}  // namespace fovea::cpu
