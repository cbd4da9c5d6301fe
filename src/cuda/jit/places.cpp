#include "cuda/jit/places.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>

#include "core/env.hpp"

namespace fovea::cuda::jit {
namespace {

namespace fs = std::filesystem;

std::optional<fs::path> user_folder(const Environment& environment) {
  if (environment.user_cache_home) return fs::path(*environment.user_cache_home) / "fovea";
  if (environment.home) return fs::path(*environment.home) / ".cache" / "fovea";
  return std::nullopt;
}

/// The Python that runs us, if one does: by its file, and by the link of a virtual environment that
/// it was called by.
std::vector<fs::path> running_pythons() {
  std::vector<fs::path> programs;
  std::ifstream command_line("/proc/self/cmdline");
  std::string first;
  if (std::getline(command_line, first, '\0') && first.starts_with('/'))
    programs.emplace_back(first);
  std::error_code error;
  programs.push_back(fs::read_symlink("/proc/self/exe", error));
  std::erase_if(programs, [](const fs::path& program) {
    return !program.filename().string().starts_with("python");
  });
  return programs;
}

}  // namespace

fs::path library_folder() {
  static const char here = 0;
  Dl_info info{};
  if (dladdr(&here, &info) == 0 || info.dli_fname == nullptr) return {};
  fs::path file = info.dli_fname;
  std::error_code error;
  // Of a program that was found by PATH the name alone is known.
  if (!file.has_parent_path()) file = fs::read_symlink("/proc/self/exe", error);
  return fs::absolute(file, error).parent_path();
}

std::vector<fs::path> entries_of(const fs::path& folder, std::string_view prefix) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().starts_with(prefix)) found.push_back(it->path());
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

std::vector<fs::path> python_sites(const fs::path& prefix) {
  std::vector<fs::path> sites;
  for (const fs::path& python : entries_of(prefix / "lib", "python3")) {
    sites.push_back(python / "site-packages");
    sites.push_back(python / "dist-packages");
  }
  return sites;
}

std::vector<fs::path> python_sites() {
  // The wheel has the library in fovea/lib and the command in fovea/bin.
  std::vector<fs::path> sites{library_folder().parent_path().parent_path()};
  const auto add = [&](const fs::path& prefix) {
    for (fs::path& site : python_sites(prefix)) sites.push_back(std::move(site));
  };
  for (const fs::path& program : running_pythons()) add(program.parent_path().parent_path());
  if (const auto environment = read_environment().virtual_env) add(*environment);
  return sites;
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
