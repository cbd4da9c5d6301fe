// What copies and stores ask of L2 (PTX ISA, Data Movement: cache hints).
#pragma once

#include "shared/types.h"

namespace fovea::cuda::ptx {

/// What becomes of the lines: the encodings that createpolicy.fractional gives for a fraction of 1.
enum class CachePolicy : std::uint64_t {
  evict_first = 0x12F0000000000000ULL,
  evict_normal = 0x1000000000000000ULL,
  evict_last = 0x14F0000000000000ULL,
};

}  // namespace fovea::cuda::ptx
