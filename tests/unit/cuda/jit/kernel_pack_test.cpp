#include "cuda/jit/kernel_pack.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

#include "fovea/error.hpp"

#include "unit/cuda/jit/support.hpp"

namespace fovea::cuda::jit {
namespace {

using testing::HasSubstr;

class Pack : public testing::Test {
 protected:
  void write(std::uint64_t count) const {
    std::vector<PackItem> items;
    for (std::uint64_t i = 0; i < count; ++i)
      items.push_back({key_number(i), entry_number(i, 100 + i)});
    write_pack(path, items);
  }
  std::string refusal() const {
    try {
      const KernelPack pack(path);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "opened";
  }

  TemporaryFolder folder;
  std::string path = folder / "kernels.pack";
};

TEST_F(Pack, GivesBackEveryCubin) {
  write(5);
  const KernelPack pack(path);
  for (std::uint64_t i = 0; i < 5; ++i) {
    const auto entry = pack.find(key_number(i));
    ASSERT_TRUE(entry) << i;
    EXPECT_TRUE(is_number(*entry, i)) << i;
    EXPECT_EQ(entry->cubin.image.size(), 100 + i);
  }
  EXPECT_FALSE(pack.find(key_number(5)));
  EXPECT_EQ(pack.list().size(), 5U);
  EXPECT_EQ(pack.list()[2].label, "kernel 2");
}

TEST_F(Pack, MayBeEmpty) {
  write(0);
  EXPECT_TRUE(KernelPack(path).list().empty());
}

TEST_F(Pack, EqualItemsGiveEqualFiles) {
  write(3);
  const std::string first = read_text(path);
  write(3);
  EXPECT_EQ(read_text(path), first);
}

TEST_F(Pack, OneKeyTwiceIsRefused) {
  const std::vector<PackItem> twice(2, PackItem{key_number(1), entry_number(1)});
  EXPECT_THROW(write_pack(path, twice), InvalidArgument);
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(Pack, PlaceThatCannotBeWrittenIsRefused) {
  try {
    write_pack("/nowhere/kernels.pack", {});
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("/nowhere"));
  }
}

TEST_F(Pack, FileThatIsNoneIsRefusedWithItsName) {
  EXPECT_THAT(refusal(), HasSubstr("No such file"));
  write_text(path, "hello");
  EXPECT_THAT(refusal(), HasSubstr("kernels.pack: is no kernel pack"));
  write_text(path, "");
  EXPECT_THAT(refusal(), HasSubstr("is no kernel pack"));
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  EXPECT_THAT(refusal(), HasSubstr("is something else than a regular file"));
}

// Cut anywhere or flipped anywhere, a pack is refused, or the cubin that is hit is missed and the
// others are right: never a wrong one.
TEST_F(Pack, DamageNeverGivesAWrongCubin) {
  write(3);
  const std::string whole = read_text(path);
  const auto gives_only_right_ones = [&] {
    try {
      const KernelPack pack(path);
      for (std::uint64_t i = 0; i < 3; ++i) {
        const auto entry = pack.find(key_number(i));
        if (entry && !is_number(*entry, i)) return false;
      }
    } catch (const InvalidArgument&) {
      return true;
    }
    return true;
  };
  for (std::size_t i = 0; i < whole.size(); ++i) {
    std::string flipped = whole;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << (i % 8)));
    write_text(path, flipped);
    EXPECT_TRUE(gives_only_right_ones()) << "byte " << i << " flipped";
    write_text(path, whole.substr(0, i));
    EXPECT_TRUE(gives_only_right_ones()) << "cut at " << i;
  }
  std::string last_flipped = whole;
  last_flipped.back() = static_cast<char>(last_flipped.back() ^ 1);
  write_text(path, last_flipped);
  const KernelPack pack(path);
  EXPECT_FALSE(pack.find(key_number(2)));
  EXPECT_TRUE(pack.find(key_number(1)));
}

// Cubins run in the user's process.
TEST_F(Pack, FileOrFolderThatOthersMayWriteIsRefused) {
  write(1);
  ASSERT_EQ(::chmod(path.c_str(), 0646), 0);
  EXPECT_THAT(refusal(), HasSubstr("has mode 646; expected that nobody but its owner may write"));
  ASSERT_EQ(::chmod(path.c_str(), 0644), 0);
  EXPECT_EQ(refusal(), "opened");
  ASSERT_EQ(::chmod(folder.path().c_str(), 0770), 0);
  EXPECT_THAT(refusal(), HasSubstr("its folder has mode 770"));
}

TEST_F(Pack, LinkIsRefused) {
  write(1);
  std::filesystem::rename(path, folder / "elsewhere");
  std::filesystem::create_symlink(folder / "elsewhere", path);
  EXPECT_THAT(refusal(), HasSubstr("is a link; expected a regular file"));
}

TEST_F(Pack, FileOrFolderOfAnotherUserIsRefused) {
  constexpr uid_t kOther = 54321;
  write(1);
  if (::chown(path.c_str(), kOther, 0) != 0) GTEST_SKIP() << "needs root, to be two users";
  EXPECT_THAT(refusal(), HasSubstr("belongs to user 54321; expected user 0 or root"));
  ASSERT_EQ(::chown(path.c_str(), 0, 0), 0);
  ASSERT_EQ(::chown(folder.path().c_str(), kOther, 0), 0);
  EXPECT_THAT(refusal(), HasSubstr("its folder belongs to user 54321"));
  EXPECT_TRUE(holds_in_child([&] { return ::setuid(kOther) == 0 && refusal() == "opened"; }));
}

TEST_F(Pack, OtherFormatIsRefusedByNumber) {
  write(1);
  std::string text = read_text(path);
  text[8 + std::string_view("fovea kernel pack").size()] = 9;
  write_text(path, text);
  EXPECT_THAT(refusal(), HasSubstr("has format 9; expected 1"));
}

/// Sets a variable, and sets it back.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    ::setenv(name, value.c_str(), 1);
  }
  ~Variable() {
    if (old_)
      ::setenv(name_, old_->c_str(), 1);
    else
      ::unsetenv(name_);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> old_;
};

TEST_F(Pack, IsFoundInTheWheelOfAPythonEnvironment) {
  const std::filesystem::path wheel = folder.path() / "lib/python3.12/site-packages/fovea_kernels";
  const Variable environment("VIRTUAL_ENV", folder.path().string());
  EXPECT_NE(default_pack_path(), (wheel / "fovea.pack").string());
  std::filesystem::create_directories(wheel);
  std::filesystem::rename((write(2), path), wheel / "fovea.pack");
  EXPECT_EQ(default_pack_path(), (wheel / "fovea.pack").string());
  const Variable named("FOVEA_PACK", "another.pack");
  EXPECT_EQ(default_pack_path(), "another.pack");
}

}  // namespace
}  // namespace fovea::cuda::jit
