// NaN and Inf backward: without effect where nobody looks; carried exactly where the formula carries them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "reference/attention_backward.hpp"
#include "support/compare.hpp"
#include "support/gradient_case.hpp"
#include "support/gradient_compare.hpp"

namespace fovea::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Two chunks of keys and several panels; each query sees 41 keys, so that neighbours in a panel see different ones.
GradientCase band(Dtype dtype) {
  return {.forward = {.label = "band",
                      .seqlen_q = 600,
                      .seqlen_kv = 600,
                      .num_heads_q = 2,
                      .num_heads_kv = 1,
                      .dtype = dtype,
                      .mask = window(20, 20),
                      .poisons_hidden_keys = false}};
}

struct Element {
  std::int64_t row = 0, head = 0, dim = 0;
};
void set(GuardedTensor& tensor, const Element& at, double value) {
  const TensorView view = tensor.view();
  tensor.set(at.row * view.stride(1) + at.head * view.stride(2) + at.dim * view.stride(3), value);
}

/// What is finite must be near, what is not must be so in both: Inf and NaN may take each other's place.
void expect_like(const TensorView& got, const std::vector<double>& expected, Dtype dtype,
                 const std::string& name) {
  const double allowed = dtype == Dtype::f32 ? 1e-4 : 5e-2;
  const std::vector<double> values = values_of(got);
  ASSERT_EQ(values.size(), expected.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(std::isfinite(values[i]), std::isfinite(expected[i])) << name << " element " << i;
    if (std::isfinite(expected[i])) {
      ASSERT_NEAR(values[i], expected[i], allowed * (1 + std::abs(expected[i])))
          << name << " element " << i;
    }
  }
}

/// In both dtypes and on every target; `change` spoils the inputs.
template <typename Change>
void expect_like_oracle(const std::string& label, GradientCase problem, const Change& change) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    problem.forward.dtype = dtype;
    GradientMemory memory(problem);
    change(memory);
    const AttentionBackward args = memory.args();
    attention_forward(memory.forward.args());
    const auto expected = reference::attention_backward(args);
    for (const CpuTarget target : gradient_targets_for(dtype)) {
      SCOPED_TRACE(label + " " + std::string(name(dtype)) + " " + std::string(name(target)));
      memory.poison_outputs();
      attention_backward(memory.args(target));
      expect_like(args.dq, expected.dq, dtype, "dq");
      expect_like(args.dk, expected.dk, dtype, "dk");
      expect_like(args.dv, expected.dv, dtype, "dv");
    }
  }
}

/// Row 100 sees the keys 80 to 120, key 300 is seen by the rows 280 to 320.
TEST(BackwardNonFinite, ReachesWhoSeesItAndNobodyElse) {
  for (const double value : {kNaN, kInfinity}) {
    const std::string label = std::isnan(value) ? "NaN" : "Inf";
    const auto expect_like_oracle_with = [&](const std::string& place, const auto& change) {
      expect_like_oracle(label + " in " + place, band(Dtype::f32), change);
    };
    expect_like_oracle_with("q", [&](auto& m) { set(m.forward.q, {100, 1, 3}, value); });
    expect_like_oracle_with("k", [&](auto& m) { set(m.forward.k, {300, 0, 2}, value); });
    expect_like_oracle_with("v", [&](auto& m) { set(m.forward.v, {300, 0, 5}, value); });
    expect_like_oracle_with("dout", [&](auto& m) { set(m.dout, {100, 0, 4}, value); });
  }
}

/// Calls the test with every target and dtype whose gradients are of products of their own.
template <typename Test>
void on_every_target(const Test& test) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const CpuTarget target : gradient_targets_for(dtype)) {
      SCOPED_TRACE(std::string(name(dtype)) + " " + std::string(name(target)));
      test(dtype, target);
    }
  }
}

/// dV is linear in dO column by column: a NaN in column 4 leaves the others alone.
TEST(BackwardNonFinite, InDoutSpoilsItsColumnOfDvAlone) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    GradientMemory memory(band(dtype));
    set(memory.dout, {100, 0, 4}, kNaN);
    attention_forward(memory.forward.args());
    const AttentionBackward args = memory.args(target);
    attention_backward(args);
    const std::vector<double> dv = values_of(args.dv);
    const std::int64_t head_dim = args.dv.size(3);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(dv.size()); ++i) {
      const std::int64_t key = i / head_dim;
      const bool is_spoilt = key >= 80 && key <= 120 && i % head_dim == 4;
      EXPECT_EQ(std::isnan(dv[static_cast<std::size_t>(i)]), is_spoilt)
          << key << " " << i % head_dim;
    }
  });
}

struct Bits {
  std::vector<std::uint64_t> dq, dk, dv;
};

Bits bits_of_run(GradientMemory& memory, CpuTarget target) {
  attention_forward(memory.forward.args());
  const AttentionBackward args = memory.args(target);
  attention_backward(args);
  return {bits_of(args.dq), bits_of(args.dk), bits_of(args.dv)};
}

/// Keys 7, 200 and 590 are hidden from all by a dense mask, in tiles that are seen.
TEST(BackwardNonFinite, HiddenKeysChangeNoBitAndHaveNoGradient) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    GradientCase problem = band(dtype);
    problem.forward.mask = window(100, 100) && parse_mask_mod("kv_idx != 7 && kv_idx != 200") &&
                           parse_mask_mod("kv_idx != 590");
    GradientMemory memory(problem);
    const Bits clean = bits_of_run(memory, target);
    for (const double value : {kNaN, kInfinity, -kInfinity}) {
      for (const std::int64_t key : {7, 200, 590}) {
        for (std::int64_t dim = 0; dim < 8; ++dim) {
          set(memory.forward.k, {key, 0, dim}, value);
          set(memory.forward.v, {key, 0, dim}, value);
        }
      }
      memory.poison_outputs();
      const Bits dirty = bits_of_run(memory, target);
      EXPECT_TRUE(dirty.dq == clean.dq);
      EXPECT_TRUE(dirty.dk == clean.dk);
      EXPECT_TRUE(dirty.dv == clean.dv);
    }
    const std::vector<double> dk = values_of(memory.args().dk);
    for (std::size_t d = 0; d < 8; ++d) EXPECT_EQ(dk[200 * 8 + d], 0.0);
  });
}

/// Rows 50 and 595 see nothing; what stands in their q, dout, dlse and out is of no effect. Row 595's panel works on
/// the last keys, which fill no block of tiles.
TEST(BackwardNonFinite, RowsThatSeeNothingChangeNoBitAndHaveNoGradient) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    GradientCase problem = band(dtype);
    problem.forward.mask = window(100, 100) && parse_mask_mod("q_idx != 50 && q_idx != 595");
    problem.forward.has_sinks = true;
    GradientMemory memory(problem);
    const auto run = [&] {
      attention_forward(memory.forward.args());
      for (const std::int64_t row : {50, 595}) {
        for (std::int64_t dim = 0; dim < 8; ++dim) set(memory.forward.out, {row, 0, dim}, kNaN);
      }
      const AttentionBackward args = memory.args(target);
      attention_backward(args);
      Bits bits{bits_of(args.dq), bits_of(args.dk), bits_of(args.dv)};
      const auto dsinks = bits_of(args.dsinks);
      bits.dq.insert(bits.dq.end(), dsinks.begin(), dsinks.end());
      return bits;
    };
    const Bits clean = run();
    for (const std::int64_t row : {50, 595}) {
      for (std::int64_t dim = 0; dim < 8; ++dim) {
        set(memory.forward.q, {row, 0, dim}, kInfinity);
        set(memory.dout, {row, 0, dim}, kNaN);
      }
    }
    memory.poison_outputs();
    const Bits dirty = run();
    EXPECT_TRUE(dirty.dq == clean.dq);
    EXPECT_TRUE(dirty.dk == clean.dk);
    EXPECT_TRUE(dirty.dv == clean.dv);
    const std::vector<double> dq = values_of(memory.args().dq);
    // Neither run: what rows that see nothing hold is not finite in the case itself.
    EXPECT_TRUE(std::ranges::all_of(dq, [](double x) { return std::isfinite(x); }));
    for (std::size_t d = 0; d < 8; ++d) {
      EXPECT_EQ(dq[50 * 16 + d], 0.0);
      EXPECT_EQ(dq[595 * 16 + d], 0.0);
    }
  });
}

/// A bias of the lowest float on all keys of a row is an ordinary number: a uniform row, whose lse in fp32 has lost
/// log(n).
TEST(BackwardNonFinite, RowsOfTheLowestBiasAreUniform) {
  GradientCase problem = band(Dtype::f32);
  problem.forward.mask = {};
  problem.forward.score = parse_score_mod("score + select(q_idx < 9, -3.4e38, 0.0)");
  expect_like_oracle("lowest bias", problem, [](const GradientMemory&) {});
}

}  // namespace
}  // namespace fovea::testing
