#include "cpu/append.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu/operands.hpp"
#include "cpu/tasks.hpp"
#include "cpu/turn_rows.hpp"
#include "problem/head_dim.hpp"
#include "quant/row_codes.hpp"

namespace fovea::cpu {
namespace {

/// Heads of one token of queries or new tokens.
class TokenHeads {
 public:
  TokenHeads(const TensorView& view, const SequenceRows& layout, const SequenceRows::Token& token)
      : rows_(view),
        batch_(layout.is_packed() ? 0 : token.sequence),
        row_(layout.begin(token.sequence) + token.index) {}
  HeadRow at(std::int64_t head) const { return head_row(rows_, batch_, row_, head); }

 private:
  const Rows rows_;
  const std::int64_t batch_, row_;
};

void write_codes(std::span<const float> row, float scale, const HeadRow& to) {
  const float reciprocal = 1 / scale;
  for (std::size_t i = 0; i < row.size(); ++i) {
    to.data[static_cast<std::int64_t>(i) * to.stride] =
        std::byte{quant::code_bits(row[i] * reciprocal, to.dtype)};
  }
}

class AppendRun {
 public:
  explicit AppendRun(const NewTokens& tokens)
      : tokens_(tokens),
        new_tokens_(new_tokens(tokens.append)),
        of_queries_(turns_queries() ? rotary_of_queries(*tokens.rotary) : Rotary{}),
        queries_(turns_queries() ? sequence_rows(tokens.q, tokens.cu_seqlens_q) : SequenceRows{}),
        num_new_(new_tokens_.total(tokens.batch)),
        num_queries_(queries_.total(tokens.batch)) {}

  void run(Executor& executor) {
    run_tasks(executor, num_new_ + num_queries_,
              [this](int /*worker*/, std::int64_t index) { compute(index); });
  }

 private:
  bool turns_queries() const { return tokens_.rotary != nullptr && tokens_.q; }

  void compute(std::int64_t index) const {
    if (index < num_new_) {
      append_token(new_tokens_.token(index, tokens_.batch));
    } else {
      turn_query(queries_.token(index - num_new_, tokens_.batch));
    }
  }

  std::int64_t position(const Rotary& rotary, const SequenceRows& layout,
                        const SequenceRows::Token& token) const {
    const CachedSequence s = cached_sequence(tokens_.cache, token.sequence);
    return rotary_position(rotary, layout, token,
                           s.end - s.begin + new_tokens_.count(token.sequence));
  }

  void append_token(const SequenceRows::Token& token) const {
    const KvCache& cache = tokens_.cache;
    if (tokens_.append.v) {
      const std::int64_t head_dim = cache.v.size(3);
      write_heads({tokens_.append.v, cache.v, cache.v_scale}, token,
                  [&](const HeadRow& from, const HeadRow& to) { copy(from, to, 0, head_dim); });
    }
    const std::int64_t head_dim = cache.k.size(3);
    const CacheTarget keys{tokens_.append.k, cache.k, cache.k_scale};
    if (tokens_.rotary == nullptr) {
      write_heads(keys, token,
                  [&](const HeadRow& from, const HeadRow& to) { copy(from, to, 0, head_dim); });
    } else {
      const Turn turn(*tokens_.rotary, position(*tokens_.rotary, new_tokens_, token));
      write_heads(keys, token, [&](const HeadRow& from, const HeadRow& to) {
        turn_row(turn, from, to, head_dim);
      });
    }
  }

  /// Of k or v.
  struct CacheTarget {
    const TensorView& from;
    const TensorView& to;
    const TensorView& scale;
  };

  /// Calls write(from, to) for each head. Where the cache holds codes, `to` is f32, and is rounded then.
  template <class Write>
  void write_heads(const CacheTarget& target, const SequenceRows::Token& token,
                   const Write& write) const {
    const CachedSequence s = cached_sequence(tokens_.cache, token.sequence);
    const CacheRow at = cache_row(tokens_.cache, s.slot, s.end + token.index);
    const TokenHeads from(target.from, new_tokens_, token);
    const Rows rows(target.to);
    const RowScales scales = row_scales(target.scale);
    for (std::int64_t head = 0; head < target.to.size(2); ++head) {
      const HeadRow to = head_row(rows, at.slot, at.row, head);
      if (scales.data == nullptr) {
        write(from.at(head), to);
        continue;
      }
      std::array<float, kMaxHeadDim> numbers;
      write(from.at(head), HeadRow{reinterpret_cast<std::byte*>(numbers.data())});
      const std::span row(numbers.data(), static_cast<std::size_t>(target.to.size(3)));
      float* const scale = scales.at(token.sequence, at, head);
      if (scales.are_of_rows) *scale = quant::row_scale(row, to.dtype);
      write_codes(row, *scale, to);
    }
  }

  /// A query that stands before the first key has no position and is copied.
  void turn_query(const SequenceRows::Token& token) const {
    const TokenHeads q(tokens_.q, queries_, token);
    const TokenHeads rotated_q(tokens_.rotated_q, queries_, token);
    const int rank = tokens_.q.rank();
    const std::int64_t head_dim = tokens_.q.size(rank - 1);
    const std::int64_t at = position(of_queries_, queries_, token);
    const auto each_head = [&](const auto& write) {
      for (std::int64_t head = 0; head < tokens_.q.size(rank - 2); ++head)
        write(q.at(head), rotated_q.at(head));
    };
    if (at < 0) {
      each_head([&](const HeadRow& from, const HeadRow& to) { copy(from, to, 0, head_dim); });
    } else {
      const Turn turn(*tokens_.rotary, at);
      each_head(
          [&](const HeadRow& from, const HeadRow& to) { turn_row(turn, from, to, head_dim); });
    }
  }

  const NewTokens& tokens_;
  const SequenceRows new_tokens_;
  const Rotary of_queries_;
  const SequenceRows queries_;
  const std::int64_t num_new_, num_queries_;
};

}  // namespace

void append_tokens(const NewTokens& tokens, Executor& executor) { AppendRun(tokens).run(executor); }

}  // namespace fovea::cpu
