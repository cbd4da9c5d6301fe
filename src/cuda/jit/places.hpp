// Folders that the compiler, the caches and the kernel pack are looked for in.
#pragma once

#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

namespace fovea::cuda::jit {

/// The folder that this code was loaded from: of libfovea.so, or of the program that it is linked into.
std::filesystem::path library_folder();

/// Folders of installed Python packages, nearest first: the one that holds the wheel that this library came in, those
/// of the Python that runs us, those of VIRTUAL_ENV.
std::vector<std::filesystem::path> python_sites();

/// The same of the Python environment at `prefix`: prefix/lib/python3.*/site-packages, and Debian's name for it.
std::vector<std::filesystem::path> python_sites(const std::filesystem::path& prefix);

/// What in `folder` has a name that starts so, last in the alphabet first: the newest version.
std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder,
                                              std::string_view prefix);

/// FOVEA_CACHE_DIR, XDG_CACHE_HOME/fovea or HOME/.cache/fovea; empty where none is set.
std::optional<std::filesystem::path> cache_folder();

/// Where scripts/dev setup puts a Python environment with the compiler's wheel, in the user's cache
/// folder whatever FOVEA_CACHE_DIR says.
std::optional<std::filesystem::path> toolchain_folder();

}  // namespace fovea::cuda::jit
