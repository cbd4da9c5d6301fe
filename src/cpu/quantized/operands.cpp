#include "cpu/quantized/operands.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "problem/input_codes.hpp"
#include "quant/formats.hpp"
#include "quant/groups.hpp"
#include "quant/hadamard.hpp"

namespace fovea::cpu {
namespace {

/// Rows that a task rounds, about: so many that what it finds out first costs nothing.
constexpr std::int64_t kPieceRows = 128;

/// Rows of one head that are fetched ahead: they lie a row of all heads apart, which prefetchers do not follow.
constexpr std::int64_t kRowsAhead = 16;

void fetch(const RowSource& row) {
  constexpr std::int64_t kLine = 64;
  const std::int64_t bytes = row.count * static_cast<std::int64_t>(size_bytes(row.dtype));
  for (std::int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(row.data + at);
}

std::size_t product_of(std::initializer_list<std::int64_t> sizes) {
  std::size_t product = 1;
  for (const std::int64_t size : sizes) product *= static_cast<std::size_t>(size);
  return product;
}

std::int64_t total_kv(const ForwardProblem& f) {
  return f.is_varlen ? f.problem.k.shape[0] : f.num_sequences * f.seqlen_kv;
}

/// Tiles start with their sequence: a last one that is not full each.
std::int64_t total_tiles(const ForwardProblem& f) {
  return total_kv(f) / f.problem.quant.block_kv + f.num_sequences;
}

RowCodes carve_codes(Carver& carver, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
                     bool as_bytes) {
  RowCodes codes{.num_rows = rows};
  if (as_bytes) {
    codes.bytes = carver.take<std::uint8_t>(
        product_of({rows, heads, CodeProducts::pitch_of(head_dim)}) + CodeProducts::kReadBeyond);
  } else {
    codes.wide = carver.take<std::uint16_t>(product_of({rows, heads, head_dim}));
  }
  codes.scale = carver.take<float>(product_of({rows, heads}));
  codes.is_plain = carver.take<std::uint8_t>(product_of({rows, heads}));
  return codes;
}

float to_dtype(float value, Dtype dtype) {
  if (dtype == Dtype::bf16) return static_cast<float>(bfloat16(value));
  return dtype == Dtype::f16 ? static_cast<float>(float16(value)) : value;
}

float given(const TensorView& scale, const Sequence& s, std::int64_t kv_head) {
  return scale ? scale_at(scale, s.index, kv_head) : 0;
}

std::size_t mean_offset(const ForwardProblem& f, const Sequence& s, std::int64_t kv_head,
                        std::int64_t head_dim) {
  return static_cast<std::size_t>((s.index * f.num_heads_kv + kv_head) * head_dim);
}

/// Rows of a piece: whole blocks, or all where one scale serves all.
std::int64_t piece_rows(std::int64_t block, ScaleGranularity scales, std::int64_t seqlen) {
  if (scales == ScaleGranularity::tensor) return std::max<std::int64_t>(1, seqlen);
  return ceil_div(kPieceRows, block) * block;
}

/// Rows of q or k of one sequence and head on their way to codes, a block at a time.
struct RowsToRound {
  const Quantization& quant;
  const RoundingSteps& steps;
  const RowCodes& to;
  std::int64_t head = 0, first_row = 0;  // in `to`
  std::int64_t head_dim = 0, block = 0;
  std::int64_t (*first_of_group)(const Quantization& quant, std::int64_t n) = nullptr;
  float given_scale = 0;    // 0: measured
  bool are_codes = false;   // already
  std::uint8_t offset = 0;  // of bytes
};

/// source_of(n) is a row of the caller's, mean_of(n) what is taken from it (null: nothing), and note(n, row, facts) is
/// told of each row so smoothed, before it is rotated.
template <typename SourceOf, typename MeanOf, typename Note>
class RowRounding {
 public:
  RowRounding(const RowsToRound& rows, const SourceOf& source_of, const MeanOf& mean_of,
              const Note& note)
      : rows_(rows),
        source_of_(source_of),
        mean_of_(mean_of),
        note_(note),
        buffer_(product_of({rows.block, rows.head_dim})) {}

  void run(std::int64_t begin, std::int64_t end, ScaleGranularity scales) {
    if (scales == ScaleGranularity::tensor) {
      each_block(begin, end, [&](std::int64_t from, std::int64_t to) { measure(from, to); });
      settle(begin, end);
      each_block(begin, end, [&](std::int64_t from, std::int64_t to) {
        for (std::int64_t n = from; n < to; ++n) load(n, row_of(n - from));
        write(from, to);
      });
    } else {
      each_block(begin, end, [&](std::int64_t from, std::int64_t to) {
        measure(from, to);
        settle(from, to);
        write(from, to);
      });
    }
  }

 private:
  template <typename F>
  void each_block(std::int64_t begin, std::int64_t end, const F& f) const {
    for (std::int64_t from = begin; from < end; from += rows_.block)
      f(from, std::min(end, from + rows_.block));
  }
  float* row_of(std::int64_t index) { return buffer_.data() + index * rows_.head_dim; }
  std::size_t at(std::int64_t n) const { return rows_.to.at(rows_.head, rows_.first_row + n); }

  RowFacts load(std::int64_t n, float* row) const {
    RowFacts facts = rows_.steps.smooth_row(source_of_(n), mean_of_(n), row);
    note_(n, row, facts);
    if (rows_.quant.hadamard) {
      quant::rotate({row, static_cast<std::size_t>(rows_.head_dim)});
      facts.greatest = rows_.steps.greatest_of(row, rows_.head_dim);
    }
    return facts;
  }

  /// The greatest of each row, then of each group in the group's first row.
  void measure(std::int64_t begin, std::int64_t end) {
    float* const scale = rows_.to.scale;
    for (std::int64_t n = begin; n < end; ++n) {
      const RowFacts facts = load(n, row_of(n - begin));
      rows_.to.is_plain[at(n)] = facts.is_finite ? 0 : 1;
      scale[at(n)] = facts.is_finite ? facts.greatest : 0;
      float& of_group = scale[at(rows_.first_of_group(rows_.quant, n))];
      of_group = std::max(of_group, scale[at(n)]);
    }
  }

  void settle(std::int64_t begin, std::int64_t end) const {
    const float largest_code =
        rows_.quant.qk == QuantFormat::int8 ? quant::kInt8Max : quant::kE4m3Max;
    float* const scale = rows_.to.scale;
    for (std::int64_t n = begin; n < end; ++n) {
      const std::int64_t first = rows_.first_of_group(rows_.quant, n);
      float& own = scale[at(n)];
      if (rows_.quant.qk == QuantFormat::e2m1) {
        own = 1;  // groups keep their scales
      } else if (rows_.given_scale > 0) {
        own = rows_.given_scale;
      } else {
        own = first == n ? quant::scale_of(own, largest_code) : scale[at(first)];
      }
    }
  }

  void write(std::int64_t begin, std::int64_t end) {
    const std::int64_t pitch = CodeProducts::pitch_of(rows_.head_dim);
    for (std::int64_t n = begin; n < end; ++n) {
      const float reciprocal = rows_.are_codes ? 1 : 1 / rows_.to.scale[at(n)];
      const float* const row = row_of(n - begin);
      if (rows_.to.bytes == nullptr) {
        std::uint16_t* const codes =
            rows_.to.wide + at(n) * static_cast<std::size_t>(rows_.head_dim);
        if (rows_.quant.qk == QuantFormat::e2m1) {
          write_groups(row, codes);
        } else {
          rows_.steps.wide_codes(row, {.reciprocals = &reciprocal}, rows_.head_dim, rows_.quant.qk,
                                 codes);
        }
        continue;
      }
      std::uint8_t* const codes = rows_.to.bytes + at(n) * static_cast<std::size_t>(pitch);
      rows_.steps.int8_codes(row, &reciprocal, /*is_of_row=*/true, rows_.head_dim, rows_.offset,
                             codes);
      std::fill(codes + rows_.head_dim, codes + pitch, rows_.offset);
    }
  }

  /// Of e2m1. Groups of q and k have the same size.
  void write_groups(const float* row, std::uint16_t* codes) const {
    const std::int64_t size = quant::group_size(rows_.quant.k_scales);
    for (std::int64_t d = 0; d < rows_.head_dim; d += size) {
      const std::int64_t count = std::min(size, rows_.head_dim - d);
      const float scale =
          quant::group_scale(rows_.quant.k_scales, rows_.steps.greatest_of(row + d, count));
      const float reciprocal = quant::group_reciprocal(scale);
      rows_.steps.wide_codes(row + d, {.reciprocals = &reciprocal, .groups = &scale}, count,
                             QuantFormat::e2m1, codes + d);
    }
  }

  const RowsToRound& rows_;
  const SourceOf& source_of_;
  const MeanOf& mean_of_;
  const Note& note_;
  std::vector<float> buffer_;
};

// ---- v ----

/// Greatest magnitudes, then scales, of each tile and channel of one head.
class ValueScales {
 public:
  ValueScales(const ForwardProblem& f, const RoundingSteps& steps, const QuantizedOperands& to,
              const Sequence& s, std::int64_t kv_head)
      : quant_(f.problem.quant),
        steps_(steps),
        width_(f.head_dim_v),
        pitch_(f.num_heads_kv * f.head_dim_v),
        first_(to.v_scale + operand_rows(f, s).tile * pitch_ + kv_head * f.head_dim_v) {}

  std::span<float> tile(std::int64_t t) const {
    return {first_ + t * pitch_, static_cast<std::size_t>(width_)};
  }

  /// Of one tile, whose greatest have been found.
  void settle(std::int64_t t, float given_scale) const {
    using G = ScaleGranularity;
    if (quant_.v_scales == G::block || quant_.v_scales == G::tensor)
      std::ranges::fill(tile(t), steps_.greatest_of(tile(t).data(), width_));
    const float largest_code = quant_.pv == QuantFormat::int8 ? quant::kInt8Max : quant_.v_max;
    for (float& scale : tile(t)) {
      if (given_scale > 0) {
        scale = given_scale;
      } else {
        scale = quant_.pv == QuantFormat::f16 ? 1 : quant::scale_of(scale, largest_code);
      }
    }
  }

 private:
  const Quantization& quant_;
  const RoundingSteps& steps_;
  const std::int64_t width_, pitch_;
  float* const first_;
};

bool shares_scales_of_tiles(const Quantization& quant) {
  return quant.v_scales == ScaleGranularity::channel || quant.v_scales == ScaleGranularity::tensor;
}

}  // namespace

// ---- memory ----

void QuantizedOperands::carve_queries(Carver& carver, const ForwardProblem& f, bool as_bytes) {
  q = carve_codes(carver, f.total_q, f.num_heads_q, f.head_dim_qk, as_bytes);
  q_shift = carver.take<float>(product_of({f.total_q, f.num_heads_q}));
  if (f.problem.quant.smooth_q != Smoothing::none)
    q_mean = carver.take<float>(product_of({f.total_q, f.num_heads_q, f.head_dim_qk}));
}

void QuantizedOperands::carve_keys(Carver& carver, const ForwardProblem& f, bool as_bytes) {
  k = carve_codes(carver, total_kv(f), f.num_heads_kv, f.head_dim_qk, as_bytes);
  k_mean = carver.take<float>(product_of({f.num_sequences, f.num_heads_kv, f.head_dim_qk}));
  has_plain_keys = carver.take<std::uint8_t>(product_of({total_tiles(f), f.num_heads_kv}));
}

void QuantizedOperands::carve_values(Carver& carver, const ForwardProblem& f, bool as_bytes) {
  num_kv_rows = total_kv(f);
  v_mean = carver.take<float>(product_of({f.num_sequences, f.num_heads_kv, f.head_dim_v}));
  has_plain_values = carver.take<std::uint8_t>(product_of({total_tiles(f), f.num_heads_kv}));
  const Quantization& quant = f.problem.quant;
  if (quant.pv == QuantFormat::none) return;
  v_scale = carver.take<float>(product_of({total_tiles(f), f.num_heads_kv, f.head_dim_v}));
  v_dtype = quant.pv == QuantFormat::f16 ? Dtype::f16 : Dtype::bf16;
  if (as_bytes) {
    const std::int64_t tile_bytes =
        CodeProducts::value_rows(f.head_dim_v) * CodeProducts::pitch_of(quant.block_kv);
    v_bytes = carver.take<std::uint8_t>(product_of({total_tiles(f), f.num_heads_kv, tile_bytes}) +
                                        CodeProducts::kReadBeyond);
  } else {
    v_wide = carver.take<std::uint16_t>(product_of({total_kv(f), f.num_heads_kv, f.head_dim_v}));
  }
}

QuantizedOperands QuantizedOperands::carve(Carver& carver, const ForwardProblem& f,
                                           const ByteProducts& bytes) {
  QuantizedOperands to;
  if (f.problem.quant.qk != QuantFormat::none) {
    to.carve_queries(carver, f, bytes.qk);
    to.carve_keys(carver, f, bytes.qk);
  }
  to.carve_values(carver, f, bytes.pv);
  return to;
}

std::uint8_t* QuantizedOperands::v_tile(std::int64_t tile, std::int64_t kv_head,
                                        const ForwardProblem& f) const {
  const std::int64_t tile_bytes =
      CodeProducts::value_rows(f.head_dim_v) * CodeProducts::pitch_of(f.problem.quant.block_kv);
  return v_bytes + (kv_head * total_tiles(f) + tile) * tile_bytes;
}

OperandRows operand_rows(const ForwardProblem& f, const Sequence& s) {
  const std::int64_t kv = f.is_varlen ? s.kv_begin : s.index * s.seqlen_kv;
  return {.q = f.is_varlen ? s.q_begin : s.index * s.seqlen_q,
          .kv = kv,
          .tile = kv / f.problem.quant.block_kv + s.index};
}

// ---- passes ----

RowSource OperandRounding::source(const Rows& rows, const RowAt& at, std::int64_t head_dim) const {
  const auto row = [&](std::int64_t n) {
    return RowSource{rows.at(at.sequence.batch_offset, at.begin + n, at.head), rows.dtype,
                     rows.col_stride, head_dim};
  };
  if (at.n + kRowsAhead < at.count) fetch(row(at.n + kRowsAhead));
  return row(at.n);
}

void OperandRounding::measure_keys(const Sequence& s, std::int64_t kv_head) const {
  const auto width = static_cast<std::size_t>(f_.head_dim_qk);
  const std::span<float> mean(to_.k_mean + mean_offset(f_, s, kv_head, f_.head_dim_qk), width);
  std::ranges::fill(mean, 0.0F);
  if (quant_.smooth_k == Smoothing::none || s.seqlen_kv == 0) return;
  const bool is_sample = quant_.smooth_k == Smoothing::sample;
  const std::int64_t count = is_sample ? quant::num_sampled(s.seqlen_kv) : s.seqlen_kv;
  const Rows rows(args_.k);
  std::vector<double> sums(width);
  std::vector<float> scratch(width);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t n = is_sample ? quant::sampled_row(i, s.seqlen_kv) : i;
    steps_.add_to_sums(source(rows, {s, s.kv_begin, n, s.seqlen_kv, kv_head}, f_.head_dim_qk),
                       /*by_element=*/false, scratch.data(), sums.data());
  }
  for (std::size_t d = 0; d < width; ++d)
    mean[d] = to_dtype(static_cast<float>(sums[d] / static_cast<double>(count)), rows.dtype);
}

void OperandRounding::measure_values(const Sequence& s, std::int64_t kv_head) const {
  const auto width = static_cast<std::size_t>(f_.head_dim_v);
  const std::span<float> mean(to_.v_mean + mean_offset(f_, s, kv_head, f_.head_dim_v), width);
  std::ranges::fill(mean, 0.0F);
  if (s.seqlen_kv == 0) return;
  const Rows rows(args_.v);
  std::vector<float> row(width);
  if (quant_.smooth_v != Smoothing::none) {
    std::vector<double> sums(width);
    for (std::int64_t n = 0; n < s.seqlen_kv; ++n) {
      steps_.add_to_sums(source(rows, {s, s.kv_begin, n, s.seqlen_kv, kv_head}, f_.head_dim_v),
                         /*by_element=*/true, row.data(), sums.data());
    }
    for (std::size_t d = 0; d < width; ++d)
      mean[d] = static_cast<float>(sums[d] / static_cast<double>(s.seqlen_kv));
  }
  if (quant_.pv == QuantFormat::none || !shares_scales_of_tiles(quant_)) return;
  const ValueScales scales(f_, steps_, to_, s, kv_head);
  const std::span<float> greatest = scales.tile(0);
  std::ranges::fill(greatest, 0.0F);
  for (std::int64_t n = 0; n < s.seqlen_kv; ++n) {
    steps_.smooth_values(source(rows, {s, s.kv_begin, n, s.seqlen_kv, kv_head}, f_.head_dim_v),
                         mean.data(), row.data());
    steps_.raise_greatest(row.data(), f_.head_dim_v, greatest.data());
  }
  scales.settle(0, given(args_.v_scale, s, kv_head));
  for (std::int64_t t = 1; t < ceil_div(s.seqlen_kv, quant_.block_kv); ++t)
    std::ranges::copy(greatest, scales.tile(t).begin());
}

std::int64_t OperandRounding::num_key_pieces() const {
  // Keys and values have the same pieces: those of keys are whole tiles too.
  return ceil_div(f_.seqlen_kv, piece_rows(quant_.block_kv, quant_.k_scales, f_.seqlen_kv));
}

std::int64_t OperandRounding::num_query_pieces() const {
  return ceil_div(f_.seqlen_q, piece_rows(quant_.block_q, quant_.q_scales, f_.seqlen_q));
}

void OperandRounding::round_keys(const Sequence& s, std::int64_t kv_head,
                                 std::int64_t piece) const {
  const std::int64_t count = piece_rows(quant_.block_kv, quant_.k_scales, f_.seqlen_kv);
  const std::int64_t begin = piece * count;
  const std::int64_t end = std::min(begin + count, s.seqlen_kv);
  if (begin >= end) return;
  const Rows rows(args_.k);
  const OperandRows first = operand_rows(f_, s);
  const float* const mean = to_.k_mean + mean_offset(f_, s, kv_head, f_.head_dim_qk);
  const auto flag_of = [&](std::int64_t n) -> std::uint8_t& {
    return to_.has_plain_keys[(first.tile + n / quant_.block_kv) * f_.num_heads_kv + kv_head];
  };
  for (std::int64_t n = begin; n < end; n += quant_.block_kv) flag_of(n) = 0;
  const RowsToRound to_round{.quant = quant_,
                             .steps = steps_,
                             .to = to_.k,
                             .head = kv_head,
                             .first_row = first.kv,
                             .head_dim = f_.head_dim_qk,
                             .block = quant_.block_kv,
                             .first_of_group = quant::first_of_k_group,
                             .given_scale = given(args_.k_scale, s, kv_head),
                             .are_codes = are_codes(rows.dtype),
                             .offset = 128};
  const auto source_of = [&](std::int64_t n) {
    return source(rows, {s, s.kv_begin, n, s.seqlen_kv, kv_head}, f_.head_dim_qk);
  };
  const auto mean_of = [&](std::int64_t /*n*/) { return mean; };
  const auto note = [&](std::int64_t n, const float* /*row*/, const RowFacts& facts) {
    if (!facts.is_finite) flag_of(n) = 1;
  };
  RowRounding(to_round, source_of, mean_of, note).run(begin, end, quant_.k_scales);
}

void OperandRounding::round_values(const Sequence& s, std::int64_t kv_head,
                                   std::int64_t piece) const {
  const std::int64_t rows = piece_rows(quant_.block_kv, quant_.k_scales, f_.seqlen_kv);
  const std::int64_t end = std::min((piece + 1) * rows, s.seqlen_kv);
  const ValueScales scales(f_, steps_, to_, s, kv_head);
  std::vector<float> values(product_of({quant_.block_kv, f_.head_dim_v}));
  for (std::int64_t begin = piece * rows; begin < end; begin += quant_.block_kv) {
    const ValueTile tile{.sequence = s,
                         .kv_head = kv_head,
                         .index = begin / quant_.block_kv,
                         .count = std::min<std::int64_t>(quant_.block_kv, end - begin)};
    load_values(tile, values.data());
    if (quant_.pv == QuantFormat::none) continue;
    const std::span<float> scale = scales.tile(tile.index);
    if (quant_.pv == QuantFormat::e2m1) {
      std::ranges::fill(scale, 1.0F);  // groups keep theirs
      write_value_groups(tile, values.data());
      continue;
    }
    if (!shares_scales_of_tiles(quant_)) {
      std::ranges::fill(scale, 0.0F);
      for (std::int64_t i = 0; i < tile.count; ++i)
        steps_.raise_greatest(values.data() + i * f_.head_dim_v, f_.head_dim_v, scale.data());
      scales.settle(tile.index, given(args_.v_scale, s, kv_head));
    }
    write_values(tile, values.data(), scale);
  }
}

/// Without their mean, and whether all are finite.
void OperandRounding::load_values(const ValueTile& tile, float* values) const {
  const Sequence& s = tile.sequence;
  const Rows rows(args_.v);
  const float* const mean = to_.v_mean + mean_offset(f_, s, tile.kv_head, f_.head_dim_v);
  bool is_finite = true;
  for (std::int64_t i = 0; i < tile.count; ++i) {
    const std::int64_t n = tile.index * quant_.block_kv + i;
    const RowSource row =
        source(rows, {s, s.kv_begin, n, s.seqlen_kv, tile.kv_head}, f_.head_dim_v);
    is_finite = steps_.smooth_values(row, mean, values + i * f_.head_dim_v) && is_finite;
  }
  const std::int64_t of_all = operand_rows(f_, s).tile + tile.index;
  to_.has_plain_values[of_all * f_.num_heads_kv + tile.kv_head] = is_finite ? 0 : 1;
}

void OperandRounding::write_values(const ValueTile& tile, const float* values,
                                   std::span<const float> scale) const {
  const std::int64_t width = f_.head_dim_v;
  const OperandRows first = operand_rows(f_, tile.sequence);
  std::vector<float> reciprocals(scale.size());
  const bool is_done = are_codes(args_.v.dtype());
  std::ranges::transform(scale, reciprocals.begin(), [=](float x) { return is_done ? 1 : 1 / x; });
  if (to_.v_bytes == nullptr) {
    for (std::int64_t i = 0; i < tile.count; ++i) {
      steps_.wide_codes(values + i * width, {.reciprocals = reciprocals.data(), .is_of_row = false},
                        width, quant_.pv, wide_row(tile, i));
    }
    return;
  }
  std::vector<std::uint8_t> codes(product_of({tile.count, width}));
  for (std::int64_t i = 0; i < tile.count; ++i) {
    steps_.int8_codes(values + i * width, reciprocals.data(), /*is_of_row=*/false, width,
                      /*offset=*/0, codes.data() + i * width);
  }
  steps_.transpose_codes(codes.data(), tile.count, width, CodeProducts::pitch_of(quant_.block_kv),
                         to_.v_tile(first.tile + tile.index, tile.kv_head, f_));
}

std::uint16_t* OperandRounding::wide_row(const ValueTile& tile, std::int64_t i) const {
  const std::int64_t row = tile.kv_head * to_.num_kv_rows + operand_rows(f_, tile.sequence).kv +
                           tile.index * quant_.block_kv + i;
  return to_.v_wide + row * f_.head_dim_v;
}

/// In e2m1: groups of keys, each channel with scales of its own.
void OperandRounding::write_value_groups(const ValueTile& tile, const float* values) const {
  const std::int64_t width = f_.head_dim_v;
  std::vector<float> scales(static_cast<std::size_t>(width)), reciprocals(scales.size());
  const std::int64_t size = quant::group_size(quant_.v_scales);
  for (std::int64_t begin = 0; begin < tile.count; begin += size) {
    const std::int64_t end = std::min(begin + size, tile.count);
    std::ranges::fill(scales, 0.0F);
    for (std::int64_t i = begin; i < end; ++i)
      steps_.raise_greatest(values + i * width, width, scales.data());
    for (float& scale : scales) scale = quant::group_scale(quant_.v_scales, scale);
    std::ranges::transform(scales, reciprocals.begin(), quant::group_reciprocal);
    const CodeScales of_group{
        .reciprocals = reciprocals.data(), .is_of_row = false, .groups = scales.data()};
    for (std::int64_t i = begin; i < end; ++i)
      steps_.wide_codes(values + i * width, of_group, width, quant_.pv, wide_row(tile, i));
  }
}

void OperandRounding::round_queries(const Sequence& s, std::int64_t q_head,
                                    std::int64_t piece) const {
  const std::int64_t count = piece_rows(quant_.block_q, quant_.q_scales, f_.seqlen_q);
  const std::int64_t begin = piece * count;
  const std::int64_t end = std::min(begin + count, s.seqlen_q);
  if (begin >= end) return;
  const Rows rows(args_.q);
  const std::int64_t first_row = operand_rows(f_, s).q;
  const std::int64_t width = f_.head_dim_qk;
  const std::int64_t kv_head = q_head / f_.group;
  const float* const k_mean =
      to_.k_mean == nullptr ? nullptr : to_.k_mean + mean_offset(f_, s, kv_head, width);
  const auto source_of = [&](std::int64_t n) {
    return source(rows, {s, s.q_begin, n, s.seqlen_q, q_head}, width);
  };
  const auto mean_of = [&](std::int64_t n) -> float* {
    if (to_.q_mean == nullptr) return nullptr;
    const std::size_t at = to_.q.at(q_head, first_row + n - n % quant_.block_q);
    return to_.q_mean + at * static_cast<std::size_t>(width);
  };
  if (to_.q_mean != nullptr) {
    std::vector<float> scratch(static_cast<std::size_t>(width));
    for (std::int64_t from = begin; from < end; from += quant_.block_q) {
      const std::int64_t to = std::min<std::int64_t>(end, from + quant_.block_q);
      std::vector<double> sums(static_cast<std::size_t>(width));
      for (std::int64_t n = from; n < to; ++n)
        steps_.add_to_sums(source_of(n), /*by_element=*/false, scratch.data(), sums.data());
      for (std::size_t d = 0; d < sums.size(); ++d)
        mean_of(from)[d] = static_cast<float>(sums[d] / static_cast<double>(to - from));
    }
  }
  // (q - its mean) · (mean of k): the mean of q meets k itself.
  const auto note = [&](std::int64_t n, const float* row, const RowFacts& /*facts*/) {
    to_.q_shift[to_.q.at(q_head, first_row + n)] =
        k_mean == nullptr ? 0 : static_cast<float>(steps_.dot(row, k_mean, width));
  };
  const RowsToRound to_round{.quant = quant_,
                             .steps = steps_,
                             .to = to_.q,
                             .head = q_head,
                             .first_row = first_row,
                             .head_dim = width,
                             .block = quant_.block_q,
                             .first_of_group = quant::first_of_q_group,
                             .given_scale = given(args_.q_scale, s, kv_head),
                             .are_codes = are_codes(rows.dtype)};
  RowRounding(to_round, source_of, mean_of, note).run(begin, end, quant_.q_scales);
}

}  // namespace fovea::cpu
