// The rows of a call, dense and packed alike: every (sequence, query head, query) once, in order.
#pragma once

#include <cstdint>
#include <vector>

#include "fovea/attention.hpp"

#include "reference/evaluate.hpp"
#include "reference/head_rows.hpp"

namespace fovea::reference {

/// A query of one head, and where everything about it lies.
struct QueryRow {
  Position at;                // of the query; score and kv_idx are 0
  RowIndex query;             // its row in q, out and what is shaped like them
  RowIndex first_key;         // key 0 of its sequence in k, v and what is shaped like them
  std::size_t statistic = 0;  // its element in lse and what is shaped like it, row-major

  RowIndex key(std::int64_t kv_idx) const {
    return {first_key.batch, first_key.row + kv_idx, first_key.head};
  }
};

/// Rows of a packed tensor behind its last sequence are not among them.
std::vector<QueryRow> query_rows(const AttentionForward& args);

/// Elements of lse: one for every row of q.
std::size_t num_statistics(const AttentionForward& args);
std::size_t num_heads_q(const AttentionForward& args);
/// The shape of out: q with head_dim_v.
TensorSpec out_spec(const AttentionForward& args);

}  // namespace fovea::reference
