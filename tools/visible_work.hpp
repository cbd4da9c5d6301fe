// How much of a problem its mask leaves, counted the way peers count flops: visible elements only.
#pragma once

#include <cstdint>

#include "fovea/attention.hpp"

namespace fovea::tools {

struct VisibleWork {
  double share = 1;  // visible elements of all seqlen_q x seqlen_kv matrices
  double flops = 0;  // 2 * num_heads_q * visible elements * (head_dim_qk + head_dim_v)
  double bytes = 0;  // q, k, v read once, out and lse written once
  // Of attention_backward, as peers count it: S, dQ and dK over head_dim_qk, dP and dV over head_dim_v, whatever is
  // computed twice; it reads what forward reads and writes, and writes as much.
  double backward_flops = 0;
  double backward_bytes = 0;
  TileCount tiles;  // of tile_q x tile_kv
};

/// Exact up to about a million elements per matrix. Above that, elements are counted by small tiles, a partial tile as
/// half.
VisibleWork visible_work(const AttentionForward& args, std::int64_t tile_q, std::int64_t tile_kv);

}  // namespace fovea::tools
