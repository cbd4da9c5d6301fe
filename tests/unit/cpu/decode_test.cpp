// Attention over a cache is attention over the same keys laid out densely, bit for bit: whatever the layout, the batch,
// the threads and what lies in memory that no sequence uses. The dense kernels are held to the oracle elsewhere.
#include <gtest/gtest.h>

#include <cmath>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "problem/cache.hpp"
#include "reference/attention_decode.hpp"
#include "reference/attention_forward.hpp"
#include "support/cache_case.hpp"
#include "support/compare.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

/// Calls the test for every dtype and target of this machine.
template <typename Test>
void on_every_target(const Test& test) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const CpuTarget target : targets_for(dtype)) {
      SCOPED_TRACE(std::string(fovea::name(target)) + " " + std::string(fovea::name(dtype)));
      test(dtype, target);
    }
  }
}

CacheCase of_dtype(CacheCase problem, Dtype dtype) {
  problem.q_dtype = problem.k_dtype = problem.v_dtype = dtype;
  return problem;
}

/// A tile holds 128 keys: pages of one row, of rows that divide no tile, of a part of a tile, of a tile, and of one row
/// more.
std::vector<CacheCase> layouts_of(const CacheCase& problem) {
  std::vector<CacheCase> layouts(4, problem);
  layouts[1].has_batch_idx = layouts[1].has_left_padding = true;
  layouts[2].has_heads_first = true;
  layouts[3].has_left_padding = true;
  layouts[3].index_dtype = Dtype::i64;
  for (const std::int64_t page_size : {1, 3, 16, 128, 129}) {
    layouts.push_back(problem);
    layouts.back().page_size = page_size;
  }
  layouts.push_back(layouts[6]);
  layouts.back().has_heads_first = layouts.back().has_left_padding = true;
  layouts.back().index_dtype = Dtype::i64;
  for (const std::size_t like : {5, 6, 9}) {  // pages of 3, of 16, and those with padding
    layouts.push_back(layouts[like]);
    layouts.back().has_page_list = true;
  }
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    layouts[i].layout_seed = i + 1;
    layouts[i].has_drawn_tokens = i % 2 == 1;
  }
  return layouts;
}

std::string describe(const CacheCase& p) {
  return "page_size " + std::to_string(p.page_size) + (p.has_heads_first ? ", heads first" : "") +
         (p.has_page_list ? ", page_indices" : "") + (p.has_left_padding ? ", left padding" : "") +
         (p.has_batch_idx ? ", batch_idx" : "") + ", layouts " + std::to_string(p.layout_seed) +
         (p.packed_q.empty() ? ", seqlen_q " + std::to_string(p.seqlen_q) : ", packed");
}

void expect_bits_of_dense(const CacheCase& problem, CpuTarget target) {
  SCOPED_TRACE(describe(problem));
  CacheMemory memory(problem);
  attention_decode(memory.args(target));
  EXPECT_EQ(memory.damage() + memory.damage_of_nobody(), "");
  for (std::int64_t i = 0; i < problem.batch(); ++i) {
    const AttentionForward dense = memory.dense(i, target);
    attention_forward(dense);
    EXPECT_TRUE(memory.out_bits(i) == bits_of(dense.out)) << "out of sequence " << i;
    EXPECT_TRUE(memory.lse_bits(i) == bits_of(dense.lse)) << "lse of sequence " << i;
  }
}

/// Lengths around a tile, none, one key, and fewer keys than queries.
CacheCase mixed_lengths(std::int64_t seqlen_q) {
  return {.seqlens = {200, 0, 1, 129, 16}, .seqlen_q = seqlen_q};
}

TEST(CpuDecode, EveryLayoutHasTheBitsOfDenseTensors) {
  // Two rows are read row by row, 10 fill a part of a panel, 120 several panels.
  on_every_target([](Dtype dtype, CpuTarget target) {
    for (const std::int64_t seqlen_q : {1, 5, 60}) {
      for (const CacheCase& problem : layouts_of(of_dtype(mixed_lengths(seqlen_q), dtype)))
        expect_bits_of_dense(problem, target);
    }
  });
}

/// Multi-head latent attention: one kv head of 576, whose first 512 columns are the values. Few rows, and several
/// panels; a tile of 128 keys and a part, over two pages of 64 and more.
TEST(CpuDecode, ValuesMayBeAViewOfKeys) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    for (const std::int64_t seqlen_q : {1, 3}) {
      CacheCase problem = of_dtype({.seqlens = {200, 0, 1}, .seqlen_q = seqlen_q}, dtype);
      problem.num_heads_q = seqlen_q == 1 ? 2 : 16;
      problem.head_dim_qk = 576;
      problem.head_dim_v = 512;
      problem.has_latent_values = true;
      for (const std::int64_t page_size : {0, 16, 64}) {
        problem.page_size = page_size;
        expect_bits_of_dense(problem, target);
      }
    }
  });
}

/// As a serving engine batches: chunks of prompts beside single tokens, and sequences that take no part. One query is
/// read row by row, 9 fill a part of a panel, 60 several panels.
CacheCase packed(CacheCase problem) {
  problem.packed_q = {60, 0, 1, 9, 1};
  return problem;
}

TEST(CpuDecode, PackedQueriesHaveTheBitsOfEachSequenceAlone) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    for (CacheCase& problem : layouts_of(of_dtype(packed(mixed_lengths(1)), dtype))) {
      problem.has_max_seqlen_q = problem.layout_seed % 2 == 0;
      problem.index_dtype = problem.layout_seed % 3 == 0 ? Dtype::i64 : Dtype::i32;
      expect_bits_of_dense(problem, target);
    }
  });
}

TEST(CpuDecode, PackedNewTokensAreThoseOfTheQueriesOrHaveOffsetsOfTheirOwn) {
  for (const std::int64_t page_size : {0, 3, 16}) {
    CacheCase problem = packed({.seqlens = {200, 0, 1, 129, 16}});
    problem.page_size = page_size;
    problem.has_page_list = page_size == 3;
    problem.has_left_padding = page_size != 16;
    problem.packed_new = problem.packed_q;
    expect_bits_of_dense(problem, CpuTarget::automatic);
    problem.packed_new = {3, 0, 0, 129, 1};
    expect_bits_of_dense(problem, CpuTarget::automatic);
    // As many of every sequence, beside queries that are packed; and the other way round.
    problem.seqlens = {200, 3, 4, 129, 16};
    problem.packed_new = {};
    problem.num_new = 3;
    expect_bits_of_dense(problem, CpuTarget::automatic);
    problem.num_new = 0;
    problem.packed_q = {};
    problem.packed_new = {3, 0, 0, 129, 1};
    problem.seqlen_q = 2;
    expect_bits_of_dense(problem, CpuTarget::automatic);
  }
}

TEST(CpuDecode, SplitsOfPackedSequencesAreCutByEachAlone) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    CacheCase problem = of_dtype({.seqlens = {5000, 2048, 2049, 70}}, dtype);
    problem.packed_q = {1, 4, 0, 40};
    problem.head_dim_qk = problem.head_dim_v = 8;
    for (const std::int64_t page_size : {0, 16}) {
      problem.page_size = page_size;
      expect_bits_of_dense(problem, target);
    }
  });
}

TEST(CpuDecode, SplitsAreCutByTheSequenceAlone) {
  // 2048 keys a split: sequences of one split, of two, and of three beside each other, of few rows and of a part of a
  // panel.
  on_every_target([](Dtype dtype, CpuTarget target) {
    for (const std::int64_t seqlen_q : {1, 4}) {
      CacheCase problem = of_dtype({.seqlens = {5000, 2048, 2049}, .seqlen_q = seqlen_q}, dtype);
      problem.head_dim_qk = problem.head_dim_v = 8;
      expect_bits_of_dense(problem, target);
      problem.page_size = 16;
      expect_bits_of_dense(problem, target);
    }
  });
}

TEST(CpuDecode, OddHeadDimsAreReadAcrossPages) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    for (const std::int64_t seqlen_q : {1, 7}) {
      CacheCase problem = of_dtype(mixed_lengths(seqlen_q), dtype);
      problem.head_dim_qk = 17;
      problem.head_dim_v = 5;
      problem.num_heads_q = problem.num_heads_kv = 3;
      problem.page_size = 3;
      expect_bits_of_dense(problem, target);
    }
  });
}

TEST(CpuDecode, ProgramsSeePositionsInTheSequence) {
  std::vector<float> bias(5 * 200, 0);
  for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = 0.01F * static_cast<float>(i % 37);
  std::vector<float> slopes = {0.5F, 0.125F};
  const TensorView by_position = view(bias.data(), {5, 200});
  const TensorView slope = view(slopes.data(), {2});
  const ScoreMod scores[] = {
      softcap(5.0F), alibi(slope),
      parse_score_mod("score + bias[q_idx, kv_idx] + 0.01 * float(seqlen_kv - kv_idx)",
                      {.tensors = {{"bias", by_position}}})};
  const MaskMod masks[] = {MaskMod(),
                           causal(Align::top_left),
                           window(40, 3),
                           causal() && parse_mask_mod("(kv_idx + q_head) % 3 != 1"),
                           parse_mask_mod("kv_idx < seqlen_kv - seqlen_q || "
                                          "bias[q_idx, kv_idx - (seqlen_kv - seqlen_q)] > 0.02",
                                          {.tensors = {{"bias", by_position}}}),
                           causal() && parse_mask_mod("bias[q_idx, kv_idx] > 0.1",
                                                      {.tensors = {{"bias", by_position}}})};
  for (const CpuTarget target : targets_for(Dtype::f32)) {
    SCOPED_TRACE(std::string(fovea::name(target)));
    for (const std::int64_t page_size : {0, 16}) {
      for (const std::int64_t seqlen_q : {1, 5}) {
        CacheCase problem = mixed_lengths(seqlen_q);
        problem.page_size = page_size;
        problem.has_left_padding = problem.has_sinks = true;
        for (const MaskMod& mask : masks) {
          problem.mask = mask;
          problem.score = scores[0];
          expect_bits_of_dense(problem, target);
        }
        for (const ScoreMod& score : scores) {
          problem.score = score;
          expect_bits_of_dense(problem, target);
        }
      }
    }
  }
}

TEST(CpuDecode, ProgramsSeeEachSequencesOwnPositions) {
  std::vector<float> bias(60 * 200, 0);
  for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = 0.01F * static_cast<float>(i % 37);
  const ScoreMod score = parse_score_mod(
      "score + bias[q_idx, kv_idx] + 0.01 * float(seqlen_q - q_idx) + 0.1 * float(batch)",
      {.tensors = {{"bias", view(bias.data(), {60, 200})}}});
  const MaskMod masks[] = {causal(), causal(Align::top_left), window(40, 3),
                           causal() && parse_mask_mod("(kv_idx + q_idx + batch) % 3 != 1")};
  CacheCase problem = packed(mixed_lengths(1));
  problem.has_left_padding = problem.has_sinks = true;
  problem.num_heads_q = 6;
  problem.num_heads_kv = 3;
  problem.score = score;
  for (const std::int64_t page_size : {0, 16}) {
    problem.page_size = page_size;
    for (const MaskMod& mask : masks) {
      problem.mask = mask;
      CacheMemory memory(problem);
      const AttentionDecode args = memory.args();
      const reference::DecodeResult expected = reference::attention_decode(args);
      attention_decode(args);
      EXPECT_EQ(memory.damage() + memory.damage_of_nobody(), "");
      const std::vector<double> out = values_of(memory.out.view());
      for (std::size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected.out[i], 2e-5) << i;
      const std::vector<double> lse = values_of(memory.lse.view());
      for (std::size_t i = 0; i < lse.size(); ++i) {
        if (lse[i] == expected.lse[i]) continue;  // -inf of rows of nobody
        ASSERT_NEAR(lse[i], expected.lse[i], 2e-5) << i;
      }
    }
  }
}

TEST(CpuDecode, KeysAndValuesHaveDtypesOfTheirOwn) {
  const Dtype floats[] = {Dtype::f32, Dtype::f16, Dtype::bf16};
  for (const Dtype q_dtype : floats) {
    for (const Dtype k_dtype : floats) {
      for (const Dtype v_dtype : floats) {
        for (const std::int64_t seqlen_q : {1, 5}) {
          CacheCase problem = mixed_lengths(seqlen_q);
          problem.q_dtype = q_dtype;
          problem.k_dtype = k_dtype;
          problem.v_dtype = v_dtype;
          problem.page_size = 16;
          SCOPED_TRACE(std::string(fovea::name(q_dtype)) + " " + std::string(fovea::name(k_dtype)) +
                       " " + std::string(fovea::name(v_dtype)) + ": " + describe(problem));
          CacheMemory memory(problem);
          attention_decode(memory.args());
          for (std::int64_t i = 0; i < problem.batch(); ++i) {
            const AttentionForward dense = memory.dense(i);
            const reference::ForwardResult expected = reference::attention_forward(dense);
            const bool is_bf16 = q_dtype == Dtype::bf16 && q_dtype == k_dtype && k_dtype == v_dtype;
            const Tolerances allowed =
                tolerances(dense, expected, is_bf16 ? ComputeDtype::bf16 : ComputeDtype::f32);
            const std::vector<double> got = values_of(entry_of(memory.out.view(), i));
            for (std::size_t at = 0; at < got.size(); ++at) {
              ASSERT_NEAR(got[at], expected.out[at], allowed.out.allowed(expected.out[at]))
                  << "element " << at << " of sequence " << i;
            }
          }
        }
      }
    }
  }
}

TEST(CpuDecode, EverythingTogetherMeetsTheOracle) {
  // Rotated queries and keys, appended into pages behind left padding, under a softcap with a sink. Caches are f32: a
  // key that rounds to another bf16 than the oracle's would say nothing about attention.
  constexpr std::int64_t kMaxPositions = 160, kHalf = 6;
  std::vector<float> cos(kMaxPositions * kHalf), sin(cos.size());
  for (std::size_t i = 0; i < cos.size(); ++i) {
    const double angle =
        static_cast<double>(i / kHalf) * std::pow(0.3, static_cast<double>(i % kHalf));
    cos[i] = static_cast<float>(std::cos(angle));
    sin[i] = static_cast<float>(std::sin(angle));
  }
  for (const std::int64_t seqlen_q : {0, 1, 3, 30}) {  // 0: packed, 30 queries of one sequence
    for (const bool is_interleaved : {false, true}) {
      CacheCase problem{.seqlens = {150, 30, 33}, .seqlen_q = seqlen_q, .num_new = seqlen_q};
      if (seqlen_q == 0) problem.packed_q = problem.packed_new = {1, 30, 2};
      problem.page_size = 3;
      problem.has_page_list = seqlen_q == 3;
      problem.has_left_padding = problem.has_sinks = true;
      problem.score = softcap(4.0F);
      CacheMemory memory(problem);
      AttentionDecode args = memory.args();
      args.rotary = Rotary{.cos = view(cos.data(), {kMaxPositions, kHalf}),
                           .sin = view(sin.data(), {kMaxPositions, kHalf}),
                           .is_interleaved = is_interleaved};
      const reference::DecodeResult expected = reference::attention_decode(args);
      attention_decode(args);
      const std::vector<double> out = values_of(memory.out.view());
      // Scores below 16 in sums of 16 products, each rounded in f32: errors of some 1e-6 in weights.
      for (std::size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected.out[i], 2e-5) << i;
      const std::vector<double> lse = values_of(memory.lse.view());
      for (std::size_t i = 0; i < lse.size(); ++i) {
        if (lse[i] == expected.lse[i]) continue;  // -inf of rows of nobody
        ASSERT_NEAR(lse[i], expected.lse[i], 2e-5) << i;
      }
    }
  }
}

TEST(CpuDecode, QueriesMayStandApartFromNewKeys) {
  std::vector<float> cos(60 * 6), sin(cos.size());
  for (std::size_t i = 0; i < cos.size(); ++i) {
    cos[i] = std::cos(0.2F * static_cast<float>(i));
    sin[i] = std::sin(0.2F * static_cast<float>(i));
  }
  std::vector<std::int32_t> of_keys(15), of_q(10);
  for (std::size_t i = 0; i < of_keys.size(); ++i)
    of_keys[i] = static_cast<std::int32_t>(i * 11 % 60);
  for (std::size_t i = 0; i < of_q.size(); ++i) of_q[i] = static_cast<std::int32_t>(i * 7 % 60);
  for (const bool is_packed : {false, true}) {
    CacheCase problem{.seqlens = {50, 30}, .seqlen_q = 2, .num_new = 3, .page_size = 16};
    if (is_packed) {
      problem.packed_q = {2, 1};
      problem.packed_new = {5, 2};
    }
    for (const bool have_keys : {false, true}) {
      CacheMemory memory(problem);
      AttentionDecode args = memory.args();
      args.rotary = Rotary{.cos = view(cos.data(), {60, 6}), .sin = view(sin.data(), {60, 6})};
      Rotary& r = *args.rotary;
      if (is_packed) {
        r.positions_q = view(of_q.data(), {args.q.size(0)});
        if (have_keys) r.positions = view(of_keys.data(), {args.append.k.size(0)});
      } else {
        r.positions_q = view(of_q.data(), {2, 2});
        if (have_keys) r.positions = view(of_keys.data(), {2, 3});
      }
      const reference::DecodeResult expected = reference::attention_decode(args);
      attention_decode(args);
      const std::vector<double> out = values_of(memory.out.view());
      for (std::size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected.out[i], 2e-5) << i;
    }
  }
}

TEST(CpuDecode, ThreadsChangeNoBit) {
  const auto one = make_thread_pool(1);
  on_every_target([&](Dtype dtype, CpuTarget target) {
    for (const std::int64_t page_size : {0, 16}) {
      CacheCase problem = of_dtype({.seqlens = {4500, 70, 2100}}, dtype);
      problem.page_size = page_size;
      CacheMemory expected(problem);
      AttentionDecode args = expected.args(target);
      args.executor = one.get();
      attention_decode(args);
      for (const int num_threads : {2, 5}) {
        const auto pool = make_thread_pool(num_threads);
        CacheMemory memory(problem);
        args = memory.args(target);
        args.executor = pool.get();
        attention_decode(args);
        EXPECT_TRUE(bits_of(memory.out.view()) == bits_of(expected.out.view()));
        EXPECT_TRUE(bits_of(memory.lse.view()) == bits_of(expected.lse.view()));
      }
    }
  });
}

TEST(CpuDecode, BatchMatesChangeNoBit) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    for (const std::int64_t seqlen_q : {1, 9}) {
      CacheCase problem = of_dtype({.seqlens = {2500, 70, 190}, .seqlen_q = seqlen_q}, dtype);
      problem.page_size = 16;
      CacheMemory together(problem);
      attention_decode(together.args(target));
      CacheMemory apart(problem);
      for (std::int64_t i = 0; i < problem.batch(); ++i) {
        AttentionDecode args = apart.args(target);
        for (TensorView* view : std::initializer_list<TensorView*>{
                 &args.q, &args.out, &args.lse, &args.cache.page_table, &args.cache.seqlens})
          *view = entry_of(*view, i);
        attention_decode(args);
        EXPECT_TRUE(apart.out_bits(i) == together.out_bits(i));
        EXPECT_TRUE(apart.lse_bits(i) == together.lse_bits(i));
      }
    }
  });
}

TEST(CpuDecode, NaNInSightReachesTheRowsThatSeeIt) {
  CacheCase problem{.seqlens = {40, 40}};
  problem.page_size = 3;
  for (const std::int64_t seqlen_q : {1, 5}) {
    problem.seqlen_q = seqlen_q;
    CacheMemory memory(problem);
    // The values of the last key of sequence 1: its last query alone sees it.
    const TensorView table = memory.page_table.view();
    const std::int64_t page = index_at(table, 1, 39 / problem.page_size);
    memory.v.set(page * memory.v.view().stride(0), std::nan(""));
    attention_decode(memory.args());
    const std::vector<double> out = values_of(memory.out.view());
    const std::size_t row = static_cast<std::size_t>(problem.num_heads_q * problem.head_dim_v);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const bool is_seen =
          i + row >= out.size() && i % static_cast<std::size_t>(problem.head_dim_v) == 0;
      EXPECT_EQ(std::isnan(out[i]), is_seen) << i;
    }
  }
}

TEST(CpuDecode, PagesMayBeShared) {
  // Two sequences with one prefix: the second's first pages are the first's.
  CacheCase problem{.seqlens = {100, 100}};
  problem.page_size = 16;
  CacheMemory memory(problem);
  const std::vector<double> table = values_of(memory.page_table.view());
  const TensorView strides = memory.page_table.view();
  for (std::int64_t page = 0; page < 7; ++page) {
    memory.page_table.set(strides.stride(0) + page * strides.stride(1),
                          table[static_cast<std::size_t>(page)]);
  }
  memory.q.fill([](std::int64_t i) { return 0.1 * static_cast<double>(i % 32); });
  attention_decode(memory.args());
  EXPECT_TRUE(memory.out_bits(0) == memory.out_bits(1));
}

}  // namespace
}  // namespace fovea::testing
