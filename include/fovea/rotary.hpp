// Rotary position embedding of rows by themselves: queries and keys before attention_forward, and their gradients.
// attention_decode and append_to_cache turn theirs by themselves (kv_cache.hpp).
//
// Call path: this header -> src/plan/rotary.cpp (check) -> src/cpu/rotary.cpp or src/cuda/rotary/rotary.cpp.
#pragma once

#include "fovea/export.hpp"
#include "fovea/runtime.hpp"
#include "fovea/tensor.hpp"

namespace fovea {

/// Everything that rotary takes. See rotary for shapes.
struct ApplyRotary {
  FloatView x{};
  FloatView out{};  // written; may be x: in place
  FloatView cos{};
  FloatView sin{};
  bool is_interleaved = false;  // pairs (2j, 2j + 1); false: pairs (j, j + rotary_dim / 2)
  bool is_conjugate = false;    // turns back, by -sin: the gradient of x from that of out
  IndexView positions{};
  IndexView offsets{};
  IndexView cu_seqlens{};

  Executor* executor = nullptr;  // cpu; default: the runtime's pool
  void* stream = nullptr;        // cuda: the CUstream of the call; null: the default stream
};

/// Pair j of each head turns by the angle of its row's position: (x, y) -> (x cos - y sin, x sin + y cos).
///
/// x          [batch, seqlen, num_heads, head_dim], packed [total, num_heads, head_dim]; f32, f16, bf16, any strides
/// out        as x, any of these dtypes; x itself, or memory of its own
/// cos, sin   [max_positions, rotary_dim / 2] f32, f16, bf16; rotary_dim <= head_dim, at most 512: the rest is copied
/// positions  [batch, seqlen], packed [total], i32 or i64, optional: the position of each row
/// offsets    [batch] i32 or i64, optional: the position of each sequence's first row; default: 0
/// cu_seqlens [batch + 1] i32 or i64: makes x and out packed; rows after the last sequence are copied
///
/// Accuracy turned in f32, rounded once.
/// Work     reads and writes each element once; angles are read once for each row.
/// Device   that of the tensors, all of them. On cuda the call is enqueued on args.stream; what positions hold is not
///          checked there: rows of a negative one are copied, beyond the last angles rows take those.
/// Throws   InvalidArgument before anything is written: shapes, a position without angles, positions beside offsets,
///          out that overlaps an input other than as said. Unsupported with the reason.
/// Source   Su et al. 2021 (RoFormer).
FOVEA_EXPORT void rotary(const ApplyRotary& args);
FOVEA_EXPORT void rotary(const ApplyRotary& args, Runtime& runtime);

}  // namespace fovea
