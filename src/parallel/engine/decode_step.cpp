#include "parallel/engine/decode_step.hpp"

#include <array>
#include <cstddef>
#include <span>

#include "core/device.hpp"
#include "core/shape.hpp"
#include "problem/forward.hpp"

namespace fovea::parallel {
namespace {

std::int64_t index_at(const TensorView& ids, std::int64_t row, std::int64_t column) {
  const std::int64_t at = row * ids.stride(0) + column * ids.stride(1);
  return ids.dtype() == Dtype::i32 ? static_cast<const std::int32_t*>(ids.data())[at]
                                   : static_cast<const std::int64_t*>(ids.data())[at];
}

std::int32_t as_int(std::int64_t value) { return static_cast<std::int32_t>(value); }

/// On the host a page that there is not is an error: what is appended are this rank's tokens, packed.
class HostStep {
 public:
  HostStep(const DecodeStepSource& source, const Memory& memory)
      : source_(source),
        memory_(memory),
        pages_{
            .rank = source.rank, .world_size = source.world_size, .page_size = source.page_size()} {
    for (std::int64_t b = 0; b < source.batch(); ++b)
      before_.push_back(cu_seqlen(source.cache.seqlens, b));
  }

  DecodeStep make() {
    DecodeStep step;
    std::vector<std::int32_t> whole, own;
    for (const std::int64_t before : before_) {
      const std::int64_t after = before + source_.num_new();
      whole.push_back(as_int(after));
      own.push_back(as_int(pages_.own(after)));
    }
    step.seqlens = memory_.of_values(whole);
    step.own_seqlens = memory_.of_values(own);
    if (source_.rotary != nullptr) step.positions_q = positions_of_queries(step.kept);
    if (source_.append.k) step.append = append(step.kept);
    return step;
  }

 private:
  using Token = std::array<std::int64_t, 2>;  // sequence, new token

  TensorView positions_of_queries(std::vector<OwnedTensor>& kept) const {
    if (source_.positions_q) return source_.positions_q;
    std::vector<std::int32_t> positions;
    for (const std::int64_t before : before_) {
      const std::int64_t first = before + source_.num_new() - source_.seqlen_q;
      for (std::int64_t i = 0; i < source_.seqlen_q; ++i) positions.push_back(as_int(first + i));
    }
    kept.push_back(memory_.of_values(positions));
    const std::array shape{source_.batch(), source_.seqlen_q};
    return {kept.back().view.data(), make_spec(Dtype::i32, shape)};
  }

  std::optional<AppendToCache> append(std::vector<OwnedTensor>& kept) const {
    std::vector<Token> own;
    std::vector<std::int32_t> lengths, begins{0}, positions;
    for (std::int64_t b = 0; b < source_.batch(); ++b) {
      const std::int64_t before = before_[static_cast<std::size_t>(b)];
      for (std::int64_t i = 0; i < source_.num_new(); ++i) {
        if (pages_.rank_of(before + i) != pages_.rank) continue;
        own.push_back({b, i});
        const TensorView& given = source_.positions_new;
        positions.push_back(as_int(given ? index_at(given, b, i) : before + i));
      }
      lengths.push_back(as_int(pages_.own(before)));
      begins.push_back(as_int(static_cast<std::int64_t>(own.size())));
    }
    if (own.empty()) return std::nullopt;
    const auto of_values = [&](std::span<const std::int32_t> values) {
      kept.push_back(memory_.of_values(values));
      return kept.back().view;
    };
    AppendToCache call{
        .cache = source_.cache, .executor = source_.executor, .stream = memory_.stream()};
    call.cache.seqlens = of_values(lengths);
    call.append = {.k = packed(source_.append.k, own, kept),
                   .v = packed(source_.append.v, own, kept),
                   .cu_seqlens = of_values(begins)};
    if (source_.rotary != nullptr) call.rotary = rotary_at(*source_.rotary, of_values(positions));
    return call;
  }

  TensorView packed(const TensorView& x, std::span<const Token> tokens,
                    std::vector<OwnedTensor>& kept) const {
    if (!x) return {};
    const auto count = static_cast<std::int64_t>(tokens.size());
    const OwnedTensor result = memory_.make(x.dtype(), std::array{count, x.size(2), x.size(3)});
    for (std::int64_t row = 0; row < count; ++row) {
      const auto [sequence, token] = tokens[static_cast<std::size_t>(row)];
      const TensorView from = part_of(part_of(x, 0, sequence, sequence + 1), 1, token, token + 1);
      // [1, 1, heads, head_dim], of one row of the result
      memory_.copy({part_of(result.view, 0, row, row + 1).mutable_data(),
                    make_spec(x.dtype(), shape_of(from))},
                   from);
    }
    kept.push_back(result);
    return result.view;
  }

  const DecodeStepSource& source_;
  const Memory& memory_;
  PagesOfRank pages_;
  std::vector<std::int64_t> before_;  // of whole sequences
};

}  // namespace

DecodeStep make_decode_step(const DecodeStepSource& source, const Memory& memory) {
  if (!is_cpu(memory.device())) return make_decode_step_on_device(source, memory);
  return HostStep(source, memory).make();
}

Rotary rotary_at(const Rotary& rotary, const TensorView& positions) {
  return {.cos = rotary.cos,
          .sin = rotary.sin,
          .is_interleaved = rotary.is_interleaved,
          .positions = positions};
}

}  // namespace fovea::parallel
