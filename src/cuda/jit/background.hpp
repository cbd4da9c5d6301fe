// Work beside the calls of a process: kernels that are compiled while other kernels run what asked for them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace fovea::cuda::jit {

/// Jobs in the order in which they were started, a few at once, by threads that end when there is nothing to do.
class Background {
 public:
  using Job = std::function<void()>;  // throws nothing

  explicit Background(unsigned most_threads) : most_threads_(most_threads) {}
  ~Background() { stop(); }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  /// Where no thread can be had, the job has run when this returns.
  void start(Job job);

  /// Destroys jobs that have not begun, waits for those that have, and begins none any more. In a child of the process
  /// that started them, which has none of its threads, does nothing.
  void stop();

 private:
  void work();
  bool is_forked() const;

  const unsigned most_threads_;
  std::mutex mutex_;  // of what follows
  std::condition_variable is_idle_;
  std::deque<Job> waiting_;
  unsigned num_threads_ = 0;
  bool is_stopping_ = false;
  std::atomic<pid_t> process_ = 0;  // that has the threads; 0: nothing was started yet
};

}  // namespace fovea::cuda::jit
