#include "reference/attention_decode.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/check.hpp"
#include "reference/element.hpp"
#include "reference/head_rows.hpp"
#include "reference/quantized.hpp"
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

/// What a cache of codes makes of a row of new tokens, each step rounded to f32 as whoever appends rounds it. `given`
/// is its scale, 0 where it has one of its own.
void round_to_codes(Dtype dtype, float given, std::span<double> row) {
  float greatest = 0;
  bool is_finite = true;
  for (const double x : row) {
    is_finite = is_finite && std::isfinite(static_cast<float>(x));
    greatest = std::max(greatest, std::abs(static_cast<float>(x)));
  }
  const float largest = dtype == Dtype::i8 ? 127 : 448;
  float scale = given != 0 ? given : std::max(greatest / largest, 0x1p-126F);
  if (given == 0 && !is_finite) scale = std::numeric_limits<float>::quiet_NaN();
  const float reciprocal = 1 / scale;
  for (double& x : row) {
    const double scaled = static_cast<float>(x) * reciprocal;
    const double code = dtype == Dtype::i8 ? std::clamp(std::nearbyint(scaled), -127.0, 127.0)
                                           : nearest_e4m3(scaled);
    x = code * scale;
  }
}

/// One sequence in the cache: rows [left_padding, seqlen) are its keys so far.
struct CachedSequence {
  const KvCache& cache;
  std::int64_t batch = 0;
  std::int64_t left_padding = 0, seqlen = 0;

  std::int64_t num_keys() const { return seqlen - left_padding; }

  /// The first two indices of a key in cache.k, cache.v and what lies beside them.
  struct Place {
    std::int64_t slot = 0, row = 0;
  };
  Place place(std::int64_t kv_idx) const {
    const std::int64_t slot_row = left_padding + kv_idx;
    const std::int64_t page_size = cache.k.size(1);
    if (const TensorView& table = cache.page_table) {
      const double page =
          element(table, batch * table.stride(0) + slot_row / page_size * table.stride(1));
      return {static_cast<std::int64_t>(page), slot_row % page_size};
    }
    if (cache.page_indptr) {
      const std::int64_t first = entry(cache.page_indptr, batch, 0);
      return {entry(cache.page_indices, first + slot_row / page_size, 0), slot_row % page_size};
    }
    return {entry(cache.batch_idx, batch, batch), slot_row};
  }

  /// Of codes: what the row's are multiplied by; of numbers 1.
  double scale(const TensorView& scales, std::int64_t kv_idx, std::int64_t head) const {
    const Place at = place(kv_idx);
    if (scales.rank() == 3) {
      return element(
          scales, at.slot * scales.stride(0) + at.row * scales.stride(1) + head * scales.stride(2));
    }
    return scales ? given_scale(scales, head) : 1;
  }
  /// Of the sequence's head, or of all.
  double given_scale(const TensorView& scales, std::int64_t head) const {
    if (scales.rank() == 1) return element(scales, 0);
    return element(scales, batch * scales.stride(0) + head * scales.stride(1));
  }

  /// Of a key in cache.k or cache.v.
  std::vector<double> row(const TensorView& rows, const TensorView& scales, std::int64_t kv_idx,
                          std::int64_t head) const {
    const Place at = place(kv_idx);
    const std::int64_t offset =
        at.slot * rows.stride(0) + at.row * rows.stride(1) + head * rows.stride(2);
    const double factor = scale(scales, kv_idx, head);
    std::vector<double> values;
    for (std::int64_t dim = 0; dim < rows.size(3); ++dim)
      values.push_back(element(rows, offset + dim * rows.stride(3)) * factor);
    return values;
  }
};

/// Which rows of q, or of new tokens, belong to which sequence.
class Tokens {
 public:
  Tokens(const TensorView& rows, const TensorView& cu_seqlens)
      : cu_seqlens_(rows.rank() == 3 ? cu_seqlens : TensorView()),
        seqlen_(rows.rank() == 4 ? rows.size(1) : 0) {}

  std::int64_t seqlen(std::int64_t sequence) const {
    return cu_seqlens_ ? offset(sequence + 1) - offset(sequence) : seqlen_;
  }
  RowIndex at(std::int64_t sequence, std::int64_t token, std::int64_t head) const {
    if (cu_seqlens_) return {.batch = 0, .row = offset(sequence) + token, .head = head};
    return {.batch = sequence, .row = token, .head = head};
  }

 private:
  std::int64_t offset(std::int64_t sequence) const { return entry(cu_seqlens_, sequence, 0); }

  const TensorView cu_seqlens_;
  const std::int64_t seqlen_;
};

HeadRows zeros(const std::array<std::int64_t, 4>& shape) {
  return HeadRows::zeros_like(make_spec(Dtype::f32, shape));
}

class Decode {
 public:
  explicit Decode(const AttentionDecode& args)
      : args_(args),
        forward_(as_forward(args)),
        queries_(args.q, args.cu_seqlens_q),
        new_tokens_(args.append.k,
                    args.append.cu_seqlens ? args.append.cu_seqlens : args.cu_seqlens_q),
        softmax_(forward_),
        q_(args.q),
        out_(HeadRows::zeros_like(out_spec(forward_))),
        appended_k_(appended(args.append.k, args.cache.k)),
        appended_v_(appended(args.append.v, args.cache.v)) {}

  DecodeResult run() {
    result_.lse.assign(num_statistics(forward_), -std::numeric_limits<double>::infinity());
    const std::int64_t batch =
        args_.cu_seqlens_q ? args_.cu_seqlens_q.size(0) - 1 : args_.q.size(0);
    for (std::int64_t b = 0; b < batch; ++b) run_sequence(cached(b));
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

  CachedSequence cached(std::int64_t b) const {
    return {.cache = args_.cache,
            .batch = b,
            .left_padding = entry(args_.cache.left_padding, b, 0),
            .seqlen = entry(args_.cache.seqlens, b, 0)};
  }

  /// The first sequence of its group, whose keys it shares.
  std::int64_t leader(std::int64_t b) const {
    const TensorView& groups = args_.shared_prefix.cu_sequences;
    if (!groups) return 0;
    std::int64_t first = 0;
    for (std::int64_t g = 0; g + 1 < groups.size(0) && entry(groups, g, 0) <= b; ++g)
      first = entry(groups, g, 0);
    return first;
  }

  void run_sequence(const CachedSequence& s) {
    const std::int64_t num_heads_kv = args_.cache.k.size(2);
    const std::int64_t num_heads_q =
        static_cast<std::int64_t>(fovea::reference::num_heads_q(forward_));
    if (args_.rotary) {
      const Rotary& rotary = *args_.rotary;
      const TensorView& of_q = rotary.positions_q ? rotary.positions_q : rotary.positions;
      rotate(q_, s, queries_, num_heads_q, of_q);
      rotate(appended_k_, s, new_tokens_, num_heads_kv, rotary.positions);
    }
    const HeadRows k = keys_with_prefix(s, {args_.cache.k, args_.cache.k_scale}, appended_k_);
    const HeadRows v = keys_with_prefix(s, {args_.cache.v, args_.cache.v_scale}, appended_v_);
    for (std::int64_t q_head = 0; q_head < num_heads_q; ++q_head) {
      for (std::int64_t q_idx = 0; q_idx < queries_.seqlen(s.batch); ++q_idx) {
        const std::int64_t kv_head = q_head / (num_heads_q / num_heads_kv);
        const RowIndex query = queries_.at(s.batch, q_idx, q_head);
        run_row({.at = {.batch = s.batch,
                        .q_head = q_head,
                        .kv_head = kv_head,
                        .q_idx = q_idx,
                        .seqlen_q = queries_.seqlen(s.batch),
                        .seqlen_kv = s.num_keys() + new_tokens_.seqlen(s.batch)},
                 .query = query,
                 .first_key = {.batch = 0, .row = 0, .head = kv_head},
                 .statistic = statistic(query)},
                k, v);
      }
    }
  }

  /// Of lse, row-major: [batch, heads, queries], packed [heads, total].
  std::size_t statistic(const RowIndex& query) const {
    const int rank = args_.q.rank();
    const std::int64_t rows = args_.q.size(rank - 3);
    return static_cast<std::size_t>((query.batch * args_.q.size(rank - 2) + query.head) * rows +
                                    query.row);
  }

  void run_row(const QueryRow& row, const HeadRows& k, const HeadRows& v) {
    const SoftmaxRow p = softmax_(row, q_[row.query], k);
    result_.lse[row.statistic] = p.lse;
    for (const VisibleKey& key : p.keys)
      add(out_[row.query], key.probability, v[row.key(key.at.kv_idx)]);
  }

  /// Turns the sequence's rows of q or of new keys. The last of them stands at the sequence's end.
  void rotate(HeadRows& rows, const CachedSequence& s, const Tokens& tokens, std::int64_t num_heads,
              const TensorView& positions) const {
    const std::int64_t seqlen = tokens.seqlen(s.batch);
    for (std::int64_t i = 0; i < seqlen; ++i) {
      const std::int64_t last = s.num_keys() + new_tokens_.seqlen(s.batch);
      const std::int64_t position =
          positions ? given_position(positions, tokens.at(s.batch, i, 0)) : last - seqlen + i;
      for (std::int64_t head = 0; head < num_heads; ++head) {
        const std::span<double> row = rows[tokens.at(s.batch, i, head)];
        const std::vector<double> turned = rotated(row, *args_.rotary, position);
        std::copy(turned.begin(), turned.end(), row.begin());
      }
    }
  }

  static std::int64_t given_position(const TensorView& positions, const RowIndex& token) {
    const std::int64_t at =
        positions.rank() == 1 ? token.row * positions.stride(0)
                              : token.batch * positions.stride(0) + token.row * positions.stride(1);
    return static_cast<std::int64_t>(element(positions, at));
  }

  /// cache.k or cache.v.
  struct CachedRows {
    const TensorView& rows;
    const TensorView& scales;
  };

  HeadRows keys_with_prefix(const CachedSequence& s, const CachedRows& of,
                            const HeadRows& added) const {
    HeadRows rows = keys(s, of, added);
    const std::int64_t first = leader(s.batch);
    if (args_.shared_prefix.seqlen == 0 || first == s.batch) return rows;
    const HeadRows shared = keys(cached(first), of, added);
    for (std::int64_t i = 0; i < args_.shared_prefix.seqlen; ++i) {
      for (std::int64_t head = 0; head < of.rows.size(2); ++head) {
        const std::span<const double> row = shared[{0, i, head}];
        std::copy(row.begin(), row.end(), rows[{0, i, head}].begin());
      }
    }
    return rows;
  }

  /// All keys (or values) of the sequence, those of the cache first: [1, seqlen_kv, heads, dim].
  HeadRows keys(const CachedSequence& s, const CachedRows& of, const HeadRows& added) const {
    const std::int64_t num_new = new_tokens_.seqlen(s.batch);
    HeadRows rows = zeros({1, s.num_keys() + num_new, of.rows.size(2), of.rows.size(3)});
    for (std::int64_t head = 0; head < of.rows.size(2); ++head) {
      for (std::int64_t i = 0; i < s.num_keys(); ++i)
        add(rows[{0, i, head}], 1, s.row(of.rows, of.scales, i, head));
      for (std::int64_t i = 0; i < num_new; ++i) {
        const std::span<double> row = rows[{0, s.num_keys() + i, head}];
        add(row, 1, added[new_tokens_.at(s.batch, i, head)]);
        round_appended(s, of, head, row);
      }
    }
    return rows;
  }

  /// As the cache will hold it.
  static void round_appended(const CachedSequence& s, const CachedRows& of, std::int64_t head,
                             std::span<double> row) {
    const Dtype dtype = of.rows.dtype();
    if (of.scales) {
      const bool is_given = of.scales.rank() != 3;
      const double given = is_given ? s.given_scale(of.scales, head) : 0;
      return round_to_codes(dtype, static_cast<float>(given), row);
    }
    for (double& value : row) value = rounded_to(dtype, value);
  }

  const AttentionDecode& args_;
  AttentionForward forward_;
  const Tokens queries_, new_tokens_;
  Softmax softmax_;
  HeadRows q_, out_;
  HeadRows appended_k_, appended_v_;
  DecodeResult result_;
};

}  // namespace

DecodeResult attention_decode(const AttentionDecode& args) {
  FOVEA_ASSERT(args.quant.is_none());
  return Decode(args).run();
}

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
