// Compares random problems with the oracle: random_problems [--count N] [--first NUMBER] [--seconds S]. A failure
// prints the number of its problem and how to repeat it. CTest runs a few hundred; the more, the better.
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

#include "random/random_problem.hpp"

namespace {

constexpr std::uint64_t kEnough = 20;  // failures

struct Options {
  std::uint64_t count = 300, first = 1, seconds = 0;
};

std::optional<Options> parse(int num_arguments, char** arguments) {
  Options options;
  for (int i = 1; i + 1 < num_arguments; i += 2) {
    const std::string_view name = arguments[i], value = arguments[i + 1];
    std::uint64_t* into = name == "--count"     ? &options.count
                          : name == "--first"   ? &options.first
                          : name == "--seconds" ? &options.seconds
                                                : nullptr;
    if (into == nullptr) return std::nullopt;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), *into);
    if (error != std::errc() || end != value.data() + value.size()) return std::nullopt;
  }
  return num_arguments % 2 == 1 ? std::optional(options) : std::nullopt;
}

void say(const std::string& text) {
  std::puts(text.c_str());
  std::fflush(stdout);
}

}  // namespace

int main(int num_arguments, char** arguments) {
  using Clock = std::chrono::steady_clock;
  const std::optional<Options> options = parse(num_arguments, arguments);
  if (!options) {
    std::fputs("usage: random_problems [--count N] [--first NUMBER] [--seconds S]\n", stderr);
    return 2;
  }
  const Clock::time_point start = Clock::now();
  std::uint64_t num_done = 0, num_wrong = 0;
  for (; num_done < options->count && num_wrong < kEnough; ++num_done) {
    const std::uint64_t number = options->first + num_done;
    if (options->seconds > 0 && Clock::now() - start > std::chrono::seconds(options->seconds))
      break;
    const std::string difference =
        fovea::testing::difference_from_oracle(fovea::testing::random_problem(number));
    if (!difference.empty()) {
      ++num_wrong;
      say(difference + "  repeat with random_problems --count 1 --first " + std::to_string(number));
    }
    if ((num_done + 1) % 1000 == 0)
      say(std::to_string(num_done + 1) + " problems, " + std::to_string(num_wrong) + " wrong");
  }
  say(std::to_string(num_done) + " problems from " + std::to_string(options->first) + " on, " +
      std::to_string(num_wrong) + " wrong");
  return num_wrong == 0 ? 0 : 1;
}
