// Strided tensors against every address of theirs: what validation calls disjoint shares no byte, and of slices of one
// buffer the answer is exact.
#include "problem/strided_overlap.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace fovea::testing {
namespace {

// Addresses are counted, never read.
std::byte origin[1] = {};

constexpr int kPairs = 20;  // of tensors, for every one of RapidCheck's cases

struct Layout {
  std::int64_t offset = 0;  // bytes
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape{}, strides{};

  TensorView view() const {
    const auto address =
        reinterpret_cast<std::uintptr_t>(origin) + static_cast<std::uintptr_t>(offset);
    return {reinterpret_cast<const void*>(address), make_spec(dtype, shape, strides)};
  }
};

std::vector<std::int64_t> bytes_of(const Layout& t) {
  const auto size = static_cast<std::int64_t>(size_bytes(t.dtype));
  std::vector<std::int64_t> places{t.offset};
  for (std::size_t dim = 0; dim < t.shape.size(); ++dim) {
    std::vector<std::int64_t> next;
    for (const std::int64_t place : places) {
      for (std::int64_t i = 0; i < t.shape[dim]; ++i)
        next.push_back(place + i * t.strides[dim] * size);
    }
    places = std::move(next);
  }
  std::vector<std::int64_t> bytes;
  for (const std::int64_t place : places) {
    for (std::int64_t i = 0; i < size; ++i) bytes.push_back(place + i);
  }
  std::ranges::sort(bytes);
  return bytes;
}

bool share_bytes(const Layout& a, const Layout& b) {
  const std::vector<std::int64_t> bytes_a = bytes_of(a);
  const std::vector<std::int64_t> bytes_b = bytes_of(b);
  return std::ranges::any_of(
      bytes_a, [&](std::int64_t byte) { return std::ranges::binary_search(bytes_b, byte); });
}

Dtype any_dtype() { return *rc::gen::element(Dtype::u8, Dtype::f16, Dtype::f32, Dtype::i64); }

Layout any_layout() {
  Layout t{.offset = *rc::gen::inRange<std::int64_t>(-120, 120), .dtype = any_dtype()};
  const auto rank = *rc::gen::inRange<std::size_t>(0, 5);
  for (std::size_t dim = 0; dim < rank; ++dim) {
    t.shape.push_back(*rc::gen::inRange<std::int64_t>(0, 6));
    t.strides.push_back(*rc::gen::inRange<std::int64_t>(-40, 41));
  }
  return t;
}

TEST(StridedOverlap, AnyStridesAreDecidedAsTheirAddressesSay) {
  EXPECT_TRUE(rc::check("exact", [] {
    for (int pair = 0; pair < kPairs; ++pair) {
      const Layout a = any_layout();
      const Layout b = any_layout();
      RC_ASSERT(may_share_bytes(a.view(), b.view()) == share_bytes(a, b));
    }
  }));
}

TEST(StridedOverlap, NothingThatMeetsIsCalledDisjointHoweverFewTheSteps) {
  EXPECT_TRUE(rc::check("sound", [] {
    for (int pair = 0; pair < kPairs; ++pair) {
      const Layout a = any_layout();
      const Layout b = any_layout();
      const int max_steps = *rc::gen::inRange(0, 6);
      if (!may_share_bytes(a.view(), b.view(), max_steps)) RC_ASSERT(!share_bytes(a, b));
    }
  }));
}

/// A buffer of nested dimensions, some with room between their rows.
Layout any_buffer() {
  Layout t{.dtype = any_dtype()};
  std::int64_t stride = 1;
  const auto rank = *rc::gen::inRange<std::size_t>(1, 6);
  for (std::size_t dim = 0; dim < rank; ++dim) {
    t.shape.push_back(*rc::gen::inRange<std::int64_t>(1, 7));
    t.strides.push_back(stride);
    stride *= t.shape.back();
    stride += *rc::gen::element<std::int64_t>(0, 0, 1, 3);
  }
  return t;
}

/// buffer[start:stop:step, ...], forward or backward, one index of a dimension, dimensions in any order, repeated ones.
Layout any_slice(const Layout& buffer) {
  Layout t{.dtype = buffer.dtype};
  const auto size = static_cast<std::int64_t>(size_bytes(t.dtype));
  for (std::size_t dim = 0; dim < buffer.shape.size(); ++dim) {
    const std::int64_t extent = buffer.shape[dim];
    const std::int64_t stride = buffer.strides[dim];
    const auto start = *rc::gen::inRange<std::int64_t>(0, extent);
    const auto step = *rc::gen::element<std::int64_t>(1, 1, 2, 3);
    const auto count = *rc::gen::inRange<std::int64_t>(1, (extent - 1 - start) / step + 2);
    const bool is_backward = *rc::gen::arbitrary<bool>();
    t.offset += (start + (is_backward ? (count - 1) * step : 0)) * stride * size;
    if (count == 1 && *rc::gen::arbitrary<bool>()) continue;
    t.shape.push_back(count);
    t.strides.push_back((is_backward ? -step : step) * stride);
  }
  if (*rc::gen::inRange(0, 4) == 0) {
    t.shape.push_back(3);
    t.strides.push_back(0);
  }
  for (std::size_t i = t.shape.size(); i > 1; --i) {
    const auto j = *rc::gen::inRange<std::size_t>(0, i);
    std::swap(t.shape[i - 1], t.shape[j]);
    std::swap(t.strides[i - 1], t.strides[j]);
  }
  return t;
}

TEST(StridedOverlap, SlicesOfOneBufferAreDecidedExactlyInFewSteps) {
  constexpr int kFew = 256;
  EXPECT_TRUE(rc::check("exact", [] {
    for (int pair = 0; pair < kPairs; ++pair) {
      const Layout buffer = any_buffer();
      const Layout a = any_slice(buffer);
      const Layout b = any_slice(buffer);
      RC_ASSERT(may_share_bytes(a.view(), b.view(), kFew) == share_bytes(a, b));
    }
  }));
}

}  // namespace
}  // namespace fovea::testing
