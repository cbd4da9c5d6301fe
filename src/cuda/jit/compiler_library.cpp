#include "cuda/jit/compiler_library.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>
#include <string_view>

#include "fovea/error.hpp"

#include "core/env.hpp"
#include "cuda/jit/places.hpp"

namespace fovea::cuda::jit {
namespace {

namespace fs = std::filesystem;

/// What tells one compiler's library from the other's.
struct Names {
  const char* name;
  const char* stem;                // of its file, before the major version
  int oldest_major, newest_major;  // that are looked for
  const char* oldest_release;
  const char* version_symbol;
  const char* variable;
  const char* advice;
};

// CUDA 12.0 is the first that takes C++20.
constexpr Names kNvrtc{.name = "NVRTC",
                       .stem = "libnvrtc.so",
                       .oldest_major = 12,
                       .newest_major = 13,
                       .oldest_release = "CUDA 12",
                       .version_symbol = "nvrtcVersion",
                       .variable = "FOVEA_NVRTC",
                       .advice = "install the wheel nvidia-cuda-nvrtc"};
// ROCm 6 is the first that has it in a file of its own. Its interface has not changed since, so files of releases to
// come are tried.
constexpr Names kHiprtc{.name = "hipRTC",
                        .stem = "libhiprtc.so",
                        .oldest_major = 6,
                        .newest_major = 15,
                        .oldest_release = "ROCm 6",
                        .version_symbol = "hiprtcVersion",
                        .variable = "FOVEA_HIPRTC",
                        .advice = "install ROCm 6.0 or newer"};

const Names& names_of(CompilerKind kind) { return kind == CompilerKind::nvrtc ? kNvrtc : kHiprtc; }

constexpr std::array kSystemFolders{"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
                                    "/usr/lib64", "/usr/lib"};
// Of the wheels: since CUDA 13, and before.
constexpr std::array kWheelFolders{"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"};

bool is_file(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

/// Newest first.
std::vector<std::string> sonames(const CompilerSearch& search) {
  const Names& names = names_of(search.kind);
  std::vector<std::string> result;
  for (int major = std::min(search.max_major, names.newest_major); major >= names.oldest_major;
       --major)
    result.push_back(fmt::format("{}.{}", names.stem, major));
  // PyTorch's wheels for ROCm bring their libraries without a version in the name.
  if (search.kind == CompilerKind::hiprtc) result.emplace_back(names.stem);
  return result;
}

std::optional<std::string> find_in_folder(const fs::path& folder, const CompilerSearch& search) {
  for (const std::string& soname : sonames(search)) {
    if (is_file(folder / soname)) return (folder / soname).string();
  }
  return std::nullopt;
}

/// The file of a library that the process has loaded by this name.
std::optional<std::string> find_in_process(const std::string& soname, const char* symbol) {
  void* handle = dlopen(soname.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return std::nullopt;
  Dl_info info{};
  const bool is_known = dladdr(dlsym(handle, symbol), &info) != 0;
  dlclose(handle);
  return is_known && is_file(info.dli_fname) ? std::optional<std::string>(info.dli_fname)
                                             : std::nullopt;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(separator), text.size());
    if (end > 0) parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

/// What the dynamic loader would find, without its cache of folders: those of /usr/local/cuda are
/// searched as a toolkit's.
std::optional<std::string> find_as_loader(const CompilerSearch& search) {
  for (const std::string& soname : sonames(search)) {
    if (auto file = find_in_process(soname, names_of(search.kind).version_symbol)) return file;
  }
  const std::optional<std::string> library_path = read_environment().library_path;
  for (const std::string& folder : split(library_path.value_or(""), ':')) {
    if (auto file = find_in_folder(folder, search)) return file;
  }
  for (const char* folder : kSystemFolders) {
    if (auto file = find_in_folder(folder, search)) return file;
  }
  return std::nullopt;
}

void add_toolkit(std::vector<std::string>& folders, const fs::path& toolkit) {
  folders.push_back(toolkit / "lib64");
  folders.push_back(toolkit / "lib");
}

void add_wheels(std::vector<std::string>& folders, const fs::path& site_packages) {
  for (const char* folder : kWheelFolders) folders.push_back(site_packages / folder);
}

/// Finds each function by its name; the first that is missing, or nothing.
const char* fill(CompilerApi& api, void* library, CompilerKind kind) {
  const auto symbol_of = [kind](const char* nvrtc, const char* hiprtc) {
    return kind == CompilerKind::nvrtc ? nvrtc : hiprtc;
  };
#define FOVEA_COMPILER_FIND(member, nvrtc, hiprtc, result, arguments)            \
  if (const char* symbol = symbol_of(nvrtc, hiprtc); *symbol != '\0') {          \
    api.member = reinterpret_cast<decltype(api.member)>(dlsym(library, symbol)); \
    if (api.member == nullptr) return symbol;                                    \
  }
  FOVEA_COMPILER_FUNCTIONS(FOVEA_COMPILER_FIND)
#undef FOVEA_COMPILER_FIND
  if (kind == CompilerKind::nvrtc) {
    api.set_flow_callback =
        reinterpret_cast<decltype(api.set_flow_callback)>(dlsym(library, "nvrtcSetFlowCallback"));
  }
  return nullptr;
}

/// NVRTC opens its second half by name, and a wheel's is in no folder that the loader knows: what the
/// process has already is found.
void open_builtins(const fs::path& folder) {
  for (const fs::path& file : entries_of(folder, "libnvrtc-builtins.so."))
    dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
}

std::string not_found(const CompilerSearch& search) {
  const Names& names = names_of(search.kind);
  const std::string soname =
      fmt::format("{}.{}", names.stem, std::min(search.max_major, names.newest_major));
  if (search.named) {
    return fmt::format("no kernel compiler: {} is '{}'; expected {} or the folder that holds {}",
                       names.variable, *search.named, names.stem, soname);
  }
  return fmt::format(
      "no kernel compiler: {} is neither where the dynamic loader looks nor in {} other folders; "
      "{}, or name it by {}",
      soname, search.folders.size(), names.advice, names.variable);
}

CompilerSearch default_nvrtc_search() {
  const Environment environment = read_environment();
  CompilerSearch search;
  search.named = environment.nvrtc;
  if (environment.cuda_home) add_toolkit(search.folders, *environment.cuda_home);
  for (const fs::path& toolkit : entries_of("/usr/local", "cuda"))
    add_toolkit(search.folders, toolkit);
  for (const fs::path& site : python_sites()) add_wheels(search.folders, site);
  if (const auto toolchain = toolchain_folder()) {
    for (const fs::path& site : python_sites(*toolchain)) add_wheels(search.folders, site);
  }
  return search;
}

CompilerSearch default_hiprtc_search() {
  const Environment environment = read_environment();
  CompilerSearch search;
  search.kind = CompilerKind::hiprtc;
  search.named = environment.hiprtc;
  if (environment.rocm_path) add_toolkit(search.folders, *environment.rocm_path);
  for (const fs::path& toolkit : entries_of("/opt", "rocm")) add_toolkit(search.folders, toolkit);
  return search;
}

}  // namespace

const char* name_of(CompilerKind kind) { return names_of(kind).name; }

CompilerSearch default_search(CompilerKind kind) {
  return kind == CompilerKind::nvrtc ? default_nvrtc_search() : default_hiprtc_search();
}

std::optional<std::string> find_compiler_file(const CompilerSearch& search) {
  if (search.named) {
    if (is_file(*search.named)) return search.named;
    return find_in_folder(*search.named, search);
  }
  if (search.wants_loader) {
    if (auto file = find_as_loader(search)) return file;
  }
  for (const std::string& folder : search.folders) {
    if (auto file = find_in_folder(folder, search)) return file;
  }
  return std::nullopt;
}

CompilerLibrary::CompilerLibrary(const CompilerSearch& search,
                                 const std::optional<std::string>& file) {
  why_absent_ = start(search, file);
}

std::string CompilerLibrary::start(const CompilerSearch& search,
                                   const std::optional<std::string>& file) {
  void* library = nullptr;
  if (file) {
    path_ = *file;
    if (search.kind == CompilerKind::nvrtc) open_builtins(fs::path(path_).parent_path());
    library = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return fmt::format("no kernel compiler: {}", dlerror());
  } else if (!search.named && search.wants_loader) {
    // A folder of the loader's cache that find_as_loader does not know.
    for (const std::string& soname : sonames(search)) {
      if (library != nullptr) break;
      path_ = soname;
      library = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
    }
  }
  if (library == nullptr) return not_found(search);
  const Names& names = names_of(search.kind);
  if (const char* missing = fill(api_, library, search.kind); missing != nullptr) {
    return fmt::format("{} lacks {}; expected {} of {} or newer", path_, missing, names.name,
                       names.oldest_release);
  }
  if (api_.version(&major_, &minor_) != 0 || major_ < names.oldest_major) {
    return fmt::format("{} is {} {}.{}; expected {}.0 or newer", path_, names.name, major_, minor_,
                       names.oldest_major);
  }
  return {};
}

const CompilerApi& CompilerLibrary::api() const {
  if (!is_present()) throw Unsupported(why_absent_);
  return api_;
}

}  // namespace fovea::cuda::jit
