// Probabilities in fp64, written out.
#pragma once

#include <cstdint>
#include <vector>

#include "fovea/attention.hpp"

namespace fovea::reference {

/// Row-major [num_sequences, num_heads_q, rows, columns]; of sequences that are shorter 0 behind the end.
struct Probabilities {
  std::vector<double> values;       // of a key that is dropped: the negative probability
  std::vector<bool> is_dropped;     // false where a key is hidden
  std::vector<double> final_score;  // 0 where a key is hidden
};

/// Reads what attention_forward reads but v.
Probabilities attention_probabilities(const AttentionForward& args, std::int64_t rows,
                                      std::int64_t columns);

}  // namespace fovea::reference
