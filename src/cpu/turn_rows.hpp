// Heads of a token whose pairs are turned by the angles of a position: rotary position embedding, a row at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "fovea/kv_cache.hpp"

#include "core/scalar_io.hpp"
#include "cpu/operands.hpp"

namespace fovea::cpu {

inline constexpr std::int64_t kMaxRotaryDim = 512;  // validation refuses wider ones

/// One head of one token: its elements, wherever they lie.
struct HeadRow {
  std::byte* data = nullptr;
  Dtype dtype = Dtype::f32;
  std::int64_t stride = 1;

  float at(std::int64_t i) const { return load_scalar(data, dtype, i * stride); }
  void set(std::int64_t i, float value) const { store_scalar(data, dtype, i * stride, value); }
};

inline HeadRow head_row(const Rows& rows, std::int64_t batch, std::int64_t row, std::int64_t head) {
  return {rows.at(batch, row, head), rows.dtype, rows.col_stride};
}

/// Of a row in its own place nothing.
inline void copy(const HeadRow& from, const HeadRow& to, std::int64_t begin, std::int64_t end) {
  if (from.data == to.data) return;
  if (from.dtype == to.dtype && from.stride == 1 && to.stride == 1) {
    const auto element = static_cast<std::int64_t>(size_bytes(from.dtype));
    std::memcpy(to.data + begin * element, from.data + begin * element,
                static_cast<std::size_t>((end - begin) * element));
    return;
  }
  for (std::int64_t i = begin; i < end; ++i) to.set(i, from.at(i));
}

/// The angles of one position.
struct Turn {
  std::int64_t num_pairs = 0;
  bool is_interleaved = false;
  float cos[kMaxRotaryDim / 2], sin[kMaxRotaryDim / 2];

  Turn(const Rotary& rotary, std::int64_t position)
      : num_pairs(rotary.cos.size(1)), is_interleaved(rotary.is_interleaved) {
    read(rotary.cos, position, cos);
    read(rotary.sin, position, sin);
  }

  /// By the same angles the other way.
  void reverse() {
    for (std::int64_t j = 0; j < num_pairs; ++j) sin[j] = -sin[j];
  }

  /// Elements of pair j.
  std::pair<std::int64_t, std::int64_t> pair(std::int64_t j) const {
    return is_interleaved ? std::pair{2 * j, 2 * j + 1} : std::pair{j, j + num_pairs};
  }

 private:
  void read(const TensorView& table, std::int64_t position, float* out) const {
    const auto* data = static_cast<const std::byte*>(table.data());
    for (std::int64_t j = 0; j < num_pairs; ++j) {
      out[j] = load_scalar(data, table.dtype(), position * table.stride(0) + j * table.stride(1));
    }
  }
};

/// Pairs are turned in fp32 and rounded once, what lies behind them is copied. `to` may be `from`.
inline void turn_row(const Turn& turn, const HeadRow& from, const HeadRow& to,
                     std::int64_t head_dim) {
  for (std::int64_t j = 0; j < turn.num_pairs; ++j) {
    const auto [first, second] = turn.pair(j);
    const float x = from.at(first);
    const float y = from.at(second);
    to.set(first, x * turn.cos[j] - y * turn.sin[j]);
    to.set(second, x * turn.sin[j] + y * turn.cos[j]);
  }
  copy(from, to, 2 * turn.num_pairs, head_dim);
}

}  // namespace fovea::cpu
