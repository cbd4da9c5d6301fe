// Scales of a cache of codes on their way into shared memory, beside the box whose keys they belong to: a float at a
// time, for those of one head are seldom neighbours. Read load.cuh for who asks for them.
#pragma once

#include "common/codes.cuh"
#include "common/sequence.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "shared/tensor_params.h"
#include "sm90/decode/cta.cuh"

namespace fovea::cuda::sm90::decoding {

/// Of the sequence and kv head that `work` is.
template <Sm90DecodeSpec spec>
class ScalesOfHead {
  using L = Layout<spec>;

 public:
  FOVEA_DEVICE_MEMBER ScalesOfHead(const Cta<spec>& cta, const Work& work)
      : cta_(cta),
        keys_(scale_at(cta.p.k_scale, work.sequence.idx, 0, 0, work.kv_head)),
        values_(scale_at(cta.p.v_scale, work.sequence.idx, 0, 0, work.kv_head)) {}

  /// Of key `key` of a box, which lies at `place`, and of its value.
  FOVEA_DEVICE_MEMBER void load(int stage, int key, const KvPlace& place) const {
    ptx::cp_async_4(cta_.key_scales_at(stage, key), at(keys_, cta_.p.k_scale, place), 4);
    ptx::cp_async_4(cta_.value_scales_at(stage, key), at(values_, cta_.p.v_scale, place), 4);
  }

  /// The box is full when what this lane has asked for has come, too.
  FOVEA_DEVICE_MEMBER void arrive(int stage) const {
    ptx::cp_async_mbarrier_arrive_noinc(cta_.barrier(L::kAt.full, stage));
  }

 private:
  FOVEA_DEVICE_MEMBER static const float* at(const float* first, const ScaleParam& scale,
                                             const KvPlace& place) {
    return first + (place.batch * scale.slot_stride + place.row * scale.row_stride);
  }

  const Cta<spec>& cta_;
  const float* const keys_;
  const float* const values_;
};

}  // namespace fovea::cuda::sm90::decoding
