#include "tools/option_values.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tools/failure.hpp"

namespace fovea::tools {
namespace {

TEST(OptionValues, WindowSidesMayBeOpen) {
  const Window window = parse_window("--window", "1024,-");
  EXPECT_EQ(window.left, 1024);
  EXPECT_EQ(window.right, std::nullopt);
  for (const char* text :
       {"", ",", "1", "1,2,3", "-1,0", "1, 2", "a,b", "99999999999999999999,0"}) {
    EXPECT_THROW(parse_window("--window", text), Failure) << text;
  }
}

TEST(OptionValues, ScalarsAreIntsOrFloatsAsTheyAreWritten) {
  EXPECT_EQ(parse_scalar("--scalar", "n=3").type, ExprType::integer);
  EXPECT_EQ(parse_scalar("--scalar", "n=-3").value, -3);
  EXPECT_EQ(parse_scalar("--scalar", "n=3.0").type, ExprType::floating);
  EXPECT_EQ(parse_scalar("--scalar", "n=1e-3").value, 1e-3);
  for (const char* text : {"n", "n=", "=3", "n=x", "n=3x", "1n=3", "n=2147483648"}) {
    EXPECT_THROW(parse_scalar("--scalar", text), Failure) << text;
  }
}

TEST(OptionValues, NumbersAreWholeFiniteAndInRange) {
  EXPECT_EQ(parse_real("--scale", "-0.5"), -0.5F);
  for (const char* text : {"", "nan", "inf", "1e99", "0.5x", " 1"})
    EXPECT_THROW(parse_real("--scale", text), Failure) << text;
  EXPECT_EQ(parse_thread_counts("--threads", "1,0"), (std::vector<int>{1, 0}));
  for (const char* text : {"", "1,", "-1", "4097"})
    EXPECT_THROW(parse_thread_counts("--threads", text), Failure) << text;
}

TEST(OptionValues, ARefusalSaysOptionValueAndWhatWasExpected) {
  try {
    parse_align("--align", "left");
    FAIL();
  } catch (const Failure& failure) {
    EXPECT_STREQ(failure.what(), "--align: got 'left'; expected bottom_right or top_left");
  }
}

TEST(OptionValues, NamesOfTypesAreReadAndWritten) {
  for (const ComputeDtype dtype :
       {ComputeDtype::automatic, ComputeDtype::f32, ComputeDtype::bf16}) {
    EXPECT_EQ(parse_compute_dtype("--compute-dtype", name(dtype)), dtype);
  }
  EXPECT_EQ(parse_float_dtype("--dtype", "bf16"), Dtype::bf16);
  EXPECT_THROW(parse_float_dtype("--dtype", "i32"), Failure);
  EXPECT_EQ(parse_target("--target", "auto"), CpuTarget::automatic);
}

TEST(OptionValues, DevicesAreNamedAsTheyPrint) {
  EXPECT_EQ(parse_device("--device", "cpu"), Device::cpu());
  EXPECT_EQ(parse_device("--device", "cuda"), Device::cuda(0));
  EXPECT_EQ(parse_device("--device", "cuda:12"), Device::cuda(12));
  for (const char* text : {"", "gpu", "cuda:", "cuda:-1", "cuda:1x", "cuda1", "CUDA"})
    EXPECT_THROW(parse_device("--device", text), Failure) << text;
}

}  // namespace
}  // namespace fovea::tools
