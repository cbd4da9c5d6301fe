// Elements i of a and j of b share a byte where |address(a, i) - address(b, j)| is less than an element. With indices
// of negative strides counted from the other end, and those of a turned round, the difference of addresses is
//
//   start + Σ factor_n · x_n,   factor_n > 0,  0 <= x_n <= most_n
//
// where dimensions of equal strides are one term. So the question is whether such a sum falls into an interval, and it
// is answered from the largest factor down: what the smaller terms can add leaves few values of x_n to try, of one
// buffer cut into nested dimensions three at most. A branch ends early where the smaller terms leave no gap that the
// interval could fall into, and where no multiple of their common divisor lies in it.
#include "problem/strided_overlap.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <span>

#include "core/shape.hpp"

namespace fovea {
namespace {

constexpr std::int64_t kMostReach = std::int64_t{1} << 60;

struct Term {
  std::int64_t factor = 0;  // bytes
  std::int64_t most = 0;
  // Of the terms behind this one, and of it:
  std::int64_t reach = 0;    // the greatest sum
  std::int64_t divisor = 0;  // common to all factors
  std::int64_t gap = 0;      // every interval of so many bytes between 0 and reach holds a sum
};

std::int64_t divide_down(std::int64_t a, std::int64_t positive) {
  return a / positive - (a % positive < 0 ? 1 : 0);
}

class Search {
 public:
  Search(const TensorView& a, const TensorView& b, int max_steps) : steps_left_(max_steps) {
    add_terms(a.spec());
    add_terms(b.spec());
    std::ranges::sort(used(), std::ranges::greater(), &Term::factor);
    prepare();
  }

  /// Does a sum fall into [low, high]?
  bool can_fall_into(std::int64_t low, std::int64_t high) { return try_from(0, low, high); }

 private:
  std::span<Term> used() { return std::span(terms_).first(num_terms_); }

  void add_terms(const TensorSpec& spec) {
    for (std::size_t dim = 0; dim < static_cast<std::size_t>(spec.rank); ++dim) {
      if (spec.shape[dim] < 2 || spec.strides[dim] == 0) continue;
      const std::int64_t stride =
          spec.strides[dim] * static_cast<std::int64_t>(size_bytes(spec.dtype));
      add_term(stride < 0 ? -stride : stride, spec.shape[dim] - 1);
    }
  }

  void add_term(std::int64_t factor, std::int64_t most) {
    const auto same = std::ranges::find(used(), factor, &Term::factor);
    if (same != used().end()) {
      same->most += most;
    } else {
      terms_[num_terms_++] = {.factor = factor, .most = most};
    }
  }

  void prepare() {
    Term behind{.gap = 1};
    for (std::size_t i = num_terms_; i-- > 0;) {
      Term& term = terms_[i];
      term.reach = behind.reach + term.factor * term.most;
      term.divisor = std::gcd(term.factor, behind.divisor);
      // Shifted copies of what is behind, `factor` apart: between two of them is the larger of their own gaps and their
      // distance.
      term.gap = std::max(behind.gap, term.factor - behind.reach);
      behind = term;
    }
  }

  bool try_from(std::size_t i, std::int64_t low, std::int64_t high) {
    if (i == num_terms_) return low <= 0 && 0 <= high;
    const Term& term = terms_[i];
    if (high < 0 || low > term.reach) return false;
    if (low <= 0 || high >= term.reach) return true;  // the least or the greatest sum itself
    if (high - low + 1 >= term.gap) return true;
    if (--steps_left_ < 0) return true;
    if (divide_down(high, term.divisor) * term.divisor < low) return false;
    const std::int64_t reach_behind = term.reach - term.factor * term.most;
    const std::int64_t first =
        std::max<std::int64_t>(0, -divide_down(reach_behind - low, term.factor));
    const std::int64_t last = std::min(term.most, divide_down(high, term.factor));
    for (std::int64_t x = first; x <= last; ++x) {
      if (try_from(i + 1, low - x * term.factor, high - x * term.factor)) return true;
    }
    return false;
  }

  std::array<Term, 2 * static_cast<std::size_t>(kMaxRank)> terms_{};
  std::size_t num_terms_ = 0;
  int steps_left_;
};

/// Adds `count` strides to one end of the reach.
bool extend(ByteReach& reach, std::int64_t stride, std::int64_t count) {
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(stride, count, &bytes)) return false;
  std::int64_t& end = bytes < 0 ? reach.low : reach.high;
  return !__builtin_add_overflow(end, bytes, &end) && -kMostReach <= end && end <= kMostReach;
}

}  // namespace

std::optional<ByteReach> byte_reach(const TensorSpec& spec) {
  if (std::ranges::count(shape_of(spec), 0) > 0) return ByteReach{};
  const auto element = static_cast<std::int64_t>(size_bytes(spec.dtype));
  ByteReach reach{.low = 0, .high = element};
  for (std::size_t dim = 0; dim < static_cast<std::size_t>(spec.rank); ++dim) {
    if (spec.shape[dim] == 1) continue;  // whatever its stride
    std::int64_t stride = 0;
    if (__builtin_mul_overflow(spec.strides[dim], element, &stride)) return std::nullopt;
    if (!extend(reach, stride, spec.shape[dim] - 1)) return std::nullopt;
  }
  return reach;
}

bool may_share_bytes(const TensorView& a, const TensorView& b, int max_steps) {
  const ByteReach reach_a = byte_reach(a.spec()).value();
  const ByteReach reach_b = byte_reach(b.spec()).value();
  if (reach_a.high == reach_a.low || reach_b.high == reach_b.low) return false;
  const auto element_a = static_cast<std::int64_t>(size_bytes(a.dtype()));
  const auto element_b = static_cast<std::int64_t>(size_bytes(b.dtype()));
  const std::uintptr_t first_b = reinterpret_cast<std::uintptr_t>(b.data()) + reach_b.low;
  const std::uintptr_t end_a = reinterpret_cast<std::uintptr_t>(a.data()) + reach_a.high;
  const std::uintptr_t end_b = reinterpret_cast<std::uintptr_t>(b.data()) + reach_b.high;
  const std::uintptr_t first_a = reinterpret_cast<std::uintptr_t>(a.data()) + reach_a.low;
  if (end_a <= first_b || end_b <= first_a) return false;
  // Both reach into the same bytes, so the difference is no longer than one of them.
  const auto start = static_cast<std::int64_t>(first_b - (end_a - element_a));
  return Search(a, b, max_steps).can_fall_into(1 - element_b - start, element_a - 1 - start);
}

}  // namespace fovea
