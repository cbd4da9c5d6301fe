// States merge by their lse: by hand, in every dtype and stride, with states that saw nothing, and what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fovea/error.hpp"
#include "fovea/state.hpp"

#include "support/compare.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// One head, one row of two elements a state: out and lse that a person can check.
struct Row {
  double x = 0, y = 0, lse = -kInfinity;
};

struct Merged {
  std::vector<double> out;
  double lse = 0;
};

Merged merge(const std::vector<Row>& rows) {
  std::vector<GuardedTensor> tensors;
  MergeStates args;
  for (const Row& row : rows) {
    tensors.push_back(tensor_of(Dtype::f32, {1, 1, 1, 2}, {row.x, row.y}));
    args.outs.push_back(tensors.back().view());
    tensors.push_back(tensor_of(Dtype::f32, {1, 1, 1}, {row.lse}));
    args.lses.push_back(tensors.back().view());
  }
  GuardedTensor out = tensor_of(Dtype::f32, {1, 1, 1, 2}, {kNan, kNan});
  GuardedTensor lse = tensor_of(Dtype::f32, {1, 1, 1}, {kNan});
  args.out = out.mutable_view();
  args.lse = lse.mutable_view();
  merge_states(args);
  return {values_of(out.view()), values_of(lse.view())[0]};
}

TEST(MergeStates, WeighsByTheExponentOfLse) {
  // Denominators 3 and 1: the whole is 3/4 of the first and 1/4 of the second.
  const Merged merged = merge({{4, 8, std::log(3.0)}, {8, -8, 0}});
  EXPECT_NEAR(merged.out[0], 5, 1e-6);
  EXPECT_NEAR(merged.out[1], 4, 1e-6);
  EXPECT_NEAR(merged.lse, std::log(4.0), 1e-6);
}

TEST(MergeStates, StatesFarApartDoNotOverflow) {
  const Merged merged = merge({{1, 2, -3000}, {3, 4, 3000}, {5, 6, 2000}});
  EXPECT_EQ(merged.out, (std::vector<double>{3, 4}));
  EXPECT_EQ(merged.lse, 3000);
}

TEST(MergeStates, AnEmptyStateChangesNothingWhateverItHolds) {
  const Merged alone = merge({{0.1, -0.2, 0.3}, {0.4, 0.5, -0.6}});
  const Merged between = merge({{kNan, kInfinity, -kInfinity},
                                {0.1, -0.2, 0.3},
                                {kNan, kNan, -kInfinity},
                                {0.4, 0.5, -0.6}});
  EXPECT_EQ(between.out, alone.out);
  EXPECT_EQ(between.lse, alone.lse);
}

TEST(MergeStates, OnlyEmptyStatesGiveZero) {
  for (const auto& rows :
       {std::vector<Row>{}, {{kNan, 7, -kInfinity}, {kInfinity, 7, -kInfinity}}}) {
    const Merged merged = merge(rows);
    EXPECT_EQ(merged.out, (std::vector<double>{0, 0}));
    EXPECT_EQ(merged.lse, -kInfinity);
  }
}

TEST(MergeStates, InfinityOutlivesAWeightThatRoundsToZero) {
  for (const double sign : {1.0, -1.0}) {
    const Row faint{sign * kInfinity, 5, -3000};
    for (const auto& rows : {std::vector<Row>{faint, {3, 4, 0}}, {{3, 4, 0}, faint}}) {
      const Merged merged = merge(rows);
      EXPECT_EQ(merged.out, (std::vector<double>{sign * kInfinity, 4}));
      EXPECT_EQ(merged.lse, 0);
    }
    EXPECT_TRUE(std::isnan(merge({faint, {-sign * kInfinity, 4, 0}}).out[0]));
  }
  EXPECT_TRUE(std::isnan(merge({{1, kNan, -3000}, {3, 4, 0}}).out[1]));
}

TEST(MergeStates, AStateOfLsePlusInfinityTakesAllTheWeight) {
  // A sink of +inf gives such a state.
  const Merged merged = merge({{1, kInfinity, 2}, {3, 4, kInfinity}});
  EXPECT_EQ(merged.out, (std::vector<double>{3, kInfinity}));
  EXPECT_EQ(merged.lse, kInfinity);
}

TEST(MergeStates, OneStateIsCopied) {
  const Merged merged = merge({{-0.0, kInfinity, 0.7F}});
  EXPECT_TRUE(std::signbit(merged.out[0]));
  EXPECT_EQ(merged.out[1], kInfinity);
  EXPECT_EQ(merged.lse, 0.7F);
}

/// What other states saw weighs nothing beside it; two of them share the weight.
TEST(MergeStates, AnInfiniteLseTakesTheWholeWeight) {
  const Merged merged = merge({{1, 2, 0}, {3, 4, kInfinity}, {5, 6, -kInfinity}});
  EXPECT_EQ(merged.out, (std::vector<double>{3, 4}));
  EXPECT_EQ(merged.lse, kInfinity);
  EXPECT_EQ(merge({{1, 2, kInfinity}, {3, 4, kInfinity}}).out, (std::vector<double>{2, 3}));
}

TEST(MergeStates, NanInSightReachesTheRow) {
  EXPECT_TRUE(std::isnan(merge({{1, kNan, 0}, {2, 3, 0}}).out[1]));
  EXPECT_EQ(merge({{1, kNan, 0}, {2, 3, 0}}).out[0], 1.5);
  EXPECT_TRUE(std::isnan(merge({{1, 2, 0}, {3, 4, kNan}}).lse));
  EXPECT_TRUE(std::isnan(merge({{1, 2, kNan}, {3, 4, 0}}).out[0]));
}

/// Three states of 2 x 37 rows x 3 heads (more rows than one task takes at 200 columns, and a cut last task), lse of
/// which every fifth is -inf.
class MergeShapes : public ::testing::TestWithParam<Dtype> {
 protected:
  static constexpr std::int64_t kBatch = 2, kRows = 37, kHeads = 3, kWidth = 200;
  static constexpr int kStates = 3;

  static double out_value(int state, std::int64_t i) {
    return Random(9, static_cast<std::uint64_t>(state)).normal(i);
  }
  static double lse_value(int state, std::int64_t i) {
    const Random random(9, 10 + static_cast<std::uint64_t>(state));
    return random.below(5, i) == 0 ? -kInfinity : 3 * random.normal(i);
  }
};

/// The plain formula in fp64 over what the tensors hold.
double expected_out(const std::vector<std::vector<double>>& outs,
                    const std::vector<std::vector<double>>& lses, std::size_t lse_index,
                    std::size_t out_index) {
  double sum = 0, total = 0;
  for (std::size_t state = 0; state < outs.size(); ++state) {
    const double weight = std::exp(lses[state][lse_index]);
    total += weight;
    if (weight > 0) sum += weight * outs[state][out_index];
  }
  return total == 0 ? 0 : sum / total;
}

TEST_P(MergeShapes, AnyStridesGiveTheFormula) {
  const Dtype dtype = GetParam();
  // Heads before rows, every other column; lse with rows before heads.
  const auto strided = [](Dtype element) {
    return make_spec(
        element, std::vector{kBatch, kRows, kHeads, kWidth},
        std::vector{kHeads * kRows * 2 * kWidth, 2 * kWidth, kRows * 2 * kWidth, std::int64_t{2}});
  };
  const TensorSpec lse_spec = make_spec(Dtype::f32, std::vector{kBatch, kHeads, kRows},
                                        std::vector{kRows * kHeads, std::int64_t{1}, kHeads});
  std::vector<GuardedTensor> tensors;
  MergeStates args;
  std::vector<std::vector<double>> outs, lses;
  for (int state = 0; state < kStates; ++state) {
    tensors.emplace_back(strided(dtype), 1);
    tensors.back().fill([=](std::int64_t i) { return out_value(state, i); });
    args.outs.push_back(tensors.back().view());
    outs.push_back(values_of(args.outs.back()));
    tensors.emplace_back(lse_spec);
    tensors.back().fill([=](std::int64_t i) { return lse_value(state, i); });
    args.lses.push_back(tensors.back().view());
    lses.push_back(values_of(args.lses.back()));
  }
  GuardedTensor out(strided(dtype), 1), lse(lse_spec);
  out.poison();
  out.seal();
  lse.seal();
  args.out = out.mutable_view();
  args.lse = lse.mutable_view();
  merge_states(args);
  EXPECT_TRUE(out.has_intact_guards());
  EXPECT_TRUE(lse.has_intact_guards());
  const std::vector<double> got = values_of(args.out);
  // Three terms of size 1: a few fp32 roundings and one of the dtype.
  const double rounding = dtype == Dtype::f32 ? 0x1p-24 : dtype == Dtype::f16 ? 0x1p-11 : 0x1p-8;
  for (std::int64_t batch = 0; batch < kBatch; ++batch) {
    for (std::int64_t row = 0; row < kRows; ++row) {
      for (std::int64_t head = 0; head < kHeads; ++head) {
        for (std::int64_t d = 0; d < kWidth; ++d) {
          const auto at =
              static_cast<std::size_t>(((batch * kRows + row) * kHeads + head) * kWidth + d);
          const auto lse_at = static_cast<std::size_t>((batch * kHeads + head) * kRows + row);
          const double expected = expected_out(outs, lses, lse_at, at);
          ASSERT_NEAR(got[at], expected, rounding * std::fabs(expected) + 8 * 0x1p-24 * 4)
              << batch << ' ' << row << ' ' << head << ' ' << d;
        }
      }
    }
  }
}

TEST_P(MergeShapes, PackedRowsEqualDenseOnesAndTheFirstStateMayBeMergedInPlace) {
  const Dtype dtype = GetParam();
  const auto states = [&](MergeStates& args, std::vector<GuardedTensor>& tensors,
                          const std::vector<std::int64_t>& out_shape,
                          const std::vector<std::int64_t>& lse_shape) {
    for (int state = 0; state < kStates; ++state) {
      tensors.emplace_back(make_spec(dtype, out_shape));
      tensors.back().fill([=](std::int64_t i) { return out_value(state, i); });
      args.outs.push_back(tensors.back().mutable_view());
      tensors.emplace_back(make_spec(Dtype::f32, lse_shape));
      tensors.back().fill([=](std::int64_t i) { return lse_value(state, i); });
      args.lses.push_back(tensors.back().mutable_view());
    }
  };
  std::vector<GuardedTensor> tensors;
  MergeStates packed, dense;
  states(packed, tensors, {kRows, kHeads, kWidth}, {kHeads, kRows});
  packed.out = packed.outs[0];
  packed.lse = packed.lses[0];
  states(dense, tensors, {1, kRows, kHeads, kWidth}, {1, kHeads, kRows});
  GuardedTensor out(make_spec(dtype, std::vector<std::int64_t>{1, kRows, kHeads, kWidth}));
  GuardedTensor lse(make_spec(Dtype::f32, std::vector<std::int64_t>{1, kHeads, kRows}));
  dense.out = out.mutable_view();
  dense.lse = lse.mutable_view();
  merge_states(packed);
  merge_states(dense);
  EXPECT_EQ(bits_of(packed.out), bits_of(dense.out));
  EXPECT_EQ(bits_of(packed.lse), bits_of(dense.lse));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, MergeShapes,
                         ::testing::Values(Dtype::f32, Dtype::f16, Dtype::bf16),
                         [](const auto& test) { return std::string(name(test.param)); });

TEST(MergeStates, StatesOfDifferentDtypesMerge) {
  GuardedTensor a = tensor_of(Dtype::bf16, {1, 1, 1, 1}, {2});
  GuardedTensor b = tensor_of(Dtype::f16, {1, 1, 1, 1}, {4});
  GuardedTensor lse = tensor_of(Dtype::f32, {1, 1, 1}, {0});
  GuardedTensor out = tensor_of(Dtype::f32, {1, 1, 1, 1}, {kNan});
  merge_states(
      {.outs = {a.view(), b.view()}, .lses = {lse.view(), lse.view()}, .out = out.mutable_view()});
  EXPECT_EQ(values_of(out.view()), std::vector<double>{3});
}

TEST(MergeStates, LengthsOfZeroAreLegal) {
  GuardedTensor out(make_spec(Dtype::f32, std::vector<std::int64_t>{2, 0, 4, 8}));
  GuardedTensor lse(make_spec(Dtype::f32, std::vector<std::int64_t>{2, 4, 0}));
  EXPECT_NO_THROW(merge_states({.outs = {out.view()},
                                .lses = {lse.view()},
                                .out = out.mutable_view(),
                                .lse = lse.mutable_view()}));
}

TEST(MergeStatesPlan, RunsWithinItsWorkspaceWithTheBitsOfACall) {
  const auto pool = make_thread_pool(3);
  std::vector<GuardedTensor> tensors;
  MergeStates args{.executor = pool.get()};
  for (int state = 0; state < 3; ++state) {
    tensors.emplace_back(make_spec(Dtype::bf16, std::vector<std::int64_t>{2, 37, 3, 200}));
    tensors.back().fill([=](std::int64_t i) { return Random(1, 2 * state).normal(i); });
    args.outs.push_back(tensors.back().view());
    tensors.emplace_back(make_spec(Dtype::f32, std::vector<std::int64_t>{2, 3, 37}));
    tensors.back().fill([=](std::int64_t i) { return Random(1, 2 * state + 1).normal(i); });
    args.lses.push_back(tensors.back().view());
  }
  GuardedTensor direct(args.outs[0].spec()), run(args.outs[0].spec());
  args.out = TensorView(static_cast<void*>(nullptr), args.outs[0].spec());
  const MergeStatesPlan plan = plan_merge_states(args);  // out needs no data
  args.out = direct.mutable_view();
  merge_states(args);
  args.out = run.mutable_view();
  PoisonedWorkspace workspace(plan.workspace_bytes());
  args.workspace = workspace.span();
  plan.run(args);
  EXPECT_EQ(bits_of(run.view()), bits_of(direct.view()));
  EXPECT_TRUE(workspace.has_intact_guards());
  const Explanation explanation = plan.explain();
  EXPECT_EQ(explanation.kernel, "cpu/merge_states");
  EXPECT_EQ(explanation.workspace_bytes, plan.workspace_bytes());
  EXPECT_EQ(explanation.bytes, 2.0 * 4 * 2 * 37 * 3 * 200 + 4.0 * 3 * 2 * 3 * 37);
}

TEST(MergeStatesPlan, RefusesOtherTensorsAndShortWorkspace) {
  GuardedTensor state = tensor_of(Dtype::f32, {1, 2, 1, 2}, {1, 2, 3, 4});
  GuardedTensor lse = tensor_of(Dtype::f32, {1, 1, 2}, {0, 0});
  GuardedTensor out = tensor_of(Dtype::f32, {1, 2, 1, 2}, {0, 0, 0, 0});
  MergeStates args{.outs = {state.view()}, .lses = {lse.view()}, .out = out.mutable_view()};
  const MergeStatesPlan plan = plan_merge_states(args);
  out.seal();
  const auto message = [&] {
    try {
      plan.run(args);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("(not refused)");
  };
  EXPECT_NE(message().find("workspace has 0 bytes; expected"), std::string::npos);
  args.outs.push_back(state.view());
  args.lses.push_back(lse.view());
  EXPECT_NE(message().find("another shape, dtype, stride or device than the plan"),
            std::string::npos);
  EXPECT_TRUE(out.is_unchanged());
}

struct Refused {
  GuardedTensor a = tensor_of(Dtype::f32, {1, 2, 1, 2}, {1, 2, 3, 4});
  GuardedTensor b = tensor_of(Dtype::f32, {1, 2, 1, 2}, {1, 2, 3, 4});
  GuardedTensor lse = tensor_of(Dtype::f32, {1, 1, 2}, {0, 0});
  GuardedTensor out = tensor_of(Dtype::f32, {1, 2, 1, 2}, {0, 0, 0, 0});
  MergeStates args{.outs = {a.mutable_view(), b.mutable_view()},
                   .lses = {lse.mutable_view(), lse.mutable_view()},
                   .out = out.mutable_view()};

  std::string message() {
    out.seal();
    try {
      merge_states(args);
    } catch (const InvalidArgument& error) {
      EXPECT_TRUE(out.is_unchanged()) << "something was written before the refusal";
      return error.what();
    }
    return "(not refused)";
  }
};

TEST(MergeStates, RefusesShapesThatDiffer) {
  Refused refused;
  EXPECT_EQ(refused.message(), "(not refused)");
  refused.args.lses.pop_back();
  EXPECT_EQ(refused.message(),
            "merge_states: 2 outs and 1 lses are given; expected one lse for every out");
  refused = {};
  GuardedTensor other = tensor_of(Dtype::f32, {1, 2, 2, 1}, {1, 2, 3, 4});
  refused.args.outs[1] = other.view();
  EXPECT_EQ(refused.message(),
            "merge_states: outs[1] is f32 [1, 2, 2, 1]; expected f32 [1, 2, 1, 2]");
  refused = {};
  GuardedTensor half = tensor_of(Dtype::f16, {1, 1, 2}, {0, 0});
  refused.args.lses[0] = half.view();
  EXPECT_EQ(refused.message(), "merge_states: lses[0] is f16 [1, 1, 2]; expected f32 [1, 1, 2]");
  refused = {};
  refused.args.out = {};
  EXPECT_EQ(refused.message(),
            "merge_states: out is missing; expected [batch, seqlen_q, num_heads_q, head_dim_v], or "
            "packed [total_q, num_heads_q, head_dim_v]");
}

TEST(MergeStates, RefusesOutputsThatOverlapAStateOtherThanTheFirst) {
  Refused refused;
  refused.args.out = refused.args.outs[1];
  EXPECT_EQ(refused.message(),
            "merge_states: out overlaps a state's out; expected memory of its own");
  refused = {};
  refused.args.out = refused.args.outs[0];
  EXPECT_EQ(refused.message(), "(not refused)");
  refused.args.lse = refused.args.lses[1];  // the first state's too, but the second reads it later
  EXPECT_EQ(refused.message(),
            "merge_states: lse overlaps a state's lse; expected memory of its own");
  refused = {};
  refused.args.outs[0] = refused.args.out;
  refused.args.outs[0] = TensorView(refused.args.out.data(), refused.args.out.spec());
  refused.args.out = refused.a.view();
  EXPECT_EQ(refused.message(),
            "merge_states: out is read-only; expected a view of writable memory");
}

}  // namespace
}  // namespace fovea::testing
