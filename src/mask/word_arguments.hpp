// Checks of the words' arguments, said in one voice. Read mask_words.cpp and score_words.cpp next.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "fovea/expr.hpp"
#include "fovea/tensor.hpp"

namespace fovea::mask {

/// "documents: segments_q has rank 3; expected 2, [batch, seqlen]"
struct TensorRule {
  std::string_view word;
  std::string_view argument;
  std::initializer_list<int> ranks;
  std::initializer_list<Dtype> dtypes;
  std::string_view shape;  // in words, for the hint
};

/// Throws InvalidArgument unless the view has one of the rule's ranks and dtypes.
void check_tensor(const TensorView& view, const TensorRule& rule);

/// Throws InvalidArgument unless value >= least.
void check_at_least(std::string_view word, std::string_view argument, std::int64_t value,
                    std::int64_t least, std::string_view hint = "");

/// A tensor of a word, whose extents each call is asked for.
Captured capture_for(std::string_view word, std::string name, const TensorView& view,
                     std::initializer_list<Axis> axes);

/// What the last two dimensions of a tensor are indexed by.
struct PairIndex {
  Expr q = arguments().q_idx, kv = arguments().kv_idx;
  Axis axis_q = Axis::q_idx, axis_kv = Axis::kv_idx;
};
/// The element of a [q, kv], [heads, q, kv] or [batch, heads, q, kv] tensor for this score; extents of 1 load index 0.
Expr load_broadcast(std::string_view word, std::string name, const TensorView& view,
                    const PairIndex& pair = {});

/// A distance between positions that no sequence reaches; longer ones are cut to it, so that a position plus or minus a
/// distance stays inside the 32 bits of a program's int.
inline constexpr std::int64_t kLongestDistance = std::int64_t{1} << 30;

}  // namespace fovea::mask
