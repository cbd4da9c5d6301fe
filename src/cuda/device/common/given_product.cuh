// The product of a row of Q and a key as they are given, for pairs of which one holds NaN or infinity: such rows have
// no codes.
#pragma once

#include "common/element.cuh"
#include "common/row_view.cuh"
#include "common/sequence.cuh"
#include "ptx/math.cuh"
#include "shared/element.h"
#include "shared/tensor_params.h"

namespace fovea::cuda {

/// q · k, of the last ones where they do not exist.
template <auto spec>
FOVEA_DEVICE float given_product(const RowView<spec>& row, std::int32_t key, const BshdParam& q,
                                 const BshdParam& k, std::int32_t head_dim) {
  const Sequence& sequence = row.work.sequence;
  const std::int32_t q_idx = least(row.q_idx, sequence.seqlen_q - 1);
  const std::int32_t kv_idx = least(key, sequence.seqlen_kv - 1);
  const std::int64_t q_at = sequence.q_batch * q.batch_stride + row.q_head * q.head_stride +
                            (sequence.q_row + q_idx) * q.row_stride;
  const std::int64_t k_at = sequence.kv_batch * k.batch_stride + row.work.kv_head * k.head_stride +
                            (sequence.kv_row + kv_idx) * k.row_stride;
  const auto* q_row = static_cast<const std::uint16_t*>(q.data) + q_at;
  const auto* k_row = static_cast<const std::uint16_t*>(k.data) + k_at;
  float sum = 0;
#pragma unroll 1
  for (std::int32_t d = 0; d < head_dim; ++d) {
    sum = ptx::fma_rn(load_element(q_row, spec.element, 0), load_element(k_row, spec.element, 0),
                      sum);
    q_row += q.col_stride;
    k_row += k.col_stride;
  }
  return sum;
}

}  // namespace fovea::cuda
