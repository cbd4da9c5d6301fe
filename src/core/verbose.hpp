// FOVEA_VERBOSE=1: a line on stderr for each call. Without it nothing is measured, formatted or printed.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

namespace fovea {

/// Read once, when the library is loaded: a call asks with one load and a branch that is never taken.
extern const bool kIsVerbose;

/// Made when a call begins.
class CallLog {
 public:
  explicit CallLog(std::string_view operation) : operation_(operation) {
    if (kIsVerbose) [[unlikely]]
      begin_ = Clock::now();
  }

  bool is_on() const { return kIsVerbose; }

  /// What `make` gives, and how long it took.
  template <typename Make>
  auto timed_plan(const Make& make) {
    if (!kIsVerbose) [[likely]]
      return make();
    const Clock::time_point begin = Clock::now();
    auto plan = make();
    planned_ = Clock::now() - begin;
    return plan;
  }

  /// One line, all at once. Only where is_on().
  void write(std::string_view problem, std::string_view kernel, std::string_view target) const;

 private:
  using Clock = std::chrono::steady_clock;

  std::string_view operation_;
  Clock::time_point begin_{};
  Clock::duration planned_{};  // 0: an earlier plan served
};

}  // namespace fovea
