// NaN and Inf: without effect where nobody looks, seen by exactly the rows that look.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "fovea/mask.hpp"

#include "support/compare.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <typename Test>
void on_every_target(const Test& test) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const CpuTarget target : targets_for(dtype)) {
      SCOPED_TRACE(std::string(fovea::name(target)) + " " + std::string(fovea::name(dtype)));
      test(dtype, target);
    }
  }
}

struct Bits {
  std::vector<std::uint64_t> out, lse, row_max;
  bool operator==(const Bits&) const = default;
};

Bits bits_of_run(CaseMemory& memory, CpuTarget target) {
  const AttentionForward args = memory.args(target);
  attention_forward(args);
  return {bits_of(args.out), bits_of(args.lse), bits_of(args.row_max)};
}

/// More keys than a tile; 40 queries, so that some panels see a key that others do not.
Case square(Dtype dtype) {
  return {.label = "square", .seqlen_q = 40, .seqlen_kv = 140, .num_heads_q = 2, .dtype = dtype};
}

/// Sets one element of a dense k or v.
struct Element {
  std::int64_t row = 0, head = 0, dim = 0;
};
void set(GuardedTensor& tensor, const Element& at, double value) {
  const TensorView view = tensor.view();
  tensor.set(at.row * view.stride(1) + at.head * view.stride(2) + at.dim * view.stride(3), value);
  tensor.seal();
}

TEST(CpuNonFinite, HiddenKeysChangeNoBit) {
  const Random random(4, 0);
  on_every_target([&](Dtype dtype, CpuTarget target) {
    Case problem = square(dtype);
    const TensorView dense = problem.capture(
        Dtype::boolean, {1, 140}, [&](std::int64_t i) { return random.uniform(i) < 0.5 ? 1 : 0; });
    const TensorView ids = problem.capture(Dtype::i32, {1, 140}, [](std::int64_t i) {
      return i % 5 == 0 ? -1.0 : static_cast<double>(i / 50);
    });
    for (const MaskMod& mask :
         {causal(Align::top_left), window(3, 2), dense_mask(dense), documents(ids),
          mask_mod([](auto x) { return x.kv_idx % 3 == 1; })}) {
      problem.mask = mask;
      problem.poisons_hidden_keys = false;
      CaseMemory clean(problem);
      problem.poisons_hidden_keys = true;
      CaseMemory poisoned(problem);
      ASSERT_FALSE(bits_of(clean.k.view()) == bits_of(poisoned.k.view())) << "nothing is hidden";
      EXPECT_TRUE(bits_of_run(clean, target) == bits_of_run(poisoned, target)) << mask.to_string();
    }
  });
}

TEST(CpuNonFinite, ValuesBehindABiasOfMinusInfinityChangeNoBit) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    Case problem = square(dtype);
    problem.score =
        score_mod([](auto x) { return select(x.kv_idx % 4 == 2, -kInfinity, x.score); });
    CaseMemory clean(problem);
    CaseMemory poisoned(problem);
    for (std::int64_t row = 2; row < 140; row += 4) {
      set(poisoned.v, {.row = row, .head = 0, .dim = row % 8}, row % 8 == 2 ? kNaN : kInfinity);
      set(poisoned.k, {.row = row, .head = 0, .dim = row % 8}, kNaN);
    }
    EXPECT_TRUE(bits_of_run(clean, target) == bits_of_run(poisoned, target));
  });
}

TEST(CpuNonFinite, NaNInAKeyReachesTheRowsThatSeeIt) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    Case problem = square(dtype);
    problem.mask = causal();
    CaseMemory clean(problem);
    CaseMemory spoiled(problem);
    constexpr std::int64_t kKey = 117;  // seen from query 117 - 100 on
    set(spoiled.k, {.row = kKey, .head = 0, .dim = 3}, kNaN);
    const Bits before = bits_of_run(clean, target);
    const Bits after = bits_of_run(spoiled, target);
    for (std::int64_t head = 0; head < 2; ++head) {
      for (std::int64_t q_idx = 0; q_idx < 40; ++q_idx) {
        const bool sees = q_idx + 100 >= kKey;
        const auto statistic = static_cast<std::size_t>(head * 40 + q_idx);
        const auto is_nan = [](std::uint64_t bits) {
          return std::isnan(std::bit_cast<double>(bits));
        };
        if (sees) {
          EXPECT_TRUE(is_nan(after.lse[statistic])) << q_idx;
          EXPECT_TRUE(is_nan(after.row_max[statistic])) << q_idx;
        } else {
          EXPECT_EQ(after.lse[statistic], before.lse[statistic]) << q_idx;
          EXPECT_EQ(after.row_max[statistic], before.row_max[statistic]) << q_idx;
        }
        for (std::int64_t dim = 0; dim < 8; ++dim) {
          const auto i = static_cast<std::size_t>((q_idx * 2 + head) * 8 + dim);
          EXPECT_TRUE(sees ? is_nan(after.out[i]) : after.out[i] == before.out[i])
              << q_idx << ", " << dim;
        }
      }
    }
  });
}

/// Those that drop the key see it too.
TEST(CpuNonFinite, NonFiniteValueReachesItsColumnOfTheRowsThatSeeIt) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    for (const auto& [value, dropped] :
         {std::pair{kNaN, 0.0F}, {kInfinity, 0.0F}, {-kInfinity, 0.0F}, {kInfinity, 0.5F}}) {
      Case problem = square(dtype);
      problem.mask = causal();
      problem.dropout = {.p = dropped, .seed = 7, .offset = 1};
      CaseMemory clean(problem);
      CaseMemory spoiled(problem);
      constexpr std::int64_t kKey = 121, kDim = 5;
      set(spoiled.v, {.row = kKey, .head = 0, .dim = kDim}, value);
      const Bits before = bits_of_run(clean, target);
      const Bits after = bits_of_run(spoiled, target);
      EXPECT_EQ(after.lse, before.lse);
      EXPECT_EQ(after.row_max, before.row_max);
      for (std::size_t i = 0; i < before.out.size(); ++i) {
        const auto q_idx = static_cast<std::int64_t>(i) / 16;
        const bool sees = q_idx + 100 >= kKey && i % 8 == kDim;
        const auto got = std::bit_cast<double>(after.out[i]);
        if (!sees) {
          EXPECT_EQ(after.out[i], before.out[i]) << value << " at " << i;
        } else {
          EXPECT_TRUE(std::isnan(value) ? std::isnan(got) : got == value)
              << value << " gave " << got;
        }
      }
    }
  });
}

/// Of keys before 2048 no weight is left beside those behind them: 1 and 12 queries split keys there, 60 do not. One
/// head's sink leaves no weight to any key.
TEST(CpuNonFinite, InfinityOutlivesAWeightThatRoundsToZero) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    for (const std::int64_t seqlen_q : {1, 12, 60}) {
      for (const double value : {kInfinity, -kInfinity}) {
        Case problem{.label = "faint",
                     .seqlen_q = seqlen_q,
                     .seqlen_kv = 4100,
                     .num_heads_q = 2,
                     .num_heads_kv = 2,
                     .dtype = dtype,
                     .has_sinks = true};
        problem.score =
            score_mod([](auto x) { return select(x.kv_idx < 2048, x.score - 1000, x.score); });
        CaseMemory memory(problem);
        memory.sinks.set(1, 1000);
        memory.sinks.seal();
        set(memory.v, {.row = 10, .head = 0, .dim = 3}, value);
        set(memory.v, {.row = 4000, .head = 1, .dim = 2}, value);
        const AttentionForward args = memory.args(target);
        attention_forward(args);
        const std::vector<double> out = values_of(args.out);
        for (std::size_t i = 0; i < out.size(); ++i) {
          const std::size_t head = i / 8 % 2, dim = i % 8;
          if (dim == 3 - head) {
            EXPECT_EQ(out[i], value) << seqlen_q << " queries, " << i;
          } else {
            EXPECT_TRUE(std::isfinite(out[i])) << seqlen_q << " queries, " << i;
          }
        }
      }
    }
  });
}

TEST(CpuNonFinite, NaNInAQueryReachesItsRowAlone) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    const Case problem = square(dtype);
    CaseMemory clean(problem);
    CaseMemory spoiled(problem);
    set(spoiled.q, {.row = 7, .head = 1, .dim = 0}, kNaN);
    const Bits before = bits_of_run(clean, target);
    const Bits after = bits_of_run(spoiled, target);
    for (std::size_t i = 0; i < before.out.size(); ++i) {
      const bool is_spoiled = i / 8 == 7 * 2 + 1;
      EXPECT_TRUE(is_spoiled ? std::isnan(std::bit_cast<double>(after.out[i]))
                             : after.out[i] == before.out[i])
          << i;
    }
  });
}

TEST(CpuNonFinite, NaNInAQueryThatSeesNothingHasNoEffect) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    Case problem = square(dtype);
    problem.mask = mask_mod([](auto x) { return x.q_idx != 7; });
    CaseMemory clean(problem);
    CaseMemory spoiled(problem);
    set(spoiled.q, {.row = 7, .head = 0, .dim = 2}, kNaN);
    EXPECT_TRUE(bits_of_run(clean, target) == bits_of_run(spoiled, target));
  });
}

TEST(CpuNonFinite, NaNAcrossSplitsEqualsOracle) {
  // The spoiled key lies in the second of three splits; head 1 sees it in the value only.
  on_every_target([](Dtype dtype, CpuTarget target) {
    Case problem{.label = "decode",
                 .seqlen_q = 1,
                 .seqlen_kv = 5000,
                 .num_heads_q = 2,
                 .num_heads_kv = 2,
                 .dtype = dtype};
    CaseMemory clean(problem);
    CaseMemory spoiled(problem);
    set(spoiled.k, {.row = 3000, .head = 0, .dim = 1}, kNaN);
    set(spoiled.v, {.row = 3000, .head = 1, .dim = 1}, kNaN);
    const Bits before = bits_of_run(clean, target);
    const Bits after = bits_of_run(spoiled, target);
    for (std::size_t dim = 0; dim < 8; ++dim) {
      EXPECT_TRUE(std::isnan(std::bit_cast<double>(after.out[dim])));
      EXPECT_EQ(std::isnan(std::bit_cast<double>(after.out[8 + dim])), dim == 1);
      if (dim != 1) {
        EXPECT_EQ(after.out[8 + dim], before.out[8 + dim]);
      }
    }
    EXPECT_TRUE(std::isnan(std::bit_cast<double>(after.lse[0])));
    EXPECT_EQ(after.lse[1], before.lse[1]);
  });
}

TEST(CpuNonFinite, NaNInAQueryWhoseFirstSplitsAreHiddenStaysNaN) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    Case problem{.label = "decode",
                 .seqlen_q = 1,
                 .seqlen_kv = 5000,
                 .dtype = dtype,
                 .mask = window(100, 0)};
    CaseMemory memory(problem);
    set(memory.q, {.row = 0, .head = 0, .dim = 4}, kNaN);
    const Bits bits = bits_of_run(memory, target);
    EXPECT_TRUE(std::isnan(std::bit_cast<double>(bits.lse[0])));
    for (const std::uint64_t out : bits.out) EXPECT_TRUE(std::isnan(std::bit_cast<double>(out)));
  });
}

}  // namespace
}  // namespace fovea::testing
