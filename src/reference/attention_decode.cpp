#include "reference/attention_decode.hpp"

#include <algorithm>
#include <array>
#include <limits>

#include "reference/element.hpp"
#include "reference/head_rows.hpp"
#include "reference/query_rows.hpp"
#include "reference/softmax.hpp"

namespace fovea::reference {

namespace {

/// Element b of a list of integers, or `otherwise` where the list is not given.
std::int64_t entry(const TensorView& list, std::int64_t b, std::int64_t otherwise) {
  return list ? static_cast<std::int64_t>(element(list, b * list.stride(0))) : otherwise;
}

double rounded_to(Dtype dtype, double value) {
  const auto single = static_cast<float>(value);
  switch (dtype) {
    case Dtype::f16:
      return static_cast<float>(float16(single));
    case Dtype::bf16:
      return static_cast<float>(bfloat16(single));
    default:
      return single;
  }
}

/// One sequence in the cache: rows [left_padding, seqlen) are its keys so far.
struct CachedSequence {
  const KvCache& cache;
  std::int64_t batch = 0;
  std::int64_t left_padding = 0, seqlen = 0;

  std::int64_t num_keys() const { return seqlen - left_padding; }

  /// Of a key in cache.k or cache.v.
  std::vector<double> row(const TensorView& rows, std::int64_t kv_idx, std::int64_t head) const {
    const std::int64_t slot_row = left_padding + kv_idx;
    std::int64_t offset = head * rows.stride(2);
    const std::int64_t page_size = rows.size(1);
    if (const TensorView& table = cache.page_table) {
      const double page =
          element(table, batch * table.stride(0) + slot_row / page_size * table.stride(1));
      offset +=
          static_cast<std::int64_t>(page) * rows.stride(0) + slot_row % page_size * rows.stride(1);
    } else if (cache.page_indptr) {
      const std::int64_t first = entry(cache.page_indptr, batch, 0);
      const std::int64_t page = entry(cache.page_indices, first + slot_row / page_size, 0);
      offset += page * rows.stride(0) + slot_row % page_size * rows.stride(1);
    } else {
      offset += entry(cache.batch_idx, batch, batch) * rows.stride(0) + slot_row * rows.stride(1);
    }
    std::vector<double> values;
    for (std::int64_t dim = 0; dim < rows.size(3); ++dim)
      values.push_back(element(rows, offset + dim * rows.stride(3)));
    return values;
  }
};

HeadRows zeros(const std::array<std::int64_t, 4>& shape) {
  return HeadRows::zeros_like(make_spec(Dtype::f32, shape));
}

class Decode {
 public:
  explicit Decode(const AttentionDecode& args)
      : args_(args),
        forward_(as_forward(args)),
        seqlen_new_(args.append.k ? args.append.k.size(1) : 0),
        softmax_(forward_),
        q_(args.q),
        out_(HeadRows::zeros_like(out_spec(forward_))),
        appended_k_(appended(args.append.k, args.cache.k)),
        appended_v_(appended(args.append.v, args.cache.v)) {}

  DecodeResult run() {
    result_.lse.assign(num_statistics(forward_), -std::numeric_limits<double>::infinity());
    for (std::int64_t b = 0; b < args_.q.size(0); ++b) {
      run_sequence({.cache = args_.cache,
                    .batch = b,
                    .left_padding = entry(args_.cache.left_padding, b, 0),
                    .seqlen = entry(args_.cache.seqlens, b, 0)});
    }
    result_.out = out_.values();
    result_.appended_k = appended_k_.values();
    result_.appended_v = appended_v_.values();
    return std::move(result_);
  }

 private:
  static AttentionForward as_forward(const AttentionDecode& args) {
    AttentionForward forward{.q = args.q, .k = args.cache.k, .v = args.cache.v};
    forward.score = args.score;
    forward.mask = args.mask;
    forward.softmax_scale = args.softmax_scale;
    forward.sinks = args.sinks;
    return forward;
  }

  static HeadRows appended(const TensorView& given, const TensorView& cached) {
    return given ? HeadRows(given) : zeros({0, 0, cached.size(2), cached.size(3)});
  }

  void run_sequence(const CachedSequence& s) {
    rotate(q_, s, {args_.q.size(1), args_.q.size(2)});
    const std::int64_t num_heads_kv = args_.cache.k.size(2);
    rotate(appended_k_, s, {seqlen_new_, num_heads_kv});
    const HeadRows k = keys(s, args_.cache.k, appended_k_);
    const HeadRows v = keys(s, args_.cache.v, appended_v_);
    const std::int64_t num_heads_q = args_.q.size(2);
    for (std::int64_t q_head = 0; q_head < num_heads_q; ++q_head) {
      for (std::int64_t q_idx = 0; q_idx < args_.q.size(1); ++q_idx) {
        const std::int64_t kv_head = q_head / (num_heads_q / num_heads_kv);
        run_row({.at = {.batch = s.batch,
                        .q_head = q_head,
                        .kv_head = kv_head,
                        .q_idx = q_idx,
                        .seqlen_q = args_.q.size(1),
                        .seqlen_kv = s.num_keys() + seqlen_new_},
                 .query = {.batch = s.batch, .row = q_idx, .head = q_head},
                 .first_key = {.batch = 0, .row = 0, .head = kv_head},
                 .statistic = static_cast<std::size_t>(
                     (s.batch * num_heads_q + q_head) * args_.q.size(1) + q_idx)},
                k, v);
      }
    }
  }

  void run_row(const QueryRow& row, const HeadRows& k, const HeadRows& v) {
    const SoftmaxRow p = softmax_(row, q_[row.query], k);
    result_.lse[row.statistic] = p.lse;
    for (const VisibleKey& key : p.keys)
      add(out_[row.query], key.probability, v[row.key(key.at.kv_idx)]);
  }

  /// Turns the sequence's rows of q or of new keys. The last of them stands at the sequence's end.
  struct Extent {
    std::int64_t seqlen = 0, num_heads = 0;
  };
  void rotate(HeadRows& rows, const CachedSequence& s, const Extent& extent) const {
    if (!args_.rotary) return;
    const TensorView& positions = args_.rotary->positions;
    for (std::int64_t i = 0; i < extent.seqlen; ++i) {
      std::int64_t position = s.num_keys() + seqlen_new_ - extent.seqlen + i;
      if (positions) {
        position = static_cast<std::int64_t>(
            element(positions, s.batch * positions.stride(0) + i * positions.stride(1)));
      }
      for (std::int64_t head = 0; head < extent.num_heads; ++head) {
        const std::span<double> row = rows[{s.batch, i, head}];
        const std::vector<double> turned = rotated(row, *args_.rotary, position);
        std::copy(turned.begin(), turned.end(), row.begin());
      }
    }
  }

  /// All keys (or values) of the sequence, those of the cache first: [1, seqlen_kv, heads, dim].
  HeadRows keys(const CachedSequence& s, const TensorView& cached, const HeadRows& added) const {
    HeadRows rows = zeros({1, s.num_keys() + seqlen_new_, cached.size(2), cached.size(3)});
    for (std::int64_t head = 0; head < cached.size(2); ++head) {
      for (std::int64_t i = 0; i < s.num_keys(); ++i)
        add(rows[{0, i, head}], 1, s.row(cached, i, head));
      for (std::int64_t i = 0; i < seqlen_new_; ++i) {
        const std::span<double> row = rows[{0, s.num_keys() + i, head}];
        add(row, 1, added[{s.batch, i, head}]);
        for (double& value : row) value = rounded_to(cached.dtype(), value);
      }
    }
    return rows;
  }

  const AttentionDecode& args_;
  AttentionForward forward_;
  std::int64_t seqlen_new_;
  Softmax softmax_;
  HeadRows q_, out_;
  HeadRows appended_k_, appended_v_;
  DecodeResult result_;
};

}  // namespace

DecodeResult attention_decode(const AttentionDecode& args) { return Decode(args).run(); }

std::vector<double> rotated(std::span<const double> row, const Rotary& rotary,
                            std::int64_t position) {
  std::vector<double> result(row.begin(), row.end());
  const std::int64_t num_pairs = rotary.cos.size(1);
  for (std::int64_t j = 0; j < num_pairs; ++j) {
    const auto first = static_cast<std::size_t>(rotary.is_interleaved ? 2 * j : j);
    const auto second = static_cast<std::size_t>(rotary.is_interleaved ? 2 * j + 1 : j + num_pairs);
    const auto at = [&](const TensorView& table) {
      return element(table, position * table.stride(0) + j * table.stride(1));
    };
    const double cos = at(rotary.cos);
    const double sin = at(rotary.sin);
    result[first] = row[first] * cos - row[second] * sin;
    result[second] = row[first] * sin + row[second] * cos;
  }
  return result;
}

}  // namespace fovea::reference
