// Kernels ready to launch, from where they are nearest: memory, kernel pack, disk, compiler; what the driver refuses of
// one is looked for at the next. A Plan
// keeps what it got; the text alone is the key here, so that nothing that shapes a kernel can be left
// out of it. Printing and hashing it costs a new plan 0.1 to 0.2 ms.
#pragma once

#include <atomic>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/driver/module.hpp"
#include "cuda/jit/background.hpp"
#include "cuda/jit/compiler.hpp"
#include "cuda/jit/disk_cache.hpp"
#include "cuda/jit/kernel_pack.hpp"

namespace fovea::cuda::jit {

struct LoadedKernel {
  LoadedKernel(const driver::DeviceContext& context, const Cubin& cubin, const std::string& label);

  driver::Module module;
  driver::Function function;
  CompileReport report;
  KernelSource source;
  std::int64_t image_bytes = 0;
};

/// Where a kernel that is not in memory would be taken from, or why it cannot be had.
struct Availability {
  KernelSource source = KernelSource::pack;
  std::string why_missing;  // empty: it can
};

/// Where cubins came from so far.
struct LoaderCounts {
  std::int64_t from_memory = 0, from_pack = 0, from_disk = 0, compiled = 0;
};

struct LoaderOptions {
  CompilerSearch nvrtc = default_search(CompilerKind::nvrtc);
  CompilerSearch hiprtc = default_search(CompilerKind::hiprtc);
  DeviceText device_text = embedded_device_text();  // of NVIDIA's GPUs
  DiskCache::Options disk = default_disk_cache();
  std::optional<std::string> pack = default_pack_path();
  // Of kernels that nobody but the loader has; images of attention kernels are 20 to 200 KB.
  std::size_t max_unused = 256;
  std::int64_t max_unused_bytes = std::int64_t{64} << 20U;
  // Kernels of one plan. Not default_num_threads(): launchers of many ranks set OMP_NUM_THREADS to 1.
  unsigned max_compiled_at_once = std::thread::hardware_concurrency();
  // Plans whose kernels are compiled while others run their calls: half of the cores are left to these.
  unsigned max_in_background = std::thread::hardware_concurrency() / 2;
  void (*at_first_background)() =
      nullptr;  // called when the compiler is open and nothing compiles there yet
};

/// Keeps what it has loaded while a plan has it or a graph may launch it, and some more. Thread safe: of threads that
/// ask for one text at once, one brings it and the others wait.
class Loader {
 public:
  explicit Loader(LoaderOptions options = {});
  ~Loader() { stop(); }
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// The kernel on this device. Throws CompileError, DeviceError, or Unsupported where neither pack nor
  /// disk holds it and there is no compiler.
  std::shared_ptr<const LoadedKernel> load(const KernelText& text,
                                           const driver::DeviceContext& context);

  /// The same of several, in their order: what has to be compiled is compiled at once, a thread each. Of several
  /// failures the first is thrown, when all is done.
  std::vector<std::shared_ptr<const LoadedKernel>> load_all(
      std::span<const KernelText* const> texts, const driver::DeviceContext& context);

  /// What `load` would do, or why it would throw Unsupported. Compiles nothing, and opens one only for what neither
  /// pack nor disk holds.
  Availability look_for(const KernelText& text, Architecture architecture);

  /// Has it been loaded into this device?
  bool is_in_memory(const KernelText& text, const driver::DeviceContext& context);

  /// Runs a job beside the process's calls, which loads kernels that nobody waits for. Throws nothing.
  void start_in_background(Background::Job job);

  /// Ends what was started so: compilations under way fail, others are not begun.
  void stop();

  /// Of a kernel for this architecture, for people: "kernel pack fovea.pack", "disk cache", "NVRTC 13.0.88".
  std::string describe(KernelSource source, Architecture architecture);

  /// The cubin alone; needs no GPU. Not kept in memory.
  Cubin cubin(const KernelText& text, Architecture architecture);

  Compiler& compiler(CompilerKind kind = CompilerKind::nvrtc) { return tool_of(kind).compiler; }
  DiskCache& disk() { return disk_; }
  /// Null where there is none; why_no_pack() says why a pack that was named does not serve.
  const KernelPack* pack() const { return pack_.get(); }
  const std::string& why_no_pack() const { return why_no_pack_; }
  LoaderCounts counts() const;
  /// Kernels in memory, those of every plan and some that were.
  std::size_t num_loaded() const;

 private:
  using Kernel = std::shared_ptr<const LoadedKernel>;
  /// A kernel that is asked for, and its name everywhere but on the disk.
  struct Request {
    const KernelText* text;
    Architecture architecture;
    Sha256 key{};
  };
  Request request(const KernelText& text, Architecture architecture);
  /// A compiler, and its version once it is known.
  struct Tool {
    Compiler compiler;
    std::once_flag once{};
    std::string version{};
  };
  Tool& tool_of(CompilerKind kind) { return kind == CompilerKind::nvrtc ? nvrtc_ : hiprtc_; }
  Tool& tool_of(Architecture architecture) { return tool_of(kind_of(architecture)); }
  /// Empty where there is no compiler. Opens none whose version the disk remembers: that costs more
  /// than all else that a kernel from disk needs.
  const std::string& compiler_version(Architecture architecture);
  std::string why_nowhere(const KernelText& text, Architecture architecture,
                          const std::string& refusal);
  /// What `take` makes of the nearest cubin in pack and on disk that it does not throw driver::ImageRefused for. Throws
  /// Unsupported where there is none and no compiler.
  template <class Take>
  std::optional<std::invoke_result_t<Take, Cubin>> take_kept(const Request& request,
                                                             const Take& take);
  CacheEntry compile(const Request& request);
  /// Of what was compiled; the disk keeps it then.
  template <class Take>
  std::invoke_result_t<Take, Cubin> take_compiled(const Request& request, const CacheEntry& entry,
                                                  const Take& take);

  Tool nvrtc_, hiprtc_;
  DiskCache disk_;
  std::string why_no_pack_;
  std::unique_ptr<KernelPack> pack_;
  /// A kernel in memory, or on its way there.
  struct Slot {
    std::shared_future<Kernel> kernel;
    std::int64_t last_asked = 0;
    bool is_loaded = false;
  };
  using Place = std::pair<driver::ContextHandle, Sha256>;
  using Slots = std::map<Place, Slot>;
  /// A request of load_all.
  struct Load {
    Request request;
    Place place;
    bool is_mine = false;  // to bring; else another thread does, or did
    std::promise<Kernel> promise{};
    std::shared_future<Kernel> kernel{};

    /// Makes a kernel of its cubin.
    auto into(const driver::DeviceContext& context) const {
      return [this, &context](const Cubin& cubin) {
        return std::make_shared<const LoadedKernel>(context, cubin, request.text->label);
      };
    }
  };
  Load claim(const KernelText& text, const driver::DeviceContext& context);
  /// Gives those who wait for a kernel of mine what `bring` returns, or why it failed: whoever asks later tries anew.
  /// Null is nothing yet.
  template <class Bring>
  void settle(Load& load, const Bring& bring);
  void compile_at_once(std::span<Load* const> loads, const driver::DeviceContext& context);

  /// Takes the least recently asked out of memory while too many are held by nobody else. The lock is held, and the
  /// kernels are unloaded when the caller lets go of them.
  std::vector<Kernel> take_unused();

  const std::size_t max_unused_;
  const std::int64_t max_unused_bytes_;
  const unsigned max_compiled_at_once_;
  mutable std::mutex mutex_;  // of slots_
  Slots slots_;
  std::int64_t num_asked_ = 0;
  std::atomic<std::int64_t> from_memory_ = 0, from_pack_ = 0, from_disk_ = 0, compiled_ = 0;
  void (*const at_first_background_)();
  std::once_flag background_once_;
  Background background_;
};

/// The digest of all that shapes a cubin but the compiler's version: unit, headers that it includes, options,
/// architecture.
Sha256 text_key(const KernelText& text, const DeviceText& device_text, Architecture architecture);

/// The architecture that a device's kernels are compiled for.
Architecture architecture_of(const driver::DeviceInfo& info);

/// The loader of calls that name no other; made at the first call. Its background ends with the process: whoever ran on
/// would find the compiler's memory gone. A compilation under way is waited for until the compiler asks whether to go
/// on, a second or two.
Loader& process_loader();
/// What it is made with on this machine.
LoaderOptions process_loader_options();

}  // namespace fovea::cuda::jit
