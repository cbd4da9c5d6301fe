// Products of a warpgroup: every kind of operand against a plain product, and what holds before and after them.

#include <gtest/gtest.h>

#include <bit>
#include <random>
#include <type_traits>
#include <vector>

#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/formats.hpp"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/generated/wgmma_bf16.cuh"
#include "ptx/memory.cuh"
#include "tile/fragment.cuh"
#include "tile/matrix_descriptor.cuh"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::emulator {
namespace {

using ptx::Major;
using ptx::WgmmaType;

constexpr int kRows = 64;

/// Operands as bits, [64, depth] and [columns, depth]; small integers are exact in every type.
struct Matrices {
  int columns, depth;
  std::vector<std::uint32_t> a, b;
  std::vector<double> product;
};

std::uint32_t encode(WgmmaType type, int value) {
  const auto as_float = static_cast<float>(value);
  switch (type) {
    case WgmmaType::bf16:
      return encode_bf16(as_float);
    case WgmmaType::f16:
      return encode_f16(as_float);
    case WgmmaType::e4m3:
    case WgmmaType::e5m2: {
      // Powers of two alone, so that both formats hold them: sign, exponent, no mantissa.
      const int bias = type == WgmmaType::e4m3 ? 7 : 15, mantissa = type == WgmmaType::e4m3 ? 3 : 2;
      const auto sign = static_cast<std::uint32_t>(value < 0) << 7;
      return sign | static_cast<std::uint32_t>(bias + (value & 3)) << mantissa;
    }
    case WgmmaType::s8:
    case WgmmaType::u8:
      return static_cast<std::uint32_t>(value) & (type == WgmmaType::u8 ? 0x7fU : 0xffU);
  }
  return 0;
}

Matrices draw(WgmmaType a_type, WgmmaType b_type, int columns) {
  Matrices m{columns, ptx::is_16_bit(a_type) ? 16 : 32, {}, {}, {}};
  std::mt19937 random(5);
  std::uniform_int_distribution<int> small(-8, 8);
  for (int i = 0; i < kRows * m.depth; ++i) m.a.push_back(encode(a_type, small(random)));
  for (int i = 0; i < columns * m.depth; ++i) m.b.push_back(encode(b_type, small(random)));
  const Format a_format = ptx::format_of(a_type), b_format = ptx::format_of(b_type);
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < columns; ++column) {
      double sum = 0;
      for (int k = 0; k < m.depth; ++k) {
        sum += double{decode(a_format, m.a[static_cast<std::size_t>(row * m.depth + k)])} *
               decode(b_format, m.b[static_cast<std::size_t>(column * m.depth + k)]);
      }
      m.product.push_back(sum);
    }
  }
  return m;
}

/// Writes element (i, k) of a [size, depth] matrix into a tile whose rows run along K or along M/N.
template <class Tile>
void store(const Tile& tile, Major major, const std::vector<std::uint32_t>& matrix, int size,
           int depth, int bytes) {
  for (int i = ptx::thread_idx().x; i < size * depth; i += 128) {
    const int row = i / depth, k = i % depth;
    const ptx::SharedAddress to =
        major == Major::k ? tile.at(row, k * bytes) : tile.at(k, row * bytes);
    const std::uint32_t bits = matrix[static_cast<std::size_t>(i)];
    if (bytes == 2) {
      ptx::st_shared(to, static_cast<std::uint16_t>(bits));
    } else {
      ptx::st_shared(to, static_cast<std::uint8_t>(bits));
    }
  }
}

template <Major major, int size, int depth, int bytes, Swizzle swizzle>
using Tile = std::conditional_t<
    major == Major::k,
    // As wide as one span at least, of which a product takes 32 bytes.
    SharedTile<size, static_cast<int>(std::max(32U, swizzle_span(swizzle))), swizzle>,
    SharedTile<depth, size * bytes, swizzle>>;

template <WgmmaType a_type, WgmmaType b_type, int n, Major a_major, Major b_major, Swizzle swizzle,
          bool is_rs>
void expect_product() {
  constexpr bool kIsInteger = a_type == WgmmaType::s8 || a_type == WgmmaType::u8;
  using Sum = std::conditional_t<kIsInteger, std::int32_t, float>;
  constexpr int kBytes = ptx::is_16_bit(a_type) ? 2 : 1, kDepth = 32 / kBytes;
  using TileA = Tile<a_major, kRows, kDepth, kBytes, swizzle>;
  using TileB = Tile<b_major, n, kDepth, kBytes, swizzle>;
  const Matrices m = draw(a_type, b_type, n);
  Device device;
  Sum* out = device.buffer<Sum>("out", kRows * n);
  const Report report = sweep(3, [&](const Options& options) {
    return device.launch({.block = {128, 1, 1}, .shared_bytes = 96 * 1024}, options, [&] {
      const TileA a{ptx::dynamic_shared()};
      const TileB b{ptx::dynamic_shared() + 32 * 1024};
      store(a, a_major, m.a, kRows, kDepth, kBytes);
      store(b, b_major, m.b, n, kDepth, kBytes);
      ptx::fence_proxy_async_shared_cta();
      ptx::sync_threads();
      const auto descriptor = [](const auto& tile, auto major) {
        if constexpr (decltype(major)::value == Major::k) {
          return k_major_descriptor(tile);
        } else {
          return mn_major_descriptor(tile);
        }
      };
      const auto b_descriptor = descriptor(b, std::integral_constant<Major, b_major>{});
      const int thread = ptx::thread_idx().x;
      // d begins with 1: what is_accumulating keeps.
      Sum d[n / 2];
      for (Sum& sum : d) sum = 1;
      std::uint32_t fragment[4] = {};
      if constexpr (is_rs) {
        for (int r = 0; r < 4; ++r) {
          const int lane = thread % 32;
          const Coordinate at =
              kBytes == 2 ? a_coordinate_16_bit(lane, r) : a_coordinate_8_bit(lane, r);
          for (int i = 0; i < 4 / kBytes; ++i) {
            const int row = 16 * (thread / 32) + at.row;
            fragment[r] |= m.a[static_cast<std::size_t>(row * kDepth + at.column + i)]
                           << (8 * kBytes * i);
          }
        }
      }
      ptx::wgmma_fence();
      if constexpr (is_rs) {
        ptx::wgmma_rs<a_type, b_type, n, b_major>(d, fragment, b_descriptor, true);
      } else {
        const auto a_descriptor = descriptor(a, std::integral_constant<Major, a_major>{});
        ptx::wgmma_ss<a_type, b_type, n, a_major, b_major>(d, a_descriptor, b_descriptor, true);
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      for (int i = 0; i < n / 2; ++i) {
        const Coordinate at = wgmma_coordinate(thread, i);
        ptx::st_global(out + at.row * n + at.column, d[i]);
      }
    });
  });
  EXPECT_EQ(report.text(), "");
  for (int i = 0; i < kRows * n; ++i) {
    ASSERT_EQ(static_cast<double>(out[i]), m.product[static_cast<std::size_t>(i)] + 1)
        << "row " << i / n << " column " << i % n;
  }
}

template <class T>
class EachSwizzle : public testing::Test {};
using Swizzles = testing::Types<std::integral_constant<Swizzle, Swizzle::none>,
                                std::integral_constant<Swizzle, Swizzle::bytes32>,
                                std::integral_constant<Swizzle, Swizzle::bytes64>,
                                std::integral_constant<Swizzle, Swizzle::bytes128>>;
TYPED_TEST_SUITE(EachSwizzle, Swizzles);

constexpr WgmmaType kBf16 = WgmmaType::bf16;

// 64 columns and not 8: several blocks of 8 rows, and where rows run along N, panels of their own.
TYPED_TEST(EachSwizzle, BothOperandsKMajor) {
  expect_product<kBf16, kBf16, 64, Major::k, Major::k, TypeParam::value, false>();
}

TYPED_TEST(EachSwizzle, BMnMajor) {
  expect_product<kBf16, kBf16, 64, Major::k, Major::mn, TypeParam::value, false>();
}

TYPED_TEST(EachSwizzle, BothOperandsMnMajor) {
  expect_product<kBf16, kBf16, 128, Major::mn, Major::mn, TypeParam::value, false>();
}

TYPED_TEST(EachSwizzle, AInRegisters) {
  expect_product<kBf16, kBf16, 128, Major::k, Major::mn, TypeParam::value, true>();
}

TEST(Wgmma, EveryTypeMultiplies) {
  constexpr Swizzle kWide = Swizzle::bytes128;
  expect_product<WgmmaType::f16, WgmmaType::f16, 8, Major::k, Major::k, kWide, false>();
  expect_product<WgmmaType::e4m3, WgmmaType::e5m2, 24, Major::k, Major::k, kWide, false>();
  expect_product<WgmmaType::e5m2, WgmmaType::e4m3, 256, Major::k, Major::k, kWide, true>();
  expect_product<WgmmaType::s8, WgmmaType::u8, 48, Major::k, Major::k, kWide, false>();
  expect_product<WgmmaType::u8, WgmmaType::s8, 32, Major::k, Major::k, kWide, true>();
}

}  // namespace
}  // namespace fovea::cuda::emulator
