// How wide heads may be: one number for validation's callers, kernels and their buffers.
#pragma once

#include <cstdint>

namespace fovea {

/// Keys of multi-head latent attention: 512 columns that are the values too, and 64 that carry the position.
inline constexpr std::int64_t kMaxHeadDim = 576;

}  // namespace fovea
