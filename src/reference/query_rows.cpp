#include "reference/query_rows.hpp"

#include "reference/element.hpp"

namespace fovea::reference {

namespace {

bool is_packed(const AttentionForward& args) { return args.q.rank() == 3; }

/// A batch entry of a dense tensor, or the rows [begin, begin + seqlen) of a packed one.
struct Sequence {
  std::int64_t batch = 0;
  std::int64_t q_begin = 0, seqlen_q = 0;
  std::int64_t kv_begin = 0, seqlen_kv = 0;
};

std::vector<Sequence> sequences_of(const AttentionForward& args) {
  std::vector<Sequence> sequences;
  if (!is_packed(args)) {
    for (std::int64_t batch = 0; batch < args.q.size(0); ++batch) {
      sequences.push_back(
          {.batch = batch, .seqlen_q = args.q.size(1), .seqlen_kv = args.k.size(1)});
    }
    return sequences;
  }
  const auto entry = [](const TensorView& cu_seqlens, std::int64_t i) {
    return static_cast<std::int64_t>(element(cu_seqlens, i * cu_seqlens.stride(0)));
  };
  for (std::int64_t i = 0; i + 1 < args.cu_seqlens_q.size(0); ++i) {
    const std::int64_t q_begin = entry(args.cu_seqlens_q, i);
    const std::int64_t kv_begin = entry(args.cu_seqlens_kv, i);
    sequences.push_back({.batch = i,
                         .q_begin = q_begin,
                         .seqlen_q = entry(args.cu_seqlens_q, i + 1) - q_begin,
                         .kv_begin = kv_begin,
                         .seqlen_kv = entry(args.cu_seqlens_kv, i + 1) - kv_begin});
  }
  return sequences;
}

}  // namespace

std::vector<QueryRow> query_rows(const AttentionForward& args) {
  const int heads = is_packed(args) ? 1 : 2;
  const std::int64_t num_heads_q = args.q.size(heads);
  const std::int64_t num_heads_kv = args.k.size(heads);
  const std::int64_t rows = args.q.size(heads - 1);  // of one batch entry
  std::vector<QueryRow> result;
  for (const Sequence& s : sequences_of(args)) {
    const std::int64_t batch = is_packed(args) ? 0 : s.batch;
    for (std::int64_t q_head = 0; q_head < num_heads_q; ++q_head) {
      const std::int64_t kv_head = q_head / (num_heads_q / num_heads_kv);
      for (std::int64_t q_idx = 0; q_idx < s.seqlen_q; ++q_idx) {
        const std::int64_t row = s.q_begin + q_idx;
        result.push_back(
            {.at = {.batch = s.batch,
                    .q_head = q_head,
                    .kv_head = kv_head,
                    .q_idx = q_idx,
                    .seqlen_q = s.seqlen_q,
                    .seqlen_kv = s.seqlen_kv},
             .query = {.batch = batch, .row = row, .head = q_head},
             .first_key = {.batch = batch, .row = s.kv_begin, .head = kv_head},
             .statistic = static_cast<std::size_t>((batch * num_heads_q + q_head) * rows + row)});
      }
    }
  }
  return result;
}

std::size_t num_statistics(const AttentionForward& args) {
  std::int64_t count = 1;
  for (int dim = 0; dim + 1 < args.q.rank(); ++dim) count *= args.q.size(dim);
  return static_cast<std::size_t>(count);
}

std::size_t num_heads_q(const AttentionForward& args) {
  return static_cast<std::size_t>(args.q.size(args.q.rank() - 2));
}

TensorSpec out_spec(const AttentionForward& args) {
  TensorSpec spec = args.q.spec();
  spec.shape[static_cast<std::size_t>(spec.rank) - 1] = args.v.size(args.v.rank() - 1);
  return spec;
}

}  // namespace fovea::reference
