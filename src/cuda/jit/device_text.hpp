// The text of src/cuda/device and src/cuda/amd, embedded in the library at build time (cmake/FoveaEmbed.cmake).
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "cuda/jit/architecture.hpp"
#include "cuda/jit/sha256.hpp"

namespace fovea::cuda::jit {

struct SourceFile {
  const char* name;  // as included: "ptx/mma.cuh"
  const char* text;
};

/// All headers that a unit may include.
struct DeviceText {
  std::span<const SourceFile> files;
  std::vector<Sha256> digests{};  // of each file's text
  Sha256 digest{};                // of all names and texts
};

/// Which of the files a unit includes, and which these include, ascending. Lines `#include "name"` are followed
/// whatever #if they stand behind; the compiler is given these files alone, so no other way to include one compiles.
std::vector<std::size_t> included_files(const DeviceText& text, std::string_view unit);

const DeviceText& embedded_device_text();

/// The files of src/cuda/amd, which stand in the place of those of their names.
const DeviceText& embedded_amd_twins();

/// What hipRTC reads: the device text with AMD's twins in it.
const DeviceText& amd_device_text();

/// What kernels for an architecture are compiled from.
const DeviceText& device_text_of(Architecture architecture);

/// Of any files, in the order given: for tests that bring their own.
DeviceText make_device_text(std::span<const SourceFile> files);

}  // namespace fovea::cuda::jit
