#include "cpu/backward/dq_sums.hpp"

#include <algorithm>
#include <vector>

namespace fovea::cpu {

std::int64_t DqSums::stride() const {
  const TensorView& dq = call_.args.dq;
  return is_apart() ? 1 : dq.stride(dq.rank() - 1);
}

float* DqSums::row(const Sequence& s, const RowOfHead& row, std::int64_t chunk) const {
  if (!is_apart()) {
    return reinterpret_cast<float*>(
        Rows(call_.args.dq).at(s.batch_offset, s.q_begin + row.q_idx, row.q_head));
  }
  const std::int64_t copy = call_.schedule.is_side_by_side ? chunk : 0;
  const std::int64_t rows = call_.f.total_q * call_.f.num_heads_q;
  return call_.memory.dq_sums + (copy * rows + call_.row_id(s, row)) * call_.f.head_dim_qk;
}

void DqSums::clear_row(const Sequence& s, const RowOfHead& at) const {
  if (!call_.problem.wants_dq() || call_.schedule.is_side_by_side) return;
  float* to = row(s, at, 0);
  for (std::int64_t d = 0; d < call_.f.head_dim_qk; ++d) to[d * stride()] = 0;
}

void DqSums::clear_item(const BackwardItem& item) const {
  if (!call_.problem.wants_dq() || !call_.schedule.is_side_by_side) return;
  const RowRange rows{item.sequence, item.kv_head, 0, call_.num_rows(item.sequence)};
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    std::fill_n(row(item.sequence, call_.row_at(rows, i), item.chunk), call_.f.head_dim_qk, 0.0F);
  }
}

void DqSums::write(const RowRange& rows) const {
  const Sequence& s = rows.sequence;
  const Rows to(call_.args.dq);
  const std::int64_t chunks = call_.schedule.is_side_by_side ? num_chunks(call_, s) : 1;
  std::vector<float> sum(static_cast<std::size_t>(call_.f.head_dim_qk));
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    const RowOfHead at = call_.row_at(rows, i);
    std::ranges::fill(sum, 0.0F);
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      const float* part = row(s, at, chunk);
      for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += part[d];
    }
    call_.kernels.store_row(sum.data(), 1.0F, call_.f.head_dim_qk, to.dtype, to.col_stride,
                            to.at(s.batch_offset, s.q_begin + at.q_idx, at.q_head));
  }
}

}  // namespace fovea::cpu
