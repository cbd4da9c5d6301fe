// A kernel under the emulator, under each way in which copies and products may land.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>

#include "cuda/emulator/emulator.hpp"
#include "kernels/emulated_device.hpp"
#include "support/long_run.hpp"

namespace fovea::testing {

/// The emulator must find nothing.
inline void for_each_landing(const std::function<void(Emulation&)>& run) {
  using cuda::emulator::Landing;
  const auto land = [&](Landing landing, std::uint64_t seed) {
    Emulation emulation;
    emulation.options = {.seed = seed, .landing = landing};
    run(emulation);
    EXPECT_EQ(emulation.findings, "");
  };
  land(Landing::earliest, 1);
  land(Landing::latest, 1);
  for (int i = 0; i < times_longer(); ++i)
    land(Landing::seeded, first_seed() + 1 + static_cast<std::uint64_t>(i));
}

}  // namespace fovea::testing
