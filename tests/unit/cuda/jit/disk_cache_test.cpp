#include "cuda/jit/disk_cache.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <array>
#include <chrono>
#include <ctime>
#include <random>

#include "cuda/jit/files.hpp"
#include "unit/cuda/jit/support.hpp"

namespace fovea::cuda::jit {
namespace {

using testing::HasSubstr;

class Disk : public testing::Test {
 protected:
  std::string file_of(std::uint64_t number) const {
    return folder / (to_hex(key_number(number)) + ".cubin");
  }
  int num_files() const {
    int count = 0;
    for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator(folder.path()))
      ++count;
    return count;
  }
  static void make_old(const std::string& path, std::time_t seconds) {
    const std::array<timespec, 2> times{
        timespec{.tv_sec = ::time(nullptr) - seconds, .tv_nsec = 0},
        timespec{.tv_sec = ::time(nullptr) - seconds, .tv_nsec = 0}};
    ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times.data(), 0), 0);
  }

  TemporaryFolder folder;
  DiskCache cache{{.folder = folder.path().string()}};
};

TEST_F(Disk, GivesBackWhatWasStored) {
  EXPECT_FALSE(cache.find(key_number(1)));
  ASSERT_TRUE(cache.store(key_number(1), entry_number(1)));
  const auto entry = cache.find(key_number(1));
  ASSERT_TRUE(entry);
  EXPECT_TRUE(is_number(*entry, 1));
  EXPECT_EQ(entry->cubin.report.spill_bytes, 4);
  EXPECT_EQ(entry->architecture, "sm_80");
  EXPECT_EQ(entry->compiler, "13.0.88");
  EXPECT_FALSE(cache.find(key_number(2)));
}

TEST_F(Disk, FolderIsMadeWhenItIsFirstNeededAndIsItsOwners) {
  DiskCache deep({.folder = folder / "a/b/c"});
  EXPECT_FALSE(deep.find(key_number(1)));
  EXPECT_FALSE(std::filesystem::exists(folder / "a"));
  ASSERT_TRUE(deep.store(key_number(1), entry_number(1)));
  struct stat status {};
  ASSERT_EQ(::stat((folder / "a/b/c").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0700U);
}

// Every byte of the file matters: none may be turned without notice.
TEST_F(Disk, FlippedByteIsAMissAndTheFileGoes) {
  cache.store(key_number(1), entry_number(1));
  const std::string whole = read_text(file_of(1));
  for (std::size_t i = 0; i < whole.size(); ++i) {
    std::string flipped = whole;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << (i % 8)));
    write_text(file_of(1), flipped);
    EXPECT_FALSE(cache.find(key_number(1))) << "byte " << i;
    EXPECT_FALSE(std::filesystem::exists(file_of(1))) << "byte " << i;
  }
  EXPECT_TRUE(cache.store(key_number(1), entry_number(1)));
  EXPECT_TRUE(cache.find(key_number(1)));
}

TEST_F(Disk, FileOfAnotherLengthIsAMiss) {
  cache.store(key_number(1), entry_number(1));
  const std::string whole = read_text(file_of(1));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    write_text(file_of(1), whole.substr(0, size));
    EXPECT_FALSE(cache.find(key_number(1))) << size << " bytes";
  }
  write_text(file_of(1), whole + "x");
  EXPECT_FALSE(cache.find(key_number(1)));
}

// What others may have put under an entry's name: another entry, a text, a folder, a pipe, a link to
// nowhere.
TEST_F(Disk, ForeignThingUnderAnEntrysNameIsAMiss) {
  cache.store(key_number(2), entry_number(2));
  std::filesystem::copy_file(file_of(2), file_of(1));
  EXPECT_FALSE(cache.find(key_number(1)));

  write_text(file_of(1), "hello");
  EXPECT_FALSE(cache.find(key_number(1)));

  std::filesystem::create_directory(file_of(1));
  EXPECT_FALSE(cache.find(key_number(1)));
  EXPECT_FALSE(cache.store(key_number(1), entry_number(1)));
  EXPECT_THAT(cache.why_not_kept(), HasSubstr(file_of(1)));
  std::filesystem::remove(file_of(1));

  ASSERT_EQ(::mkfifo(file_of(1).c_str(), 0600), 0);
  EXPECT_FALSE(cache.find(key_number(1)));
  EXPECT_TRUE(cache.store(key_number(1), entry_number(1)));
  EXPECT_TRUE(cache.find(key_number(1)));

  std::filesystem::remove(file_of(1));
  std::filesystem::create_symlink(folder / "nowhere", file_of(1));
  EXPECT_FALSE(cache.find(key_number(1)));
  EXPECT_TRUE(cache.store(key_number(1), entry_number(1)));
  EXPECT_TRUE(cache.find(key_number(1)));
  EXPECT_TRUE(cache.find(key_number(2)));
}

TEST_F(Disk, ClearTakesOursAndLeavesOthers) {
  cache.store(key_number(1), entry_number(1));
  cache.store_note(key_number(1), "a note");
  write_text(folder / "README", "of somebody else");
  write_text(folder / "short.cubin", "of somebody else");
  const DiskCache::Removed removed = cache.clear();
  EXPECT_EQ(removed.files, 2);
  EXPECT_GT(removed.bytes, 64);
  EXPECT_EQ(num_files(), 2);
}

TEST_F(Disk, ListTellsWhatIsThereAndWhatIsWrong) {
  cache.store(key_number(1), entry_number(1));
  cache.store(key_number(2), entry_number(2));
  make_old(file_of(1), 1000);
  write_text(file_of(3), "hello");
  make_old(file_of(3), 2000);
  const auto rows = cache.list();
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows[0].label, "kernel 2");
  EXPECT_EQ(rows[1].label, "kernel 1");
  EXPECT_EQ(rows[1].architecture, "sm_80");
  EXPECT_TRUE(rows[1].why_bad.empty());
  EXPECT_FALSE(rows[2].why_bad.empty());
  EXPECT_EQ(cache.remove_bad().files, 1);
  EXPECT_EQ(cache.list().size(), 2U);
}

// Room for five entries of the ten; number 0 is the oldest but for its last use.
TEST_F(Disk, TheLeastRecentlyUsedGoFirst) {
  const auto bytes = static_cast<std::int64_t>(entry_to_bytes({}, entry_number(0, 10000)).size());
  DiskCache small({.folder = folder.path().string(), .max_bytes = 5 * bytes + bytes / 2});
  for (std::uint64_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(small.store(key_number(i), entry_number(i, 10000)));
    make_old(file_of(i), static_cast<std::time_t>(1000 - i));
  }
  ASSERT_TRUE(small.find(key_number(0)));
  ASSERT_TRUE(small.store(key_number(5), entry_number(5, 10000)));
  EXPECT_TRUE(small.find(key_number(0)));
  EXPECT_FALSE(small.find(key_number(1)));
  EXPECT_TRUE(small.find(key_number(5)));
  for (std::uint64_t i = 6; i < 40; ++i) small.store(key_number(i), entry_number(i, 10000));
  EXPECT_TRUE(small.find(key_number(39)));
  std::int64_t total = 0;
  for (const auto& row : small.list()) total += row.bytes;
  EXPECT_LE(total, small.options().max_bytes);
}

TEST_F(Disk, EntryAboveTheFoldersSizeIsNotKept) {
  DiskCache tiny({.folder = folder.path().string(), .max_bytes = 100});
  EXPECT_FALSE(tiny.store(key_number(1), entry_number(1)));
  EXPECT_EQ(num_files(), 0);
  EXPECT_THAT(tiny.why_not_kept(), HasSubstr("100"));
}

TEST_F(Disk, SizeOfZeroOrNoFolderKeepsNothing) {
  DiskCache none({.folder = ""}), zero({.folder = folder.path().string(), .max_bytes = 0});
  for (DiskCache* off : {&none, &zero}) {
    EXPECT_FALSE(off->store(key_number(1), entry_number(1)));
    EXPECT_FALSE(off->find(key_number(1)));
    off->store_note(key_number(1), "a note");
    EXPECT_FALSE(off->find_note(key_number(1)));
    EXPECT_TRUE(off->list().empty());
    EXPECT_EQ(off->clear().files, 0);
  }
  EXPECT_EQ(num_files(), 0);
}

// A writer that was killed long ago left its file; one that writes right now has one too.
TEST_F(Disk, WhatAKilledWriterLeftGoesAfterAnHour) {
  write_text(folder / ".writing-0123456789abcdef", "half a ker");
  write_text(folder / ".writing-fedcba9876543210", "half a ker");
  make_old(folder / ".writing-0123456789abcdef", 4000);
  cache.store(key_number(1), entry_number(1));
  EXPECT_FALSE(std::filesystem::exists(folder / ".writing-0123456789abcdef"));
  EXPECT_TRUE(std::filesystem::exists(folder / ".writing-fedcba9876543210"));
}

TEST_F(Disk, NotesAreCheckedToo) {
  cache.store_note(key_number(1), "13.0.88");
  EXPECT_EQ(cache.find_note(key_number(1)), "13.0.88");
  const std::string path = folder / (to_hex(key_number(1)) + ".note");
  std::string text = read_text(path);
  text[3] = '9';
  write_text(path, text);
  EXPECT_FALSE(cache.find_note(key_number(1)));
  EXPECT_FALSE(cache.find_note(key_number(2)));
}

// As an ordinary user, since root may write everywhere.
TEST_F(Disk, FolderThatCannotBeWrittenStillServes) {
  cache.store(key_number(1), entry_number(1));
  cache.store(key_number(3), entry_number(3));
  write_text(file_of(3), "torn");
  ASSERT_EQ(::chmod(folder.path().c_str(), 0555), 0);
  const bool holds = holds_in_child([&] {
    if (::geteuid() == 0 && ::setuid(65534) != 0) return false;
    const bool finds = cache.find(key_number(1)).has_value();
    const bool keeps = cache.store(key_number(2), entry_number(2));
    const bool finds_torn = cache.find(key_number(3)).has_value();
    return finds && !keeps && !finds_torn && !cache.why_not_kept().empty();
  });
  ASSERT_EQ(::chmod(folder.path().c_str(), 0700), 0);
  EXPECT_TRUE(holds);
}

// Cubins run in the user's process: those that another user may have written are not read.
TEST_F(Disk, FolderThatOthersMayWriteIsNotUsed) {
  cache.store(key_number(1), entry_number(1));
  cache.store_note(key_number(1), "13.0.88");
  EXPECT_EQ(cache.why_unused(), "");
  for (const mode_t mode : {0770, 0707, 01777}) {
    ASSERT_EQ(::chmod(folder.path().c_str(), mode), 0);
    EXPECT_FALSE(cache.find(key_number(1))) << std::oct << mode;
    EXPECT_FALSE(cache.find_note(key_number(1))) << std::oct << mode;
    EXPECT_FALSE(cache.store(key_number(2), entry_number(2))) << std::oct << mode;
    EXPECT_TRUE(cache.list().empty()) << std::oct << mode;
    EXPECT_EQ(cache.clear().files, 0) << std::oct << mode;
    EXPECT_THAT(cache.why_unused(), HasSubstr("nobody but its owner may write"));
    EXPECT_EQ(cache.why_not_kept(), cache.why_unused());
  }
  ASSERT_EQ(::chmod(folder.path().c_str(), 0755), 0);
  EXPECT_TRUE(cache.find(key_number(1))) << "all may read";
}

TEST_F(Disk, FileThatOthersMayWriteIsNotUsedAndReplaced) {
  cache.store(key_number(1), entry_number(1));
  ASSERT_EQ(::chmod(file_of(1).c_str(), 0664), 0);
  EXPECT_FALSE(cache.find(key_number(1)));
  EXPECT_THAT(cache.list()[0].why_bad, HasSubstr("has mode 664"));
  EXPECT_TRUE(cache.store(key_number(1), entry_number(1)));
  EXPECT_TRUE(cache.find(key_number(1)));
}

TEST_F(Disk, LinkToARightEntryElsewhereIsNotFollowed) {
  cache.store(key_number(1), entry_number(1));
  const TemporaryFolder elsewhere;
  std::filesystem::rename(file_of(1), elsewhere / "right");
  std::filesystem::create_symlink(elsewhere / "right", file_of(1));
  EXPECT_FALSE(cache.find(key_number(1)));
  EXPECT_TRUE(cache.store(key_number(1), entry_number(1)));
  EXPECT_TRUE(std::filesystem::exists(elsewhere / "right"));
  EXPECT_FALSE(std::filesystem::is_symlink(file_of(1)));
}

// Another user made the folder, or put a file into it before its mode was right.
TEST_F(Disk, FolderOrFileOfAnotherUserIsNotUsed) {
  constexpr uid_t kOther = 54321;
  cache.store(key_number(1), entry_number(1));
  if (::chown(file_of(1).c_str(), kOther, 0) != 0) GTEST_SKIP() << "needs root, to be two users";
  EXPECT_FALSE(cache.find(key_number(1)));
  EXPECT_EQ(cache.list()[0].why_bad, "belongs to user 54321; expected user 0 or root");
  ASSERT_EQ(::chown(file_of(1).c_str(), 0, 0), 0);
  ASSERT_EQ(::chown(folder.path().c_str(), kOther, 0), 0);
  EXPECT_FALSE(cache.find(key_number(1)));
  EXPECT_FALSE(cache.store(key_number(2), entry_number(2)));
  EXPECT_THAT(cache.why_unused(), HasSubstr("belongs to user 54321; expected user 0 or root"));
  // To that user the folder is their own, and what root put there is right.
  EXPECT_TRUE(holds_in_child([&] {
    if (::setuid(kOther) != 0) return false;
    return cache.find(key_number(1)) && cache.store(key_number(2), entry_number(2)) &&
           cache.find(key_number(2)) && cache.why_unused().empty();
  }));
  ASSERT_EQ(::chown(folder.path().c_str(), 0, 0), 0);
  EXPECT_TRUE(cache.find(key_number(1)));
  EXPECT_FALSE(cache.find(key_number(2))) << "a file of that user";
}

TEST_F(Disk, PlaceThatIsNoFolderKeepsNothing) {
  write_text(folder / "file", "");
  DiskCache inside({.folder = folder / "file/kernels"});
  EXPECT_FALSE(inside.store(key_number(1), entry_number(1)));
  EXPECT_FALSE(inside.find(key_number(1)));
  EXPECT_THAT(inside.why_not_kept(), HasSubstr("file/kernels"));
}

// A process's limit of file sizes would end it by a signal.
TEST_F(Disk, LimitOfFileSizesKeepsNothingAndHarmsNobody) {
  EXPECT_TRUE(holds_in_child([&] {
    const rlimit limit{.rlim_cur = 256, .rlim_max = 256};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
    return !cache.store(key_number(1), entry_number(1, 4096)) && !cache.find(key_number(1)) &&
           !cache.why_not_kept().empty();
  }));
  EXPECT_EQ(num_files(), 0);
}

// A disk of 64 KiB, mounted where nobody else sees it.
TEST_F(Disk, FullDiskKeepsNothingAndLeavesNoTornFile) {
  enum : int { kHolds = 0, kFails = 1, kCannotMount = 77 };
  const pid_t child = ::fork();
  if (child == 0) {
    const bool is_mounted =
        ::unshare(CLONE_NEWNS) == 0 &&
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
        ::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=64k,mode=700") == 0;
    if (!is_mounted) ::_exit(kCannotMount);
    bool has_refused = false, is_right = true;
    for (std::uint64_t i = 0; i < 10; ++i) {
      const bool is_kept = cache.store(key_number(i), entry_number(i, 10000));
      has_refused = has_refused || !is_kept;
      const auto found = cache.find(key_number(i));
      is_right = is_right && found.has_value() == is_kept && (!found || is_number(*found, i));
    }
    for (const auto& row : cache.list()) is_right = is_right && row.why_bad.empty();
    for (const auto& file : std::filesystem::directory_iterator(folder.path()))
      is_right = is_right && !is_written_aside(file.path().filename());
    const bool is_told = cache.why_not_kept().find("space") != std::string::npos;
    ::_exit(has_refused && is_right && is_told ? kHolds : kFails);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WEXITSTATUS(status) == kCannotMount) GTEST_SKIP() << "needs the right to mount a small disk";
  EXPECT_EQ(status, 0);
}

// 80 writers, each killed within its first few stores: whatever they were doing, what is there is
// right. Files of 300 kB take several writes' time.
TEST_F(Disk, WriterKilledAtAnyMomentTearsNothing) {
  const auto start = std::chrono::steady_clock::now();
  ASSERT_TRUE(holds_in_child([&] {
    DiskCache elsewhere({.folder = folder / "elsewhere"});
    for (std::uint64_t i = 0; i < 4; ++i) elsewhere.store(key_number(i), entry_number(i, 300000));
    return true;
  }));
  const auto window = std::chrono::duration_cast<std::chrono::microseconds>(
      std::chrono::steady_clock::now() - start);
  std::minstd_rand random(7);
  int num_killed = 0;
  for (std::uint64_t round = 0; round < 80; ++round) {
    const bool was_killed = kill_after(
        static_cast<useconds_t>(random() % static_cast<unsigned long>(window.count())), [&] {
          for (std::uint64_t i = 0;; ++i) {
            const std::uint64_t number = (round * 7 + i) % 23;
            cache.store(key_number(number), entry_number(number, 300000));
            const auto found = cache.find(key_number(number));
            if (found && !is_number(*found, number)) ::_exit(1);
          }
        });
    num_killed += was_killed ? 1 : 0;
  }
  EXPECT_EQ(num_killed, 80) << "a writer read a wrong entry";
  const auto rows = cache.list();
  EXPECT_FALSE(rows.empty());
  for (const auto& row : rows) EXPECT_EQ(row.why_bad, "") << row.file;
  for (std::uint64_t number = 0; number < 23; ++number) {
    if (const auto found = cache.find(key_number(number))) {
      EXPECT_TRUE(is_number(*found, number));
    }
  }
}

// Readers and writers of the same few entries, one that clears and one whose folder is small and evicts.
TEST_F(Disk, EightProcessesAtOnceReadWhatIsRight) {
  std::array<pid_t, 8> children{};
  for (std::size_t self = 0; self < children.size(); ++self) {
    children[self] = ::fork();
    if (children[self] != 0) continue;
    const std::int64_t max_bytes = self == 7 ? 50000 : std::int64_t{512} << 20U;
    DiskCache mine({.folder = folder.path().string(), .max_bytes = max_bytes});
    for (std::uint64_t i = 0; i < 200; ++i) {
      const std::uint64_t number = (i * (self + 1)) % 13;
      const auto found = mine.find(key_number(number));
      if (found && !is_number(*found, number)) ::_exit(1);
      if (!found) mine.store(key_number(number), entry_number(number, 8000));
      if (self == 6 && i % 20 == 0) mine.clear();
    }
    ::_exit(0);
  }
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  for (const auto& row : cache.list()) EXPECT_EQ(row.why_bad, "") << row.file;
}

}  // namespace
}  // namespace fovea::cuda::jit
