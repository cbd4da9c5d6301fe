#include "tools/files.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "tools/failure.hpp"

namespace fovea::tools {
namespace {

class Files : public testing::Test {
 protected:
  Files() : folder_(std::filesystem::path(testing::TempDir()) / "fovea_files_XXXXXX") {
    std::string name = folder_.string();
    folder_ = mkdtemp(name.data());
  }
  ~Files() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string content(const std::string& name) const {
    std::stringstream text;
    text << std::ifstream(path(name)).rdbuf();
    return text.str();
  }

  std::filesystem::path folder_;
};

TEST_F(Files, HeaderAndPartsFollowEachOther) {
  OutputFiles::write(
      {{path("a"), "head ", {as_part("one "), as_part("two")}}, {path("b"), "b", {}}});
  EXPECT_EQ(content("a"), "head one two");
  EXPECT_EQ(content("b"), "b");
  EXPECT_EQ(read_file("--x", path("a"))->size(), 12U);
}

TEST_F(Files, NothingIsReplacedWhenOneOfSeveralCannotBeWritten) {
  OutputFiles::write({{path("a"), "old", {}}});
  EXPECT_THROW(OutputFiles::write({{path("a"), "new", {}}, {path("missing/b"), "new", {}}}),
               Failure);
  EXPECT_EQ(content("a"), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

TEST_F(Files, AskingWhetherAFileCanBeWrittenLeavesNoTrace) {
  OutputFiles files;
  files.add("--out", path("a"));
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(Files, ClashesAreFoundThroughLinksAndDots) {
  OutputFiles::write({{path("a"), "a", {}}});
  std::filesystem::create_symlink("a", path("link"));
  std::filesystem::create_hard_link(path("a"), path("hard"));
  for (const char* other : {"a", "link", "hard", "./a"}) {
    OutputFiles files;
    files.add_input("--q", path("a"));
    files.add("--out", path(other));
    EXPECT_THROW(files.refuse_clashes(), Failure) << other;
  }
  OutputFiles files;
  files.add("--out", path("new"));
  files.add("--lse", path("./new"));
  EXPECT_THROW(files.refuse_clashes(), Failure);
}

}  // namespace
}  // namespace fovea::tools
