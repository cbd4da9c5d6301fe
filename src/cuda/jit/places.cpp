#include "cuda/jit/places.hpp"

#include <dlfcn.h>

#include "core/env.hpp"

namespace fovea::cuda::jit {
namespace {

namespace fs = std::filesystem;

std::optional<fs::path> user_folder(const Environment& environment) {
  if (environment.user_cache_home) return fs::path(*environment.user_cache_home) / "fovea";
  if (environment.home) return fs::path(*environment.home) / ".cache" / "fovea";
  return std::nullopt;
}

}  // namespace

fs::path library_folder() {
  static const char here = 0;
  Dl_info info{};
  if (dladdr(&here, &info) == 0 || info.dli_fname == nullptr) return {};
  return fs::path(info.dli_fname).parent_path();
}

std::optional<fs::path> cache_folder() {
  const Environment environment = read_environment();
  if (environment.cache_dir) return fs::path(*environment.cache_dir);
  return user_folder(environment);
}

std::optional<fs::path> toolchain_folder() {
  const auto folder = user_folder(read_environment());
  return folder ? std::optional(*folder / "toolchain") : std::nullopt;
}

}  // namespace fovea::cuda::jit
