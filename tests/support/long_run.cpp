#include "support/long_run.hpp"

#include <algorithm>
#include <cstdlib>

namespace fovea::testing {
namespace {

std::uint64_t number_of(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr || *text == 0 ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace

std::uint64_t first_seed() { return number_of("FOVEA_TEST_SEED", 0); }

int times_longer() {
  return static_cast<int>(std::clamp<std::uint64_t>(number_of("FOVEA_TEST_LONG", 1), 1, 1'000'000));
}

}  // namespace fovea::testing
