// Which buffer of a ring comes next, and which phase of its barriers.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda {

/// Stage and parity of a ring of n buffers. Whoever fills starts with parity 1: a fresh barrier lets that wait pass.
template <int n>
struct Ring {
  int stage = 0;
  std::uint32_t parity = 0;

  FOVEA_DEVICE_MEMBER explicit Ring(std::uint32_t first_parity) : parity(first_parity) {}
  FOVEA_DEVICE_MEMBER void advance() {
    if (++stage == n) {
      stage = 0;
      parity ^= 1U;
    }
  }
};

/// Of a ring that began with parity 0, after so many turns: for threads that have one register to keep it in.
template <int n>
FOVEA_DEVICE Ring<n> ring_after(std::uint32_t turns) {
  Ring<n> ring{turns / n % 2};
  ring.stage = static_cast<int>(turns % n);
  return ring;
}

}  // namespace fovea::cuda
