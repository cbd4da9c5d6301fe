#include "support/drawn_spec.hpp"

#include <algorithm>
#include <array>
#include <numeric>

namespace fovea::testing {
namespace {

enum Draw : std::int64_t { kind, inner_step, order, gap = 20, sign = 30, shared = 40 };

constexpr std::int64_t kFarAway = 1'000'003;  // where no step may lead: one element needs none

/// Dimensions from the innermost to the outermost.
std::array<std::size_t, kMaxRank> drawn_order(std::size_t rank, const Random& random) {
  std::array<std::size_t, kMaxRank> dims{};
  std::iota(dims.begin(), dims.end(), 0);
  const auto rank_of = [&](std::size_t dim) {
    return random.bits(Draw::order + static_cast<std::int64_t>(dim));
  };
  std::sort(dims.begin(), dims.begin() + static_cast<std::ptrdiff_t>(rank),
            [&](std::size_t a, std::size_t b) { return rank_of(a) < rank_of(b); });
  return dims;
}

}  // namespace

TensorSpec drawn_spec(Dtype dtype, std::span<const std::int64_t> shape, const Random& random,
                      Strides strides) {
  TensorSpec spec = make_spec(dtype, shape);
  if (random.below(3, Draw::kind) == 0) return spec;
  std::int64_t step = 1 + random.below(3, Draw::inner_step);
  const auto dims = drawn_order(shape.size(), random);
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const std::size_t dim = dims[i];
    const auto at = static_cast<std::int64_t>(dim);
    std::int64_t& stride = spec.strides[dim];
    if (shape[dim] <= 1) {
      stride = kFarAway;
      continue;
    }
    stride = step;
    if (strides == Strides::of_any_values && random.below(6, Draw::shared + at) == 0) {
      stride = 0;
      continue;
    }
    step = step * shape[dim] + random.below(6, Draw::gap + at);
    if (strides != Strides::of_output && random.below(4, Draw::sign + at) == 0) stride = -stride;
  }
  return spec;
}

}  // namespace fovea::testing
