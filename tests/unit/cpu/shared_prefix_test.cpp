// A decode call with a shared prefix is the plain call over the same keys, up to the rounding of two states: in every
// layout, with programs that see positions, and without a look at the prefix's rows of any but a group's first
// sequence, where these tests have NaN.
#include "problem/shared_prefix.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "expr/passes.hpp"
#include "reference/attention_decode.hpp"
#include "reference/attention_forward.hpp"
#include "support/cache_case.hpp"
#include "support/compare.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

std::string describe(const CacheCase& p) {
  return "prefix " + std::to_string(p.shared_prefix) + ", " + std::to_string(p.groups.size()) +
         " groups, page_size " + std::to_string(p.page_size) +
         (p.has_page_list ? ", page_indices" : "") + (p.has_left_padding ? ", left padding" : "") +
         (p.has_batch_idx ? ", batch_idx" : "") +
         (p.packed_q.empty() ? ", seqlen_q " + std::to_string(p.seqlen_q) : ", packed") +
         ", mask " + p.mask.to_string();
}

/// Each sequence against the oracle over its keys, laid out densely.
void expect_equals_oracle_of_dense(const CacheCase& problem, CpuTarget target) {
  SCOPED_TRACE(describe(problem));
  CacheMemory memory(problem);
  const AttentionDecode args = memory.args(target);
  attention_decode(args);
  EXPECT_EQ(memory.damage() + memory.damage_of_nobody(), "");
  for (std::int64_t i = 0; i < problem.batch(); ++i) {
    if (problem.queries(i) == 0) continue;
    const AttentionForward dense = memory.dense(i, target);
    const reference::ForwardResult expected = reference::attention_forward(dense);
    const Tolerances allowed = tolerances(
        dense, expected, compute_dtype_on(target, problem.q_dtype, ComputeDtype::automatic));
    const TensorView out = memory.rows_of(memory.out.view(), i);
    const TensorView lse = memory.lse_of(memory.lse.view(), i);
    EXPECT_EQ(difference({"out", out, expected.out, allowed.out}), "") << "sequence " << i;
    EXPECT_EQ(difference({"lse", lse, expected.lse, allowed.lse}), "") << "sequence " << i;
  }
}

/// All of them against the oracle over the cache, which knows each by its number. Scores below 16 in sums of 16
/// products, each rounded in f32: errors of some 1e-6 in weights.
void expect_equals_oracle_of_cache(CacheMemory& memory, const AttentionDecode& args) {
  const reference::DecodeResult expected = reference::attention_decode(args);
  attention_decode(args);
  EXPECT_EQ(memory.damage() + memory.damage_of_nobody(), "");
  const std::vector<double> out = values_of(memory.out.view());
  for (std::size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected.out[i], 2e-5) << i;
  const std::vector<double> lse = values_of(memory.lse.view());
  for (std::size_t i = 0; i < lse.size(); ++i) {
    if (lse[i] == expected.lse[i]) continue;  // -inf of rows that see nothing
    ASSERT_NEAR(lse[i], expected.lse[i], 2e-5) << i;
  }
}

/// Lengths around a tile of 128 keys behind a prefix, and none behind it but the queries' own.
CacheCase over_prefix(std::int64_t num_keys, std::int64_t seqlen_q) {
  CacheCase problem{.seqlen_q = seqlen_q};
  for (const std::int64_t behind : {150, 0, 1, 128, 37})
    problem.seqlens.push_back(num_keys + seqlen_q + behind);
  problem.num_heads_q = 4;
  problem.num_heads_kv = 2;
  problem.shared_prefix = num_keys;
  return problem;
}

/// Prefixes of whole pages and of parts, of one group and several.
std::vector<CacheCase> layouts_of(const CacheCase& problem) {
  std::vector<CacheCase> layouts;
  for (const std::int64_t page_size : {0, 1, 3, 16, 300}) {
    for (const bool has_left_padding : {false, true}) {
      layouts.push_back(problem);
      CacheCase& layout = layouts.back();
      layout.page_size = page_size;
      layout.has_left_padding = has_left_padding;
      layout.has_batch_idx = page_size == 0 && has_left_padding;
      layout.has_page_list = page_size == 3 || (page_size == 16 && has_left_padding);
      layout.layout_seed = layouts.size();
      layout.index_dtype = layouts.size() % 2 == 0 ? Dtype::i32 : Dtype::i64;
      if (layouts.size() % 3 != 0) layout.groups = {0, 2, 2};  // the second has no sequence
    }
  }
  return layouts;
}

TEST(SharedPrefix, EveryLayoutMeetsTheOracle) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const CpuTarget target : targets_for(dtype)) {
      SCOPED_TRACE(std::string(fovea::name(target)) + " " + std::string(fovea::name(dtype)));
      // One query is read row by row, 9 of each sequence fill several panels of the prefix.
      for (const std::int64_t seqlen_q : {1, 9}) {
        for (CacheCase& problem : layouts_of(over_prefix(192, seqlen_q))) {
          problem.q_dtype = problem.k_dtype = problem.v_dtype = dtype;
          problem.has_sinks = problem.layout_seed % 2 == 0;
          expect_equals_oracle_of_dense(problem, target);
        }
      }
    }
  }
}

TEST(SharedPrefix, PackedQueriesMeetTheOracle) {
  CacheCase base = over_prefix(192, 1);
  base.packed_q = {60, 0, 1, 9, 1};
  base.seqlens = {192 + 60 + 5, 3, 193, 400, 192 + 33};  // who asks nothing may be shorter
  base.has_sinks = true;
  for (CacheCase& problem : layouts_of(base)) {
    problem.has_max_seqlen_q = problem.layout_seed % 2 == 0;
    expect_equals_oracle_of_dense(problem, CpuTarget::automatic);
  }
}

TEST(SharedPrefix, ProgramsSeePositionsOfTheWholeSequence) {
  std::vector<float> bias(60 * 600, 0);
  for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = 0.01F * static_cast<float>(i % 37);
  const Captures captures{.tensors = {{"bias", view(bias.data(), {60, 600})},
                                      {"rows_of_prefix", view(bias.data(), {5})}}};
  // A name that the library takes itself where it is free.
  const ScoreMod score = parse_score_mod(
      "score + bias[q_idx, kv_idx] + 0.01 * float(seqlen_q - q_idx) + rows_of_prefix[batch]",
      captures);
  const MaskMod masks[] = {causal(),
                           causal(Align::top_left),
                           MaskMod(),
                           window(40, 3),
                           window(250, 0),
                           causal() && parse_mask_mod("(kv_idx + q_idx + batch) % 3 != 1"),
                           parse_mask_mod("kv_idx < 100 || kv_idx >= seqlen_kv - 20"),
                           parse_mask_mod("kv_idx * 2 > seqlen_kv - seqlen_q")};
  CacheCase dense = over_prefix(192, 3);
  CacheCase packed = over_prefix(192, 1);
  packed.packed_q = {60, 0, 1, 9, 1};
  packed.seqlens = {192 + 60 + 5, 250, 193, 400, 192 + 33};
  packed.has_left_padding = true;
  for (CacheCase problem : {dense, packed}) {
    problem.has_sinks = true;
    problem.score = score;
    for (const std::int64_t page_size : {0, 16, 24, 100}) {
      problem.page_size = page_size;
      problem.groups =
          page_size == 24 ? std::vector<std::int64_t>{0, 3} : std::vector<std::int64_t>();
      for (const MaskMod& mask : masks) {
        problem.mask = mask;
        SCOPED_TRACE(describe(problem));
        CacheMemory memory(problem);
        expect_equals_oracle_of_cache(memory, memory.args());
      }
    }
  }
}

TEST(SharedPrefix, AppendedAndTurnedTokensMeetTheOracle) {
  constexpr std::int64_t kMaxPositions = 400, kHalf = 6;
  std::vector<float> cos(kMaxPositions * kHalf), sin(cos.size());
  for (std::size_t i = 0; i < cos.size(); ++i) {
    const double angle =
        static_cast<double>(i / kHalf) * std::pow(0.3, static_cast<double>(i % kHalf));
    cos[i] = static_cast<float>(std::cos(angle));
    sin[i] = static_cast<float>(std::sin(angle));
  }
  for (const std::int64_t seqlen_q : {0, 1, 3, 30}) {  // 0: packed
    CacheCase problem{.seqlens = {250, 190, 133}, .seqlen_q = seqlen_q, .num_new = seqlen_q};
    if (seqlen_q == 0) problem.packed_q = problem.packed_new = {1, 30, 2};
    problem.page_size = seqlen_q == 30 ? 0 : 3;
    problem.has_page_list = seqlen_q == 3;
    problem.has_left_padding = problem.has_sinks = problem.has_drawn_tokens = true;
    problem.score = softcap(4.0F);
    problem.shared_prefix = 100;
    CacheMemory memory(problem);
    AttentionDecode args = memory.args();
    args.rotary = Rotary{.cos = view(cos.data(), {kMaxPositions, kHalf}),
                         .sin = view(sin.data(), {kMaxPositions, kHalf})};
    expect_equals_oracle_of_cache(memory, args);
  }
}

TEST(SharedPrefix, LatentValuesMeetTheOracle) {
  CacheCase problem = over_prefix(100, 1);
  problem.num_heads_q = 4;
  problem.num_heads_kv = 1;
  problem.head_dim_qk = 576;
  problem.head_dim_v = 512;
  problem.has_latent_values = true;
  for (const std::int64_t page_size : {0, 64}) {
    problem.page_size = page_size;
    expect_equals_oracle_of_dense(problem, CpuTarget::automatic);
  }
}

TEST(SharedPrefix, ThreadsChangeNoBit) {
  CacheCase problem = over_prefix(3000, 9);
  problem.page_size = 16;
  const auto one = make_thread_pool(1);
  const auto four = make_thread_pool(4);
  CacheMemory a(problem), b(problem);
  AttentionDecode args = a.args();
  args.executor = one.get();
  attention_decode(args);
  args = b.args();
  args.executor = four.get();
  attention_decode(args);
  EXPECT_TRUE(bits_of(a.out.view()) == bits_of(b.out.view()));
}

/// What is asked of the prefix's keys is what its rows say, and nothing where a mask shows all of them.
TEST(SharedPrefix, CausalMasksAskNothingOfThePrefix) {
  const auto mask_of = [](const MaskMod& mask) {
    return prefix_programs(ScoreMod(), mask, false).prefix_mask.is_all_visible();
  };
  EXPECT_TRUE(mask_of(causal()));
  EXPECT_TRUE(mask_of(MaskMod()));
  EXPECT_TRUE(mask_of(causal() || window(5, 0)));
  EXPECT_FALSE(mask_of(window(100000, 0)));
  EXPECT_FALSE(mask_of(causal(Align::top_left)));
  EXPECT_FALSE(mask_of(causal() && parse_mask_mod("kv_idx < 1000000")));
}

TEST(SharedPrefix, MasksOfDistancesAreTheSameBehindIt) {
  const auto suffix_of = [](const char* text) {
    return prefix_programs(ScoreMod(), parse_mask_mod(text), false).suffix_mask.to_string();
  };
  for (const char* unmoved :
       {"kv_idx <= q_idx + (seqlen_kv - seqlen_q)", "q_idx % 2 == 0",
        "kv_idx - seqlen_kv >= -20 && kv_idx - (q_idx + (seqlen_kv - seqlen_q)) >= -5",
        "(kv_idx - seqlen_kv) % 3 == 0"})
    EXPECT_EQ(suffix_of(unmoved), unmoved);
  const MaskMod near = window(5, 0);
  EXPECT_EQ(prefix_programs(ScoreMod(), near, false).suffix_mask, near);
  EXPECT_EQ(suffix_of("kv_idx % 3 == 0"), "(kv_idx + seqlen_prefix) % 3 == 0");
  EXPECT_EQ(suffix_of("kv_idx * 2 < seqlen_kv"),
            "(kv_idx + seqlen_prefix) * 2 < seqlen_kv + seqlen_prefix");
  EXPECT_EQ(suffix_of("kv_idx < 300000000 + seqlen_kv"),  // may wrap: left to the shifted numbers
            "kv_idx + seqlen_prefix < 300000000 + (seqlen_kv + seqlen_prefix)");
}

}  // namespace
}  // namespace fovea::testing
