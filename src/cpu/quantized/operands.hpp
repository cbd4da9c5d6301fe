// q, k and v of a call as codes and scales, in workspace. Codes are kept in 16 bits that hold them exactly, so that the
// f32 kernels multiply them as they are: sums of int8 products below 2^24 are exact. Read attention_quantized.hpp next.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fovea/attention.hpp"

#include "cpu/carver.hpp"
#include "cpu/operands.hpp"
#include "problem/forward.hpp"

namespace fovea::cpu {

/// Of q and k: rows of all sequences, dense and packed alike, each with its heads.
struct RowCodes {
  bfloat16* codes = nullptr;  // [rows][heads][head_dim]
  float* scale = nullptr;     // [rows][heads]: a code times this is the number
  std::uint8_t* is_plain =
      nullptr;  // [rows][heads]: holds a value that is not finite, and is not rounded
};

struct QuantizedOperands {
  RowCodes q, k;  // codes are null where quant.qk is none
  float* q_shift =
      nullptr;  // [rows][heads]: what scores of the row have beside codes and mean of q, from k's mean
  float* q_mean =
      nullptr;  // [rows][heads][head_dim_qk] in first rows of blocks; null without smooth_q
  float* k_mean = nullptr;  // [num_sequences][num_heads_kv][head_dim_qk]
  std::uint16_t* v =
      nullptr;  // [rows][num_heads_kv][head_dim_v] in v_dtype; null where quant.pv is none
  Dtype v_dtype = Dtype::bf16;  // f16 where that is the format
  float* v_scale = nullptr;     // [tiles][num_heads_kv][head_dim_v]
  float* v_mean = nullptr;      // [num_sequences][num_heads_kv][head_dim_v]

  static QuantizedOperands carve(Carver& carver, const ForwardProblem& problem);
  void carve_queries(Carver& carver, const ForwardProblem& problem);
  void carve_keys(Carver& carver, const ForwardProblem& problem);
  void carve_values(Carver& carver, const ForwardProblem& problem);

  /// Of the block whose first row this is.
  float* q_mean_of(std::size_t first_row, const ForwardProblem& problem) const {
    return q_mean + first_row * static_cast<std::size_t>(problem.head_dim_qk);
  }
};

/// A sequence as operands number it: rows of q and k, and tiles of its keys.
struct OperandRows {
  std::int64_t q = 0, kv = 0;  // the first row
  std::int64_t tile = 0;       // the first tile
};
OperandRows operand_rows(const ForwardProblem& problem, const Sequence& sequence);

/// Of one sequence and head.
void quantize_keys(const ForwardProblem& problem, const AttentionForward& args,
                   const Sequence& sequence, std::int64_t kv_head, const QuantizedOperands& to);
void quantize_values(const ForwardProblem& problem, const AttentionForward& args,
                     const Sequence& sequence, std::int64_t kv_head, const QuantizedOperands& to);
/// Codes, scales and means of blocks alone.
void round_queries(const ForwardProblem& problem, const AttentionForward& args,
                   const Sequence& sequence, std::int64_t q_head, const QuantizedOperands& to);
/// q_shift too: reads the mean of its keys.
void quantize_queries(const ForwardProblem& problem, const AttentionForward& args,
                      const Sequence& sequence, std::int64_t q_head, const QuantizedOperands& to);

}  // namespace fovea::cpu
