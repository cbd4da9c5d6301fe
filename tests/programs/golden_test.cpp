// The text of the library's words, read and found good by people; see golden/. After a change of the printer,
// `print_programs golden
// tests/programs/golden` writes them anew, to be read again.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "expr/print_cuda.hpp"
#include "programs/library_words.hpp"

namespace fovea::testing {
namespace {

std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(PrintedText, OfLibraryWordsIsAsReviewed) {
  for (const LibraryWord& word : library_words()) {
    const std::string path = std::string(FOVEA_GOLDEN_FOLDER) + "/" + word.name + ".txt";
    EXPECT_EQ(golden_text(word), contents_of(path)) << path;
  }
}

TEST(PrintedText, IsTheSameForOtherNames) {
  const auto text = [](const char* name) {
    const auto slope = CapturedScalar::of(name, 0.5);
    return expr::print_cuda(score_mod([&](auto x) { return x.score * scalar(slope); }), {}).mods;
  };
  EXPECT_EQ(text("slope"), text("steepness"));
}

TEST(PrintedText, OfOneNameInBothProgramsHasTwoSlots) {
  const auto limit = [](auto value) { return CapturedScalar::of("limit", value); };
  const auto program =
      expr::print_cuda(score_mod([&](auto x) { return min(x.score, scalar(limit(2.5))); }),
                       mask_mod([&](auto x) { return x.kv_idx < scalar(limit(7)); }));
  ASSERT_EQ(program.scalars.size(), 2U);
  EXPECT_EQ(program.scalars[0].role, expr::ProgramRole::score);
  EXPECT_EQ(program.scalars[1].type, ExprType::integer);
}

TEST(PrintedText, OfADeepFormulaGrowsWithItsNodes) {
  // Each step uses the last one twice: written out, the formula would have 2^400 parts.
  Expr sum = arguments().score;
  for (int i = 0; i < 400; ++i) sum = sum + sum;
  EXPECT_LT(expr::print_cuda(ScoreMod(sum), {}).mods.size(), 400U * 60U);
}

}  // namespace
}  // namespace fovea::testing
