// The emulated twin of src/cuda/amd/ptx/lds_transpose.cuh.
#pragma once

#include "ptx/memory.cuh"
#include "shared/element.h"

namespace fovea::cuda::ptx {

template <Element element>
FOVEA_DEVICE U32x2 ds_read_b64_tr_b16(SharedAddress from, Site site = Site::here()) {
  static_assert(element != Element::f32, "ds_read_b64_tr_b16 reads bf16 or f16");
  U32x2 column;
  emulator::ds_read_tr_b16(from, &column.x, {"ds_read_b64_tr_b16", site});
  return column;
}

}  // namespace fovea::cuda::ptx
