// Dense masks and biases against the oracle, on every target: rows and keys around panels, tiles and splits, tensors
// that broadcast or lie in any order, rows that see nothing.
#include <gtest/gtest.h>

#include <cstddef>
#include <iterator>
#include <limits>
#include <vector>

#include "fovea/mask.hpp"

#include "support/compare.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

using Shape = std::vector<std::int64_t>;

/// A panel and more; an odd number of keys; few rows; few rows whose keys are split.
constexpr Lengths kLengths[] = {{50, 180}, {97, 257}, {3, 150}, {2, 2100}, {13, 2100}};

/// Of the scores of a problem, and those that broadcast to it.
std::vector<Shape> shapes_for(const Case& problem) {
  const std::int64_t batch = problem.num_sequences(), heads = problem.num_heads_q;
  const std::int64_t rows = problem.max_seqlen_q(), keys = problem.max_seqlen_kv();
  return {{rows, keys},           {heads, rows, keys}, {batch, heads, rows, keys},
          {batch, 1, rows, keys}, {batch, 1, 1, keys}, {1, 1, rows, 1}};
}

/// Keys in sight: a tile of nothing, one of all, and any; the second row of every three sees nothing.
double is_visible(const Shape& shape, const Random& random, std::int64_t i) {
  const std::int64_t row = i / shape.back(), key = i % shape.back();
  if (row % 3 == 1 || (128 <= key && key < 160)) return 0;
  return key < 64 || random.uniform(i) < 0.7 ? 1 : 0;
}

template <typename Test>
void on_every_problem(const Test& test) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    for (const Lengths& lengths : kLengths) {
      Case problem{.label = "dense",
                   .batch = 2,
                   .seqlen_q = lengths.q,
                   .seqlen_kv = lengths.kv,
                   .num_heads_q = 2,
                   .dtype = dtype};
      test(problem);
    }
    test({.label = "dense, packed",
          .sequences = {{3, 0}, {20, 131}, {0, 2}, {70, 257}, {1, 40}},
          .trailing_rows = 2,
          .num_heads_q = 2,
          .dtype = dtype});
  }
}

TEST(CpuDense, MasksEqualTheOracle) {
  on_every_problem([](Case problem) {
    for (const Shape& shape : shapes_for(problem)) {
      const Random random(problem.seed, 31);
      const TensorView mask = problem.capture(
          Dtype::boolean, shape, [&](std::int64_t i) { return is_visible(shape, random, i); },
          Strides::of_any_values);
      for (const MaskMod& of : {dense_mask(mask), dense_mask(mask) && causal()}) {
        problem.mask = of;
        expect_equals_oracle(problem);
      }
    }
  });
}

TEST(CpuDense, BiasesEqualTheOracle) {
  constexpr Dtype kElements[] = {Dtype::f32, Dtype::bf16, Dtype::f16};
  std::size_t num_tables = 0;
  on_every_problem([&](Case problem) {
    for (const Shape& shape : shapes_for(problem)) {
      const Random random(problem.seed, 32);
      const TensorView table = problem.capture(
          kElements[num_tables++ % std::size(kElements)], shape,
          [&](std::int64_t i) {
            return is_visible(shape, random, i) != 0 ? random.normal(i)
                                                     : -std::numeric_limits<double>::infinity();
          },
          Strides::of_any_values);
      problem.score = bias(table);
      expect_equals_oracle(problem);
    }
    num_tables += 1;  // every shape meets every dtype
  });
}

}  // namespace
}  // namespace fovea::testing
