// Programs of the whole sequence, for calls on some of its rows, keys and heads: what they read is found there.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/expr.hpp"
#include "fovea/parallel.hpp"

#include "parallel/engine/memory.hpp"

namespace fovea::parallel {

/// Where a call's tokens stand in the whole: in these ranges, one behind the other; without any, index for index.
struct Places {
  std::span<const TokenRange> ranges{};  // the plan's
  TensorView table{};                    // [tokens] i32, where there are several ranges
};

struct OwnedPlaces {
  Places places{};
  OwnedTensor table{};
};
OwnedPlaces places_of(std::span<const TokenRange> ranges, const Memory& memory);
void append_tokens(std::vector<std::int32_t>& tokens, std::span<const TokenRange> ranges);

/// The first range whose keys do not stand in fours as they do in the whole, which dropout draws for four at once; null
/// where all do.
const TokenRange* range_out_of_step(std::span<const TokenRange> ranges);

/// A call's part of the whole.
struct Part {
  Places q{}, kv{};
  std::int64_t seqlen = 0;  // of the whole
  std::int64_t first_q_head = 0, first_kv_head = 0;
};

/// A cache's part of the whole: every world_size-th page of each sequence.
struct PagesOfRank {
  int rank = 0, world_size = 1;
  std::int64_t page_size = 1;
  TensorView seqlens{};  // [batch] i32: of whole sequences

  std::int64_t rank_of(std::int64_t kv_idx) const { return kv_idx / page_size % world_size; }
  /// Keys of this rank among the first seqlen.
  std::int64_t own(std::int64_t seqlen) const;
};

/// The same program, whose variables say for an index of the call what they say for that place in the whole.
ScoreMod placed(const ScoreMod& score, const Part& part);
MaskMod placed(const MaskMod& mask, const Part& part);
ScoreMod placed(const ScoreMod& score, const PagesOfRank& pages);
MaskMod placed(const MaskMod& mask, const PagesOfRank& pages);

}  // namespace fovea::parallel
