// The comparison that all gradients pass is shown to fail: one planted fault after another goes
// through it.
#include <gtest/gtest.h>

#include <functional>
#include <iterator>
#include <string>
#include <string_view>

#include "fovea/mask.hpp"

#include "support/gradient_compare.hpp"
#include "support/planted_backward.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

struct Plant {
  GradientCase problem;
  PlantedBackwardFeatures features;

  std::string difference(BackwardFault fault) const {
    return backward_difference(problem, {.run = [&](const AttentionBackward& args) {
                                 planted_attention_backward(args, features, fault);
                               }});
  }
};

/// No feature at all. Heads 6/2: three q heads share a key head; lengths are no multiples of a tile.
Plant plain() {
  GradientCase problem{.forward = {.label = "plain",
                                   .batch = 2,
                                   .seqlen_q = 19,
                                   .seqlen_kv = 37,
                                   .num_heads_q = 6,
                                   .num_heads_kv = 2,
                                   .head_dim_qk = 12,
                                   .head_dim_v = 8},
                       .gradient_dtype = Dtype::f32};
  return {.problem = problem, .features = {}};
}

/// All features at once; keys that no query sees are NaN.
Plant everything() {
  Plant plant = plain();
  Case& problem = plant.problem.forward;
  problem.label = "everything";
  problem.has_sinks = true;
  problem.dropout = {.p = 0.25F, .seed = 5, .offset = 9};
  const Random random(17, 0);
  plant.features = {.is_causal = true, .num_hidden_keys = 4, .softcap = 3};
  plant.features.bias =
      problem.capture(Dtype::f32, {6, 19, 37}, [&](std::int64_t i) { return random.normal(i); });
  problem.score = softcap(3) | bias(plant.features.bias);
  problem.mask = causal() && mask_mod([](auto x) { return x.kv_idx >= 4; });
  return plant;
}

/// More queries than keys: the first rows see nothing, and all of theirs is NaN.
Plant blind_rows() {
  Plant plant = plain();
  plant.problem.forward.label = "blind rows";
  plant.problem.forward.seqlen_q = 21;
  plant.problem.forward.seqlen_kv = 11;
  plant.problem.forward.mask = causal();
  plant.features.is_causal = true;
  return plant;
}

struct Planted {
  BackwardFault fault;
  Plant (*plant)();            // the problem that shows it
  bool is_arithmetic = false;  // too small to show among the roundings of 16-bit inputs
};

constexpr Planted kPlanted[] = {
    {BackwardFault::delta_missing, plain},
    {BackwardFault::delta_of_dout_squared, plain},
    {BackwardFault::delta_in_bf16, plain, true},
    {BackwardFault::dlse_ignored, plain},
    {BackwardFault::dlse_added, plain},
    {BackwardFault::scale_missing_in_dk, plain},
    {BackwardFault::scale_twice_in_dq, plain},
    {BackwardFault::softcap_slope_missing, everything},
    {BackwardFault::softcap_slope_at_raw_score, everything},
    {BackwardFault::bias_gradient_scaled, everything},
    {BackwardFault::bias_gradient_overwritten, everything},
    {BackwardFault::dropout_missing_in_dp, everything},
    {BackwardFault::dropout_missing_in_dv, everything},
    {BackwardFault::dropout_transposed, everything},
    {BackwardFault::dropout_not_rescaled_in_dv, everything},
    {BackwardFault::gqa_head_modulo, plain},
    {BackwardFault::gqa_last_head_wins, plain},
    {BackwardFault::causal_off_by_one, blind_rows},
    {BackwardFault::causal_top_left, everything},
    {BackwardFault::last_query_missing_in_dk, plain},
    {BackwardFault::last_key_missing_in_dq, plain},
    {BackwardFault::sink_gradient_sign, everything},
    {BackwardFault::sink_gradient_without_dlse, everything},
    {BackwardFault::probability_without_sink, everything},
    {BackwardFault::batch_of_neighbour_in_dv, plain},
    {BackwardFault::ds_in_bf16, plain, true},
    {BackwardFault::weight_in_bf16, plain, true},
    {BackwardFault::dq_sum_in_bf16, plain, true},
    {BackwardFault::hidden_key_read, everything},
    {BackwardFault::blind_row_read, blind_rows},
};
static_assert(std::size(kPlanted) == kNumBackwardFaults - 1, "every fault is planted once");

constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::f16, Dtype::bf16};

TEST(GradientFaults, CleanBackwardPasses) {
  for (Plant (*make)() : {plain, everything, blind_rows}) {
    for (const Dtype dtype : kDtypes) {
      Plant plant = make();
      plant.problem.forward.dtype = dtype;
      EXPECT_EQ(plant.difference(BackwardFault::none), "");
    }
  }
}

TEST(GradientFaults, EachIsCaught) {
  for (const Planted& planted : kPlanted) {
    for (const Dtype dtype : kDtypes) {
      if (planted.is_arithmetic && dtype != Dtype::f32) continue;
      Plant plant = planted.plant();
      plant.problem.forward.dtype = dtype;
      EXPECT_NE(plant.difference(planted.fault), "")
          << "fault " << static_cast<int>(planted.fault) << " in " << fovea::name(dtype);
    }
  }
}

/// Forward mode with a fault is forward mode of another direction.
TEST(GradientFaults, EveryTangentMattersInForwardMode) {
  const Plant plant = everything();
  const auto difference_of = [&](const std::function<void(AttentionJvp&)>& harm) {
    return jvp_difference(plant.problem, [&](const AttentionJvp& args) {
      AttentionJvp other = args;
      harm(other);
      attention_jvp(other);
    });
  };
  EXPECT_EQ(difference_of([](AttentionJvp&) {}), "");
  EXPECT_NE(difference_of([](AttentionJvp& args) { args.q_tangent = {}; }), "");
  EXPECT_NE(difference_of([](AttentionJvp& args) { args.k_tangent = {}; }), "");
  EXPECT_NE(difference_of([](AttentionJvp& args) { args.v_tangent = {}; }), "");
  EXPECT_NE(difference_of([](AttentionJvp& args) { args.sinks_tangent = {}; }), "");
  EXPECT_NE(difference_of([](AttentionJvp& args) { args.captured_tangents.pop_back(); }), "");
  EXPECT_NE(difference_of([](AttentionJvp& args) { args.forward.dropout.p = 0; }), "");
  EXPECT_NE(difference_of([](AttentionJvp& args) { args.forward.softmax_scale = 0.3F; }), "");
}

TEST(GradientFaults, FailureTellsWhereWhatAndHowToRepeat) {
  const std::string message = plain().difference(BackwardFault::delta_missing);
  for (const std::string_view part :
       {"dq[", "dk[", "got", "expected", "allowed", "seed 1", "target",
        "--gtest_filter=GradientFaults.FailureTellsWhereWhatAndHowToRepeat"}) {
    EXPECT_NE(message.find(part), std::string::npos) << part << " is missing in\n" << message;
  }
}

TEST(GradientFaults, WritesIntoInputsAndOutsideOfOutputsAreCaught) {
  const Plant plant = plain();
  const auto difference_after = [&](const std::function<void(const AttentionBackward&)>& harm) {
    return backward_difference(plant.problem, {.run = [&](const AttentionBackward& args) {
                                 planted_attention_backward(args, plant.features,
                                                            BackwardFault::none);
                                 harm(args);
                               }});
  };
  const auto touch = [](const TensorView& view, std::int64_t element) {
    static_cast<float*>(const_cast<void*>(view.data()))[element] = 0.25F;
  };
  EXPECT_EQ(difference_after([](const AttentionBackward&) {}), "");
  const auto finds = [&](const std::string& text, const auto& harm) {
    EXPECT_NE(difference_after(harm).find(text), std::string::npos) << text;
  };
  finds("wrote outside of dq", [&](const auto& args) { touch(args.dq, -1); });
  finds("wrote outside of dv",
        [&](const auto& args) { touch(args.dv, args.dv.spec().num_elements()); });
  finds("input dout was written", [&](const auto& args) { touch(args.dout, 0); });
  finds("input lse was written", [&](const auto& args) { touch(args.forward.lse, 3); });
  finds("input out was written", [&](const auto& args) { touch(args.forward.out, 3); });
}

}  // namespace
}  // namespace fovea::testing
