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

#include <cstdint>

#include "cpu/forward/call.hpp"
#include "cpu/forward/row_panel.hpp"
#include "cpu/forward/schedule.hpp"
#include "cpu/forward/workspace.hpp"
#include "cpu/key_source.hpp"

namespace fovea::cpu {

/// Heads that are best walked together.
std::int64_t heads_at_once(const KeySource& k, std::int64_t num_heads_kv);

/// All rows of the item's heads against its tiles.
void walk_few_rows(const ForwardCall& call, const ForwardItem& item, const ForwardScratch& scratch,
                   const EmitState& emit);

}  // namespace fovea::cpu
