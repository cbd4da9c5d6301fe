// What tests of the compiler and its caches share: a folder that goes away, children that may die, a
// small kernel, and the compiler or the reason to skip.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "cuda/jit/compiler.hpp"
#include "cuda/jit/disk_cache.hpp"

namespace fovea::cuda::jit {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "fovea_jit_XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::filesystem::path path() const { return path_; }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

/// Runs body in a child; true where it returned true there.
template <class Body>
bool holds_in_child(const Body& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    bool holds = false;
    try {
      holds = body();
    } catch (...) {
    }
    ::_exit(holds ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// Runs body in a child and kills it with SIGKILL after so many microseconds; true where it lived
/// until then.
template <class Body>
bool kill_after(useconds_t microseconds, const Body& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      body();
    } catch (...) {
    }
    ::_exit(0);
  }
  ::usleep(microseconds);
  ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status);
}

/// Afresh: some file systems wait for the disk where a file is truncated and written again.
inline void write_text(const std::string& path, const std::string& text) {
  std::error_code error;
  std::filesystem::remove(path, error);
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline Sha256 key_number(std::uint64_t number) {
  Sha256Hasher hasher;
  hasher.add_number(number);
  return hasher.finish();
}

/// An entry whose bytes follow from a number, so that a reader can tell whether it got the right one.
inline CacheEntry entry_number(std::uint64_t number, std::size_t image_bytes = 64) {
  CacheEntry entry{.cubin = {.image = std::vector<std::byte>(image_bytes),
                             .report = {.registers = 32, .spill_bytes = 4, .log = "words"}},
                   .label = "kernel " + std::to_string(number),
                   .architecture = "sm_80",
                   .compiler = "13.0.88"};
  for (std::size_t i = 0; i < image_bytes; ++i)
    entry.cubin.image[i] = static_cast<std::byte>(number * 31 + i);
  return entry;
}

inline bool is_number(const CacheEntry& entry, std::uint64_t number) {
  const CacheEntry expected = entry_number(number, entry.cubin.image.size());
  return entry.label == expected.label && entry.cubin.image == expected.cubin.image &&
         entry.cubin.report.registers == 32 && entry.cubin.report.log == "words";
}

/// Without a toolkit, without wheels: NVRTC is nowhere.
inline CompilerSearch search_nowhere() {
  CompilerSearch search;
  search.wants_loader = false;
  return search;
}

/// A kernel that reads a header of ours; `value` makes another text of it.
inline KernelText small_kernel(int value = 0) {
  return {
      .unit =
          "#include \"shared/types.h\"\n"
          "extern \"C\" __global__ void __launch_bounds__(128) fovea_kernel(std::uint32_t* out) {\n"
          "  out[threadIdx.x] = threadIdx.x + " +
          std::to_string(value) + "U;\n}\n",
      .label = "small kernel " + std::to_string(value)};
}

#define FOVEA_SKIP_WITHOUT_NVRTC()                                                  \
  if (const fovea::cuda::jit::CompilerLibrary nvrtc(                                \
          fovea::cuda::jit::default_search(fovea::cuda::jit::CompilerKind::nvrtc)); \
      !nvrtc.is_present()) {                                                        \
    GTEST_SKIP() << "needs NVRTC: " << nvrtc.why_absent();                          \
  }                                                                                 \
  static_assert(true)

}  // namespace fovea::cuda::jit
