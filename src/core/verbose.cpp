#include "core/verbose.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include "core/env.hpp"

namespace fovea {

const bool kIsVerbose = read_verbose();

namespace {

template <typename Duration>
double microseconds(const Duration& duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

}  // namespace

void CallLog::write(std::string_view problem, std::string_view kernel,
                    std::string_view target) const {
  const double total = microseconds(Clock::now() - begin_);
  std::string line = fmt::format("fovea: {}: {}; {} on {}", operation_, problem, kernel, target);
  if (planned_ > Clock::duration::zero())
    line += fmt::format("; planned in {:.1f} us", microseconds(planned_));
  line += fmt::format("; {:.1f} us on the host\n", total);
  // Unbuffered, so that lines of several threads do not mix. What cannot be written is lost.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace fovea
