// What the 64 lanes of a CDNA wave do together: products by v_mfma, copies to LDS. Which lane holds what is written
// down here again, from AMD's matrix instruction calculator.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/formats.hpp"
#include "ptx/barrier.cuh"
#include "ptx/copy_to_shared.cuh"
#include "ptx/lds_transpose.cuh"
#include "ptx/mfma.cuh"

namespace fovea::cuda::emulator {
namespace {

constexpr LaunchConfig kOneWave{.block = {64, 1, 1}, .shared_bytes = 4096, .warp_lanes = 64};

LaunchConfig on(int gfx) {
  LaunchConfig config = kOneWave;
  config.gfx = gfx;
  return config;
}

/// Small integers, of which products and sums are exact in every format.
template <int rows, int columns>
struct Matrix {
  int element[rows][columns];

  explicit Matrix(unsigned seed) {
    std::mt19937 random(seed);
    for (auto& row : element)
      for (int& x : row) x = static_cast<int>(random() % 17) - 8;
  }
};

template <Element element>
std::uint32_t pair(int lo, int hi) {
  const auto bits = [](int x) {
    const auto value = static_cast<float>(x);
    return element == Element::bf16 ? encode_bf16(value) : encode_f16(value);
  };
  return bits(lo) | bits(hi) << 16U;
}

/// D = A B + C by one product, as lanes see it.
template <Element element, int depth>
void expect_product() {
  const Matrix<32, depth> a(1);
  const Matrix<depth, 32> b(2);
  const Matrix<32, 32> c(3);
  Device device;
  auto* out = device.buffer<float>("out", 32 * 32);
  const Report report = device.launch(on(depth == 8 ? 0x942 : 0x950), {}, [&] {
    const int lane = ptx::lane_idx(), slow = lane % 32, first = depth / 2 * (lane / 32);
    std::uint32_t mine_a[4] = {}, mine_b[4] = {};
    for (int i = 0; i < depth / 2; i += 2) {
      mine_a[i / 2] = pair<element>(a.element[slow][first + i], a.element[slow][first + i + 1]);
      mine_b[i / 2] = pair<element>(b.element[first + i][slow], b.element[first + i + 1][slow]);
    }
    const auto row_of = [&](int g) { return 8 * (g / 4) + 4 * (lane / 32) + g % 4; };
    float d[16];
    for (int g = 0; g < 16; ++g) d[g] = static_cast<float>(c.element[row_of(g)][slow]);
    if constexpr (depth == 8) {
      ptx::mfma_32x32x8<element>(d, {mine_a[0], mine_a[1]}, {mine_b[0], mine_b[1]});
    } else {
      ptx::mfma_32x32x16<element>(d, {mine_a[0], mine_a[1], mine_a[2], mine_a[3]},
                                  {mine_b[0], mine_b[1], mine_b[2], mine_b[3]});
    }
    for (int g = 0; g < 16; ++g) ptx::st_global(out + 32 * row_of(g) + slow, d[g]);
  });
  EXPECT_EQ(report.text(), "");
  for (int row = 0; row < 32; ++row) {
    for (int column = 0; column < 32; ++column) {
      int expected = c.element[row][column];
      for (int k = 0; k < depth; ++k) expected += a.element[row][k] * b.element[k][column];
      ASSERT_EQ(out[32 * row + column], static_cast<float>(expected)) << row << ", " << column;
    }
  }
}

TEST(Mfma, MultipliesMatricesAsLanesHoldThem) {
  expect_product<Element::bf16, 8>();
  expect_product<Element::f16, 8>();
  expect_product<Element::bf16, 16>();
  expect_product<Element::f16, 16>();
}

TEST(Mfma, OfDepth16IsGfx950s) {
  Device device;
  const Report report = device.launch(on(0x942), {}, [] {
    float d[16] = {};
    ptx::mfma_32x32x16<Element::f16>(d, {}, {});
  });
  EXPECT_TRUE(report.has(Fault::architecture)) << report.text();
}

/// 64 rows of 16 elements, each its place: four rows for each 16 lanes, by four lanes each.
Report read_columns(int gfx, std::uint32_t (&columns)[64][2], int lanes = 64) {
  Device device;
  auto* out = device.buffer<std::uint32_t>("out", 128);
  Report report = device.launch(on(gfx), {}, [&] {
    const int lane = ptx::lane_idx();
    const ptx::SharedAddress smem = ptx::dynamic_shared();
    for (int i = lane; i < 256; i += 64)
      ptx::st_shared(smem + 2 * i, static_cast<std::uint16_t>(1000 + i));
    ptx::sync_threads();
    if (lane >= lanes) return;
    const int row = lane / 16 * 4 + lane % 16 / 4, part = lane % 4;
    const ptx::U32x2 column = ptx::ds_read_b64_tr_b16<Element::f16>(smem + 32 * row + 8 * part);
    ptx::st_global(out + 2 * lane, column.x);
    ptx::st_global(out + 2 * lane + 1, column.y);
  });
  for (int i = 0; i < 128; ++i) columns[i / 2][i % 2] = out[i];
  return report;
}

TEST(TransposedRead, GivesEachLaneAColumnOfFourRows) {
  std::uint32_t columns[64][2];
  EXPECT_EQ(read_columns(0x950, columns).text(), "");
  for (std::uint32_t lane = 0; lane < 64; ++lane) {
    const auto element = [&](std::uint32_t row) {
      return 1000 + 16 * (4 * (lane / 16) + row) + lane % 16;
    };
    EXPECT_EQ(columns[lane][0], element(0) | element(1) << 16U) << lane;
    EXPECT_EQ(columns[lane][1], element(2) | element(3) << 16U) << lane;
  }
}

TEST(TransposedRead, IsGfx950sAndNeedsAllLanes) {
  std::uint32_t columns[64][2];
  EXPECT_TRUE(read_columns(0x942, columns).has(Fault::architecture));
  EXPECT_TRUE(read_columns(0x950, columns, 32).has(Fault::divergence));
}

template <int bytes>
void expect_lanes_in_a_row() {
  constexpr int kWords = bytes / 4;
  std::vector<std::uint32_t> values(64 * kWords);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint32_t>(3 * i);
  Device device;
  const auto* in = device.buffer("in", values);
  auto* out = device.buffer<std::uint32_t>("out", values.size());
  const Report report = sweep(3, [&](const Options& options) {
    return device.launch(kOneWave, options, [&] {
      const int lane = ptx::lane_idx();
      const ptx::SharedAddress to = ptx::dynamic_shared() + 256;
      const auto* const from = in + (63 - lane) * kWords;
      ptx::copy_to_shared<bytes>(to, from);
      ptx::wait_for_copies<0>();
      ptx::sync_threads();
      for (int i = 0; i < kWords; ++i) {
        const int word = lane * kWords + i;
        ptx::st_global(out + word, ptx::ld_shared<std::uint32_t>(to + 4 * word));
      }
    });
  });
  EXPECT_EQ(report.text(), "");
  for (int lane = 0; lane < 64; ++lane)
    for (int i = 0; i < kWords; ++i)
      ASSERT_EQ(out[lane * kWords + i], static_cast<std::uint32_t>(3 * ((63 - lane) * kWords + i)));
}

TEST(CopyToShared, BringsLanesSideBySide) {
  expect_lanes_in_a_row<4>();
  expect_lanes_in_a_row<16>();
}

}  // namespace
}  // namespace fovea::cuda::emulator
