#include "cuda/jit/device_text.hpp"

namespace fovea::cuda::jit {

DeviceText make_device_text(std::span<const SourceFile> files) {
  Sha256Hasher hasher;
  for (const SourceFile& file : files) {
    hasher.add_text(file.name);
    hasher.add_text(file.text);
  }
  return {files, hasher.finish()};
}

}  // namespace fovea::cuda::jit
