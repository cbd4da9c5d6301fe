// Threads and plans: what lives longer than a call. Most programs never name it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "fovea/export.hpp"
#include "fovea/tensor.hpp"
#include "fovea/version.h"

namespace fovea {

/// Runs indexed tasks. Give Fovea your own to run on a host's thread pool; results never depend on it.
class FOVEA_EXPORT Executor {
 public:
  /// body(context, worker, index); worker is unique among concurrent calls and below concurrency().
  struct Task {
    void (*body)(void* context, int worker, std::int64_t index);
    void* context;
  };

  virtual ~Executor();
  virtual int concurrency() const = 0;
  /// Calls the task once for every index in [0, count), any order, any thread; returns when all are done.
  /// The task does not throw.
  virtual void run(std::int64_t count, const Task& task) = 0;
};

/// A persistent pool of num_threads - 1 threads beside the caller. 0: as many as the affinity mask, the cgroup quota
/// and FOVEA_NUM_THREADS allow. Threads start as runs have use for them, not here, and a run makes do with those that
/// could be started. Nested runs, and runs while another caller has the threads, execute in the caller's thread; safe
/// after fork.
[[nodiscard]] FOVEA_EXPORT std::unique_ptr<Executor> make_thread_pool(int num_threads = 0);

/// Where attention_forward, attention_backward, attention_jvp and attention_decode take the workspace that they were
/// not given, if not from the heap and, on cuda, from the driver's pool.
/// Called from any thread, once for a call, and once to give it back when the call returns: on cuda the work is then
/// enqueued on `stream` and not done, so memory may only be reused in the order of that stream.
struct Allocator {
  void* context = nullptr;
  /// bytes > 0, alignment a power of two. Null, or an exception: there is no memory, and the call is refused.
  void* (*allocate)(void* context, std::size_t bytes, std::size_t alignment, Device device,
                    void* stream) = nullptr;
  /// What allocate returned, with the same bytes, device and stream. Does not throw.
  void (*deallocate)(void* context, void* data, std::size_t bytes, Device device,
                     void* stream) = nullptr;
};

/// Owns the default executor, the allocator and the cache of plans. Thread safe.
class FOVEA_EXPORT Runtime {
 public:
  explicit Runtime(int num_threads = 0);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  Executor& executor();

  /// For calls that begin after it, on devices of one kind or of all; a default-constructed one restores the default.
  /// Throws InvalidArgument where one of its functions is missing.
  void set_allocator(Device::Kind kind, const Allocator& allocator);
  void set_allocator(const Allocator& allocator);

  struct Impl;
  Impl& impl() { return *impl_; }

  /// The one that calls without a runtime use; made at the first such call.
  static Runtime& process_default();

 private:
  std::unique_ptr<Impl> impl_;
};

/// Of the library that runs, "0.1.0"; FOVEA_VERSION is that of the headers.
[[nodiscard]] FOVEA_EXPORT std::string_view version();

}  // namespace fovea
