// Text in, cubin out: one unit, its headers from memory, NVRTC in this process. Needs no GPU. Read
// loader.hpp for the caches before it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda/jit/cubin.hpp"
#include "cuda/jit/device_text.hpp"
#include "cuda/jit/nvrtc.hpp"

namespace fovea::cuda::jit {

class Compiler {
 public:
  /// Opens nothing: NVRTC is opened by the first call that needs it.
  explicit Compiler(NvrtcSearch search = default_nvrtc_search(),
                    DeviceText device_text = embedded_device_text());

  /// Throws CompileError with the place in the unit and the log, Unsupported where NVRTC is missing or
  /// does not know the architecture. Thread safe.
  Cubin compile(const KernelText& text, Architecture architecture);

  /// The compiler, opened now.
  const Nvrtc& nvrtc();
  /// "13.0.88": with the release that its version function hides, read from what it writes.
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
  NvrtcSearch search_;
  DeviceText device_text_;
  std::atomic<std::int64_t> num_compiles_ = 0;
  std::once_flag search_once_, open_once_, version_once_;
  std::optional<std::string> file_;
  std::unique_ptr<Nvrtc> nvrtc_;
  std::string version_;
};

/// The options of every compilation for this architecture; part of a cubin's name on disk.
std::vector<std::string> compile_options(Architecture architecture);

/// The numbers in ptxas' words about `entry`.
CompileReport parse_report(const std::string& log, const std::string& entry = kEntryName);

}  // namespace fovea::cuda::jit
