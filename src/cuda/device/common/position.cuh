// Where a score stands, and which scores a tile holds: what programs are asked about. Read program.cuh for what printed
// programs call, tile_walk.cuh for how a kernel finds the tiles of a row.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda {

/// One score. Positions count inside one sequence, in every layout: never offsets into a packed tensor or a cache.
struct Position {
  std::int32_t batch, q_head, kv_head, q_idx, kv_idx, seqlen_q, seqlen_kv;
};

/// The scores of a tile that exist: half-open ranges, all rows of all q heads that share the tile, keys of one kv head.
struct TileSpan {
  std::int32_t batch;
  std::int32_t q_head_begin, q_head_end, kv_head;
  std::int32_t q_begin, q_end;
  std::int32_t kv_begin, kv_end;
  std::int32_t seqlen_q, seqlen_kv;
};

/// What is proven of a tile's mask. A full tile needs no mask; its score program still runs, and may still yield -inf.
enum class TileKind : std::uint8_t { empty, partial, full };

}  // namespace fovea::cuda
