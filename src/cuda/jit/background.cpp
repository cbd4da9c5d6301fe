#include "cuda/jit/background.hpp"

#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <utility>

namespace fovea::cuda::jit {

void Background::start(Job job) {
  if (is_forked()) return;
  std::unique_lock lock(mutex_);
  if (is_stopping_) return;
  process_ = ::getpid();
  waiting_.push_back(std::move(job));
  if (num_threads_ >= std::max(1U, most_threads_)) return;
  ++num_threads_;
  try {
    // Nobody joins it: whoever stops waits until it has let go of this object.
    std::thread([this] { work(); }).detach();
  } catch (const std::system_error&) {
    lock.unlock();
    work();
  }
}

void Background::work() {
  std::unique_lock lock(mutex_);
  while (!waiting_.empty()) {
    Job job = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    job();
    job = nullptr;  // what it holds may end here, too
    lock.lock();
  }
  --num_threads_;
  is_idle_.notify_all();  // under the lock: after it, this object may be gone
}

void Background::stop() {
  if (is_forked()) return;  // the lock may be held by a thread that is not here
  std::unique_lock lock(mutex_);
  is_stopping_ = true;
  std::deque<Job> dropped = std::move(waiting_);
  waiting_.clear();
  lock.unlock();
  dropped.clear();  // now: others may wait for what they promise
  lock.lock();
  is_idle_.wait(lock, [this] { return num_threads_ == 0; });
}

bool Background::is_forked() const {
  const pid_t process = process_;
  return process != 0 && process != ::getpid();
}

}  // namespace fovea::cuda::jit
