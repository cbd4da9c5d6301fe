// What all work items of a call of attention_backward read: its arguments, the kernels of its plan, the captured data
// of its programs, and how rows and keys are found. Read schedule.hpp next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cpu/attention_backward.hpp"
#include "cpu/backward/workspace.hpp"
#include "cpu/kernels/gradient.hpp"
#include "cpu/operands.hpp"
#include "mask/block_map.hpp"

namespace fovea::cpu {

struct RowOfHead {
  std::int64_t q_idx = 0, q_head = 0;
};

/// Rows [begin, end) of one kv head. Row r is query r % seqlen_q of head kv_head * group + r / seqlen_q.
struct RowRange {
  Sequence sequence;
  std::int64_t kv_head = 0;
  std::int64_t begin = 0, end = 0;

  std::int64_t count() const { return end - begin; }
};

struct BackwardCall {
  BackwardCall(const GradientProblem& problem, const BackwardPlan& plan,
               const AttentionBackward& args, const BackwardMemory& memory);
  BackwardCall(const BackwardCall&) = delete;
  BackwardCall& operator=(const BackwardCall&) = delete;

  const GradientProblem& problem;
  const ForwardProblem& f;
  const BackwardPlan& plan;
  const BackwardSpec& spec;
  const BackwardSchedule& schedule;
  const AttentionBackward& args;
  const AttentionForward& forward;
  const BackwardMemory& memory;
  const PanelKernels& kernels;
  const GradientKernels& gradient;
  const Rows q, k, v, out, dout;
  const Bindings score_bindings, mask_bindings, derivative_bindings;
  const PanelDropout dropout;
  const bool is_prescaled;  // else the scale is left to the softmax
  const bool wants_score_gradients;

  const mask::BlockMapper& mapper() const { return own_mapper_ ? *own_mapper_ : *plan.mapper; }

  Sequence sequence(std::int64_t index) const { return sequence_at(f, forward, index); }
  /// Of one kv head.
  std::int64_t num_rows(const Sequence& s) const {
    return f.num_heads_q == 0 ? 0 : f.group * s.seqlen_q;
  }
  RowOfHead row_at(const RowRange& rows, std::int64_t index) const {
    return {index % rows.sequence.seqlen_q,
            rows.kv_head * f.group + index / rows.sequence.seqlen_q};
  }
  /// Where a row stands in arrays of rows: see BackwardMemory.
  std::int64_t row_id(const Sequence& s, const RowOfHead& row) const;
  float row_value(const TensorView& view, const Sequence& s, const RowOfHead& row) const {
    return static_cast<const float*>(view.data())[row_value_offset(view, s, row.q_idx, row.q_head)];
  }
  const std::byte* row_of(const Rows& rows, const Sequence& s, const RowOfHead& row) const {
    return rows.at(s.batch_offset, s.q_begin + row.q_idx, row.q_head);
  }
  double dlse_of(const Sequence& s, const RowOfHead& row) const {
    return args.dlse ? row_value(args.dlse, s, row) : 0;
  }
  double sink_of(std::int64_t q_head) const;

  /// Keys [begin, end) of a sequence and head, of k or v.
  TileSource tile_of(const Rows& rows, const Sequence& s, std::int64_t kv_head, std::int64_t begin,
                     std::int64_t end, std::int64_t head_dim) const;
  /// Ready for `scores`. Rows that lie apart are copied: with every row on a page of its own, the panels of a chunk
  /// would pay for page walks again and again.
  KeyTile load_rows(const TileSource& source, std::byte* buffer) const;

 private:
  // Of this call's captures, where the mask reads some.
  std::optional<mask::BlockMapper> own_mapper_;
};

}  // namespace fovea::cpu
