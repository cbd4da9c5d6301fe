// One problem of rotary (RotaryCase) and its memory in any layout: equal for equal cases.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "fovea/rotary.hpp"

#include "support/drawn_spec.hpp"
#include "support/guarded_tensor.hpp"
#include "support/random.hpp"

namespace fovea::testing {

inline constexpr std::int64_t kRotaryPositions = 60;

struct RotaryCase {
  std::vector<std::int64_t> lengths{};  // packed; else 3 sequences of 7 rows
  std::int64_t num_heads = 3, head_dim = 20, num_pairs = 10;
  Dtype dtype = Dtype::f32, out_dtype = Dtype::f32;
  bool is_interleaved = false, is_conjugate = false, is_in_place = false;
  bool has_positions = false, has_offsets = false;
  std::uint64_t seed = 1;
};

struct RotaryMemory {
  explicit RotaryMemory(const RotaryCase& c) {
    std::vector<std::int64_t> begins{0};
    for (const std::int64_t length : c.lengths) begins.push_back(begins.back() + length);
    std::vector<std::int64_t> shape{3, 7, c.num_heads, c.head_dim};
    if (!c.lengths.empty()) shape = {begins.back() + 2, c.num_heads, c.head_dim};
    const auto drawn = [&](std::uint64_t stream, Dtype dtype, const std::vector<std::int64_t>& of,
                           Strides strides = Strides::of_input) {
      return GuardedTensor(drawn_spec(dtype, of, Random(c.seed, stream), strides));
    };
    x = drawn(1, c.dtype, shape, Strides::of_output);
    const Random random(c.seed, 9);
    x.fill([&](std::int64_t i) { return random.normal(i); });
    out = drawn(2, c.out_dtype, shape, Strides::of_output);
    cos = drawn(3, Dtype::f32, {kRotaryPositions, c.num_pairs});
    sin = drawn(4, Dtype::f32, {kRotaryPositions, c.num_pairs});
    cos.fill([](std::int64_t i) { return std::cos(0.37 * static_cast<double>(i)); });
    sin.fill([](std::int64_t i) { return std::sin(0.37 * static_cast<double>(i)); });
    args = {.x = c.is_in_place ? x.mutable_view() : x.view(),
            .out = c.is_in_place ? x.mutable_view() : out.mutable_view(),
            .cos = cos.view(),
            .sin = sin.view(),
            .is_interleaved = c.is_interleaved,
            .is_conjugate = c.is_conjugate};
    if (!c.lengths.empty()) {
      cu_seqlens = drawn(5, Dtype::i64, {static_cast<std::int64_t>(begins.size())});
      cu_seqlens.fill(
          [&](std::int64_t i) { return static_cast<double>(begins[static_cast<std::size_t>(i)]); });
      args.cu_seqlens = cu_seqlens.view();
    }
    if (c.has_positions) {
      shape.resize(shape.size() - 2);
      positions = drawn(6, Dtype::i32, shape);
      positions.fill([](std::int64_t i) { return static_cast<double>(i * 7 % kRotaryPositions); });
      args.positions = positions.view();
    }
    if (c.has_offsets) {
      offsets = drawn(7, Dtype::i64,
                      {c.lengths.empty() ? 3 : static_cast<std::int64_t>(begins.size()) - 1});
      offsets.fill([](std::int64_t i) { return static_cast<double>((5 * i + 1) % 40); });
      args.offsets = offsets.view();
    }
    for (GuardedTensor* tensor : {&x, &out, &cos, &sin, &cu_seqlens, &positions, &offsets})
      tensor->seal();
  }

  GuardedTensor x, out, cos, sin, cu_seqlens, positions, offsets;
  ApplyRotary args;
};

}  // namespace fovea::testing
