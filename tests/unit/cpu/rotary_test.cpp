// Rows turned by their positions are those of the oracle, whatever the layout, and nothing else is written.
#include "fovea/rotary.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "reference/attention_decode.hpp"
#include "support/compare.hpp"
#include "support/rotary_case.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

/// Row-major, by the oracle: the gradient of a rotation is the rotation by the negative angle.
std::vector<double> expected_of(const RotaryCase& c, const RotaryMemory& m) {
  std::vector<double> values = values_of(m.x.view());
  std::vector<double> back = values_of(m.sin.view());
  if (c.is_conjugate) {
    for (double& value : back) value = -value;
  }
  const GuardedTensor sin = tensor_of(Dtype::f32, {kRotaryPositions, c.num_pairs}, back);
  const Rotary by{.cos = m.cos.view(), .sin = sin.view(), .is_interleaved = c.is_interleaved};
  const auto width = static_cast<std::size_t>(c.head_dim);
  const auto turn = [&](std::int64_t row, std::int64_t position) {
    for (std::int64_t head = 0; head < c.num_heads; ++head) {
      const std::span at(values.data() + static_cast<std::size_t>(row * c.num_heads + head) * width,
                         width);
      const std::vector<double> turned = reference::rotated(at, by, position);
      std::ranges::copy(turned, at.begin());
    }
  };
  const std::vector<std::int64_t> lengths =
      c.lengths.empty() ? std::vector<std::int64_t>(3, 7) : c.lengths;
  std::int64_t row = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    for (std::int64_t idx = 0; idx < lengths[i]; ++idx, ++row) {
      const std::int64_t offset = c.has_offsets ? (5 * static_cast<std::int64_t>(i) + 1) % 40 : 0;
      turn(row, c.has_positions ? row * 7 % kRotaryPositions : offset + idx);
    }
  }
  return values;
}

void expect_equals_oracle(const RotaryCase& c) {
  RotaryMemory m(c);
  const std::vector<double> expected = expected_of(c, m);
  rotary(m.args);
  const std::vector<double> got = values_of(m.args.out);
  for (std::size_t i = 0; i < got.size(); ++i) {
    // Two products and a sum of numbers below 4, each rounded in f32, then one rounding.
    ASSERT_NEAR(got[i], expected[i], 0x1p-20 + 2 * rounding(m.args.out.dtype(), expected[i])) << i;
  }
  for (const GuardedTensor* tensor : {&m.cos, &m.sin, &m.cu_seqlens, &m.positions, &m.offsets})
    EXPECT_TRUE(!tensor->view() || tensor->is_unchanged());
  EXPECT_TRUE(c.is_in_place || m.x.is_unchanged());
  EXPECT_TRUE(m.out.has_intact_guards() && m.x.has_intact_guards());
}

TEST(RotaryOfRows, EveryLayoutMeetsTheOracle) {
  std::uint64_t seed = 0;
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{}, std::vector<std::int64_t>{9, 0, 1, 12}}) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
      for (const std::int64_t num_pairs : {10, 4, 0}) {
        for (const int options : {0, 1, 2, 3, 4, 5, 6, 7}) {
          RotaryCase c{.lengths = lengths, .num_pairs = num_pairs, .dtype = dtype};
          c.is_interleaved = (options & 1) != 0;
          c.is_conjugate = (options & 2) != 0;
          c.is_in_place = (options & 4) != 0;
          c.out_dtype = options == 3 ? Dtype::f32 : dtype;
          c.has_positions = seed % 3 == 1;
          c.has_offsets = seed % 3 == 2;
          c.seed = ++seed;
          SCOPED_TRACE("seed " + std::to_string(seed));
          expect_equals_oracle(c);
        }
      }
    }
  }
}

TEST(RotaryOfRows, TheConjugateTurnsBack) {
  RotaryCase c{.is_in_place = true};
  RotaryMemory m(c);
  const std::vector<double> before = values_of(m.x.view());
  rotary(m.args);
  m.args.is_conjugate = true;
  rotary(m.args);
  const std::vector<double> after = values_of(m.x.view());
  for (std::size_t i = 0; i < after.size(); ++i) EXPECT_NEAR(after[i], before[i], 0x1p-19);
}

TEST(RotaryOfRows, RefusesByName) {
  const auto refusal = [](RotaryCase c, const auto& spoil) -> std::string {
    RotaryMemory m(c);
    spoil(m.args);
    try {
      rotary(m.args);
    } catch (const Error& error) {
      EXPECT_TRUE(m.out.is_unchanged());
      return error.what();
    }
    return "(not refused)";
  };
  std::vector<std::int64_t> far(8, 60);
  std::vector<float> wide(60 * 11);
  EXPECT_EQ(refusal({}, [](ApplyRotary& a) { a.x = {}; }),
            "rotary: x is missing; expected [batch, seqlen, num_heads, head_dim]");
  EXPECT_EQ(refusal({},
                    [&](ApplyRotary& a) {
                      a.cos = view(wide.data(), {60, 11});
                      a.sin = a.cos;
                    }),
            "rotary: cos is f32 [60, 11], for a rotary_dim of 2 x 11; expected at most 20, the "
            "head_dim of x");
  EXPECT_EQ(
      refusal({.has_positions = true}, [&](ApplyRotary& a) { a.offsets = view(far.data(), {3}); }),
      "rotary: positions is given beside offsets; expected one of them, or none: rows from 0 "
      "on");
  EXPECT_EQ(refusal({}, [&](ApplyRotary& a) { a.offsets = view(far.data(), {3}); }),
            "rotary: row 0 of sequence 0 stands at position 60; expected 0 to 59, the rows of cos");
  EXPECT_NE(refusal({},
                    [](ApplyRotary& a) {
                      a.x = a.out.permuted({1, 0, 2, 3});
                      a.out = a.out.permuted({0, 1, 2, 3});
                    })
                .find("out is"),
            std::string::npos);
  EXPECT_NE(refusal({}, [&](ApplyRotary& a) { a.cos = a.out; }).find("cos is"), std::string::npos);
}

}  // namespace
}  // namespace fovea::testing
