#include "progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <thread>

namespace fovea::tools {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSilence = std::chrono::seconds(2);
constexpr auto kPeriod = std::chrono::milliseconds(500);

}  // namespace

struct Progress::Impl {
  explicit Impl(std::string text) : what(std::move(text)), thread([this] { watch(); }) {}

  ~Impl() {
    {
      const std::scoped_lock lock(mutex);
      is_done = true;
    }
    wake.notify_one();
    thread.join();
  }

  void watch() {
    const Clock::time_point begin = Clock::now();
    std::unique_lock lock(mutex);
    if (wake.wait_for(lock, kSilence, [this] { return is_done; })) return;
    do {
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - begin);
      fmt::print(stderr, "\r\x1b[K{} ({} s)", what, seconds.count());
      std::fflush(stderr);
    } while (!wake.wait_for(lock, kPeriod, [this] { return is_done; }));
    fmt::print(stderr, "\r\x1b[K");
    std::fflush(stderr);
  }

  std::mutex mutex;
  std::condition_variable wake;
  bool is_done = false;
  std::string what;
  std::thread thread;  // last: it reads all of the above
};

Progress::Progress(std::string what) {
  if (::isatty(STDERR_FILENO) != 0) impl_ = std::make_unique<Impl>(std::move(what));
}

Progress::~Progress() = default;

void Progress::set(std::string what) {
  if (impl_ == nullptr) return;
  const std::scoped_lock lock(impl_->mutex);
  impl_->what = std::move(what);
}

std::string bar(std::size_t done, std::size_t total) {
  constexpr std::size_t kWidth = 20;
  const std::size_t filled = total == 0 ? kWidth : kWidth * std::min(done, total) / total;
  return fmt::format("[{}{}] {}/{}", std::string(filled, '#'), std::string(kWidth - filled, '-'),
                     done, total);
}

}  // namespace fovea::tools
