#include "cpu/quantized/operands.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "core/scalar_io.hpp"
#include "quant/formats.hpp"
#include "quant/groups.hpp"
#include "quant/hadamard.hpp"

namespace fovea::cpu {
namespace {

std::size_t product_of(std::initializer_list<std::int64_t> sizes) {
  std::size_t product = 1;
  for (const std::int64_t size : sizes) product *= static_cast<std::size_t>(size);
  return product;
}

std::int64_t total_kv(const ForwardProblem& f) {
  return f.is_varlen ? f.problem.k.shape[0] : f.num_sequences * f.seqlen_kv;
}

RowCodes carve_codes(Carver& carver, std::int64_t rows, std::int64_t heads, std::int64_t head_dim) {
  return {.codes = carver.take<bfloat16>(product_of({rows, heads, head_dim})),
          .scale = carver.take<float>(product_of({rows, heads})),
          .is_plain = carver.take<std::uint8_t>(product_of({rows, heads}))};
}

/// Rows of one head of one sequence in the caller's memory, as f32.
class SourceRows {
 public:
  SourceRows(const TensorView& view, std::int64_t batch, std::int64_t first, std::int64_t head)
      : rows_(view), batch_(batch), first_(first), head_(head) {}

  float at(std::int64_t n, std::int64_t d) const {
    return load_scalar(rows_.at(batch_, first_ + n, head_), rows_.dtype, d * rows_.col_stride);
  }
  /// False where a value is not finite.
  bool load(std::int64_t n, std::span<float> row) const {
    const std::byte* data = rows_.at(batch_, first_ + n, head_);
    bool is_finite = true;
    for (std::size_t d = 0; d < row.size(); ++d) {
      row[d] = load_scalar(data, rows_.dtype, static_cast<std::int64_t>(d) * rows_.col_stride);
      is_finite = is_finite && std::isfinite(row[d]);
    }
    return is_finite;
  }

 private:
  const Rows rows_;
  const std::int64_t batch_, first_, head_;
};

/// The mean of `count` rows, row_of(0), row_of(1), ...; those that are not finite count as zeros.
template <typename RowOf>
void write_mean(const SourceRows& source, std::int64_t count, const RowOf& row_of,
                std::span<float> mean) {
  std::vector<double> sum(mean.size());
  std::vector<float> row(mean.size());
  for (std::int64_t i = 0; i < count; ++i) {
    if (!source.load(row_of(i), row)) continue;
    for (std::size_t d = 0; d < row.size(); ++d) sum[d] += row[d];
  }
  for (std::size_t d = 0; d < mean.size(); ++d)
    mean[d] = static_cast<float>(sum[d] / static_cast<double>(count));
}

float to_dtype(float value, Dtype dtype) {
  if (dtype == Dtype::bf16) return static_cast<float>(bfloat16(value));
  return dtype == Dtype::f16 ? static_cast<float>(float16(value)) : value;
}

float greatest_of(std::span<const float> row) {
  float greatest = 0;
  for (const float x : row) greatest = std::max(greatest, std::fabs(x));
  return greatest;
}

/// How rows of q or k of one head become codes.
struct RowsToRound {
  const Quantization& quant;
  const SourceRows& source;
  std::int64_t count = 0, head_dim = 0;
  std::int64_t (*first_of_group)(const Quantization& quant, std::int64_t n) = nullptr;
  float given_scale = 0;  // 0: measured
};

/// Where codes, scale and flag of row n lie; `pitch` rows of all heads apart.
struct RoundedRows {
  RowCodes to;
  std::int64_t first = 0, pitch = 0, head = 0;

  std::size_t at(std::int64_t n) const {
    return static_cast<std::size_t>((first + n) * pitch + head);
  }
};

/// Row n without its mean, rotated where the recipe says so. False: it is not finite.
template <typename MeanOf>
bool load_smoothed(const RowsToRound& rows, std::int64_t n, const MeanOf& mean_of,
                   std::span<float> row) {
  if (!rows.source.load(n, row)) return false;
  const float* mean = mean_of(n);
  if (mean != nullptr)
    for (std::size_t d = 0; d < row.size(); ++d) row[d] -= mean[d];
  if (rows.quant.hadamard) quant::rotate(row);
  return true;
}

/// Scales first, of which a group has one: the greatest of each row, then of each group in the group's first row.
template <typename MeanOf>
void write_scales(const RowsToRound& rows, const MeanOf& mean_of, const RoundedRows& to) {
  std::vector<float> row(static_cast<std::size_t>(rows.head_dim));
  const float largest_code = rows.quant.qk == QuantFormat::int8 ? quant::kInt8Max : quant::kE4m3Max;
  float* const scale = to.to.scale;
  for (std::int64_t n = 0; n < rows.count; ++n) {
    const bool is_finite = load_smoothed(rows, n, mean_of, row);
    to.to.is_plain[to.at(n)] = is_finite ? 0 : 1;
    scale[to.at(n)] = is_finite ? greatest_of(row) : 0;
    float& of_group = scale[to.at(rows.first_of_group(rows.quant, n))];
    of_group = std::max(of_group, scale[to.at(n)]);
  }
  for (std::int64_t n = 0; n < rows.count; ++n) {
    const std::int64_t first = rows.first_of_group(rows.quant, n);
    float& own = scale[to.at(n)];
    if (rows.given_scale > 0) {
      own = rows.given_scale;
    } else {
      own = first == n ? quant::scale_of(own, largest_code) : scale[to.at(first)];
    }
  }
}

template <typename MeanOf>
void write_codes(const RowsToRound& rows, const MeanOf& mean_of, const RoundedRows& to) {
  std::vector<float> row(static_cast<std::size_t>(rows.head_dim));
  const bool is_int8 = rows.quant.qk == QuantFormat::int8;
  for (std::int64_t n = 0; n < rows.count; ++n) {
    if (!load_smoothed(rows, n, mean_of, row)) std::ranges::fill(row, 0.0F);
    const float reciprocal = 1 / to.to.scale[to.at(n)];
    bfloat16* const codes = to.to.codes + to.at(n) * row.size();
    for (std::size_t d = 0; d < row.size(); ++d) {
      const float scaled = row[d] * reciprocal;
      codes[d] = bfloat16(is_int8 ? quant::int8_code(scaled) : quant::e4m3_code(scaled));
    }
  }
}

template <typename MeanOf>
void round_rows(const RowsToRound& rows, const MeanOf& mean_of, const RoundedRows& to) {
  write_scales(rows, mean_of, to);
  write_codes(rows, mean_of, to);
}

float given(const TensorView& scale, const Sequence& s, std::int64_t kv_head) {
  return scale ? scale_at(scale, s.index, kv_head) : 0;
}

std::size_t mean_offset(const ForwardProblem& f, const Sequence& s, std::int64_t kv_head,
                        std::int64_t head_dim) {
  return static_cast<std::size_t>((s.index * f.num_heads_kv + kv_head) * head_dim);
}

// ---- v ----

/// Greatest magnitudes, then scales, of each tile and channel.
class ValueScales {
 public:
  ValueScales(const ForwardProblem& f, std::int64_t first_tile, std::int64_t num_tiles,
              std::int64_t kv_head, float* scales)
      : quant_(f.problem.quant),
        width_(static_cast<std::size_t>(f.head_dim_v)),
        num_tiles_(num_tiles),
        pitch_(f.num_heads_kv * f.head_dim_v),
        first_(scales + first_tile * pitch_ + kv_head * f.head_dim_v) {}

  std::span<float> tile(std::int64_t t) const { return {first_ + t * pitch_, width_}; }

  void clear() const {
    for (std::int64_t t = 0; t < num_tiles_; ++t) std::ranges::fill(tile(t), 0.0F);
  }

  /// Each group's greatest, in all its tiles and channels; then scales.
  void settle(float given_scale) const {
    using G = ScaleGranularity;
    if (quant_.v_scales == G::channel || quant_.v_scales == G::tensor) join_tiles();
    if (quant_.v_scales == G::block || quant_.v_scales == G::tensor) join_channels();
    const float largest_code = quant_.pv == QuantFormat::int8 ? quant::kInt8Max : quant_.v_max;
    for (std::int64_t t = 0; t < num_tiles_; ++t) {
      for (float& scale : tile(t)) {
        if (given_scale > 0) {
          scale = given_scale;
        } else {
          scale = quant_.pv == QuantFormat::f16 ? 1 : quant::scale_of(scale, largest_code);
        }
      }
    }
  }

 private:
  void join_tiles() const {
    for (std::int64_t t = 1; t < num_tiles_; ++t) {
      for (std::size_t d = 0; d < width_; ++d) tile(0)[d] = std::max(tile(0)[d], tile(t)[d]);
    }
    for (std::int64_t t = 1; t < num_tiles_; ++t) std::ranges::copy(tile(0), tile(t).begin());
  }
  void join_channels() const {
    for (std::int64_t t = 0; t < num_tiles_; ++t) std::ranges::fill(tile(t), greatest_of(tile(t)));
  }

  const Quantization& quant_;
  const std::size_t width_;
  const std::int64_t num_tiles_, pitch_;
  float* const first_;
};

/// The mean of the values of each channel, of which those that are not finite count as 0.
void write_value_mean(const SourceRows& source, std::int64_t count, std::span<float> mean) {
  for (std::size_t d = 0; d < mean.size(); ++d) {
    double sum = 0;
    for (std::int64_t n = 0; n < count; ++n) {
      const float value = source.at(n, static_cast<std::int64_t>(d));
      if (std::isfinite(value)) sum += value;
    }
    mean[d] = static_cast<float>(sum / static_cast<double>(count));
  }
}

std::uint16_t value_code(QuantFormat format, float value) {
  if (format == QuantFormat::f16) return float16(quant::f16_code(value)).bits;
  return bfloat16(format == QuantFormat::int8 ? quant::int8_code(value) : quant::e4m3_code(value))
      .bits;
}

}  // namespace

void QuantizedOperands::carve_queries(Carver& carver, const ForwardProblem& f) {
  q = carve_codes(carver, f.total_q, f.num_heads_q, f.head_dim_qk);
  if (f.problem.quant.smooth_q != Smoothing::none)
    q_mean = carver.take<float>(product_of({f.total_q, f.num_heads_q, f.head_dim_qk}));
}

void QuantizedOperands::carve_keys(Carver& carver, const ForwardProblem& f) {
  k = carve_codes(carver, total_kv(f), f.num_heads_kv, f.head_dim_qk);
  k_mean = carver.take<float>(product_of({f.num_sequences, f.num_heads_kv, f.head_dim_qk}));
}

void QuantizedOperands::carve_values(Carver& carver, const ForwardProblem& f) {
  v_dtype = f.problem.quant.pv == QuantFormat::f16 ? Dtype::f16 : Dtype::bf16;
  v = carver.take<std::uint16_t>(product_of({total_kv(f), f.num_heads_kv, f.head_dim_v}));
  // Tiles start with their sequence: a last one that is not full each.
  const std::int64_t tiles = total_kv(f) / f.problem.quant.block_kv + f.num_sequences;
  v_scale = carver.take<float>(product_of({tiles, f.num_heads_kv, f.head_dim_v}));
  v_mean = carver.take<float>(product_of({f.num_sequences, f.num_heads_kv, f.head_dim_v}));
}

QuantizedOperands QuantizedOperands::carve(Carver& carver, const ForwardProblem& f) {
  QuantizedOperands to;
  if (f.problem.quant.qk != QuantFormat::none) {
    to.carve_queries(carver, f);
    to.carve_keys(carver, f);
    to.q_shift = carver.take<float>(product_of({f.total_q, f.num_heads_q}));
  }
  if (f.problem.quant.pv != QuantFormat::none) to.carve_values(carver, f);
  return to;
}

OperandRows operand_rows(const ForwardProblem& f, const Sequence& s) {
  const std::int64_t kv = f.is_varlen ? s.kv_begin : s.index * s.seqlen_kv;
  return {.q = f.is_varlen ? s.q_begin : s.index * s.seqlen_q,
          .kv = kv,
          .tile = kv / f.problem.quant.block_kv + s.index};
}

void quantize_keys(const ForwardProblem& f, const AttentionForward& args, const Sequence& s,
                   std::int64_t kv_head, const QuantizedOperands& to) {
  const Quantization& quant = f.problem.quant;
  if (quant.qk == QuantFormat::none || s.seqlen_kv == 0) return;
  const SourceRows source(args.k, s.batch_offset, s.kv_begin, kv_head);
  const std::span<float> mean(to.k_mean + mean_offset(f, s, kv_head, f.head_dim_qk),
                              static_cast<std::size_t>(f.head_dim_qk));
  if (quant.smooth_k == Smoothing::sample) {
    write_mean(
        source, quant::num_sampled(s.seqlen_kv),
        [&](std::int64_t i) { return quant::sampled_row(i, s.seqlen_kv); }, mean);
  } else if (quant.smooth_k == Smoothing::sequence) {
    write_mean(
        source, s.seqlen_kv, [](std::int64_t i) { return i; }, mean);
  } else {
    std::ranges::fill(mean, 0.0F);
  }
  for (float& x : mean) x = to_dtype(x, args.k.dtype());
  const RowsToRound rows{.quant = quant,
                         .source = source,
                         .count = s.seqlen_kv,
                         .head_dim = f.head_dim_qk,
                         .first_of_group = quant::first_of_k_group,
                         .given_scale = given(args.k_scale, s, kv_head)};
  round_rows(rows, [&](std::int64_t /*n*/) { return mean.data(); },
             {to.k, operand_rows(f, s).kv, f.num_heads_kv, kv_head});
}

void quantize_values(const ForwardProblem& f, const AttentionForward& args, const Sequence& s,
                     std::int64_t kv_head, const QuantizedOperands& to) {
  const Quantization& quant = f.problem.quant;
  if (quant.pv == QuantFormat::none) return;
  const SourceRows source(args.v, s.batch_offset, s.kv_begin, kv_head);
  const std::span<float> mean(to.v_mean + mean_offset(f, s, kv_head, f.head_dim_v),
                              static_cast<std::size_t>(f.head_dim_v));
  std::ranges::fill(mean, 0.0F);
  if (s.seqlen_kv == 0) return;
  if (quant.smooth_v != Smoothing::none) write_value_mean(source, s.seqlen_kv, mean);
  const OperandRows rows = operand_rows(f, s);
  const ValueScales scales(f, rows.tile, ceil_div(s.seqlen_kv, quant.block_kv), kv_head,
                           to.v_scale);
  // What is not finite is added apart (forward/non_finite.hpp): here it is the mean.
  const auto at = [&](std::int64_t n, std::size_t d) {
    const float value = source.at(n, static_cast<std::int64_t>(d));
    return std::isfinite(value) ? value - mean[d] : 0;
  };
  scales.clear();
  for (std::int64_t n = 0; n < s.seqlen_kv; ++n) {
    const std::span<float> greatest = scales.tile(n / quant.block_kv);
    for (std::size_t d = 0; d < mean.size(); ++d)
      greatest[d] = std::max(greatest[d], std::fabs(at(n, d)));
  }
  scales.settle(given(args.v_scale, s, kv_head));
  for (std::int64_t n = 0; n < s.seqlen_kv; ++n) {
    const std::span<const float> scale = scales.tile(n / quant.block_kv);
    std::uint16_t* const codes = to.v + ((rows.kv + n) * f.num_heads_kv + kv_head) * f.head_dim_v;
    for (std::size_t d = 0; d < mean.size(); ++d)
      codes[d] = value_code(quant.pv, at(n, d) * (1 / scale[d]));
  }
}

void round_queries(const ForwardProblem& f, const AttentionForward& args, const Sequence& s,
                   std::int64_t q_head, const QuantizedOperands& to) {
  const Quantization& quant = f.problem.quant;
  const SourceRows source(args.q, s.batch_offset, s.q_begin, q_head);
  const RoundedRows rounded{to.q, operand_rows(f, s).q, f.num_heads_q, q_head};
  const auto head_dim = static_cast<std::size_t>(f.head_dim_qk);
  const auto mean_of = [&](std::int64_t n) {
    return to.q_mean == nullptr ? nullptr : to.q_mean_of(rounded.at(n - n % quant.block_q), f);
  };
  if (to.q_mean != nullptr) {
    for (std::int64_t begin = 0; begin < s.seqlen_q; begin += quant.block_q) {
      write_mean(source, std::min<std::int64_t>(quant.block_q, s.seqlen_q - begin),
                 [&](std::int64_t i) { return begin + i; }, {mean_of(begin), head_dim});
    }
  }
  round_rows({.quant = quant,
              .source = source,
              .count = s.seqlen_q,
              .head_dim = f.head_dim_qk,
              .first_of_group = quant::first_of_q_group,
              .given_scale = given(args.q_scale, s, q_head / f.group)},
             mean_of, rounded);
}

void quantize_queries(const ForwardProblem& f, const AttentionForward& args, const Sequence& s,
                      std::int64_t q_head, const QuantizedOperands& to) {
  const Quantization& quant = f.problem.quant;
  if (quant.qk == QuantFormat::none || s.seqlen_q == 0 || s.seqlen_kv == 0) return;
  round_queries(f, args, s, q_head, to);
  // (q - its mean) · (mean of k): the mean of q meets k itself.
  const SourceRows source(args.q, s.batch_offset, s.q_begin, q_head);
  const RoundedRows rounded{to.q, operand_rows(f, s).q, f.num_heads_q, q_head};
  const float* const k_mean = to.k_mean + mean_offset(f, s, q_head / f.group, f.head_dim_qk);
  std::vector<float> row(static_cast<std::size_t>(f.head_dim_qk));
  for (std::int64_t n = 0; n < s.seqlen_q; ++n) {
    source.load(n, row);
    const float* const q_mean =
        to.q_mean == nullptr ? nullptr : to.q_mean_of(rounded.at(n - n % quant.block_q), f);
    double shift = 0;
    for (std::size_t d = 0; d < row.size(); ++d)
      shift += (static_cast<double>(row[d]) - (q_mean != nullptr ? q_mean[d] : 0.0F)) * k_mean[d];
    to.q_shift[rounded.at(n)] = static_cast<float>(shift);
  }
}

}  // namespace fovea::cpu
