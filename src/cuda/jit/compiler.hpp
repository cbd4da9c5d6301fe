// Text in, cubin or code object out: one unit, its headers from memory, NVRTC or hipRTC in this process. Needs no GPU.
// Read loader.hpp for the caches before it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda/jit/compiler_library.hpp"
#include "cuda/jit/cubin.hpp"
#include "cuda/jit/device_text.hpp"

namespace fovea::cuda::jit {

class Compiler {
 public:
  /// Opens nothing: the library is opened by the first call that needs it.
  explicit Compiler(CompilerSearch search = default_search(CompilerKind::nvrtc),
                    DeviceText device_text = embedded_device_text());

  /// Throws CompileError with the place in the unit and the log, Unsupported where the library is missing or
  /// does not know the architecture. Thread safe.
  Cubin compile(const KernelText& text, Architecture architecture);

  /// For a process that ends: compilations under way fail as soon as the compiler asks, and all that follow.
  void stop() { is_stopped_ = true; }

  /// The compiler, opened now.
  const CompilerLibrary& library();
  /// "NVRTC", "hipRTC".
  const char* name() const { return name_of(search_.kind); }
  /// "13.0.88", or of hipRTC its clang's, "20.0.0git": read from what it writes, since its version function hides the
  /// one's release and the other's all.
  const std::string& version();
  /// What it can compile for, ascending.
  std::vector<Architecture> architectures();

  /// The file that would be opened, searched at the first call; empty where only the loader may know one.
  const std::optional<std::string>& file();
  /// Why it cannot compile for this architecture, absent or too old; empty: it can.
  std::string why_not(Architecture architecture);
  const DeviceText& device_text() const { return device_text_; }
  /// Compilations that were begun: what tests of the caches count.
  std::int64_t num_compiles() const { return num_compiles_.load(); }

 private:
  std::vector<Architecture> nvidia_architectures();

  CompilerSearch search_;
  DeviceText device_text_;
  std::atomic<std::int64_t> num_compiles_ = 0;
  std::atomic<bool> is_stopped_ = false;
  std::once_flag search_once_, open_once_, version_once_;
  std::optional<std::string> file_;
  std::unique_ptr<CompilerLibrary> library_;
  std::string version_;
};

/// The options of every compilation for this architecture; part of a cubin's name on disk.
std::vector<std::string> compile_options(Architecture architecture);

/// The numbers in ptxas' words about `entry`.
CompileReport parse_report(const std::string& log, const std::string& entry = kEntryName);

}  // namespace fovea::cuda::jit
