// Registers move between the warpgroups of a CTA (Miscellaneous: setmaxnreg; sm_90a). All warps of a warpgroup run it
// together; the kernel must have a register bound from __launch_bounds__, else ptxas ignores it (C7508). Counts are
// multiples of 8, 24 to 256.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

/// setmaxnreg.inc: waits until `num_registers` a thread can be had.
template <int num_registers>
FOVEA_DEVICE void setmaxnreg_inc() {
  static_assert(num_registers >= 24 && num_registers <= 256 && num_registers % 8 == 0);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(num_registers));
}

/// setmaxnreg.dec: gives back all above `num_registers` a thread.
template <int num_registers>
FOVEA_DEVICE void setmaxnreg_dec() {
  static_assert(num_registers >= 24 && num_registers <= 256 && num_registers % 8 == 0);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(num_registers));
}

}  // namespace fovea::cuda::ptx
