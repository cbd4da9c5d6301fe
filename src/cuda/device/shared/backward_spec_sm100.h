// The spec of Blackwell's backward kernel, and where things lie in its shared memory and its tensor memory. Read
// backward_params_sm90.h for what it takes at the launch.
#pragma once

#include "shared/backward_spec_sm90.h"
#include "shared/forward_spec_sm100.h"
#include "shared/types.h"

namespace fovea::cuda {

/// sm100/attention_backward: what sm90/attention_backward asks of its spec. Tiles are 128 queries, threads subtract
/// deltas, and dk and dv go to memory from where threads have them.
struct Sm100BackwardSpec : Sm90BackwardSpec {
  // dq that takes the place of dS waits until dS has been multiplied, as the ISA's text asks for. Else it is issued
  // behind that product, by the same thread: tensor cores execute in the order of issue, but no text says so.
  bool awaits_keys = false;

  bool operator==(const Sm100BackwardSpec&) const = default;
};

/// Warps of sm100/attention_backward: two groups that compute, of four each, one that adds to dq, and four that serve
/// them.
inline constexpr std::int32_t kSm100BackwardWarps = 16;
inline constexpr std::int32_t kSm100BackwardQueries = 128;

/// Columns of tensor memory, 32 bits each. P, two to a column, lies over the scores that a group made it of; dS so over
/// dP. Of each a group has half.
struct Sm100BackwardTensorLayout {
  std::int32_t s, dp;   // of 128 keys, a column for each query
  std::int32_t dv, dk;  // of 128 keys
  std::int32_t dq;      // of 128 queries
  bool is_dq_over_ds;   // else it has columns of its own
  std::int32_t columns;
};

constexpr Sm100BackwardTensorLayout sm100_backward_tensor_layout(const Sm100BackwardSpec& spec) {
  Sm100BackwardTensorLayout at{};
  at.dp = spec.tile_q;
  at.dv = 2 * spec.tile_q;
  at.dk = at.dv + spec.head_dim_v;
  const std::int32_t end = at.dk + spec.head_dim_qk;
  at.is_dq_over_ds = end + spec.head_dim_qk > kSm100Columns;
  at.dq = at.is_dq_over_ds ? at.dp : end;
  at.columns = at.is_dq_over_ds ? end : end + spec.head_dim_qk;
  return at;
}

/// Shared memory: that of Hopper's kernel as far as the same roles read it, with one buffer of dS.
struct Sm100BackwardLayout : Sm90BackwardLayout {
  // Barriers of 8 bytes: one of each, a phase for each tile of queries; of the last two a phase in all.
  std::int32_t s_full, dp_full, p_full, dv_done, dk_done, dq_full, dq_empty, sums_full, memory_read;
  std::int32_t tensor_memory;  // where that begins
};

constexpr Sm100BackwardLayout sm100_backward_layout(const Sm100BackwardSpec& spec) {
  SharedRoom room;
  Sm100BackwardLayout at{};
  const std::int32_t bytes = element_bytes(spec.element);
  at.k = room.take(kSm90BackwardKeys * bytes * spec.head_dim_qk);
  at.v = room.take(kSm90BackwardKeys * bytes * spec.head_dim_v);
  at.q = room.take(spec.stages * spec.tile_q * bytes * spec.head_dim_qk);
  at.dout = room.take(spec.stages * spec.tile_q * bytes * spec.head_dim_v);
  at.ds = room.take(kSm90BackwardKeys * bytes * spec.tile_q);
  at.delta = room.take(spec.stages * spec.tile_q * delta_bytes(spec));
  at.log_sum = room.take(spec.stages * spec.tile_q * 4);
  at.k_full = room.take(8);
  at.v_full = room.take(8);
  at.q_full = room.take(8 * spec.stages);
  at.dout_full = room.take(8 * spec.stages);
  at.stage_empty = room.take(8 * spec.stages);
  at.ds_full = room.take(8);
  at.s_full = room.take(8);
  at.dp_full = room.take(8);
  at.p_full = room.take(8);
  at.dv_done = room.take(8);
  at.dk_done = room.take(8);
  at.dq_full = room.take(8);
  at.dq_empty = room.take(8);
  at.sums_full = room.take(8);
  at.memory_read = room.take(8);
  at.turn = room.take(8 * kSm90BackwardTurns);
  at.added = room.take(8 * kSm90BackwardTurns);
  at.passed = room.take(8 * kSm90BackwardTurns);
  at.words = room.take(8 * kSm90BackwardWords);
  at.num_watched = room.take(4);
  at.last_tiles = room.take(4 * 2);
  at.tensor_memory = room.take(4);
  room.align(16);
  at.work = room.take(16 * 2);
  at.bytes = room.end;
  return at;
}

}  // namespace fovea::cuda
