// The oracle of serving: what attention over a cache means, in fp64. Keys are gathered from wherever
// they lie, one sequence after the other, and then attention is that of softmax.hpp.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/kv_cache.hpp"

namespace fovea::reference {

/// Row-major fp64, whatever the strides.
struct DecodeResult {
  std::vector<double> out;  // [batch, seqlen_q, num_heads_q, head_dim_v], packed [total_q, ...]
  std::vector<double> lse;  // [batch, num_heads_q, seqlen_q], packed [num_heads_q, total_q]
  /// What is appended, in the shapes of append: k rotated, neither rounded yet.
  std::vector<double> appended_k, appended_v;
};

/// Of calls without a recipe: with one they are attention_forward at the numbers that the cache holds, in q's dtype.
/// Reads the cache as it is before the append, writes nothing. New keys and values are seen as the
/// cache will hold them, rounded to its dtypes; rotated queries are not rounded.
DecodeResult attention_decode(const AttentionDecode& args);

/// A head's row with every pair turned by the angle that cos and sin hold for this position.
std::vector<double> rotated(std::span<const double> row, const Rotary& rotary,
                            std::int64_t position);

}  // namespace fovea::reference
