// What every operation reads: rows of a tensor, the sequences of a call, the captured data of a program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fovea/attention.hpp"

#include "core/ceil_div.hpp"
#include "core/philox.hpp"
#include "cpu/kernels/panel.hpp"
#include "mask/block_map.hpp"
#include "problem/forward.hpp"

namespace fovea::cpu {

/// A tensor of rows, dense or packed: [batch,] row, head, element.
struct Rows {
  std::byte* data = nullptr;
  Dtype dtype = Dtype::f32;
  std::int64_t batch_stride = 0, row_stride = 0, head_stride = 0, col_stride = 0;

  explicit Rows(const TensorView& view)
      : data(const_cast<std::byte*>(static_cast<const std::byte*>(view.data()))),
        dtype(view.dtype()),
        batch_stride(view.rank() == 4 ? view.stride(0) : 0),
        row_stride(view.stride(view.rank() - 3)),
        head_stride(view.stride(view.rank() - 2)),
        col_stride(view.stride(view.rank() - 1)) {}

  std::byte* at(std::int64_t batch, std::int64_t row, std::int64_t head) const {
    const std::int64_t offset = batch * batch_stride + row * row_stride + head * head_stride;
    return data + offset * static_cast<std::int64_t>(size_bytes(dtype));
  }
};

/// One sequence of the batch; for packed tensors batch_offset is 0 and the rows start at q_begin, kv_begin.
struct Sequence {
  std::int64_t index = 0;
  std::int64_t batch_offset = 0;
  std::int64_t q_begin = 0, kv_begin = 0;
  std::int64_t seqlen_q = 0, seqlen_kv = 0;
  std::int64_t slot = 0;  // of k and v: batch_offset, or where a cache keeps the sequence
};

inline Sequence sequence_at(const ForwardProblem& problem, const AttentionForward& args,
                            std::int64_t index) {
  if (!problem.is_varlen) return {index, index, 0, 0, args.q.size(1), args.k.size(1), index};
  const std::int64_t q_begin = cu_seqlen(args.cu_seqlens_q, index);
  const std::int64_t kv_begin = cu_seqlen(args.cu_seqlens_kv, index);
  return {index,
          0,
          q_begin,
          kv_begin,
          cu_seqlen(args.cu_seqlens_q, index + 1) - q_begin,
          cu_seqlen(args.cu_seqlens_kv, index + 1) - kv_begin};
}

/// The block map's question for `count` rows given by q_idx and q_head, in order of heads.
inline mask::TileRow tile_row(const Sequence& sequence, std::int64_t kv_head,
                              const std::int32_t* q_idx, const std::int32_t* q_head,
                              std::int64_t count) {
  const bool is_one_head = q_head[0] == q_head[count - 1];
  return {.batch = sequence.index,
          .q_head_begin = q_head[0],
          .q_head_end = q_head[count - 1] + 1,
          .kv_head = kv_head,
          .q_begin = is_one_head ? q_idx[0] : 0,
          .q_end = is_one_head ? q_idx[count - 1] + 1 : sequence.seqlen_q,
          .seqlen_q = sequence.seqlen_q,
          .seqlen_kv = sequence.seqlen_kv};
}

/// Offset of a row's element in a tensor of the shape of lse: [batch, heads, rows], packed [heads, rows].
inline std::int64_t row_value_offset(const TensorView& view, const Sequence& sequence,
                                     std::int64_t q_idx, std::int64_t q_head) {
  if (view.rank() == 2)
    return q_head * view.stride(0) + (sequence.q_begin + q_idx) * view.stride(1);
  return sequence.index * view.stride(0) + q_head * view.stride(1) + q_idx * view.stride(2);
}

/// What all panels of a call drop; where they stand is filled in per tile.
inline PanelDropout panel_dropout(const AttentionForward& args) {
  const Dropout dropout = dropout_of(args);
  if (dropout.p <= 0) return {};
  const philox::Key key = philox::dropout_key(dropout.seed, dropout.offset);
  return {.threshold = philox::drop_threshold(dropout.p),
          .keep_scale = dropout.p < 1 ? 1.0F / (1.0F - dropout.p) : 0.0F,
          .key = {key[0], key[1]},
          .places = dropout_places_of(args)};
}

/// Does a run have something to put into a plan's BlockMapper?
inline bool reads_captures(const MaskMod& mask) {
  return !mask.captures().tensors.empty() || !mask.captures().scalars.empty();
}

/// Captured data of a program in the order of its tape's slots.
struct Bindings {
  std::vector<TensorView> tensors;
  std::vector<double> scalars;

  Bindings(const Captures& captures, const std::vector<int>& tensor_slots,
           const std::vector<int>& scalar_slots) {
    for (const int i : tensor_slots)
      tensors.push_back(captures.tensors[static_cast<std::size_t>(i)].view);
    for (const int i : scalar_slots)
      scalars.push_back(captures.scalars[static_cast<std::size_t>(i)].value);
  }
};

}  // namespace fovea::cpu
