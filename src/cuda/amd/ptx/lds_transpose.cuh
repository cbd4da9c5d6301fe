// ds_read_b64_tr of gfx950: reads of LDS that transpose. Each 16 lanes read four rows of 16 elements, and each of them
// gets a column: what a product takes of a matrix whose sum goes over rows, where rows lie as they are in memory.
#pragma once

#include "ptx/memory.cuh"
#include "shared/element.h"

namespace fovea::cuda::ptx {

#if defined(__gfx950__)
/// Note: LLVM 22 waits for all copies to LDS, those of the next tile too, before an access of which it knows nothing.
/// ld_shared has its type; this has `restrict`, and is a function for that.
struct TransposedRead {
  using Column = short __attribute__((vector_size(8)));
  using LocalColumn = __attribute__((address_space(3))) Column;

  FOVEA_DEVICE_MEMBER static Column of(LocalColumn* __restrict from) {
    return __builtin_amdgcn_ds_read_tr16_b64_v4i16(from);
  }
};
#endif

/// ds_read_b64_tr_b16: of 16 lanes, lane 4 r + c names elements 4 c .. 4 c + 3 of row r, 8 bytes; lane i gets element i
/// of rows 0 to 3 (so say the tests of AMD's emulator, rocjitsu). All lanes of the wave must be on.
template <Element element>
FOVEA_DEVICE U32x2 ds_read_b64_tr_b16(SharedAddress from) {
  static_assert(element != Element::f32, "ds_read_b64_tr_b16 reads bf16 or f16");
#if defined(__gfx950__)
  return bit_cast<U32x2>(TransposedRead::of((TransposedRead::LocalColumn*)from));
#else
  static_assert(element == Element::f32, "there are no transposed reads before gfx950");
#endif
}

}  // namespace fovea::cuda::ptx
