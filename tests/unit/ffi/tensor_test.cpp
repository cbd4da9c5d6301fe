#include "ffi/tensor.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/ffi/c_call.hpp"

namespace fovea::ffi {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using testing::FloatTensor;
using ::testing::HasSubstr;

std::string refusal(const DLTensor& tensor) {
  try {
    to_view(&tensor, Access::read, "k");
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Tensor, NullIsAnAbsentTensor) {
  EXPECT_FALSE(static_cast<bool>(to_view(nullptr, Access::read, "lse")));
}

TEST(Tensor, NullStridesAreRowMajor) {
  FloatTensor t({2, 3, 4});
  const TensorView view = to_view(&t.tensor, Access::read, "q");
  EXPECT_EQ(view.stride(0), 12);
  EXPECT_EQ(view.stride(1), 4);
  EXPECT_EQ(view.stride(2), 1);
  EXPECT_EQ(view.data(), t.values.data());
}

TEST(Tensor, GivenStridesAreKeptBroadcastAndNegativeOnesToo) {
  FloatTensor t({2, 3, 4});
  std::int64_t strides[] = {0, -4, 1};
  t.tensor.strides = strides;
  const TensorView view = to_view(&t.tensor, Access::read, "q");
  EXPECT_EQ(view.stride(0), 0);
  EXPECT_EQ(view.stride(1), -4);
}

TEST(Tensor, ByteOffsetMovesTheData) {
  FloatTensor t({4});
  t.tensor.byte_offset = 8;
  EXPECT_EQ(to_view(&t.tensor, Access::read, "q").data(), t.values.data() + 2);
}

TEST(Tensor, ByteOffsetInsideAnElementIsRefused) {
  FloatTensor t({4});
  t.tensor.byte_offset = 2;
  EXPECT_THAT(refusal(t.tensor), HasSubstr("k: byte_offset is 2; expected a multiple"));
}

TEST(Tensor, NullDataStaysNullWhateverTheOffset) {
  FloatTensor t({4});
  t.tensor.data = nullptr;
  t.tensor.byte_offset = 8;
  EXPECT_EQ(to_view(&t.tensor, Access::read, "q").data(), nullptr);
}

TEST(Tensor, OnlyOutputsAreMutable) {
  FloatTensor t({4});
  EXPECT_FALSE(to_view(&t.tensor, Access::read, "q").is_mutable());
  EXPECT_TRUE(to_view(&t.tensor, Access::write, "out").is_mutable());
}

TEST(Tensor, EveryDtypeHasItsDlpackCode) {
  struct Row {
    DLDataType code;
    Dtype dtype;
  };
  const Row rows[] = {{{2, 32, 1}, Dtype::f32},  {{2, 16, 1}, Dtype::f16},
                      {{4, 16, 1}, Dtype::bf16}, {{6, 8, 1}, Dtype::boolean},
                      {{1, 8, 1}, Dtype::u8},    {{0, 8, 1}, Dtype::i8},
                      {{0, 32, 1}, Dtype::i32},  {{0, 64, 1}, Dtype::i64}};
  FloatTensor t({1});
  for (const Row& row : rows) {
    t.tensor.dtype = row.code;
    EXPECT_EQ(to_view(&t.tensor, Access::read, "q").dtype(), row.dtype) << name(row.dtype);
  }
}

TEST(Tensor, UnknownDtypesAreRefused) {
  FloatTensor t({4});
  t.tensor.dtype = {kDLFloat, 64, 1};
  EXPECT_THAT(refusal(t.tensor),
              AllOf(HasSubstr("k: dtype is f64; expected f32, f16"), EndsWith("cast it to f32")));
  t.tensor.dtype = {kDLInt, 16, 1};
  EXPECT_THAT(refusal(t.tensor),
              AllOf(HasSubstr("k: dtype is i16; expected f32"), EndsWith("or e4m3")));
  t.tensor.dtype = {kDLUInt, 64, 1};
  EXPECT_THAT(refusal(t.tensor), HasSubstr("k: dtype is u64; expected f32"));
  t.tensor.dtype = {5, 64, 1};  // kDLComplex
  EXPECT_THAT(refusal(t.tensor), HasSubstr("k: dtype is complex64; expected f32"));
  t.tensor.dtype = {200, 8, 1};
  EXPECT_THAT(refusal(t.tensor), HasSubstr("k: dtype is of code 200 and 8 bits; expected f32"));
  t.tensor.dtype = {kDLFloat, 32, 4};
  EXPECT_THAT(refusal(t.tensor), HasSubstr("k: dtype has 4 lanes; expected 1"));
}

TEST(Tensor, RanksOutsideOneToEightAreRefused) {
  FloatTensor t({4});
  for (const int rank : {-1, 0, kMaxRank + 1}) {
    t.tensor.ndim = rank;
    EXPECT_THAT(refusal(t.tensor), HasSubstr("k: rank is " + std::to_string(rank)));
  }
}

TEST(Tensor, NegativeExtentsAndMissingShapesAreRefused) {
  FloatTensor t({4, 2});
  t.shape[1] = -2;
  EXPECT_THAT(refusal(t.tensor), HasSubstr("k: shape[1] is -2; expected >= 0"));
  t.tensor.shape = nullptr;
  EXPECT_THAT(refusal(t.tensor), HasSubstr("k: shape is NULL"));
}

TEST(Tensor, DevicesAreTranslatedAndUnknownOnesRefused) {
  FloatTensor t({4});
  t.tensor.device = {kDLCUDA, 3};
  EXPECT_EQ(to_view(&t.tensor, Access::read, "q").spec().device, Device::cuda(3));
  t.tensor.device = {kDLCUDAHost, 0};
  EXPECT_EQ(to_view(&t.tensor, Access::read, "q").spec().device, Device::cpu());
  t.tensor.device.device_type = static_cast<DLDeviceType>(8);  // Metal
  EXPECT_THAT(refusal(t.tensor), HasSubstr("k: device type is 8"));
}

}  // namespace
}  // namespace fovea::ffi
