// Attention of sequences with at most kFewRows rows per key head (decode): several heads at a time, so that keys and
// values are read in the order in which they lie.
//
//   for each kv tile:
//     for each block of keys, for each head:  scores, straight from K
//     for each head:                          program, mask, softmax
//     for each block of keys, for each head:  sums, straight from V
//
// Where rows come before heads in memory, or where the heads of a page lie together, a block of all heads is one piece
// of memory. What is read one block later is fetched meanwhile. Heads never mix: how many are walked together cannot
// change a bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "cpu/attention_forward.hpp"
#include "cpu/kernels/panel.hpp"
#include "cpu/key_source.hpp"
#include "cpu/operands.hpp"
#include "cpu/workspace.hpp"
#include "mask/block_map.hpp"

namespace fovea::cpu {

/// What all items of a call share.
struct FewRowsCall {
  const ForwardProblem& problem;
  const ForwardPlan& plan;
  const PanelKernels& kernels;  // of f32 products
  const Rows& q;
  const KeySource& k;
  const KeySource& v;
  const mask::BlockMapper& mapper;
  const Bindings& score_bindings;
  const Bindings& mask_bindings;
  const PanelDropout& dropout;
  bool is_prescaled = false;
  float unit = 1;  // what raw scores are multiplied by in the softmax
};

/// All rows of some heads against kv tiles [tile_begin, tile_end).
struct FewRowsItem {
  Sequence sequence;
  std::int64_t head_begin = 0, head_end = 0;  // of k and v
  std::int64_t tile_begin = 0, tile_end = 0;
};

/// Heads that are best walked together.
std::int64_t heads_at_once(const KeySource& k, std::int64_t num_heads_kv);

/// Called with the kv head, the row and its state (row_state.hpp).
using EmitRow = std::function<void(std::int64_t, std::int64_t, float*)>;

void walk_few_rows(const FewRowsCall& call, const FewRowsItem& item, const WorkerScratch& scratch,
                   const FewRowsScratch& few, const PageScratch& pages, const EmitRow& emit);

}  // namespace fovea::cpu
