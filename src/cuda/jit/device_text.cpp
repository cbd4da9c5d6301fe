#include "cuda/jit/device_text.hpp"

#include <algorithm>
#include <vector>

namespace fovea::cuda::jit {

DeviceText make_device_text(std::span<const SourceFile> files) {
  Sha256Hasher hasher;
  for (const SourceFile& file : files) {
    hasher.add_text(file.name);
    hasher.add_text(file.text);
  }
  return {files, hasher.finish()};
}

const DeviceText& amd_device_text() {
  static const std::vector<SourceFile> files = [] {
    const std::span<const SourceFile> twins = embedded_amd_twins().files;
    std::vector<SourceFile> all(twins.begin(), twins.end());
    for (const SourceFile& file : embedded_device_text().files) {
      const bool has_twin = std::ranges::any_of(
          twins, [&](const SourceFile& twin) { return std::string_view(twin.name) == file.name; });
      if (!has_twin) all.push_back(file);
    }
    return all;
  }();
  static const DeviceText text = [] {
    Sha256Hasher
        hasher;  // of digests: hashing the text again would take longer than a kernel from disk
    hasher.add_digest(embedded_amd_twins().digest);
    hasher.add_digest(embedded_device_text().digest);
    return DeviceText{files, hasher.finish()};
  }();
  return text;
}

const DeviceText& device_text_of(Architecture architecture) {
  return architecture.is_amd() ? amd_device_text() : embedded_device_text();
}

}  // namespace fovea::cuda::jit
