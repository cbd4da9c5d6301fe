#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <fstream>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "fovea/runtime.hpp"

#include "core/env.hpp"
#include "core/num_threads.hpp"

namespace fovea {
namespace {

/// CPU time that the cgroup grants, in whole processors (v2 "max 100000" or v1 quota files); 0: unlimited or unknown.
int cgroup_quota() {
  double quota = 0;
  double period = 0;
  std::string first;
  if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); v2 >> first >> period && first != "max") {
    quota = std::strtod(first.c_str(), nullptr);
  } else {
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> quota;
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? std::max(1, static_cast<int>(quota / period + 0.5)) : 0;
}

int affinity_count() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 0;
}

/// Set in a thread that is executing a task: a nested run must not wait for the pool that it occupies.
thread_local bool is_inside_task = false;

/// The threads of one process and what they share. Workers sleep between runs; a short spin first, because attention
/// calls come in rows. A run invites as many as it has use for and waits for those alone that came before its indices
/// ran out: a thread that is late, or that could not be started, is not missed.
class Team {
 public:
  explicit Team(int concurrency) : concurrency_(concurrency) {}

  bool is_of_this_process() const { return pid_ == getpid(); }

  /// False where another caller's run has the threads; nothing is done then.
  bool try_run(std::int64_t count, const Executor::Task& task) {
    const std::unique_lock one_run_at_a_time(run_mutex_, std::try_to_lock);
    if (!one_run_at_a_time) return false;
    const auto helpers = static_cast<std::size_t>(std::min<std::int64_t>(count, concurrency_) - 1);
    start_threads(helpers);
    invite(std::min(helpers, threads_.size()), count, task);
    work(0, count, task);
    std::unique_lock lock(mutex_);
    invitations_.store(0, std::memory_order_relaxed);
    done_.wait(lock, [this] { return num_busy_ == 0; });
    return true;
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      is_stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  /// Up to `wanted` threads, or as many as there are means for; the next run tries again.
  void start_threads(std::size_t wanted) {
    try {
      threads_.reserve(wanted);
      while (threads_.size() < wanted) {
        const int worker = static_cast<int>(threads_.size()) + 1;
        threads_.emplace_back([this, worker] { serve(worker); });
      }
    } catch (const std::system_error&) {  // no thread
    } catch (const std::bad_alloc&) {     // no memory for one
    }
  }

  void invite(std::size_t helpers, std::int64_t count, const Executor::Task& task) {
    std::size_t num_asleep = 0;
    {
      const std::lock_guard lock(mutex_);
      task_ = task;
      count_ = count;
      next_.store(0, std::memory_order_relaxed);
      invitations_.store(helpers, std::memory_order_relaxed);
      num_asleep = num_asleep_;
    }
    // Threads that are awake look for invitations before they sleep.
    const std::size_t num_awake = threads_.size() - num_asleep;
    if (helpers == threads_.size()) {
      wake_.notify_all();
    } else {
      for (std::size_t i = num_awake; i < helpers; ++i) wake_.notify_one();
    }
  }

  void serve(int worker) {
    for (;;) {
      for (int spin = 0; spin < kSpins && invitations_.load(std::memory_order_relaxed) == 0; ++spin)
        std::this_thread::yield();
      std::unique_lock lock(mutex_);
      ++num_asleep_;
      wake_.wait(lock, [this] { return invitations_ > 0 || is_stopping_; });
      --num_asleep_;
      if (is_stopping_) return;
      --invitations_;
      ++num_busy_;
      const std::int64_t count = count_;
      const Executor::Task task = task_;
      lock.unlock();
      work(worker, count, task);
      lock.lock();
      if (--num_busy_ == 0) done_.notify_one();
    }
  }

  void work(int worker, std::int64_t count, const Executor::Task& task) {
    is_inside_task = true;
    for (;;) {
      const std::int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
      if (index >= count) break;
      task.body(task.context, worker, index);
    }
    is_inside_task = false;
  }

  static constexpr int kSpins =
      200;  // about 50 us of yields: the gap between two layers of a model

  const int concurrency_;
  const pid_t pid_ = getpid();
  std::mutex run_mutex_;
  std::vector<std::thread> threads_;  // of workers 1, 2, ...
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Executor::Task task_{};
  std::int64_t count_ = 0;
  std::atomic<std::int64_t> next_{0};
  std::atomic<std::size_t> invitations_{0};  // changes under mutex_
  std::size_t num_asleep_ = 0;
  int num_busy_ = 0;
  bool is_stopping_ = false;
};

/// A fork copies locks in whatever state they are, and sleepers that will never wake: the child leaves its copy of the
/// team where it lies and makes a new one.
class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(int num_threads) : concurrency_(std::max(1, num_threads)) {}

  ~ThreadPool() override {
    Team* team = team_.load();
    if (team == nullptr || !team->is_of_this_process()) return;
    team->stop();
    delete team;
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int concurrency() const override { return concurrency_; }

  void run(std::int64_t count, const Task& task) override {
    if (count <= 0) return;
    const bool is_alone = is_inside_task || concurrency_ == 1 || count == 1;
    if (is_alone || !team().try_run(count, task)) run_inline(count, task);
  }

 private:
  static void run_inline(std::int64_t count, const Task& task) {
    const bool was_inside = is_inside_task;
    is_inside_task = true;
    for (std::int64_t i = 0; i < count; ++i) task.body(task.context, 0, i);
    is_inside_task = was_inside;
  }

  /// Without a lock, which a fork could copy while it is held.
  Team& team() {
    Team* current = team_.load(std::memory_order_acquire);
    if (current != nullptr && current->is_of_this_process()) return *current;
    auto fresh = std::make_unique<Team>(concurrency_);
    if (team_.compare_exchange_strong(current, fresh.get(), std::memory_order_acq_rel))
      return *fresh.release();
    return *current;  // another thread was first
  }

  const int concurrency_;
  std::atomic<Team*> team_{nullptr};
};

}  // namespace

Executor::~Executor() = default;

int default_num_threads() {
  const Environment env = read_environment();
  int count = affinity_count();
  if (count == 0) count = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  if (const int quota = cgroup_quota(); quota > 0) count = std::min(count, quota);
  if (env.omp_num_threads) count = std::min(count, *env.omp_num_threads);
  return env.num_threads.value_or(count);
}

std::unique_ptr<Executor> make_thread_pool(int num_threads) {
  return std::make_unique<ThreadPool>(num_threads > 0 ? num_threads : default_num_threads());
}

}  // namespace fovea
