// Folders that the compiler, the caches and the kernel pack are looked for in.
#pragma once

#include <filesystem>
#include <optional>

namespace fovea::cuda::jit {

/// The folder that this code was loaded from: of libfovea.so, or of the program that it is linked into.
std::filesystem::path library_folder();

/// FOVEA_CACHE_DIR, XDG_CACHE_HOME/fovea or HOME/.cache/fovea; empty where none is set.
std::optional<std::filesystem::path> cache_folder();

/// Where scripts/dev setup puts a Python environment with the compiler's wheel, in the user's cache
/// folder whatever FOVEA_CACHE_DIR says.
std::optional<std::filesystem::path> toolchain_folder();

}  // namespace fovea::cuda::jit
