// The kernel that builds tables of ranges gives the least and greatest of each run, and look-ups bound what loads can
// yield.
#include "common/range_table.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "fovea/mask.hpp"

#include "cuda/emulator/emulator.hpp"
#include "cuda/params/captures.hpp"
#include "cuda/params/range_tables.hpp"
#include "expr/print_cuda.hpp"

namespace fovea::cuda {
namespace {

using program::FloatRange;
using program::Int;
using program::IntRange;

TensorView tensor_of(const void* data, Dtype dtype, std::vector<std::int64_t> shape,
                     std::vector<std::int64_t> strides) {
  TensorSpec spec;
  spec.dtype = dtype;
  spec.rank = static_cast<int>(shape.size());
  std::ranges::copy(shape, spec.shape.begin());
  std::ranges::copy(strides, spec.strides.begin());
  return {data, spec};
}

/// A mask that reads `t` along positions, its slots, and its tables in the memory of the emulator.
struct Built {
  Built(emulator::Device& device, const TensorView& view, const char* formula)
      : mask(parse_mask_mod(formula, {.tensors = {{"t", view}}})),
        text(expr::print_cuda({}, mask)),
        tables(text),
        captures(CaptureSlots(text, {}, mask).bind({}, mask)) {
    const std::size_t bytes = tables.workspace_bytes(captures);
    auto* workspace = device.buffer<std::byte>("workspace", bytes);
    const RangeTableLaunch launch = tables.place(captures, {workspace, bytes});
    if (launch.is_empty()) return;
    const emulator::LaunchConfig config{.grid = {static_cast<std::int32_t>(launch.num_groups),
                                                 static_cast<std::int32_t>(launch.num_tables), 1},
                                        .block = {32 * kRunsPerGroup, 1, 1},
                                        .shared_bytes = kRunsPerGroup * sizeof(RangeEntry)};
    report = device.launch(config, {}, [&] { build_range_tables(launch.params); }).text();
  }

  MaskMod mask;
  expr::CudaProgram text;
  RangeTables tables;
  Captures captures;
  std::string report;
};

/// Look-ups read global memory: they run in a thread of the emulator.
template <class LookUp>
auto on_device(emulator::Device& device, LookUp look_up) {
  auto result = look_up(true);
  const emulator::Report report =
      device.launch({.block = {1, 1, 1}}, {}, [&] { result = look_up(false); });
  EXPECT_EQ(report.text(), "");
  return result;
}

IntRange int_range(emulator::Device& device, const Captures& captures, Int batch,
                   IntRange positions) {
  return on_device(device, [&](bool is_dry) {
    return is_dry ? program::any_int()
                  : program::load_range<0, std::int32_t, 1>(captures, batch, positions);
  });
}

// Two sequences; runs of 64 and a tail; more than a group of 2048 positions.
constexpr std::int64_t kBatch = 2;
constexpr std::int64_t kSeqlen = 2048 + 64 * 3 + 17;

std::vector<std::int32_t> random_ids() {
  std::mt19937 random(3);
  std::vector<std::int32_t> ids(kBatch * kSeqlen);
  for (std::size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<std::int32_t>(i / 40) + static_cast<std::int32_t>(random() % 5);
  return ids;
}

IntRange exact(std::span<const std::int32_t> ids, std::int64_t begin, std::int64_t end) {
  const auto [lo, hi] = std::ranges::minmax(
      ids.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)));
  return {std::int64_t{lo}, std::int64_t{hi}};
}

TEST(RangeTable, BoundsTheRunsThatATileTouches) {
  emulator::Device device;
  const std::vector<std::int32_t> ids = random_ids();
  const auto* data = device.buffer("ids", ids);
  Built built(device, tensor_of(data, Dtype::i32, {kBatch, kSeqlen}, {kSeqlen, 1}),
              "t[batch, q_idx] == t[batch, kv_idx]");
  ASSERT_EQ(built.report, "");
  ASSERT_NE(built.captures.tensors[0].ranges, nullptr);
  struct Tile {
    std::int64_t begin, end;
  };
  // A run, two, the tail; a few elements; runs cut at both ends; a group and more.
  for (const Tile tile : {Tile{64, 128}, Tile{0, 128}, Tile{2240, 2257}, Tile{70, 77},
                          Tile{100, 300}, Tile{0, 2048}, Tile{1000, 2257}}) {
    for (std::int32_t batch = 0; batch < kBatch; ++batch) {
      const IntRange got = int_range(device, built.captures, batch, {tile.begin, tile.end - 1});
      const bool is_few = tile.end - tile.begin <= program::kMaxElements;
      const bool is_in_runs = tile.end - tile.begin < 64 * program::kMaxEntries - 64;
      const std::int64_t unit = is_few ? 1 : is_in_runs ? 64 : 2048;
      const std::int64_t begin = tile.begin / unit * unit;
      const std::int64_t end = std::min(kSeqlen, (tile.end + unit - 1) / unit * unit);
      const IntRange expected =
          exact(std::span(ids).subspan(static_cast<std::size_t>(batch * kSeqlen)), begin, end);
      EXPECT_EQ(got.lo, expected.lo) << tile.begin << " to " << tile.end;
      EXPECT_EQ(got.hi, expected.hi) << tile.begin << " to " << tile.end;
    }
  }
}

TEST(RangeTable, TakesPositionsOutsideTheTensorAsItsEnds) {
  emulator::Device device;
  const std::vector<std::int32_t> ids = random_ids();
  Built built(device,
              tensor_of(device.buffer("ids", ids), Dtype::i32, {kBatch, kSeqlen}, {kSeqlen, 1}),
              "t[batch, kv_idx] == 3");
  const IntRange before = int_range(device, built.captures, 0, {-500, -1});
  EXPECT_EQ(before.lo, ids[0]);
  EXPECT_EQ(before.hi, ids[0]);
  const IntRange behind = int_range(device, built.captures, 7, {1 << 30, (1 << 30) + 200});
  EXPECT_EQ(behind.lo, ids.back());
  EXPECT_EQ(behind.hi, ids.back());
}

TEST(RangeTable, WithoutMemoryKnowsTheDtypeAlone) {
  emulator::Device device;
  const std::vector<std::int32_t> ids = random_ids();
  Built built(device,
              tensor_of(device.buffer("ids", ids), Dtype::i32, {kBatch, kSeqlen}, {kSeqlen, 1}),
              "t[batch, kv_idx] == 3");
  EXPECT_TRUE(built.tables.place(built.captures, {}).is_empty());
  built.captures.tensors[0].ranges = nullptr;
  EXPECT_TRUE(is_any(int_range(device, built.captures, 0, {0, 127})));
}

TEST(RangeTable, OfFloatsTellsNanFromNumbers) {
  emulator::Device device;
  std::vector<float> values(256, 1.5F);
  values[10] = -0.0F;
  values[70] = -std::numeric_limits<float>::infinity();
  values[130] = std::numeric_limits<float>::quiet_NaN();
  values[200] = -std::nanf("");
  Built built(device, tensor_of(device.buffer("values", values), Dtype::f32, {256}, {1}),
              "t[kv_idx] > 0.0");
  ASSERT_EQ(built.report, "");
  const auto at = [&](std::int64_t begin) {
    return on_device(device, [&](bool is_dry) {
      return is_dry ? program::any_float()
                    : program::load_range<0, float, 0>(built.captures, IntRange(begin, begin + 63));
    });
  };
  EXPECT_EQ(at(0).lo, 0);
  EXPECT_EQ(at(0).hi, 1.5);
  EXPECT_FALSE(at(0).may_be_nan);
  EXPECT_EQ(at(64).lo, -std::numeric_limits<double>::infinity());
  EXPECT_FALSE(at(64).may_be_nan);
  EXPECT_TRUE(at(128).may_be_nan);
  EXPECT_TRUE(at(192).may_be_nan);
}

TEST(RangeTable, OfEveryDtypeAndStrideIsThatOfItsElements) {
  emulator::Device device;
  constexpr std::int64_t kExtent = 100;
  std::vector<std::int64_t> wide(3 * kExtent);
  for (std::size_t i = 0; i < wide.size(); ++i)
    wide[i] = (static_cast<std::int64_t>(i) - 150) * (std::int64_t{1} << 25);
  const auto* wide_data = device.buffer("wide", wide);
  // Every third element, backwards; saturated to 32 bits.
  Built built(device, tensor_of(wide_data + 3 * kExtent - 1, Dtype::i64, {kExtent}, {-3}),
              "t[kv_idx] == 3");
  ASSERT_EQ(built.report, "");
  const auto range = on_device(device, [&](bool is_dry) {
    return is_dry ? program::any_int()
                  : program::load_range<0, std::int64_t, 0>(built.captures, IntRange(64, 99));
  });
  const auto element = [&](std::int64_t i) {
    return std::clamp<std::int64_t>(wide[static_cast<std::size_t>(299 - 3 * i)], INT32_MIN,
                                    INT32_MAX);
  };
  EXPECT_EQ(range.lo, element(99));
  EXPECT_EQ(range.hi, element(64));

  std::vector<std::uint8_t> flags(kExtent, 7);
  flags[99] = 0;
  Built flagged(device,
                tensor_of(device.buffer("flags", flags), Dtype::boolean, {2, kExtent}, {0, 1}),
                "t[batch, kv_idx]");
  ASSERT_EQ(flagged.report, "");
  const auto truth = [&](std::int64_t begin, std::int64_t end) {
    return on_device(device, [&](bool is_dry) {
      return is_dry ? program::any_bool()
                    : program::load_range<0, program::Bool, 1>(flagged.captures, Int(1),
                                                               IntRange(begin, end - 1));
    });
  };
  EXPECT_FALSE(truth(0, 64).can_be_false);
  EXPECT_TRUE(truth(64, 100).can_be_false);
}

}  // namespace
}  // namespace fovea::cuda
