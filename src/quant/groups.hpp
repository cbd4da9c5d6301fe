// Which scale a row of a sequence has: index maps of granularities. Read formats.hpp for the scales themselves.
#pragma once

#include <cstdint>

#include "fovea/quant.hpp"

#include "quant/formats.hpp"

namespace fovea::quant {

/// Of group_16 and group_32: numbers that share a scale, and that scale.
constexpr std::int64_t group_size(ScaleGranularity groups) {
  return groups == ScaleGranularity::group_16 ? 16 : 32;
}
constexpr float group_scale(ScaleGranularity groups, float greatest) {
  return groups == ScaleGranularity::group_16 ? e4m3_value(ue4m3_scale_bits(greatest))
                                              : ue8m0_value(ue8m0_scale_bits(greatest));
}
/// A group that is lost has a scale of 0.
constexpr float group_reciprocal(float scale) { return scale == 0 ? 0 : 1 / scale; }

/// The group of row n of q. Rows of one thread: in the accumulator of an MMA lane l holds rows l / 4 and l / 4 + 8 of
/// every 16, so one scale serves all rows that a thread holds of warp_q.
constexpr std::int64_t q_group(const Quantization& quant, std::int64_t n) {
  switch (quant.q_scales) {
    case ScaleGranularity::block:
      return n / quant.block_q;
    case ScaleGranularity::warp:
      return n / quant.warp_q;
    case ScaleGranularity::thread:
      return n / quant.warp_q * 8 + n % 8;
    case ScaleGranularity::token:
    case ScaleGranularity::group_16:  // in each row
    case ScaleGranularity::group_32:
      return n;
    default:
      return 0;
  }
}

/// The group of row n of k. A lane holds columns 2 (l mod 4) and the next of every 8.
constexpr std::int64_t k_group(const Quantization& quant, std::int64_t n) {
  switch (quant.k_scales) {
    case ScaleGranularity::block:
      return n / quant.block_kv;
    case ScaleGranularity::thread:
      return n / quant.block_kv * 4 + n % 8 / 2;
    case ScaleGranularity::token:
    case ScaleGranularity::group_16:  // in each row
    case ScaleGranularity::group_32:
      return n;
    default:
      return 0;
  }
}

/// Most groups that `rows` rows have: those of whole blocks.
constexpr std::int64_t num_q_groups(const Quantization& quant, std::int64_t rows) {
  const std::int64_t blocks = (rows + quant.block_q - 1) / quant.block_q;
  switch (quant.q_scales) {
    case ScaleGranularity::block:
      return blocks;
    case ScaleGranularity::warp:
      return blocks * (quant.block_q / quant.warp_q);
    case ScaleGranularity::thread:
      return blocks * (quant.block_q / quant.warp_q) * 8;
    case ScaleGranularity::token:
    case ScaleGranularity::group_16:
    case ScaleGranularity::group_32:
      return rows;
    default:
      return 1;
  }
}
constexpr std::int64_t num_k_groups(const Quantization& quant, std::int64_t rows) {
  const std::int64_t blocks = (rows + quant.block_kv - 1) / quant.block_kv;
  switch (quant.k_scales) {
    case ScaleGranularity::block:
      return blocks;
    case ScaleGranularity::thread:
      return blocks * 4;
    case ScaleGranularity::token:
    case ScaleGranularity::group_16:
    case ScaleGranularity::group_32:
      return rows;
    default:
      return 1;
  }
}

/// The first row of the group of row n: where a group is known by a row of its own.
constexpr std::int64_t first_of_q_group(const Quantization& quant, std::int64_t n) {
  switch (quant.q_scales) {
    case ScaleGranularity::block:
      return n - n % quant.block_q;
    case ScaleGranularity::warp:
      return n - n % quant.warp_q;
    case ScaleGranularity::thread:
      return n - n % quant.warp_q + n % 8;
    case ScaleGranularity::token:
    case ScaleGranularity::group_16:  // in each row
    case ScaleGranularity::group_32:
      return n;
    default:
      return 0;
  }
}
constexpr std::int64_t first_of_k_group(const Quantization& quant, std::int64_t n) {
  switch (quant.k_scales) {
    case ScaleGranularity::block:
      return n - n % quant.block_kv;
    case ScaleGranularity::thread:
      return n - n % quant.block_kv + n % 8 / 2 * 2;
    case ScaleGranularity::token:
    case ScaleGranularity::group_16:  // in each row
    case ScaleGranularity::group_32:
      return n;
    default:
      return 0;
  }
}

inline constexpr std::int64_t kSampledRows = 64;

/// Row i of the sample of `rows` rows that Smoothing::sample takes the mean of.
constexpr std::int64_t sampled_row(std::int64_t i, std::int64_t rows) {
  return rows <= kSampledRows ? i : i * rows / kSampledRows;
}
constexpr std::int64_t num_sampled(std::int64_t rows) {
  return rows < kSampledRows ? rows : kSampledRows;
}

}  // namespace fovea::quant
