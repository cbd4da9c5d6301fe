#include "cuda/jit/loader.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>

#include "fovea/error.hpp"

namespace fovea::cuda::jit {
namespace {

/// What tells one compiler's file from another without opening it.
std::optional<Sha256> stamp_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return std::nullopt;
  Sha256Hasher hasher;
  hasher.add_text("compiler version");
  hasher.add_text(path);
  hasher.add_number(static_cast<std::uint64_t>(status.st_size));
  hasher.add_number(static_cast<std::uint64_t>(status.st_mtim.tv_sec));
  hasher.add_number(static_cast<std::uint64_t>(status.st_mtim.tv_nsec));
  return hasher.finish();
}

Sha256 disk_key(const Sha256& text_key, const std::string& compiler_version) {
  Sha256Hasher hasher;
  hasher.add_digest(text_key);
  hasher.add_text(compiler_version);
  return hasher.finish();
}

std::unique_ptr<KernelPack> open_pack(const std::optional<std::string>& path,
                                      std::string& why_not) {
  if (!path) {
    why_not =
        "none is named by FOVEA_PACK, there is no fovea.pack beside the library, and no Python has "
        "the wheel fovea-kernels";
    return nullptr;
  }
  try {
    return std::make_unique<KernelPack>(*path);
  } catch (const InvalidArgument& error) {
    why_not = error.what();
    return nullptr;
  }
}

/// What `take` makes of a cubin; empty where the driver refuses it, whose words are kept then.
template <class Take>
auto unless_refused(const Take& take, Cubin cubin, std::string& refusal) {
  std::optional<std::invoke_result_t<Take, Cubin>> taken;
  try {
    taken = take(std::move(cubin));
  } catch (const driver::ImageRefused& error) {
    refusal = error.what();
  }
  return taken;
}

}  // namespace

LoadedKernel::LoadedKernel(const driver::DeviceContext& context, const Cubin& cubin,
                           const std::string& label)
    : module(context, cubin.image, label),
      function(module.function(kEntryName)),
      report(cubin.report),
      source(cubin.source),
      image_bytes(static_cast<std::int64_t>(cubin.image.size())) {}

Loader::Loader(LoaderOptions options)
    : nvrtc_{.compiler = Compiler(std::move(options.nvrtc), options.device_text)},
      hiprtc_{.compiler = Compiler(std::move(options.hiprtc), amd_device_text())},
      disk_(std::move(options.disk)),
      pack_(open_pack(options.pack, why_no_pack_)),
      max_unused_(options.max_unused),
      max_unused_bytes_(options.max_unused_bytes),
      max_compiled_at_once_(options.max_compiled_at_once),
      at_first_background_(options.at_first_background),
      background_(options.max_in_background) {}

const std::string& Loader::compiler_version(Architecture architecture) {
  Tool& tool = tool_of(architecture);
  std::call_once(tool.once, [&] {
    const std::optional<std::string>& file = tool.compiler.file();
    const std::optional<Sha256> stamp = file ? stamp_of(*file) : std::nullopt;
    if (const auto note = stamp ? disk_.find_note(*stamp) : std::nullopt) {
      tool.version = *note;
    } else if (tool.compiler.library().is_present()) {
      tool.version = tool.compiler.version();
      if (stamp) disk_.store_note(*stamp, tool.version);
    }
  });
  return tool.version;
}

std::string Loader::why_nowhere(const KernelText& text, Architecture architecture,
                                const std::string& refusal) {
  return fmt::format(
      "kernel {} for {} {}, and there is {}", text.label, architecture.name(),
      refusal.empty() ? "is in no kernel pack" : "of the kernel pack is refused: " + refusal,
      tool_of(architecture).compiler.library().why_absent());
}

Availability Loader::look_for(const KernelText& text, Architecture architecture) {
  const Sha256 key = request(text, architecture).key;
  if (pack_ != nullptr && pack_->find(key)) return {KernelSource::pack, ""};
  const std::string& version = compiler_version(architecture);
  if (version.empty()) return {KernelSource::compiler, why_nowhere(text, architecture, "")};
  if (disk_.find(disk_key(key, version))) return {KernelSource::disk, ""};
  return {KernelSource::compiler, tool_of(architecture).compiler.why_not(architecture)};
}

std::string Loader::describe(KernelSource source, Architecture architecture) {
  switch (source) {
    case KernelSource::pack:
      return "kernel pack " + (pack_ != nullptr ? pack_->path() : "");
    case KernelSource::disk:
      return "disk cache";
    case KernelSource::compiler:
      break;
  }
  return fmt::format("{} {}", tool_of(architecture).compiler.name(),
                     compiler_version(architecture));
}

bool Loader::is_in_memory(const KernelText& text, const driver::DeviceContext& context) {
  const Place place{context.handle(), request(text, architecture_of(context.info())).key};
  const std::lock_guard lock(mutex_);
  const auto found = slots_.find(place);
  return found != slots_.end() && found->second.is_loaded;
}

void Loader::start_in_background(Background::Job job) {
  std::call_once(background_once_, [this] {
    if (at_first_background_ == nullptr) return;
    compiler().library();  // opened
    at_first_background_();
  });
  background_.start(std::move(job));
}

void Loader::stop() {
  nvrtc_.compiler.stop();
  hiprtc_.compiler.stop();
  background_.stop();
}

Loader::Request Loader::request(const KernelText& text, Architecture architecture) {
  const DeviceText& device_text = tool_of(architecture).compiler.device_text();
  return {&text, architecture, text_key(text, device_text, architecture)};
}

template <class Take>
std::optional<std::invoke_result_t<Take, Cubin>> Loader::take_kept(const Request& request,
                                                                   const Take& take) {
  std::string refusal;
  if (auto entry = pack_ != nullptr ? pack_->find(request.key) : std::nullopt) {
    entry->cubin.source = KernelSource::pack;
    if (auto taken = unless_refused(take, std::move(entry->cubin), refusal)) {
      ++from_pack_;
      return taken;
    }
  }
  const std::string& version = compiler_version(request.architecture);
  if (version.empty()) throw Unsupported(why_nowhere(*request.text, request.architecture, refusal));
  const Sha256 name = disk_key(request.key, version);
  if (auto entry = disk_.find(name)) {
    entry->cubin.source = KernelSource::disk;
    if (auto taken = unless_refused(take, std::move(entry->cubin), refusal)) {
      ++from_disk_;
      return taken;
    }
    disk_.remove(name);
  }
  return std::nullopt;
}

CacheEntry Loader::compile(const Request& request) {
  Compiler& compiler = tool_of(request.architecture).compiler;
  return {.cubin = compiler.compile(*request.text, request.architecture),
          .label = request.text->label,
          .architecture = request.architecture.name(),
          .compiler = compiler_version(request.architecture)};
}

template <class Take>
std::invoke_result_t<Take, Cubin> Loader::take_compiled(const Request& request,
                                                        const CacheEntry& entry, const Take& take) {
  auto taken = take(entry.cubin);
  disk_.store(disk_key(request.key, entry.compiler), entry);  // not what the driver refused
  return taken;
}

Cubin Loader::cubin(const KernelText& text, Architecture architecture) {
  const auto take = [](Cubin cubin) { return cubin; };
  const Request wanted = request(text, architecture);
  if (auto kept = take_kept(wanted, take)) return std::move(*kept);
  return take_compiled(wanted, compile(wanted), take);
}

std::shared_ptr<const LoadedKernel> Loader::load(const KernelText& text,
                                                 const driver::DeviceContext& context) {
  const KernelText* const one[] = {&text};
  return load_all(one, context).front();
}

std::vector<std::shared_ptr<const LoadedKernel>> Loader::load_all(
    std::span<const KernelText* const> texts, const driver::DeviceContext& context) {
  std::vector<Load> loads;
  for (const KernelText* text : texts) loads.push_back(claim(*text, context));
  std::vector<Load*> to_compile;
  for (Load& load : loads) {
    if (!load.is_mine) continue;
    settle(load, [&] {
      auto kept = take_kept(load.request, load.into(context));
      if (!kept) to_compile.push_back(&load);
      return kept.value_or(nullptr);
    });
  }
  compile_at_once(to_compile, context);
  // What others bring is waited for at last: they may wait for one of these.
  std::vector<Kernel> kernels;
  kernels.reserve(loads.size());
  for (const Load& load : loads) kernels.push_back(load.kernel.get());
  std::vector<Kernel> unused;  // outlives the lock
  const std::lock_guard lock(mutex_);
  unused = take_unused();
  return kernels;
}

Loader::Load Loader::claim(const KernelText& text, const driver::DeviceContext& context) {
  const Request wanted = request(text, architecture_of(context.info()));
  Load load{.request = wanted, .place = {context.handle(), wanted.key}};
  const std::lock_guard lock(mutex_);
  const auto [found, is_new] = slots_.try_emplace(load.place);
  Slot& slot = found->second;
  slot.last_asked = ++num_asked_;
  load.is_mine = is_new;
  if (is_new) {
    slot.kernel = load.promise.get_future().share();
  } else {
    ++from_memory_;
  }
  load.kernel = slot.kernel;
  return load;
}

template <class Bring>
void Loader::settle(Load& load, const Bring& bring) {
  Kernel kernel;
  try {
    kernel = bring();
  } catch (...) {
    load.promise.set_exception(std::current_exception());
    const std::lock_guard lock(mutex_);
    slots_.erase(load.place);
    return;
  }
  if (kernel == nullptr) return;
  load.promise.set_value(kernel);
  const std::lock_guard lock(mutex_);
  slots_.at(load.place).is_loaded = true;
}

void Loader::compile_at_once(std::span<Load* const> loads, const driver::DeviceContext& context) {
  std::vector<std::future<CacheEntry>> entries;
  for (const Load* load : loads) {
    // This thread is one of them: it compiles what is deferred. Where no thread can be had, all of it.
    const bool has_thread =
        entries.size() + 1 < loads.size() && entries.size() + 1 < max_compiled_at_once_;
    entries.push_back(
        std::async(has_thread ? std::launch::async | std::launch::deferred : std::launch::deferred,
                   [this, load] { return compile(load->request); }));
  }
  // From behind: first what is deferred.
  for (std::size_t i = loads.size(); i-- > 0;) {
    Load& load = *loads[i];
    settle(load, [&] { return take_compiled(load.request, entries[i].get(), load.into(context)); });
  }
}

std::vector<std::shared_ptr<const LoadedKernel>> Loader::take_unused() {
  std::vector<Slots::iterator> unused;
  std::int64_t bytes = 0;
  for (auto slot = slots_.begin(); slot != slots_.end(); ++slot) {
    if (!slot->second.is_loaded) continue;
    const Kernel& kernel = slot->second.kernel.get();
    if (kernel.use_count() > 1 || kernel->module.is_captured()) continue;
    unused.push_back(slot);
    bytes += kernel->image_bytes;
  }
  std::vector<Kernel> taken;
  if (unused.size() <= max_unused_ && bytes <= max_unused_bytes_) return taken;
  std::ranges::sort(unused, {}, [](const auto& slot) { return slot->second.last_asked; });
  for (std::size_t left = unused.size(); left > max_unused_ || bytes > max_unused_bytes_; --left) {
    const Slots::iterator slot = unused[unused.size() - left];
    taken.push_back(slot->second.kernel.get());
    bytes -= taken.back()->image_bytes;
    slots_.erase(slot);
  }
  return taken;
}

std::size_t Loader::num_loaded() const {
  const std::lock_guard lock(mutex_);
  return slots_.size();
}

LoaderCounts Loader::counts() const {
  return {.from_memory = from_memory_.load(),
          .from_pack = from_pack_.load(),
          .from_disk = from_disk_.load(),
          .compiled = nvrtc_.compiler.num_compiles() + hiprtc_.compiler.num_compiles()};
}

Sha256 text_key(const KernelText& text, const DeviceText& device_text, Architecture architecture) {
  Sha256Hasher hasher;
  hasher.add_text("kernel");
  const std::vector<std::string> options = compile_options(architecture);
  hasher.add_number(options.size());
  for (const std::string& option : options) hasher.add_text(option);
  for (const std::size_t i : included_files(device_text, text.unit)) {
    hasher.add_text(device_text.files[i].name);
    hasher.add_digest(device_text.digests[i]);
  }
  hasher.add_text(text.unit);
  return hasher.finish();
}

Architecture architecture_of(const driver::DeviceInfo& info) {
  return {info.compute_capability_major, info.compute_capability_minor, info.gfx};
}

Loader& process_loader() {
  // Never destroyed, as the process's driver is not.
  static Loader* const loader = [] {
    LoaderOptions options = process_loader_options();
    // Registered once the compiler is open: what it has for the end of the process comes after this.
    options.at_first_background = [] { std::atexit([] { process_loader().stop(); }); };
    return new Loader(std::move(options));
  }();
  return *loader;
}

LoaderOptions process_loader_options() {
  LoaderOptions options;
  const driver::Driver& driver = driver::process_driver();
  if (driver.is_present()) options.nvrtc.max_major = driver.version() / 1000;
  return options;
}

}  // namespace fovea::cuda::jit
