// q, k and v of a call as codes and scales, in workspace. Codes that are multiplied as such are bytes in the layouts of
// codes.hpp; others are kept in 16 bits that hold them exactly (those of e2m1 with the scales of their groups), which
// the kernels of panels multiply as numbers: sums of int8 products below 2^24 are exact in f32. Read
// attention_quantized.hpp next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fovea/attention.hpp"

#include "cpu/carver.hpp"
#include "cpu/kernels/codes.hpp"
#include "cpu/operands.hpp"
#include "problem/forward.hpp"

namespace fovea::cpu {

/// Which products multiply codes of eight bits.
struct ByteProducts {
  bool qk = false, pv = false;
  bool operator==(const ByteProducts&) const = default;
};

/// Of q and k: rows of all sequences, dense and packed alike, head by head.
struct RowCodes {
  std::int64_t num_rows = 0;
  std::uint8_t* bytes = nullptr;  // [heads][rows][pitch_of(head_dim)]: s8 of q, code + 128 of k
  std::uint16_t* wide = nullptr;  // [heads][rows][head_dim] bf16; null where bytes are not
  float* scale = nullptr;         // [heads][rows]: a code times this is the number
  std::uint8_t* is_plain =
      nullptr;  // [heads][rows]: holds a value that is not finite, and is not rounded

  std::size_t at(std::int64_t head, std::int64_t row) const {
    return static_cast<std::size_t>(head * num_rows + row);
  }
};

struct QuantizedOperands {
  RowCodes q, k;  // null where quant.qk is none
  float* q_shift =
      nullptr;  // [heads][rows]: what scores of the row have beside codes and mean of q, from k's mean
  float* q_mean =
      nullptr;  // [heads][rows][head_dim_qk] in first rows of blocks; null without smooth_q
  float* k_mean = nullptr;  // [num_sequences][num_heads_kv][head_dim_qk]
  std::int64_t num_kv_rows = 0;
  std::uint8_t* v_bytes = nullptr;  // [heads][tiles][value_rows(head_dim_v)][pitch_of(block_kv)] s8
  std::uint16_t* v_wide =
      nullptr;                  // [heads][rows][head_dim_v] in v_dtype; null where bytes are not
  Dtype v_dtype = Dtype::bf16;  // f16 where that is the format
  float* v_scale = nullptr;     // [tiles][num_heads_kv][head_dim_v]
  float* v_mean = nullptr;      // [num_sequences][num_heads_kv][head_dim_v]
  // [tiles][num_heads_kv]: keys, or values, of the tile are not all finite
  std::uint8_t* has_plain_keys = nullptr;
  std::uint8_t* has_plain_values = nullptr;

  static QuantizedOperands carve(Carver& carver, const ForwardProblem& problem,
                                 const ByteProducts& bytes);
  void carve_queries(Carver& carver, const ForwardProblem& problem, bool as_bytes);
  void carve_keys(Carver& carver, const ForwardProblem& problem, bool as_bytes);
  void carve_values(Carver& carver, const ForwardProblem& problem, bool as_bytes);

  std::uint8_t* v_tile(std::int64_t tile, std::int64_t kv_head,
                       const ForwardProblem& problem) const;
};

/// A sequence as operands number it: rows of q and k, and tiles of its keys.
struct OperandRows {
  std::int64_t q = 0, kv = 0;  // the first row
  std::int64_t tile = 0;       // the first tile
};
OperandRows operand_rows(const ForwardProblem& problem, const Sequence& sequence);

/// The passes over the operands of a call, in this order: what is known of whole sequences, then rows, a piece at a
/// time. Queries read the mean of their keys.
class OperandRounding {
 public:
  OperandRounding(const ForwardProblem& problem, const AttentionForward& args,
                  const RoundingSteps& steps, const QuantizedOperands& to)
      : f_(problem), quant_(problem.problem.quant), args_(args), steps_(steps), to_(to) {}

  /// Means, and scales that all values of a head share.
  void measure_keys(const Sequence& sequence, std::int64_t kv_head) const;
  void measure_values(const Sequence& sequence, std::int64_t kv_head) const;

  /// Pieces are whole groups of rows that share a scale; those behind the end of a sequence do nothing.
  std::int64_t num_key_pieces() const;
  std::int64_t num_query_pieces() const;
  void round_keys(const Sequence& sequence, std::int64_t kv_head, std::int64_t piece) const;
  void round_values(const Sequence& sequence, std::int64_t kv_head, std::int64_t piece) const;
  void round_queries(const Sequence& sequence, std::int64_t q_head, std::int64_t piece) const;

 private:
  /// Of block_kv keys of one sequence and head.
  struct ValueTile {
    const Sequence& sequence;
    std::int64_t kv_head = 0, index = 0, count = 0;
  };

  void load_values(const ValueTile& tile, float* values) const;
  void write_values(const ValueTile& tile, const float* values, std::span<const float> scale) const;
  void write_value_groups(const ValueTile& tile, const float* values) const;
  /// Key i of the tile, in 16 bits.
  std::uint16_t* wide_row(const ValueTile& tile, std::int64_t i) const;
  /// Row n of `count` that one head of a sequence has from `begin` on.
  struct RowAt {
    const Sequence& sequence;
    std::int64_t begin = 0, n = 0, count = 0, head = 0;
  };
  /// The row; one that comes soon is fetched.
  RowSource source(const Rows& rows, const RowAt& at, std::int64_t head_dim) const;

  const ForwardProblem& f_;
  const Quantization& quant_;
  const AttentionForward& args_;
  const RoundingSteps& steps_;
  const QuantizedOperands& to_;
};

}  // namespace fovea::cpu
