// What must hold for any problem: laws between runs, checked on problems that RapidCheck draws.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "reference/attention_forward.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

using Values = std::vector<double>;

/// Dense, of any small shape, dtype and target. 160 keys: past one tile; 50 queries: past one
/// panel.
struct Drawn {
  Case problem;
  CpuTarget target = CpuTarget::scalar;
};

Drawn draw() {
  Drawn drawn;
  Case& problem = drawn.problem;
  problem.label = "drawn";
  problem.batch = *rc::gen::inRange<std::int64_t>(1, 3);
  problem.seqlen_q = *rc::gen::inRange<std::int64_t>(1, 50);
  problem.seqlen_kv = *rc::gen::inRange<std::int64_t>(1, 160);
  problem.num_heads_kv = *rc::gen::inRange<std::int64_t>(1, 3);
  problem.num_heads_q = problem.num_heads_kv * *rc::gen::inRange<std::int64_t>(1, 4);
  problem.head_dim_qk = *rc::gen::inRange<std::int64_t>(1, 40);
  problem.head_dim_v = *rc::gen::inRange<std::int64_t>(1, 40);
  problem.dtype = *rc::gen::element(Dtype::f32, Dtype::f16, Dtype::bf16);
  problem.out_dtype = Dtype::f32;  // laws are between sums, not between roundings
  problem.seed = *rc::gen::inRange<std::uint64_t>(1, 1000000);
  drawn.target = *rc::gen::elementOf(targets_for(problem.dtype));
  return drawn;
}

struct Tensors {
  Values q, k, v;
  static Tensors of(const CaseMemory& memory) {
    return {values_of(memory.q.view()), values_of(memory.k.view()), values_of(memory.v.view())};
  }
};

struct Result {
  Values out, lse;
};

Result run(const AttentionForward& args) {
  attention_forward(args);
  return {values_of(args.out), values_of(args.lse)};
}

/// Runs other values through a problem; they are exact in its dtype already.
Result run(const Drawn& drawn, const Tensors& tensors) {
  CaseMemory memory(drawn.problem);
  const auto refill = [](GuardedTensor& tensor, const Values& values) {
    tensor.fill([&](std::int64_t i) { return values[static_cast<std::size_t>(i)]; });
  };
  refill(memory.q, tensors.q);
  refill(memory.k, tensors.k);
  refill(memory.v, tensors.v);
  return run(memory.args(drawn.target));
}
Result run(const Drawn& drawn) {
  CaseMemory memory(drawn.problem);
  return run(memory.args(drawn.target));
}

Tolerances tolerances_of(const Drawn& drawn) {
  CaseMemory memory(drawn.problem);
  const AttentionForward args = memory.args(drawn.target);
  const ComputeDtype compute_dtype =
      compute_dtype_on(drawn.target, drawn.problem.dtype, ComputeDtype::automatic);
  return tolerances(args, reference::attention_forward(args), compute_dtype);
}

/// Two runs may each be as far from the truth as the tolerance allows, on opposite sides.
void assert_near(const Values& a, const Values& b, const Tolerance& tolerance) {
  RC_ASSERT(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    RC_ASSERT(std::fabs(a[i] - b[i]) <=
              2 * tolerance.allowed(std::max(std::fabs(a[i]), std::fabs(b[i]))));
  }
}

void assert_same_bits(const Values& a, const Values& b) { RC_ASSERT(a == b); }

void holds(const char* law, void (*check)()) { EXPECT_TRUE(rc::check(law, check)); }

TEST(Contract, ShiftingAllScoresMovesLseOnly) {
  holds("shift", [] {
    Drawn drawn = draw();
    const Result before = run(drawn);
    const auto shift = static_cast<double>(*rc::gen::inRange(-20, 21));
    drawn.problem.score = score_mod([shift](auto x) { return x.score + shift; });
    const Result after = run(drawn);
    const Tolerances allowed = tolerances_of(drawn);
    assert_near(before.out, after.out, allowed.out);
    Values moved = before.lse;
    for (double& lse : moved) lse += shift;
    assert_near(moved, after.lse, allowed.lse);
  });
}

TEST(Contract, PermutingKeysChangesNothing) {
  holds("permutation", [] {
    Drawn drawn = draw();
    Case& problem = drawn.problem;
    const Tensors tensors = Tensors::of(CaseMemory(problem));
    std::vector<std::int64_t> order(static_cast<std::size_t>(problem.seqlen_kv));
    std::iota(order.begin(), order.end(), 0);
    const Random random(problem.seed, 40);
    std::sort(order.begin(), order.end(),
              [&](auto a, auto b) { return random.bits(a) < random.bits(b); });
    const auto permuted = [&](const Values& values, std::int64_t row) {
      Values result;
      for (std::int64_t batch = 0; batch < problem.batch; ++batch) {
        for (const std::int64_t from : order) {
          const auto begin = values.begin() + (batch * problem.seqlen_kv + from) * row;
          result.insert(result.end(), begin, begin + row);
        }
      }
      return result;
    };
    const auto is_visible = [&](std::int64_t q_idx, std::int64_t kv_idx) {
      return Random(problem.seed, 41).uniform(q_idx * 1000 + kv_idx) < 0.7;
    };
    const std::int64_t keys = problem.seqlen_kv;
    problem.poisons_hidden_keys = false;
    problem.mask =
        dense_mask(problem.capture(Dtype::boolean, {problem.seqlen_q, keys}, [&](std::int64_t i) {
          return is_visible(i / keys, i % keys) ? 1 : 0;
        }));
    const Result before = run(drawn, tensors);
    const Tolerances allowed = tolerances_of(drawn);
    problem.mask =
        dense_mask(problem.capture(Dtype::boolean, {problem.seqlen_q, keys}, [&](std::int64_t i) {
          return is_visible(i / keys, order[static_cast<std::size_t>(i % keys)]) ? 1 : 0;
        }));
    const Result after =
        run(drawn, {tensors.q, permuted(tensors.k, problem.num_heads_kv * problem.head_dim_qk),
                    permuted(tensors.v, problem.num_heads_kv * problem.head_dim_v)});
    assert_near(before.out, after.out, allowed.out);
    assert_near(before.lse, after.lse, allowed.lse);
  });
}

TEST(Contract, ValuesOfOneGiveOne) {
  holds("ones", [] {
    Drawn drawn = draw();
    drawn.problem.mask = causal(Align::top_left);  // every row sees a key
    drawn.problem.poisons_hidden_keys = false;
    Tensors tensors = Tensors::of(CaseMemory(drawn.problem));
    std::fill(tensors.v.begin(), tensors.v.end(), 1.0);
    const bool is_bf16 = compute_dtype_on(drawn.target, drawn.problem.dtype,
                                          ComputeDtype::automatic) == ComputeDtype::bf16;
    // Numerator and denominator sum the same weights, but for the rounding of each weight to the
    // product's dtype.
    const double allowed = is_bf16 ? 0x1p-8 : 0x1p-21;
    for (const double value : run(drawn, tensors).out) RC_ASSERT(std::fabs(value - 1) <= allowed);
  });
}

TEST(Contract, PackedEqualsPadded) {
  holds("packed", [] {
    Drawn drawn = draw();
    Case& problem = drawn.problem;
    problem.mask = mask_mod([](auto x) { return (x.q_idx + x.kv_idx) % 3 != 0; });
    problem.poisons_hidden_keys = false;
    const Result padded = run(drawn);
    const Tensors tensors = Tensors::of(CaseMemory(problem));
    const std::int64_t heads = problem.num_heads_q;
    const std::int64_t seqlen_q = problem.seqlen_q;
    // A dense tensor of equal lengths is a packed one, row for row.
    problem.sequences.assign(static_cast<std::size_t>(problem.batch),
                             {seqlen_q, problem.seqlen_kv});
    const Result packed = run(drawn, tensors);
    assert_same_bits(padded.out, packed.out);
    for (std::int64_t batch = 0; batch < problem.batch; ++batch) {
      for (std::int64_t head = 0; head < heads; ++head) {
        for (std::int64_t row = 0; row < seqlen_q; ++row) {
          RC_ASSERT(
              padded.lse[static_cast<std::size_t>((batch * heads + head) * seqlen_q + row)] ==
              packed
                  .lse[static_cast<std::size_t>((head * problem.batch + batch) * seqlen_q + row)]);
        }
      }
    }
  });
}

TEST(Contract, HiddenPaddingEqualsShorterKeys) {
  holds("padding", [] {
    Drawn drawn = draw();
    Case& problem = drawn.problem;
    problem.batch = 1;
    const std::int64_t kept = *rc::gen::inRange<std::int64_t>(1, problem.seqlen_kv + 1);
    problem.mask = mask_mod([kept](auto x) { return x.kv_idx < kept; });  // what lies behind is NaN
    const Result padded = run(drawn);
    Tensors tensors = Tensors::of(CaseMemory(problem));
    tensors.k.resize(static_cast<std::size_t>(kept * problem.num_heads_kv * problem.head_dim_qk));
    tensors.v.resize(static_cast<std::size_t>(kept * problem.num_heads_kv * problem.head_dim_v));
    problem.seqlen_kv = kept;
    problem.mask = MaskMod();
    const Result shorter = run(drawn, tensors);
    assert_same_bits(padded.out, shorter.out);
    assert_same_bits(padded.lse, shorter.lse);
  });
}

TEST(Contract, CausalIsItsTextAndItsDenseMask) {
  holds("causal", [] {
    Drawn drawn = draw();
    Case& problem = drawn.problem;
    problem.poisons_hidden_keys = false;
    const bool is_top_left = *rc::gen::arbitrary<bool>();
    const std::int64_t keys = problem.seqlen_kv;
    const std::int64_t shift = is_top_left ? 0 : keys - problem.seqlen_q;
    problem.mask = causal(is_top_left ? Align::top_left : Align::bottom_right);
    const Result word = run(drawn);
    const MaskMod text = parse_mask_mod(is_top_left ? "kv_idx <= q_idx"
                                                    : "kv_idx <= q_idx + (seqlen_kv - seqlen_q)");
    RC_ASSERT(text == problem.mask);
    problem.mask = text;
    const Result of_text = run(drawn);
    problem.mask =
        dense_mask(problem.capture(Dtype::boolean, {problem.seqlen_q, keys}, [&](std::int64_t i) {
          return i % keys <= i / keys + shift ? 1 : 0;
        }));
    const Result dense = run(drawn);
    assert_same_bits(word.out, of_text.out);
    assert_same_bits(word.lse, of_text.lse);
    assert_same_bits(word.out, dense.out);
    assert_same_bits(word.lse, dense.lse);
  });
}

TEST(Contract, GqaEqualsRepeatedHeads) {
  holds("gqa", [] {
    Drawn drawn = draw();
    Case& problem = drawn.problem;
    const Tensors tensors = Tensors::of(CaseMemory(problem));
    const Result grouped = run(drawn);
    const Tolerances allowed = tolerances_of(drawn);
    const std::int64_t group = problem.num_heads_q / problem.num_heads_kv;
    const auto repeated = [&](const Values& values, std::int64_t head_dim) {
      Values result;
      for (std::size_t head = 0; head < values.size() / static_cast<std::size_t>(head_dim);
           ++head) {
        const auto begin = values.begin() + static_cast<std::ptrdiff_t>(head) * head_dim;
        for (std::int64_t copy = 0; copy < group; ++copy)
          result.insert(result.end(), begin, begin + head_dim);
      }
      return result;
    };
    problem.num_heads_kv = problem.num_heads_q;
    const Result alone = run(drawn, {tensors.q, repeated(tensors.k, problem.head_dim_qk),
                                     repeated(tensors.v, problem.head_dim_v)});
    // Not bit for bit: few rows are summed in another order, and a group has more rows than a head.
    assert_near(grouped.out, alone.out, allowed.out);
    assert_near(grouped.lse, alone.lse, allowed.lse);
  });
}

TEST(Contract, KeysSplitAndMergedByLseEqualTheWhole) {
  holds("split", [] {
    Drawn drawn = draw();
    Case& problem = drawn.problem;
    problem.batch = 1;
    problem.poisons_hidden_keys = false;
    const Result whole = run(drawn);
    const Tolerances allowed = tolerances_of(drawn);
    const std::int64_t cut = *rc::gen::inRange<std::int64_t>(0, problem.seqlen_kv + 1);
    problem.mask = mask_mod([cut](auto x) { return x.kv_idx < cut; });
    const Result left = run(drawn);
    problem.mask = mask_mod([cut](auto x) { return x.kv_idx >= cut; });
    const Result right = run(drawn);
    Result merged = whole;
    for (std::int64_t head = 0; head < problem.num_heads_q; ++head) {
      for (std::int64_t row = 0; row < problem.seqlen_q; ++row) {
        const auto statistic = static_cast<std::size_t>(head * problem.seqlen_q + row);
        const double largest = std::max(left.lse[statistic], right.lse[statistic]);
        const double left_sum = std::exp(left.lse[statistic] - largest);
        const double right_sum = std::exp(right.lse[statistic] - largest);
        merged.lse[statistic] = largest + std::log(left_sum + right_sum);
        for (std::int64_t dim = 0; dim < problem.head_dim_v; ++dim) {
          const auto i = static_cast<std::size_t>(
              (row * problem.num_heads_q + head) * problem.head_dim_v + dim);
          merged.out[i] =
              (left.out[i] * left_sum + right.out[i] * right_sum) / (left_sum + right_sum);
        }
      }
    }
    assert_near(whole.out, merged.out, allowed.out);
    assert_near(whole.lse, merged.lse, allowed.lse);
  });
}

TEST(Contract, DrawnProblemsEqualOracle) {
  holds("oracle", [] {
    Drawn drawn = draw();
    Case& problem = drawn.problem;
    problem.layout =
        *rc::gen::element(Layout::bshd, Layout::bhsd, Layout::padded, Layout::odd_offset,
                          Layout::strided_dim, Layout::reversed, Layout::shared_batch);
    problem.out_dtype = *rc::gen::element(Dtype::f32, Dtype::f16, Dtype::bf16);
    problem.has_sinks = *rc::gen::arbitrary<bool>();
    if (*rc::gen::arbitrary<bool>())
      problem.dropout = {.p = 0.25F, .seed = problem.seed, .offset = 2};
    if (*rc::gen::arbitrary<bool>()) problem.mask = problem.mask && causal();
    if (*rc::gen::arbitrary<bool>()) {
      problem.mask = problem.mask && window(*rc::gen::inRange<std::int64_t>(0, 60), std::nullopt);
    }
    if (*rc::gen::arbitrary<bool>()) problem.score = problem.score | softcap(3);
    RC_ASSERT(difference_from_oracle(problem, {.targets = {drawn.target}}) == "");
  });
}

}  // namespace
}  // namespace fovea::testing
