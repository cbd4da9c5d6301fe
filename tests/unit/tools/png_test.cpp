#include "tools/png.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace fovea::tools {
namespace {

TEST(Png, HeaderHoldsTheSizeAndTheFileEnds) {
  // 3 x 2 pixels: width and height differ, so swapped ones show. tests/cli decodes a whole file.
  const std::vector<std::uint8_t> rgb(18, 7);
  const std::string png = encode_png(3, 2, rgb);
  EXPECT_EQ(png.substr(0, 8), "\x89PNG\r\n\x1a\n");
  EXPECT_EQ(png.substr(12, 4), "IHDR");
  EXPECT_EQ(png[19], 3);
  EXPECT_EQ(png[23], 2);
  EXPECT_EQ(png.substr(png.size() - 8, 4), "IEND");
}

}  // namespace
}  // namespace fovea::tools
