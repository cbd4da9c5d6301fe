// The text of src/cuda/device, embedded in the library at build time (cmake/FoveaEmbed.cmake).
#pragma once

#include <span>
#include <string_view>

#include "cuda/jit/sha256.hpp"

namespace fovea::cuda::jit {

struct SourceFile {
  const char* name;  // as included: "ptx/mma.cuh"
  const char* text;
};

/// All headers that a unit may include, and a digest of their names and texts.
struct DeviceText {
  std::span<const SourceFile> files;
  Sha256 digest{};
};

const DeviceText& embedded_device_text();

/// Of any files, in the order given: for tests that bring their own.
DeviceText make_device_text(std::span<const SourceFile> files);

}  // namespace fovea::cuda::jit
