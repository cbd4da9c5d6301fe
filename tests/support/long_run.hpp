// How much chance a test takes: docs/design/emulator.md has the two variables.
#pragma once

#include <cstdint>

namespace fovea::testing {

/// FOVEA_TEST_SEED: what seeds of tests begin at; 0 where it is not set.
std::uint64_t first_seed();

/// FOVEA_TEST_LONG: how many times as many draws a test makes; 1 where it is not set.
int times_longer();

}  // namespace fovea::testing
