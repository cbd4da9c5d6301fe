#include "cuda/jit/nvrtc.hpp"

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

// CUDA 12.0 is the first that takes C++20.
constexpr int kOldestMajor = 12, kNewestMajor = 13;
constexpr std::array kSystemFolders{"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
                                    "/usr/lib64", "/usr/lib"};
// Of the wheels: since CUDA 13, and before.
constexpr std::array kWheelFolders{"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"};

bool is_file(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

/// Newest first.
std::vector<std::string> sonames(const NvrtcSearch& search) {
  std::vector<std::string> names;
  for (int major = std::min(search.max_major, kNewestMajor); major >= kOldestMajor; --major)
    names.push_back(fmt::format("libnvrtc.so.{}", major));
  return names;
}

std::optional<std::string> find_in_folder(const fs::path& folder, const NvrtcSearch& search) {
  for (const std::string& soname : sonames(search)) {
    if (is_file(folder / soname)) return (folder / soname).string();
  }
  return std::nullopt;
}

/// The file of a library that the process has loaded by this name.
std::optional<std::string> find_in_process(const std::string& soname) {
  void* handle = dlopen(soname.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return std::nullopt;
  Dl_info info{};
  const bool is_known = dladdr(dlsym(handle, "nvrtcVersion"), &info) != 0;
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
std::optional<std::string> find_as_loader(const NvrtcSearch& search) {
  for (const std::string& soname : sonames(search)) {
    if (auto file = find_in_process(soname)) return file;
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
const char* fill(NvrtcApi& api, void* library) {
#define FOVEA_NVRTC_FIND(member, symbol, result, arguments)                    \
  api.member = reinterpret_cast<decltype(api.member)>(dlsym(library, symbol)); \
  if (api.member == nullptr) return symbol;
  FOVEA_NVRTC_FUNCTIONS(FOVEA_NVRTC_FIND)
#undef FOVEA_NVRTC_FIND
  return nullptr;
}

/// NVRTC opens its second half by name, and a wheel's is in no folder that the loader knows: what the
/// process has already is found.
void open_builtins(const fs::path& folder) {
  for (const fs::path& file : entries_of(folder, "libnvrtc-builtins.so."))
    dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
}

std::string not_found(const NvrtcSearch& search) {
  const std::string soname =
      fmt::format("libnvrtc.so.{}", std::min(search.max_major, kNewestMajor));
  if (search.named) {
    return fmt::format(
        "no kernel compiler: FOVEA_NVRTC is '{}'; expected libnvrtc.so or the folder that holds {}",
        *search.named, soname);
  }
  return fmt::format(
      "no kernel compiler: {} is neither where the dynamic loader looks nor in {} other folders; "
      "install the wheel nvidia-cuda-nvrtc, or name it by FOVEA_NVRTC",
      soname, search.folders.size());
}

}  // namespace

NvrtcSearch default_nvrtc_search() {
  const Environment environment = read_environment();
  NvrtcSearch search;
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

std::optional<std::string> find_nvrtc_file(const NvrtcSearch& search) {
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

Nvrtc::Nvrtc(const NvrtcSearch& search, const std::optional<std::string>& file) {
  why_absent_ = start(search, file);
}

std::string Nvrtc::start(const NvrtcSearch& search, const std::optional<std::string>& file) {
  void* library = nullptr;
  if (file) {
    path_ = *file;
    open_builtins(fs::path(path_).parent_path());
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
  if (const char* missing = fill(api_, library); missing != nullptr)
    return fmt::format("{} lacks {}; expected NVRTC of CUDA 12 or newer", path_, missing);
  if (api_.version(&major_, &minor_) != 0 || major_ < kOldestMajor)
    return fmt::format("{} is NVRTC {}.{}; expected 12.0 or newer", path_, major_, minor_);
  return {};
}

const NvrtcApi& Nvrtc::api() const {
  if (!is_present()) throw Unsupported(why_absent_);
  return api_;
}

}  // namespace fovea::cuda::jit
