// fovea_attention_probabilities: the same bits as attention_probabilities, without v and out.
#include "fovea/probabilities.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "fovea/fovea.h"
#include "fovea/mask.hpp"

#include "unit/ffi/c_call.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

/// A small call with dropout, and room for what it is asked for.
struct ProbabilitiesCall : SmallCall {
  ProbabilitiesCall() {
    args.v = args.out = nullptr;
    args.softcap = 2;
    args.causal = 1;
    args.score_mod = "score + 0.5 * q_head";
    args.dropout = {0.5F, 3, 1};
    probed.struct_size = sizeof(probed);
    probed.version = FOVEA_ABI_VERSION;
    probed.forward = &args;
    probed.probabilities = &p.tensor;
  }

  FloatTensor p{{1, 2, 5, 5}, kPoison};
  fovea_attention_probabilities_args probed{};
};

TEST(CProbabilities, EqualThoseOfCxx) {
  ProbabilitiesCall c, cxx;
  ASSERT_EQ(outcome_of(fovea_attention_probabilities, &c.probed).message, "");
  attention_probabilities(
      {.forward = {.q = view(cxx.q.values.data(), {1, 5, 2, 8}),
                   .k = view(cxx.k.values.data(), {1, 5, 2, 8}),
                   .score = softcap(2) | parse_score_mod("score + 0.5 * q_head"),
                   .mask = causal(),
                   .dropout = {.p = 0.5F, .seed = 3, .offset = 1}},
       .probabilities = view(cxx.p.values.data(), {1, 2, 5, 5})});
  EXPECT_EQ(c.p.values, cxx.p.values);
  EXPECT_EQ(c.p.values[1], 0);  // the first query sees the first key alone
  EXPECT_EQ(std::fabs(c.p.values[0]), 1);
}

TEST(CProbabilities, RefusesByNameAndWritesNothing) {
  ProbabilitiesCall c;
  c.probed.probabilities = nullptr;
  EXPECT_THAT(outcome_of(fovea_attention_probabilities, &c.probed).message,
              HasSubstr("probabilities is missing; expected f32, f16 or bf16 [1, 2, 5, 5]"));
  c.probed.probabilities = &c.p.tensor;
  c.args.k = nullptr;
  EXPECT_THAT(outcome_of(fovea_attention_probabilities, &c.probed).message,
              HasSubstr("fovea_attention_probabilities: forward: k: is NULL"));
  c.args.k = &c.k.tensor;
  c.p.tensor.device = {kDLCUDA, 0};
  const Outcome outcome = outcome_of(fovea_attention_probabilities, &c.probed);
  EXPECT_EQ(outcome.kind, FOVEA_UNSUPPORTED);
  EXPECT_THAT(outcome.message, HasSubstr("probabilities lives on cuda:0"));
  for (const float value : c.p.values) EXPECT_TRUE(std::isnan(value));
}

}  // namespace
}  // namespace fovea::testing
