#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "mask/block_map.hpp"

namespace fovea::mask {
namespace {

TEST(PrintBlockMap, ShowsOneCharacterPerTile) {
  EXPECT_EQ(print_block_map(build_block_map(causal(), 32, 32, 8, 8)),
            "┌────┐\n"
            "│░   │\n"
            "│█░  │\n"
            "│██░ │\n"
            "│███░│\n"
            "└────┘\n"
            "█ full 37.5 %   ░ partial 25.0 %   blank: empty 37.5 %\n"
            "4 x 4 tiles of 8 queries (down) x 8 keys (across)\n");
}

TEST(PrintBlockMap, GathersTilesToFit) {
  const std::string text = print_block_map(build_block_map(causal(), 1024, 1024, 8, 8), 4, 4);
  EXPECT_NE(text.find("│██░ │\n"), std::string::npos) << text;
  EXPECT_NE(text.find("a character is 32 x 32 tiles"), std::string::npos) << text;
}

TEST(PrintBlockMap, EmptyMapsArePrintable) {
  EXPECT_NE(print_block_map(build_block_map(causal(), 0, 0, 8, 8)).find("0 x 0 tiles"),
            std::string::npos);
}

std::vector<int> pixel(const MaskPicture& image, int x, int y) {
  const std::size_t at = 3 * (static_cast<std::size_t>(y) * static_cast<std::size_t>(image.width) +
                              static_cast<std::size_t>(x));
  return {image.rgb[at], image.rgb[at + 1], image.rgb[at + 2]};
}

TEST(DrawBlockMap, DrawsASquareOfPixelsPerTile) {
  const MaskPicture image = draw_block_map(build_block_map(causal(), 32, 40, 8, 8), 10);
  EXPECT_EQ(image.width, 10);
  EXPECT_EQ(image.height, 8);
  EXPECT_EQ(image.rgb.size(), 240U);
  EXPECT_EQ(pixel(image, 9, 0), (std::vector<int>{255, 255, 255}));
  EXPECT_EQ(pixel(image, 2, 0), pixel(image, 9, 7));  // both on the diagonal: partial
  EXPECT_EQ(pixel(image, 0, 0), pixel(image, 7, 7));  // both below it: full
  EXPECT_NE(pixel(image, 0, 0), pixel(image, 2, 0));
}

TEST(DrawBlockMap, BlendsTilesUnderOnePixel) {
  const MaskPicture image = draw_block_map(build_block_map(causal(), 1024, 1024, 8, 8), 2);
  EXPECT_EQ(image.width, 2);
  EXPECT_EQ(image.height, 2);
  EXPECT_EQ(pixel(image, 1, 0), (std::vector<int>{255, 255, 255}));
  const std::vector<int> full = pixel(image, 0, 1);
  const std::vector<int> blend = pixel(image, 0, 0);
  EXPECT_LT(full[0], blend[0]);
  EXPECT_LT(blend[0], 255);
}

TEST(DrawBlockMap, EmptyMapsHaveNoPixels) {
  EXPECT_TRUE(draw_block_map(build_block_map(causal(), 0, 0, 8, 8)).rgb.empty());
}

}  // namespace
}  // namespace fovea::mask
