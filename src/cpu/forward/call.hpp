// What all work items of a call of attention_forward read: its arguments, the kernels of its plan, the captured data
// of its programs. Read schedule.hpp next.
#pragma once

#include <cstdint>
#include <optional>

#include "cpu/attention_forward.hpp"
#include "cpu/kernels/panel.hpp"
#include "cpu/key_source.hpp"
#include "cpu/operands.hpp"
#include "mask/block_map.hpp"

namespace fovea::cpu {

struct ForwardCall {
  ForwardCall(const ForwardProblem& problem, const ForwardPlan& plan, const AttentionForward& args,
              const GrownCache* cache);
  ForwardCall(const ForwardCall&) = delete;
  ForwardCall& operator=(const ForwardCall&) = delete;

  const ForwardProblem& problem;
  const ForwardPlan& plan;
  const ForwardSpec& spec;
  const AttentionForward& args;
  const GrownCache* const cache;      // null: keys and values are the arguments'
  const PanelKernels& kernels;        // of the plan
  const PanelKernels& plain_kernels;  // of f32 products, on the same panels
  const Rows q;
  const KeySource k, v;
  const Rows out;
  const Bindings score_bindings, mask_bindings;
  const PanelDropout dropout;
  // Without a program the softmax works on raw scores and folds the scale into its exponent, where it can.
  const bool is_prescaled;
  const float unit;  // what scores are multiplied by in the softmax

  const mask::BlockMapper& mapper() const { return own_mapper_ ? *own_mapper_ : *plan.mapper; }
  Sequence sequence(std::int64_t index) const;

  /// Keys or values of one tile.
  TileSource key_tile(const Sequence& sequence, std::int64_t kv_head, std::int64_t tile,
                      const RowList& list) const {
    return tile_of(k, sequence, kv_head, tile, problem.head_dim_qk, list);
  }
  TileSource value_tile(const Sequence& sequence, std::int64_t kv_head, std::int64_t tile,
                        const RowList& list) const {
    return tile_of(v, sequence, kv_head, tile, problem.head_dim_v, list);
  }

 private:
  TileSource tile_of(const KeySource& source, const Sequence& sequence, std::int64_t kv_head,
                     std::int64_t tile, std::int64_t head_dim, const RowList& list) const;

  // Of this call's captures, where the mask reads some.
  std::optional<mask::BlockMapper> own_mapper_;
};

}  // namespace fovea::cpu
