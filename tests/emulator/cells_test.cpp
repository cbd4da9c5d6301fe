// Accesses to parts of 16 bytes, which have one history while all of them are touched at once.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>

#include "cuda/emulator/emulator.hpp"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"

namespace fovea::cuda::emulator {
namespace {

struct Part {
  std::uint32_t begin, bytes;

  bool touches(const Part& other) const {
    return begin < other.begin + other.bytes && other.begin < begin + bytes;
  }
};

constexpr std::array kParts{Part{0, 16}, Part{0, 4}, Part{4, 4}, Part{12, 4},
                            Part{0, 1},  Part{5, 1}, Part{6, 1}, Part{15, 1}};

void read(const Part& part) {
  const ptx::SharedAddress at = ptx::dynamic_shared() + part.begin;
  if (part.bytes == 16) ptx::ld_shared<ptx::U32x4>(at);
  if (part.bytes == 4) ptx::ld_shared<std::uint32_t>(at);
  if (part.bytes == 1) ptx::ld_shared<std::uint8_t>(at);
}

void write(const Part& part) {
  const ptx::SharedAddress at = ptx::dynamic_shared() + part.begin;
  if (part.bytes == 16) ptx::st_shared(at, ptx::U32x4{});
  if (part.bytes == 4) ptx::st_shared(at, std::uint32_t{});
  if (part.bytes == 1) ptx::st_shared(at, std::uint8_t{});
}

/// A thread of one warp writes the first part, one of another warp reads or writes the second, and nobody waits. Before
/// that all bytes were written, read by two threads, and waited for.
Report touch(const Part& first, const Part& second, bool second_writes) {
  Device device;
  const LaunchConfig config{.block = {64, 1, 1}, .shared_bytes = 128};
  return device.launch(config, {.landing = Landing::earliest}, [&] {
    const int thread = ptx::thread_idx().x;
    if (thread == 0) write({0, 16});
    ptx::sync_threads();
    if (thread % 32 == 1) read({0, 16});
    ptx::sync_threads();
    if (thread == 0) write(first);
    if (thread == 32) second_writes ? write(second) : read(second);
  });
}

TEST(Cells, RaceWhereBytesAreShared) {
  for (const Part& first : kParts) {
    for (const Part& second : kParts) {
      for (const bool second_writes : {false, true}) {
        const Report report = touch(first, second, second_writes);
        EXPECT_EQ(report.has(Fault::race), first.touches(second))
            << fmt::format("{}+{} and {}+{}\n", first.begin, first.bytes, second.begin,
                           second.bytes)
            << report.text();
      }
    }
  }
}

/// Two threads read all bytes, the late one behind its arrival; then some of them are written.
Report write_part(const Part& part, int late) {
  Device device;
  const LaunchConfig config{.block = {96, 1, 1}, .shared_bytes = 128};
  return device.launch(config, {.landing = Landing::earliest}, [&] {
    const int thread = ptx::thread_idx().x;
    if (thread == 0) write({0, 16});
    ptx::sync_threads();
    if (thread / 32 == late / 32) ptx::bar_arrive(1, 96);
    if (thread == 32 || thread == 64) read({0, 16});
    if (thread / 32 != late / 32 && thread >= 32) ptx::bar_arrive(1, 96);
    if (thread < 32) ptx::bar_sync(1, 96);
    if (thread == 0) write(part);
  });
}

TEST(Cells, PartsKeepTheReadersOfTheWhole) {
  for (const Part& part : kParts) {
    for (const int late : {32, 64}) {
      EXPECT_TRUE(write_part(part, late).has(Fault::race))
          << fmt::format("{}+{}, {}\n", part.begin, part.bytes, late);
    }
  }
}

}  // namespace
}  // namespace fovea::cuda::emulator
