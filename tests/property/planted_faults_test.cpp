// The comparison that all kernels pass is shown to fail: one planted fault after another goes
// through it, in every dtype, so that no tolerance is so wide that a kind of fault hides in it.
// Whether problems that show a fault are among those that kernels are tested with is another
// question: scripts/dev mutate plants the same kinds in the kernels themselves.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "support/compare.hpp"
#include "support/planted_attention.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

struct Plant {
  Case problem;
  PlantedFeatures features;

  std::string difference(Fault fault) const {
    return difference_from_oracle(problem, {.run = [&](const AttentionForward& args) {
                                    planted_attention_forward(args, features, fault);
                                  }});
  }
};

/// No feature at all. 53 keys: three tiles of 16 and a tail. 37 queries: two tiles and a tail.
Plant plain() {
  return {.problem = {.label = "plain",
                      .batch = 2,
                      .seqlen_q = 37,
                      .seqlen_kv = 53,
                      .num_heads_q = 6,
                      .num_heads_kv = 2,
                      .head_dim_qk = 24,
                      .head_dim_v = 16},
          .features = {}};
}

/// All features at once, keys before the window poisoned by NaN.
Plant everything() {
  Plant plant = plain();
  Case& problem = plant.problem;
  problem.label = "everything";
  problem.has_sinks = true;
  problem.dropout = {.p = 0.25F, .seed = 5, .offset = 9};
  const Random random(17, 0);
  plant.features = {.is_causal = true, .window_left = 12, .softcap = 3};
  plant.features.bias =
      problem.capture(Dtype::f32, {6, 37, 53}, [&](std::int64_t i) { return random.normal(i); });
  problem.score = softcap(3) | bias(plant.features.bias);
  problem.mask = causal() && window(12, std::nullopt);
  return plant;
}

/// More queries than keys: the first rows see nothing.
Plant empty_rows() {
  Plant plant = plain();
  plant.problem.label = "empty rows";
  plant.problem.seqlen_q = 40;
  plant.problem.seqlen_kv = 21;
  plant.problem.mask = causal();
  plant.features.is_causal = true;
  return plant;
}

/// Scores in the hundreds: exponentials overflow unless the running maximum is subtracted. row_max
/// would give a wrong maximum away by itself, so it is not asked for.
Plant steep() {
  Plant plant = plain();
  plant.problem.label = "steep";
  plant.problem.softmax_scale = 40.F;
  plant.problem.wants_row_max = false;
  return plant;
}

struct Planted {
  Fault fault;
  Plant (*plant)();            // the problem that shows it
  bool is_arithmetic = false;  // too small to show in the roundings of a 16-bit output
};

constexpr Planted kPlanted[] = {
    {Fault::window_off_by_one, everything},
    {Fault::top_left_for_bottom_right, everything},
    {Fault::tail_key_unmasked, plain},
    {Fault::last_kv_tile_skipped, plain},
    {Fault::query_of_next_tile, plain},
    {Fault::scale_applied_twice, plain},
    {Fault::scale_before_and_after_cap, everything},
    {Fault::softcap_after_mask, everything},
    {Fault::bias_of_kv_head, everything},
    {Fault::bias_before_softcap, everything},
    {Fault::gqa_head_modulo, plain},
    {Fault::batch_ignored, everything},
    {Fault::missing_rescale, plain},
    {Fault::row_sum_missing_rescale, plain},
    {Fault::stale_max, steep},
    {Fault::bf16_accumulator, plain, true},
    {Fault::bf16_row_sum, plain, true},
    {Fault::row_sum_of_rounded_weights, plain, true},
    {Fault::sink_counted_twice, everything},
    {Fault::sink_ignored_by_lse, everything},
    {Fault::sink_scaled, everything},
    {Fault::dropout_transposed, everything},
    {Fault::dropout_not_rescaled, everything},
    {Fault::dropout_before_row_sum, everything},
    {Fault::lse_in_log2, plain},
    {Fault::lse_without_max, plain},
    {Fault::finite_mask, empty_rows},
    {Fault::hidden_value_read, everything},
};
static_assert(std::size(kPlanted) == kNumFaults - 1, "every fault is planted once");

TEST(PlantedFaults, CleanKernelPasses) {
  for (Plant (*make)() : {plain, everything, empty_rows, steep}) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      Plant plant = make();
      plant.problem.dtype = dtype;
      EXPECT_EQ(plant.difference(Fault::none), "");
    }
  }
}

TEST(PlantedFaults, EachIsCaught) {
  for (const Planted& planted : kPlanted) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      if (planted.is_arithmetic && dtype != Dtype::f32) continue;
      Plant plant = planted.plant();
      plant.problem.dtype = dtype;
      EXPECT_NE(plant.difference(planted.fault), "")
          << name(planted.fault) << " in " << fovea::name(dtype);
    }
  }
}

TEST(PlantedFaults, AllButThoseOfStatisticsShowInOutAlone) {
  for (const Planted& planted : kPlanted) {
    Plant plant = planted.plant();
    plant.problem.wants_lse = plant.problem.wants_row_max = false;
    const bool changes_out = planted.fault != Fault::sink_ignored_by_lse &&
                             planted.fault != Fault::lse_in_log2 &&
                             planted.fault != Fault::lse_without_max;
    EXPECT_EQ(plant.difference(planted.fault) != "", changes_out) << name(planted.fault);
  }
}

TEST(PlantedFaults, FailureTellsWhereWhatAndHowToRepeat) {
  const std::string message = plain().difference(Fault::missing_rescale);
  for (const std::string_view part :
       {"out[", "got", "expected", "allowed", "seed 1", "target",
        "--gtest_filter=PlantedFaults.FailureTellsWhereWhatAndHowToRepeat"}) {
    EXPECT_NE(message.find(part), std::string::npos) << part << " is missing in\n" << message;
  }
}

TEST(PlantedFaults, WritesOutsideOfOutputsAndIntoInputsAreCaught) {
  Plant plant = plain();
  plant.problem.out_layout = Layout::padded;
  const auto difference_after = [&](const std::function<void(const AttentionForward&)>& harm) {
    return difference_from_oracle(plant.problem, {.run = [&](const AttentionForward& args) {
                                    planted_attention_forward(args, plant.features, Fault::none);
                                    harm(args);
                                  }});
  };
  EXPECT_EQ(difference_after([](const AttentionForward&) {}), "");
  EXPECT_NE(difference_after([](const AttentionForward& args) {
              static_cast<float*>(args.out.mutable_data())[args.out.size(3)] =
                  0;  // between two heads
            }).find("wrote outside of out"),
            std::string::npos);
  EXPECT_NE(difference_after([](const AttentionForward& args) {
              static_cast<float*>(args.lse.mutable_data())[-1] = 0;
            }).find("wrote outside of lse"),
            std::string::npos);
  EXPECT_NE(difference_after([](const AttentionForward& args) {
              *static_cast<float*>(const_cast<void*>(args.k.data())) += 1;
            }).find("input k was written"),
            std::string::npos);
}

}  // namespace
}  // namespace fovea::testing
