// Readers of a word since its last write: all of them are kept, whoever comes in between.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <random>

#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/history.hpp"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"

namespace fovea::cuda::emulator {
namespace {

TEST(Readers, HoldTheLastAccessOfEach) {
  std::mt19937 random(1);
  for (int round = 0; round < 100; ++round) {
    Readers readers;
    std::map<AgentId, std::uint32_t> expected;
    AgentId agent = 0;
    for (std::uint32_t time = 1; time <= 200; ++time) {
      // Mostly the next lane, as in a warp.
      agent = static_cast<AgentId>((random() % 4 == 0 ? random() : agent + 1) % 64);
      readers.note({.time = time, .agent = agent});
      expected[agent] = time;
    }
    std::map<AgentId, std::uint32_t> held;
    for (const Stamp& each : readers.stamps()) held[each.agent] = each.time;
    EXPECT_EQ(held, expected);
    EXPECT_EQ(readers.stamps().size(), expected.size());
    readers.clear();
    EXPECT_TRUE(readers.is_empty());
  }
}

/// Two warps read a word and arrive, the first waits for them and writes. Thread `late` reads once more behind its
/// arrival, before the last warp arrives.
Report read_late(int late) {
  Device device;
  const LaunchConfig config{.block = {96, 1, 1}, .shared_bytes = 128};
  return device.launch(config, {.landing = Landing::earliest}, [&] {
    const int thread = ptx::thread_idx().x;
    const ptx::SharedAddress word = ptx::dynamic_shared();
    if (thread == 0) ptx::st_shared(word, 1);
    ptx::sync_threads();
    if (thread < 32) {
      ptx::bar_sync(1, 96);
      if (thread == 0) ptx::st_shared(word, 2);
      return;
    }
    for (int i = 0; i < 2; ++i) ptx::ld_shared<int>(word);
    ptx::bar_arrive(1, 96);
    if (thread == late) ptx::ld_shared<int>(word);
  });
}

TEST(Readers, EachMustBeWaitedFor) {
  EXPECT_EQ(read_late(-1).text(), "");
  for (const int late : {32, 33, 47, 63}) {
    const Report report = read_late(late);
    EXPECT_TRUE(report.has(Fault::race)) << late << report.text();
    EXPECT_NE(report.text().find("writes 4 bytes"), std::string::npos) << report.text();
  }
}

}  // namespace
}  // namespace fovea::cuda::emulator
