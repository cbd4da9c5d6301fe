#include "reference/quantized.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numbers>
#include <span>

#include "problem/forward.hpp"
#include "problem/input_codes.hpp"
#include "quant/groups.hpp"
#include "quant/hadamard.hpp"
#include "reference/element.hpp"
#include "reference/head_rows.hpp"
#include "reference/query_rows.hpp"
#include "reference/softmax.hpp"

namespace fovea::reference {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
/// The mean of (1 + f) / 2^f over [0, 1): what codes that are linear in the exponent are too large by.
const double kLinearMean = [] {
  const double ln2 = std::numbers::ln2;
  return 1 / (2 * ln2) + (1 - (1 + ln2) / 2) / (ln2 * ln2);
}();

/// Numbers from there on are whole, and a multiple of a step that is none may be far from all of them.
constexpr double kNoFractions = 0x1p52;

using Row = std::vector<double>;
using FloatRow = std::vector<float>;

bool is_finite(std::span<const double> row) {
  return std::ranges::all_of(row, [](double x) { return std::isfinite(x); });
}

// ---- formats ----

/// Of a format with `mantissa` bits, normal numbers from 2^least_exponent on, and this greatest number.
struct MiniFloat {
  int mantissa = 0, least_exponent = 0;
  double greatest = 0;
};
constexpr MiniFloat kE4m3{3, -6, 448};
constexpr MiniFloat kF16{10, -14, 65504};
constexpr MiniFloat kE2m1{1, 0, 6};

double nearest(double value, const MiniFloat& format) {
  if (std::isnan(value)) return value;
  if (value == 0 || std::isinf(value))
    return std::copysign(value == 0 ? 0 : format.greatest, value);
  const int exponent = std::max(std::ilogb(value), format.least_exponent);
  const double unit = std::ldexp(1.0, exponent - format.mantissa);
  return std::copysign(std::min(std::nearbyint(std::fabs(value) / unit) * unit, format.greatest),
                       value);
}

double nearest_of(QuantFormat format, double value) {
  switch (format) {
    case QuantFormat::int8:
      return std::clamp(std::nearbyint(value), -127.0, 127.0);
    case QuantFormat::e4m3:
      return nearest(value, kE4m3);
    case QuantFormat::f16:
      return nearest(value, kF16);
    case QuantFormat::e2m1:
      return nearest(value, kE2m1);
    case QuantFormat::none:
      break;
  }
  return value;
}

std::size_t group_size(ScaleGranularity groups) {
  return groups == ScaleGranularity::group_16 ? 16 : 32;
}

/// Of e2m1. A power of two is the least that saturates nothing.
float scale_of_group(float greatest, ScaleGranularity groups) {
  if (groups == ScaleGranularity::group_16)
    return static_cast<float>(nearest(greatest * (1.0F / 6), kE4m3));
  int exponent = -126;
  while (std::ldexp(6.0, exponent) < static_cast<double>(greatest)) ++exponent;
  return std::ldexp(1.0F, exponent);
}

/// What numbers of this greatest magnitude are divided by.
float measured_scale(float greatest, QuantFormat format, float v_max) {
  if (format == QuantFormat::f16 || format == QuantFormat::none) return 1;
  const float most = format == QuantFormat::int8 ? 127.0F : v_max;
  return std::max(greatest / most, 0x1p-126F);
}

double rounded(float value, float scale, QuantFormat format) {
  const float reciprocal = 1 / scale;
  return nearest_of(format, value * reciprocal) * static_cast<double>(scale);
}

/// A scale that the call gives, 0 where it gives none, and whether what it belongs to are codes already: then there is
/// nothing to round.
struct GivenScale {
  float value = 0;
  bool is_of_codes = false;
};
double rounded(float value, const GivenScale& scale, QuantFormat format) {
  if (scale.is_of_codes) return static_cast<double>(value) * static_cast<double>(scale.value);
  return rounded(value, scale.value, format);
}

float greatest_of(std::span<const float> row) {
  float greatest = 0;
  for (const float x : row) greatest = std::max(greatest, std::fabs(x));
  return greatest;
}

/// A row whose neighbours share scales.
Row round_groups(std::span<const float> row, ScaleGranularity groups) {
  Row result;
  while (!row.empty()) {
    const auto group = row.first(std::min(group_size(groups), row.size()));
    const Row of_group = rounded_group(group, groups);
    result.insert(result.end(), of_group.begin(), of_group.end());
    row = row.subspan(group.size());
  }
  return result;
}

// ---- operands ----

/// The rows of one sequence and head.
struct Matrix {
  std::vector<Row> rows;
  std::int64_t count() const { return static_cast<std::int64_t>(rows.size()); }
  std::size_t width() const { return rows.empty() ? 0 : rows.front().size(); }
};

/// Of rows first, first + 1, ... ; rows that are not finite count as zeros. To f32.
FloatRow mean_of(const Matrix& matrix, std::span<const std::int64_t> which) {
  Row sum(matrix.width());
  for (const std::int64_t n : which) {
    const Row& row = matrix.rows[static_cast<std::size_t>(n)];
    if (is_finite(row)) add(sum, 1, row);
  }
  FloatRow mean(matrix.width());
  for (std::size_t d = 0; d < mean.size(); ++d)
    mean[d] = static_cast<float>(sum[d] / static_cast<double>(which.size()));
  return mean;
}

std::vector<std::int64_t> rows_from(std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> rows;
  for (std::int64_t n = begin; n < end; ++n) rows.push_back(n);
  return rows;
}

float to_dtype(float value, Dtype dtype) {
  if (dtype == Dtype::bf16) return static_cast<float>(bfloat16(value));
  return dtype == Dtype::f16 ? static_cast<float>(float16(value)) : value;
}

FloatRow key_mean(const Matrix& k, Smoothing smoothing, Dtype dtype) {
  std::vector<std::int64_t> which = rows_from(0, k.count());
  if (smoothing == Smoothing::sample) {
    which.clear();
    for (std::int64_t i = 0; i < quant::num_sampled(k.count()); ++i)
      which.push_back(quant::sampled_row(i, k.count()));
  }
  FloatRow mean = smoothing == Smoothing::none ? FloatRow(k.width()) : mean_of(k, which);
  for (float& x : mean) x = to_dtype(x, dtype);
  return mean;
}

/// (row - mean) rotated, in f32.
FloatRow smoothed(const Row& row, const FloatRow& mean, bool hadamard) {
  FloatRow result(row.size());
  for (std::size_t d = 0; d < row.size(); ++d) result[d] = static_cast<float>(row[d]) - mean[d];
  if (!hadamard) return result;
  const auto block =
      static_cast<std::size_t>(quant::hadamard_block(static_cast<std::int64_t>(row.size())));
  for (std::size_t d = 0; d < row.size(); ++d)
    if (quant::is_flipped(static_cast<std::int64_t>(d))) result[d] = -result[d];
  for (std::size_t apart = 1; apart < block; apart *= 2) {
    const FloatRow before = result;
    for (std::size_t d = 0; d < row.size(); ++d) {
      const std::size_t other = d ^ apart;
      result[d] = d < other ? before[d] + before[other] : before[other] - before[d];
    }
  }
  for (float& x : result) x *= 1 / std::sqrt(static_cast<float>(block));
  return result;
}

/// The rotation is orthogonal: each number is the sum of what it went into.
Row turned_back(const Row& row) {
  const auto block =
      static_cast<std::size_t>(quant::hadamard_block(static_cast<std::int64_t>(row.size())));
  Row result(row.size());
  for (std::size_t d = 0; d < row.size(); ++d) {
    const std::size_t first = d - d % block;
    for (std::size_t i = 0; i < block; ++i) {
      const bool is_odd = std::popcount(i & (d % block)) % 2 == 1;
      result[d] += is_odd ? -row[first + i] : row[first + i];
    }
    result[d] /= std::sqrt(static_cast<double>(block));
    if (quant::is_flipped(static_cast<std::int64_t>(d))) result[d] = -result[d];
  }
  return result;
}

/// Rows after smoothing, rounded by the scale of their group, or by one that is given.
using GroupOf = std::function<std::int64_t(std::int64_t)>;
std::vector<Row> round_rows(const Matrix& matrix, const std::vector<FloatRow>& rows,
                            QuantFormat format, const GroupOf& group_of, std::int64_t num_groups,
                            const GivenScale& given) {
  std::vector<float> greatest(static_cast<std::size_t>(num_groups));
  for (std::int64_t n = 0; n < matrix.count(); ++n) {
    if (!is_finite(matrix.rows[static_cast<std::size_t>(n)])) continue;
    float& of_group = greatest[static_cast<std::size_t>(group_of(n))];
    of_group = std::max(of_group, greatest_of(rows[static_cast<std::size_t>(n)]));
  }
  std::vector<Row> result;
  for (std::int64_t n = 0; n < matrix.count(); ++n) {
    const float of_group = greatest[static_cast<std::size_t>(group_of(n))];
    const GivenScale scale =
        given.value > 0 ? given : GivenScale{measured_scale(of_group, format, 448)};
    Row& to = result.emplace_back();
    for (const float x : rows[static_cast<std::size_t>(n)]) to.push_back(rounded(x, scale, format));
  }
  return result;
}

/// In e2m1. What is not finite counts for nothing: a row that holds it is not read again.
std::vector<Row> round_groups_of_rows(const std::vector<FloatRow>& rows, ScaleGranularity groups) {
  std::vector<Row> result;
  for (const FloatRow& row : rows) result.push_back(round_groups(row, groups));
  return result;
}

/// A row of q or k: as given, as rounded, and whether it is.
struct Operand {
  Matrix given;
  std::vector<Row> rounded;
  std::vector<bool> is_rounded;
};

void note_finite(Operand& operand) {
  for (const Row& row : operand.given.rows) operand.is_rounded.push_back(is_finite(row));
}

struct Keys : Operand {
  FloatRow mean;
};

struct Queries : Operand {
  std::vector<FloatRow> block_means;  // of block_q rows each
};

Keys keys_of(const Quantization& quant, Matrix k, Dtype dtype, const GivenScale& given_scale) {
  Keys keys;
  keys.given = std::move(k);
  keys.mean = key_mean(keys.given, quant.smooth_k, dtype);
  note_finite(keys);
  std::vector<FloatRow> rows;
  for (const Row& row : keys.given.rows) rows.push_back(smoothed(row, keys.mean, quant.hadamard));
  const std::int64_t count = keys.given.count();
  keys.rounded = quant.qk == QuantFormat::e2m1
                     ? round_groups_of_rows(rows, quant.k_scales)
                     : round_rows(
                           keys.given, rows, quant.qk,
                           [&](std::int64_t n) { return quant::k_group(quant, n); },
                           quant::num_k_groups(quant, count), given_scale);
  return keys;
}

Queries queries_of(const Quantization& quant, Matrix q, const GivenScale& given_scale) {
  Queries queries;
  queries.given = std::move(q);
  note_finite(queries);
  const std::int64_t count = queries.given.count();
  for (std::int64_t begin = 0; begin < count; begin += quant.block_q) {
    const std::int64_t end = std::min<std::int64_t>(count, begin + quant.block_q);
    queries.block_means.push_back(quant.smooth_q == Smoothing::none
                                      ? FloatRow(queries.given.width())
                                      : mean_of(queries.given, rows_from(begin, end)));
  }
  std::vector<FloatRow> rows;
  for (std::int64_t n = 0; n < count; ++n) {
    rows.push_back(smoothed(queries.given.rows[static_cast<std::size_t>(n)],
                            queries.block_means[static_cast<std::size_t>(n / quant.block_q)],
                            quant.hadamard));
  }
  queries.rounded = quant.qk == QuantFormat::e2m1
                        ? round_groups_of_rows(rows, quant.q_scales)
                        : round_rows(
                              queries.given, rows, quant.qk,
                              [&](std::int64_t n) { return quant::q_group(quant, n); },
                              quant::num_q_groups(quant, count), given_scale);
  return queries;
}

/// Scale · this is the score of the problem, but for what rounding costs.
double product(const Quantization& quant, const Queries& q, const Keys& k, std::int64_t q_idx,
               std::int64_t kv_idx) {
  const auto i = static_cast<std::size_t>(q_idx);
  const auto j = static_cast<std::size_t>(kv_idx);
  if (quant.qk == QuantFormat::none || !q.is_rounded[i] || !k.is_rounded[j])
    return dot(q.given.rows[i], k.given.rows[j]);
  double sum = dot(q.rounded[i], k.rounded[j]);
  const FloatRow& q_mean = q.block_means[i / static_cast<std::size_t>(quant.block_q)];
  for (std::size_t d = 0; d < q_mean.size(); ++d) {
    sum += static_cast<double>(q_mean[d]) * (k.given.rows[j][d] - static_cast<double>(k.mean[d]));
    sum += q.given.rows[i][d] * static_cast<double>(k.mean[d]);
  }
  return sum;
}

/// What product() has of all keys alike, which takes no part in their differences.
double common_product(const Quantization& quant, const Queries& q, const Keys& k,
                      std::int64_t q_idx) {
  const auto i = static_cast<std::size_t>(q_idx);
  if (quant.qk == QuantFormat::none || !q.is_rounded[i]) return 0;
  const FloatRow& q_mean = q.block_means[i / static_cast<std::size_t>(quant.block_q)];
  double sum = 0;
  for (std::size_t d = 0; d < k.mean.size(); ++d)  // none where there are no keys
    sum += (q.given.rows[i][d] - static_cast<double>(q_mean[d])) * static_cast<double>(k.mean[d]);
  return sum;
}

struct Values {
  std::vector<Row> rounded;  // without the mean; what is not finite as it is
  FloatRow mean;
};

/// Tiles and channels over which the greatest magnitude is taken.
struct ValueGroup {
  std::int64_t tile = 0;
  std::size_t channel = 0;
};
ValueGroup value_group(const Quantization& quant, std::int64_t n, std::size_t channel) {
  using G = ScaleGranularity;
  const bool has_tiles = quant.v_scales == G::block || quant.v_scales == G::tile_channel;
  const bool has_channels = quant.v_scales == G::channel || quant.v_scales == G::tile_channel;
  return {has_tiles ? n / quant.block_kv : 0, has_channels ? channel : 0};
}

/// In e2m1, by groups of keys. at(n, d) is v without its mean, 0 for what is not finite and stays.
template <typename At>
void round_column(Values& values, std::size_t d, const At& at, ScaleGranularity groups) {
  FloatRow column;
  for (std::size_t n = 0; n < values.rounded.size(); ++n)
    column.push_back(std::isfinite(values.rounded[n][d]) ? at(static_cast<std::int64_t>(n), d) : 0);
  const Row rounded = round_groups(column, groups);
  for (std::size_t n = 0; n < column.size(); ++n)
    if (std::isfinite(values.rounded[n][d])) values.rounded[n][d] = rounded[n];
}

Values values_of(const Quantization& quant, const Matrix& v, const GivenScale& given_scale) {
  Values values;
  const std::size_t width = v.width();
  Matrix finite = v;
  for (Row& row : finite.rows) {
    for (double& x : row) x = std::isfinite(x) ? x : 0;
  }
  values.mean = quant.smooth_v == Smoothing::none ? FloatRow(width)
                                                  : mean_of(finite, rows_from(0, v.count()));
  const auto at = [&](std::int64_t n, std::size_t d) {
    return static_cast<float>(finite.rows[static_cast<std::size_t>(n)][d]) - values.mean[d];
  };
  if (quant.pv == QuantFormat::e2m1) {
    values.rounded = v.rows;
    for (std::size_t d = 0; d < width; ++d) round_column(values, d, at, quant.v_scales);
    return values;
  }
  std::vector<FloatRow> greatest(static_cast<std::size_t>(v.count() / quant.block_kv + 1),
                                 FloatRow(width));
  const auto greatest_at = [&](std::int64_t n, std::size_t d) -> float& {
    const ValueGroup group = value_group(quant, n, d);
    return greatest[static_cast<std::size_t>(group.tile)][group.channel];
  };
  for (std::int64_t n = 0; n < v.count(); ++n) {
    for (std::size_t d = 0; d < width; ++d) {
      if (!std::isfinite(v.rows[static_cast<std::size_t>(n)][d])) continue;
      float& of_group = greatest_at(n, d);
      of_group = std::max(of_group, std::fabs(at(n, d)));
    }
  }
  for (std::int64_t n = 0; n < v.count(); ++n) {
    Row& to = values.rounded.emplace_back();
    for (std::size_t d = 0; d < width; ++d) {
      const double given = v.rows[static_cast<std::size_t>(n)][d];
      const GivenScale scale =
          given_scale.value > 0
              ? given_scale
              : GivenScale{measured_scale(greatest_at(n, d), quant.pv, quant.v_max)};
      to.push_back(std::isfinite(given) ? rounded(at(n, d), scale, quant.pv) : given);
    }
  }
  return values;
}

// ---- probabilities ----

/// Sums of one row, relative to exp(reference).
class RowOfSums {
 public:
  /// `common`: of the row's scores, what references are counted from.
  RowOfSums(const Quantization& quant, const Values& values, double common)
      : quant_(quant), values_(values), common_(common), sums_(values.mean.size()) {}

  /// The visible keys of one tile.
  void add_tile(std::span<const VisibleKey> keys) {
    double tile_max = -kInfinity;
    for (const VisibleKey& key : keys) tile_max = std::max(tile_max, key.score);
    raise_reference(tile_max);
    const double origin = quant_.pv == QuantFormat::int8 ? tile_max : reference_;
    const double weight = std::exp(origin - reference_);
    const Row codes = codes_of(keys, origin);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const VisibleKey& key = keys[i];
      const double exact = std::exp(key.score - origin);
      const double coded = codes[i] / unit();
      const double counted = weight * (quant_.row_sums == RowSums::codes ? coded : exact);
      sum_ += counted;
      kept_ += key.kept * counted;
      add_value(sums_, key.kept * weight * coded,
                values_.rounded[static_cast<std::size_t>(key.at.kv_idx)]);
    }
  }

  /// Σ of the row's probabilities, sink and all, is exp(lse).
  double lse(double sink) const {
    const double top = std::isnan(sink) ? sink : std::max(reference_, sink);
    return top +
           std::log(sum_ * std::exp(reference_ - top) + (sink == top ? 1 : std::exp(sink - top)));
  }

  /// Not by lse, which has lost the denominator where the reference is so large that it is the same number.
  std::vector<double> out(double sink) const {
    std::vector<double> result = sums_;
    const double factor = 1 / (sum_ + std::exp(sink - reference_));
    for (std::size_t d = 0; d < result.size(); ++d) {
      const double sum = result[d] + static_cast<double>(values_.mean[d]) * kept_;
      result[d] = factor == 0 && !std::isfinite(sum) ? sum : sum * factor;
    }
    return result;
  }

 private:
  /// Codes of a probability of 1, on average.
  double unit() const {
    return static_cast<double>(quant_.p_max) *
           (quant_.p_codes == ProbabilityCodes::linear ? kLinearMean : 1);
  }

  Row codes_of(std::span<const VisibleKey> keys, double origin) const {
    Row codes;
    if (quant_.pv != QuantFormat::e2m1) {
      for (const VisibleKey& key : keys) codes.push_back(code(key.score - origin));
      return codes;
    }
    const auto size = static_cast<std::int64_t>(group_size(quant_.v_scales));
    for (std::size_t i = 0; i < keys.size();) {  // a group, of which some keys may be hidden
      FloatRow group;
      for (const std::int64_t of_first = keys[i].at.kv_idx / size;
           i < keys.size() && keys[i].at.kv_idx / size == of_first; ++i) {
        const double p = static_cast<double>(quant_.p_max) * std::exp(keys[i].score - origin);
        group.push_back(static_cast<float>(p));
      }
      const Row of_group = rounded_group(group, quant_.v_scales);
      codes.insert(codes.end(), of_group.begin(), of_group.end());
    }
    return codes;
  }

  double code(double exponent) const {
    const double p_max = quant_.p_max;
    if (quant_.pv == QuantFormat::int8) return std::nearbyint(p_max * std::exp(exponent));
    if (quant_.p_codes == ProbabilityCodes::exp2)
      return nearest_of(quant_.pv, p_max * std::exp(exponent));
    const double bits = std::nearbyint(8 * (exponent * std::numbers::log2e + std::log2(p_max) + 7));
    const auto b = static_cast<int>(std::clamp(bits, 0.0, 126.0));
    return b < 8 ? b * 0x1p-9 : (8 + b % 8) * std::ldexp(1.0, b / 8 - 10);
  }

  void raise_reference(double tile_max) {
    if (tile_max <= reference_) return;
    const double step = static_cast<double>(quant_.p_step) * std::numbers::ln2;
    const bool has_steps = step > 0 && std::fabs(tile_max) < kNoFractions;
    const double raised =
        has_steps ? common_ + step * std::nearbyint((tile_max - common_) / step) : tile_max;
    const double factor = std::exp(reference_ - raised);
    for (double& sum : sums_) sum = factor == 0 && !std::isfinite(sum) ? sum : sum * factor;
    sum_ *= factor;
    kept_ *= factor;
    reference_ = raised;
  }

  const Quantization& quant_;
  const Values& values_;
  const double common_;
  double reference_ = -kInfinity;
  double sum_ = 0, kept_ = 0;
  std::vector<double> sums_;
};

// ---- a call ----

/// Everything of one sequence and query head.
struct HeadOfCall {
  Queries q;
  Keys k;
  Values v;
};

Matrix matrix_of(const HeadRows& rows, RowIndex first, std::int64_t count) {
  Matrix matrix;
  for (std::int64_t n = 0; n < count; ++n, ++first.row) {
    const std::span<const double> row = rows[first];
    matrix.rows.emplace_back(row.begin(), row.end());
  }
  return matrix;
}

GivenScale given_scale(const TensorView& scale, const TensorView& of, const Position& at) {
  if (!scale) return {};
  return {scale_at(scale, at.batch, at.kv_head), are_codes(of.dtype())};
}

HeadOfCall head_of(const AttentionForward& args, const HeadRows& q, const HeadRows& k,
                   const HeadRows& v, const QueryRow& first) {
  const Position& at = first.at;
  return {queries_of(args.quant, matrix_of(q, first.query, at.seqlen_q),
                     given_scale(args.q_scale, args.q, at)),
          keys_of(args.quant, matrix_of(k, first.first_key, at.seqlen_kv), args.k.dtype(),
                  given_scale(args.k_scale, args.k, at)),
          values_of(args.quant, matrix_of(v, first.first_key, at.seqlen_kv),
                    given_scale(args.v_scale, args.v, at))};
}

/// Row i of q or k as a number again: to, which holds the row as given, stays that where it is not rounded.
void write_rounded(const Quantization& quant, const Operand& operand, std::size_t i,
                   const FloatRow& mean, std::span<double> to) {
  if (quant.qk == QuantFormat::none || !operand.is_rounded[i]) return;
  const Row row = quant.hadamard ? turned_back(operand.rounded[i]) : operand.rounded[i];
  for (std::size_t d = 0; d < to.size(); ++d) to[d] = row[d] + static_cast<double>(mean[d]);
}

/// The row's out; lse where it is that of codes.
std::vector<double> attend(const Quantization& quant, const Values& values, double common,
                           double sink, SoftmaxRow& p) {
  if (quant.pv == QuantFormat::none || !std::isfinite(p.row_max)) {
    std::vector<double> out(values.mean.size());
    for (const VisibleKey& key : p.keys)
      add_value(out, key.kept * key.probability,
                values.rounded[static_cast<std::size_t>(key.at.kv_idx)]);
    return out;
  }
  RowOfSums sums(quant, values, common);
  for (std::span<const VisibleKey> rest(p.keys); !rest.empty();) {
    const std::int64_t tile = rest.front().at.kv_idx / quant.block_kv;
    const auto end = std::ranges::find_if(
        rest, [&](const VisibleKey& key) { return key.at.kv_idx / quant.block_kv != tile; });
    const auto count = static_cast<std::size_t>(end - rest.begin());
    sums.add_tile(rest.first(count));
    rest = rest.subspan(count);
  }
  p.lse = sums.lse(sink);
  return sums.out(sink);
}

}  // namespace

RoundedOperands rounded_operands(const AttentionForward& args) {
  const HeadRows q(args.q);
  const HeadRows k(args.k);
  const HeadRows v(args.v);
  RoundedOperands to{q, k, v};
  for (const QueryRow& row : query_rows(args)) {
    if (row.at.q_idx != 0) continue;  // the first row of a head stands for all
    const HeadOfCall head = head_of(args, q, k, v, row);
    const auto width = static_cast<std::size_t>(args.quant.block_q);
    for (std::int64_t n = 0; n < row.at.seqlen_q; ++n) {
      const auto i = static_cast<std::size_t>(n);
      const RowIndex at{row.query.batch, row.query.row + n, row.query.head};
      write_rounded(args.quant, head.q, i, head.q.block_means[i / width], to.q[at]);
    }
    for (std::int64_t n = 0; n < row.at.seqlen_kv; ++n) {
      const auto i = static_cast<std::size_t>(n);
      write_rounded(args.quant, head.k, i, head.k.mean, to.k[row.key(n)]);
      if (args.quant.pv == QuantFormat::none) continue;
      const std::span<double> values = to.v[row.key(n)];
      for (std::size_t d = 0; d < values.size(); ++d) {
        if (std::isfinite(values[d]))
          values[d] = head.v.rounded[i][d] + static_cast<double>(head.v.mean[d]);
      }
    }
  }
  return to;
}

double nearest_e4m3(double value) { return nearest(value, kE4m3); }

std::vector<double> rounded_group(std::span<const float> group, ScaleGranularity groups) {
  const float scale = scale_of_group(greatest_of(group), groups);
  Row result;
  for (const float x : group)
    result.push_back(scale == 0 ? 0 : rounded(x, scale, QuantFormat::e2m1));
  return result;
}

ForwardResult quantized_forward(const AttentionForward& args) {
  const Quantization& quant = args.quant;
  const HeadRows q(args.q);
  const HeadRows k(args.k);
  const HeadRows v(args.v);
  HeadRows out = HeadRows::zeros_like(out_spec(args));
  ForwardResult result;
  result.lse.assign(num_statistics(args), -kInfinity);
  result.row_max = result.lse;
  Softmax softmax(args);
  HeadOfCall head;
  for (const QueryRow& row : query_rows(args)) {
    if (row.at.q_idx == 0) head = head_of(args, q, k, v, row);
    SoftmaxRow p = softmax(row, [&](std::int64_t kv_idx) {
      return product(quant, head.q, head.k, row.at.q_idx, kv_idx);
    });
    const double sink =
        args.sinks ? element(args.sinks, row.at.q_head * args.sinks.stride(0)) : -kInfinity;
    const double common = softmax.scale() * common_product(quant, head.q, head.k, row.at.q_idx);
    const std::vector<double> attended = attend(quant, head.v, common, sink, p);
    std::ranges::copy(attended, out[row.query].begin());
    result.lse[row.statistic] = p.lse;
    result.row_max[row.statistic] = p.row_max;
  }
  result.out = out.values();
  return result;
}

}  // namespace fovea::reference
