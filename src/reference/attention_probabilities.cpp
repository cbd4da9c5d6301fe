#include "reference/attention_probabilities.hpp"

#include "reference/head_rows.hpp"
#include "reference/query_rows.hpp"
#include "reference/softmax.hpp"

namespace fovea::reference {

Probabilities attention_probabilities(const AttentionForward& args, std::int64_t rows,
                                      std::int64_t columns) {
  const HeadRows q(args.q);
  const HeadRows k(args.k);
  const std::int64_t num_sequences =
      args.cu_seqlens_q ? args.cu_seqlens_q.size(0) - 1 : args.q.size(0);
  const auto heads = static_cast<std::int64_t>(num_heads_q(args));
  const auto count = static_cast<std::size_t>(num_sequences * heads * rows * columns);
  Probabilities result{std::vector<double>(count), std::vector<bool>(count),
                       std::vector<double>(count)};
  Softmax softmax(args);
  for (const QueryRow& row : query_rows(args)) {
    const std::int64_t first =
        ((row.at.batch * heads + row.at.q_head) * rows + row.at.q_idx) * columns;
    for (const VisibleKey& key : softmax(row, q[row.query], k).keys) {
      const auto at = static_cast<std::size_t>(first + key.at.kv_idx);
      result.is_dropped[at] = key.kept == 0;
      result.values[at] = key.kept == 0 ? -key.probability : key.probability;
      result.final_score[at] = key.score;
    }
  }
  return result;
}

}  // namespace fovea::reference
