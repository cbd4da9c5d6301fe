#include "cuda/jit/architecture.hpp"

#include <gtest/gtest.h>

#include "fovea/error.hpp"

namespace fovea::cuda::jit {
namespace {

TEST(Architecture, NamesTheDevicesOwnFeaturesFromHopperOn) {
  EXPECT_EQ((Architecture{7, 5}.name()), "sm_75");
  EXPECT_EQ((Architecture{8, 0}.name()), "sm_80");
  EXPECT_EQ((Architecture{8, 9}.name()), "sm_89");
  EXPECT_EQ((Architecture{9, 0}.name()), "sm_90a");
  EXPECT_EQ((Architecture{10, 3}.name()), "sm_103a");
  EXPECT_EQ((Architecture{12, 0}.name()), "sm_120a");
}

TEST(Architecture, EverySpellingIsRead) {
  for (const char* text : {"sm_90a", "sm_90", "90a", "90"})
    EXPECT_EQ(parse_architecture(text, "test"), (Architecture{9, 0})) << text;
  EXPECT_EQ(parse_architecture("sm_103a", "test"), (Architecture{10, 3}));
  EXPECT_EQ(parse_architecture("sm_75", "test"), (Architecture{7, 5}));
}

TEST(Architecture, AmdsAreNamedAsTheirInstructionSets) {
  for (const AmdTarget& target : amd_targets()) {
    const Architecture architecture{.major = 0, .minor = 0, .gfx = target.gfx};
    EXPECT_TRUE(architecture.is_amd());
    EXPECT_EQ(parse_architecture(architecture.name(), "test"), architecture);
  }
  EXPECT_EQ(parse_architecture("gfx942", "test").gfx, 0x942);
  EXPECT_EQ(amd_target_names(), "gfx90a, gfx942, gfx950, gfx1100 or gfx1201");
  for (const char* text : {"gfx", "gfx900", "gfx94", "gfx9420", "gfx942a", "gfxen"})
    EXPECT_THROW(parse_architecture(text, "test"), InvalidArgument) << text;
}

// A word, nothing, one below the oldest, a device's marketing name, and a number beyond any.
TEST(Architecture, OthersAreRefused) {
  for (const char* text : {"hopper", "", "sm_72", "sm_", "h100", "sm_90ab", "123456"})
    EXPECT_THROW(parse_architecture(text, "test"), InvalidArgument) << text;
}

}  // namespace
}  // namespace fovea::cuda::jit
