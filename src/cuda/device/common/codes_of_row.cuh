// Rows of a cache of codes key by key, for who computes a row again (careful_row.cuh).
#pragma once

#include "common/codes.cuh"
#include "common/sequence.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/element.h"
#include "shared/forward_params.h"
#include "shared/tensor_params.h"

namespace fovea::cuda {

/// Keys and values as floats. Each lane has a pair of every 64 columns.
template <Codes k_codes, Codes v_codes>
struct CodesOfRow {
  const ForwardParams& p;  // k and v: codes, strides in bytes
  const ScaleParam &k_scale, &v_scale;
  const Work& work;

  template <int count>
  FOVEA_DEVICE_MEMBER void load_key(float (&elements)[count], const KvPlace& place) const {
    load<k_codes>(elements, p.k, k_scale, place);
  }
  template <int count>
  FOVEA_DEVICE_MEMBER void load_value(float (&elements)[count], const KvPlace& place) const {
    load<v_codes>(elements, p.v, v_scale, place);
  }

 private:
  template <Codes codes, int count>
  FOVEA_DEVICE_MEMBER void load(float (&elements)[count], const BshdParam& t,
                                const ScaleParam& scales, const KvPlace& place) const {
    const float scale =
        ptx::ld_global(scale_at(scales, work.sequence.idx, place.batch, place.row, work.kv_head));
    const auto* const row = static_cast<const std::uint8_t*>(t.data) + place.in(t, work.kv_head);
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
      const std::uint32_t pair = ptx::ld_global(
          reinterpret_cast<const std::uint16_t*>(row + 64 * i + 2 * ptx::lane_idx()));
      const FourNumbers numbers = numbers_of<codes>(pair, scale);
      elements[2 * i] = numbers.x[0];
      elements[2 * i + 1] = numbers.x[1];
    }
  }
};

}  // namespace fovea::cuda
