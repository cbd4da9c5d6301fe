// The text of this folder's kernels, embedded by its CMakeLists.txt.
#pragma once

#include <vector>

#include "cuda/jit/device_text.hpp"

namespace fovea::cuda::conformance {

std::vector<jit::SourceFile> device_text();

}  // namespace fovea::cuda::conformance
