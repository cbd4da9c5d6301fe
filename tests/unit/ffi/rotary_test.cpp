// fovea_rotary: the same as rotary, in place and by tensors of C.
#include "fovea/rotary.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "fovea/fovea.h"

#include "unit/ffi/c_call.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

struct RotaryCall {
  RotaryCall() {
    for (std::size_t i = 0; i < x.values.size(); ++i) x.values[i] = std::sin(static_cast<float>(i));
    for (std::size_t i = 0; i < cos.values.size(); ++i) {
      cos.values[i] = std::cos(0.3F * static_cast<float>(i));
      sin.values[i] = std::sin(0.3F * static_cast<float>(i));
    }
    args.struct_size = sizeof(args);
    args.version = FOVEA_ABI_VERSION;
    args.x = args.out = &x.tensor;
    args.cos = &cos.tensor;
    args.sin = &sin.tensor;
    args.offsets = &offsets.tensor;
    args.is_interleaved = 1;
    args.is_conjugate = 1;
  }

  FloatTensor x{{2, 3, 2, 8}}, cos{{16, 3}}, sin{{16, 3}};
  IndexTensor offsets{{2}, {4, 0}};
  fovea_rotary_args args{};
};

TEST(CRotary, TurnsInPlace) {
  RotaryCall c, cxx;
  EXPECT_EQ(outcome_of(fovea_rotary, &c.args).message, "");
  float* const x = cxx.x.values.data();
  rotary({.x = view(x, {2, 3, 2, 8}),
          .out = view(x, {2, 3, 2, 8}),
          .cos = view(cxx.cos.values.data(), {16, 3}),
          .sin = view(cxx.sin.values.data(), {16, 3}),
          .is_interleaved = true,
          .is_conjugate = true,
          .offsets = cxx.offsets.view()});
  EXPECT_EQ(c.x.values, cxx.x.values);
  c.args.is_conjugate = 2;
  EXPECT_THAT(outcome_of(fovea_rotary, &c.args).message,
              HasSubstr("is_conjugate: is 2; expected 0 to 1"));
  c.args.is_conjugate = 0;
  c.args.offsets = nullptr;
  c.args.cos = nullptr;
  EXPECT_THAT(outcome_of(fovea_rotary, &c.args).message,
              HasSubstr("cos is missing; expected rank 2: [max_positions, rotary_dim / 2]"));
}

}  // namespace
}  // namespace fovea::testing
