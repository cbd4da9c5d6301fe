// Copies of tiles and of runs of bytes: where each byte lands, what the edges do, what is counted.

#include "ptx/tma.cuh"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <vector>

#include "fovea/error.hpp"

#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/tensor_map.hpp"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::emulator {
namespace {

// 20 rows of 64: a box of 16 rows reaches beyond both ends in turn.
constexpr int kRows = 20, kColumns = 64, kBoxRows = 16;
constexpr std::uint32_t kBarrier = 16384;
constexpr LaunchConfig kOneWarp{.block = {32, 1, 1}, .shared_bytes = kBarrier + 16};

std::vector<std::uint16_t> numbers() {
  std::vector<std::uint16_t> values(kRows * kColumns);
  std::iota(values.begin(), values.end(), std::uint16_t{1});
  return values;
}

ptx::TensorMap map_of(const void* data, int box_columns, driver::TensorMapSwizzle swizzle) {
  driver::TensorMapSpec spec;
  spec.element = driver::TensorMapElement::u16;
  spec.rank = 2;
  spec.shape = {kColumns, kRows};
  spec.stride_bytes = {2, kColumns * 2};
  spec.box = {static_cast<std::uint32_t>(box_columns), kBoxRows};
  spec.swizzle = swizzle;
  return encode_tensor_map<ptx::TensorMap>(spec, data);
}

constexpr std::int32_t kOrigin[2] = {0, 0};

ptx::SharedAddress barrier() { return ptx::dynamic_shared() + kBarrier; }

void begin() {
  if (ptx::lane_idx() == 0) {
    ptx::mbarrier_init(barrier(), 1);
    ptx::fence_mbarrier_init_release_cluster();
  }
  ptx::sync_threads();
}

/// One thread issues `copy` of so many bytes; all wait for it.
void load(std::uint32_t bytes, const std::function<void()>& copy) {
  if (ptx::lane_idx() == 0) {
    ptx::mbarrier_arrive_expect_tx(barrier(), bytes);
    copy();
  }
  ptx::mbarrier_wait_parity(barrier(), 0);
}

Report sweep_launch(Device& device, const std::function<void()>& kernel) {
  return sweep(5, [&](const Options& options) { return device.launch(kOneWarp, options, kernel); });
}

template <Swizzle swizzle>
void expect_load(driver::TensorMapSwizzle map_swizzle, int row, int column,
                 int box_columns = static_cast<int>(swizzle_span(swizzle)) / 2) {
  constexpr int kSpan = static_cast<int>(swizzle_span(swizzle));
  Device device;
  const ptx::TensorMap map = map_of(device.buffer("in", numbers()), box_columns, map_swizzle);
  auto* out = device.buffer<std::uint16_t>("out", kBoxRows * kColumns);
  const Report report = sweep_launch(device, [&] {
    begin();
    load(kBoxRows * box_columns * 2, [&] {
      const std::int32_t coordinates[2] = {column, row};
      ptx::cp_async_bulk_tensor_load(ptx::dynamic_shared(), &map, coordinates, barrier(),
                                     ptx::CachePolicy::evict_normal);
    });
    const SharedTile<kBoxRows, kSpan, swizzle> tile{ptx::dynamic_shared()};
    for (int i = ptx::lane_idx(); i < kBoxRows * box_columns; i += 32) {
      const auto address = tile.at(i / box_columns, i % box_columns * 2);
      ptx::st_global(out + i, ptx::ld_shared<std::uint16_t>(address));
    }
  });
  EXPECT_EQ(report.text(), "");
  for (int i = 0; i < kBoxRows * box_columns; ++i) {
    const int r = row + i / box_columns, c = column + i % box_columns;
    const bool is_inside = r >= 0 && r < kRows && c >= 0 && c < kColumns;
    ASSERT_EQ(out[i], is_inside ? 1 + r * kColumns + c : 0) << "row " << r << " column " << c;
  }
}

TEST(Tma, LoadsWithEachSwizzle) {
  expect_load<Swizzle::bytes128>(driver::TensorMapSwizzle::bytes_128, 2, 0);
  expect_load<Swizzle::bytes64>(driver::TensorMapSwizzle::bytes_64, 2, 32);
  expect_load<Swizzle::bytes32>(driver::TensorMapSwizzle::bytes_32, 2, 16);
  expect_load<Swizzle::none>(driver::TensorMapSwizzle::none, 2, 24);
}

TEST(Tma, FillsWithZeroAndCountsWhatIsOutside) {
  expect_load<Swizzle::bytes64>(driver::TensorMapSwizzle::bytes_64, 9, 56);
  expect_load<Swizzle::bytes64>(driver::TensorMapSwizzle::bytes_64, -3, -16);
  expect_load<Swizzle::bytes128>(driver::TensorMapSwizzle::bytes_128, 100, 0);
}

// Seen on an H200: docs/kernels/ptx.md.
TEST(Tma, RowsOfANarrowBoxBeginASpanApart) {
  expect_load<Swizzle::bytes128>(driver::TensorMapSwizzle::bytes_128, 2, 8, 16);
  expect_load<Swizzle::bytes64>(driver::TensorMapSwizzle::bytes_64, 18, 0, 8);
}

TEST(Tma, FirstCoordinateInsideAChunkIsNamed) {
  Device device;
  const ptx::TensorMap map =
      map_of(device.buffer("in", numbers()), 64, driver::TensorMapSwizzle::bytes_128);
  const Report report = device.launch(kOneWarp, {}, [&] {
    begin();
    const std::int32_t coordinates[2] = {4, 0};
    ptx::cp_async_bulk_tensor_load(ptx::dynamic_shared(), &map, coordinates, barrier(),
                                   ptx::CachePolicy::evict_normal);
  });
  EXPECT_TRUE(report.has(Fault::misaligned)) << report.text();
}

TEST(Tma, StoresDropWhatIsOutside) {
  Device device;
  auto* out = device.buffer<std::uint16_t>("out", kRows * kColumns);
  const ptx::TensorMap map = map_of(out, 32, driver::TensorMapSwizzle::bytes_64);
  const Report report = sweep_launch(device, [&] {
    const SharedTile<kBoxRows, 64, Swizzle::bytes64> tile{ptx::dynamic_shared()};
    for (int i = ptx::lane_idx(); i < kBoxRows * 32; i += 32) {
      ptx::st_shared(tile.at(i / 32, i % 32 * 2), static_cast<std::uint16_t>(i));
    }
    ptx::fence_proxy_async_shared_cta();
    ptx::sync_threads();
    if (ptx::lane_idx() == 0) {
      const std::int32_t coordinates[2] = {48, 10};
      ptx::cp_async_bulk_tensor_store(&map, coordinates, ptx::dynamic_shared());
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group<0>();
    }
  });
  EXPECT_EQ(report.text(), "");
  EXPECT_EQ(out[10 * kColumns + 48], 0);
  EXPECT_EQ(out[19 * kColumns + 63], 9 * 32 + 15);
  EXPECT_EQ(out[9 * kColumns + 48], 0xffff);
  EXPECT_EQ(out[11 * kColumns], 0xffff) << "a box does not wrap into the next row";
}

TEST(Tma, BulkCopiesMoveRunsOfBytesAndAdd) {
  Device device;
  const std::vector<float> values(64, 1.5F);
  const float* in = device.buffer("in", values);
  float* sums = device.buffer("sums", values);
  const Report report = device.launch(kOneWarp, {}, [&] {
    begin();
    load(256, [&] {
      ptx::cp_async_bulk_load(ptx::dynamic_shared(), in, 256, barrier(),
                              ptx::CachePolicy::evict_first);
    });
    if (ptx::lane_idx() == 0) {
      ptx::cp_reduce_async_bulk_add_f32(sums, ptx::dynamic_shared(), 256);
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group<0>();
    }
  });
  EXPECT_EQ(report.text(), "");
  EXPECT_EQ(sums[63], 3.0F);
}

TEST(Tma, MapThatPromisesMoreThanTheBufferHasIsOutOfBounds) {
  Device device;
  const ptx::TensorMap map = map_of(device.buffer<std::uint16_t>("in", 10 * kColumns), 64,
                                    driver::TensorMapSwizzle::bytes_128);
  const Report report = device.launch(kOneWarp, {}, [&] {
    begin();
    load(kBoxRows * 128, [&] {
      ptx::cp_async_bulk_tensor_load(ptx::dynamic_shared(), &map, kOrigin, barrier(),
                                     ptx::CachePolicy::evict_normal);
    });
  });
  EXPECT_TRUE(report.has(Fault::out_of_bounds)) << report.text();
}

TEST(Tma, WhatIsNoTensorMapIsNamed) {
  Device device;
  const ptx::TensorMap map{};
  const Report report = device.launch(kOneWarp, {}, [&] { ptx::prefetch_tensormap(&map); });
  EXPECT_TRUE(report.has(Fault::tensor_map)) << report.text();
}

TEST(Tma, DestinationMustBeAligned) {
  Device device;
  const ptx::TensorMap map =
      map_of(device.buffer("in", numbers()), 64, driver::TensorMapSwizzle::bytes_128);
  const Report report = device.launch(kOneWarp, {}, [&] {
    begin();
    load(kBoxRows * 128, [&] {
      ptx::cp_async_bulk_tensor_load(ptx::dynamic_shared() + 64, &map, kOrigin, barrier(),
                                     ptx::CachePolicy::evict_normal);
    });
  });
  EXPECT_TRUE(report.has(Fault::misaligned)) << report.text();
}

TEST(Tma, BoxThatTheDriverWouldRefuseIsRefused) {
  Device device;
  const std::vector<std::uint16_t> values = numbers();
  EXPECT_THROW(map_of(device.buffer("in", values), 64, driver::TensorMapSwizzle::bytes_64),
               InvalidArgument)
      << "128 bytes in a swizzle of 64";
}

}  // namespace
}  // namespace fovea::cuda::emulator
