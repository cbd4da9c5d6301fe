// The rotary kernel under the emulator writes what the CPU writes, in every layout, and nothing else.
#include "cuda/rotary/rotary.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/rotary.cuh"
#include "cpu/rotary.hpp"
#include "cuda/emulator/emulator.hpp"
#include "kernels/wrong_numbers.hpp"
#include "support/compare.hpp"
#include "support/launch_memory.hpp"
#include "support/long_run.hpp"
#include "support/rotary_case.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

std::string findings_of(const ApplyRotary& args, const cuda::emulator::Options& options = {}) {
  cuda::emulator::Device device;
  const auto add = [&](const char* name, const TensorView& view) {
    const TensorBytes bytes = tensor_bytes(name, view);
    if (bytes.size > 0) device.register_buffer(bytes.name, bytes.begin, bytes.size);
  };
  add("x", args.x);
  if (args.out.data() != args.x.data()) add("out", args.out);
  add("cos", args.cos);
  add("sin", args.sin);
  add("cu_seqlens", args.cu_seqlens);
  add("positions", args.positions);
  add("offsets", args.offsets);
  const cuda::RotaryLaunch launch = cuda::rotary_launch(args);
  return device
      .launch({.grid = {static_cast<std::int32_t>(launch.grid.x), 1, 1},
               .block = {static_cast<std::int32_t>(launch.num_threads), 1, 1}},
              options, [&] { cuda::rotary(launch.params); })
      .text();
}

std::vector<RotaryCase> rotary_cases() {
  std::vector<RotaryCase> cases;
  std::vector<std::int64_t> many;  // more sequences than lanes
  for (std::int64_t i = 0; i < 40; ++i) many.push_back(i % 3);
  for (const std::vector<std::int64_t>& lengths : {{}, {9, 0, 1, 12}, many}) {
    for (const int options : {0, 1, 2, 3, 4, 5, 6, 7}) {
      RotaryCase c{.lengths = lengths, .num_pairs = options == 6 ? 3 : 10};
      c.is_interleaved = (options & 1) != 0;
      c.is_conjugate = (options & 2) != 0;
      c.is_in_place = (options & 4) != 0;
      c.dtype = options % 3 == 0 ? Dtype::bf16 : options % 3 == 1 ? Dtype::f16 : Dtype::f32;
      c.out_dtype = c.is_in_place ? c.dtype : Dtype::bf16;
      c.has_positions = options % 3 == 1;
      c.has_offsets = options % 3 == 2;
      c.seed = cases.size() + 1;
      cases.push_back(c);
    }
  }
  return cases;
}

class EmulatedRotary : public ::testing::TestWithParam<RotaryCase> {};

TEST_P(EmulatedRotary, WritesWhatTheCpuWrites) {
  RotaryMemory expected(GetParam()), got(GetParam());
  const auto pool = make_thread_pool(1);
  cpu::rotary(expected.args, *pool);
  EXPECT_EQ(findings_of(got.args), "");
  const std::vector<double> a = values_of(got.args.out);
  const std::vector<double> b = values_of(expected.args.out);
  // A compiler may have fused a product and a sum of the CPU's.
  for (std::size_t i = 0; i < a.size(); ++i)
    ASSERT_NEAR(a[i], b[i], 2 * rounding(got.args.out.dtype(), b[i]) + 0x1p-22) << i;
  EXPECT_TRUE(got.x.has_intact_guards() && got.out.has_intact_guards());
}

/// Whatever offsets and positions hold.
TEST_P(EmulatedRotary, WritesNowhereElse) {
  for (int i = 0; i < 4 * times_longer(); ++i) {
    const std::uint64_t draw = first_seed() + static_cast<std::uint64_t>(i);
    SCOPED_TRACE("FOVEA_TEST_SEED=" + std::to_string(draw));
    RotaryMemory memory(GetParam());
    const ApplyRotary& args = memory.args;
    spoil_numbers(args.cu_seqlens, args.x.size(0), 3 * draw);
    spoil_numbers(args.positions, kRotaryPositions, 3 * draw + 1);
    spoil_numbers(args.offsets, kRotaryPositions, 3 * draw + 2);
    EXPECT_EQ(findings_of(args, {.seed = draw, .max_switches = kMostSwitches}), "");
    EXPECT_TRUE(memory.x.has_intact_guards() && memory.out.has_intact_guards());
  }
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedRotary, ::testing::ValuesIn(rotary_cases()));

}  // namespace
}  // namespace fovea::testing
