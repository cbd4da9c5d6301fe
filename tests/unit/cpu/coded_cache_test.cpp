// Caches of codes: attention over them is attention over an f32 cache of the numbers that they stand for, bit for bit;
// what appending writes follows the rules of quant/row_codes.hpp, which the oracle has in its own words.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fovea/kv_cache.hpp"

#include "quant/row_codes.hpp"
#include "reference/attention_decode.hpp"
#include "reference/attention_forward.hpp"
#include "support/cache_case.hpp"
#include "support/compare.hpp"
#include "support/guarded_tensor.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

constexpr Dtype kCodes[] = {Dtype::i8, Dtype::e4m3};

/// Lengths around a tile of 128 keys, none, one key, and fewer keys than queries.
CacheCase coded(Dtype dtype, std::int64_t seqlen_q) {
  CacheCase problem{.seqlens = {200, 0, 1, 129, 16}, .seqlen_q = seqlen_q};
  problem.num_heads_q = 4;
  problem.num_heads_kv = 2;
  problem.k_dtype = problem.v_dtype = dtype;
  return problem;
}

/// Contiguous in slots behind padding; pages of a row, of rows that divide no tile, of a part of a tile, of one row
/// more than a tile, by table and by list. Codes may be of one half of the cache alone.
std::vector<CacheCase> layouts_of(const CacheCase& problem) {
  std::vector<CacheCase> layouts(8, problem);
  layouts[1].has_batch_idx = layouts[1].has_left_padding = true;
  layouts[2].has_heads_first = true;
  for (std::size_t i = 3; i < layouts.size(); ++i) {
    constexpr std::int64_t kPageSizes[] = {1, 3, 16, 129, 16};
    layouts[i].page_size = kPageSizes[i - 3];
    layouts[i].has_left_padding = i % 2 == 0;
  }
  layouts[5].has_page_list = true;
  layouts[7].has_heads_first = true;
  layouts[3].k_dtype = Dtype::f32;
  layouts[6].v_dtype = Dtype::f32;
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    layouts[i].layout_seed = i + 1;
    layouts[i].has_given_scales =
        i % 3 == 2 && layouts[i].k_dtype != Dtype::i8 && layouts[i].v_dtype != Dtype::i8;
    if (i % 2 == 0) continue;
    layouts[i].has_sinks = true;
    layouts[i].mask = window(40, 3);
    layouts[i].score = softcap(5.0F);
  }
  return layouts;
}

void expect_bits_of_numbers(const CacheCase& problem, CpuTarget target) {
  SCOPED_TRACE(std::string(fovea::name(target)) + " " + std::string(fovea::name(problem.k_dtype)) +
               " seqlen_q " + std::to_string(problem.seqlen_q) + ", layouts " +
               std::to_string(problem.layout_seed));
  CacheMemory memory(problem);
  attention_decode(memory.args(target));
  EXPECT_EQ(memory.damage(), "");
  for (std::int64_t i = 0; i < problem.batch(); ++i) {
    const AttentionForward dense = memory.dense(i, target);
    attention_forward(dense);
    EXPECT_TRUE(memory.out_bits(i) == bits_of(dense.out)) << "out of sequence " << i;
    EXPECT_TRUE(memory.lse_bits(i) == bits_of(dense.lse)) << "lse of sequence " << i;
  }
}

TEST(CodedCache, HasTheBitsOfTheNumbersThatCodesStandFor) {
  // One query is read row by row, 60 fill several panels.
  for (const Dtype dtype : kCodes) {
    for (const CpuTarget target : targets_for(Dtype::f32)) {
      for (const std::int64_t seqlen_q : {1, 60}) {
        for (const CacheCase& problem : layouts_of(coded(dtype, seqlen_q)))
          expect_bits_of_numbers(problem, target);
      }
    }
  }
}

TEST(CodedCache, HeadsWiderThanAVectorAndSplitsToo) {
  for (const Dtype dtype : kCodes) {
    for (const std::int64_t seqlen_q : {1, 9}) {
      CacheCase problem = coded(dtype, seqlen_q);
      problem.seqlens = {2200, 70};  // two splits
      problem.head_dim_qk = 37;
      problem.head_dim_v = 64;
      problem.page_size = 16;
      expect_bits_of_numbers(problem, CpuTarget::automatic);
    }
  }
}

TEST(CodedCache, QueriesOfSixteenBitsMeetTheOracle) {
  for (const Dtype q_dtype : {Dtype::bf16, Dtype::f16}) {
    for (const Dtype dtype : kCodes) {
      for (const ComputeDtype compute : {ComputeDtype::automatic, ComputeDtype::bf16}) {
        if (compute == ComputeDtype::bf16 && targets_for(Dtype::bf16) == targets_for(Dtype::f32))
          continue;  // no target multiplies bf16
        CacheCase problem = coded(dtype, 5);
        problem.q_dtype = q_dtype;
        problem.page_size = 16;
        CacheMemory memory(problem);
        AttentionDecode args = memory.args();
        args.compute_dtype = compute;
        attention_decode(args);
        for (std::int64_t i = 0; i < problem.batch(); ++i) {
          const AttentionForward dense = memory.dense(i);
          const reference::ForwardResult expected = reference::attention_forward(dense);
          const Tolerances allowed =
              tolerances(dense, expected,
                         compute == ComputeDtype::bf16 ? ComputeDtype::bf16 : ComputeDtype::f32);
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

// ---- append ----

/// The same cache with its new tokens in it.
CacheCase grown(CacheCase problem) {
  problem.num_new = 0;
  problem.packed_new.clear();
  return problem;
}

TEST(CodedCache, NewRowsAndTheirScalesLandBehindEachSequence) {
  for (const Dtype dtype : kCodes) {
    for (const Dtype of_tokens : {Dtype::f32, Dtype::bf16}) {
      for (const std::int64_t page_size : {0, 1, 3, 16}) {
        CacheCase problem{.seqlens = {40, 7, 18}, .num_new = 7};
        problem.q_dtype = of_tokens;
        problem.k_dtype = problem.v_dtype = dtype;
        problem.num_heads_q = problem.num_heads_kv = 2;
        problem.page_size = page_size;
        problem.has_left_padding = true;
        problem.has_heads_first = page_size == 16;
        problem.has_page_list = page_size == 3;
        problem.has_given_scales = dtype == Dtype::e4m3 && page_size == 1;
        if (page_size == 0) {
          problem.num_new = 0;
          problem.packed_q = {1, 2, 0};
          problem.packed_new = {5, 7, 0};
        }
        CacheMemory memory(problem), expected(grown(problem));
        const AttentionDecode args = memory.args();
        append_to_cache({.cache = args.cache, .append = args.append});
        EXPECT_EQ(memory.damage(), "");
        EXPECT_TRUE(bits_of(memory.k.view()) == bits_of(expected.k.view())) << page_size;
        EXPECT_TRUE(bits_of(memory.v.view()) == bits_of(expected.v.view())) << page_size;
        EXPECT_TRUE(bits_of(memory.k_scale.view()) == bits_of(expected.k_scale.view()));
        EXPECT_TRUE(bits_of(memory.v_scale.view()) == bits_of(expected.v_scale.view()));
      }
    }
  }
}

/// Angles of 60 positions and 6 pairs.
struct Angles {
  std::vector<float> cos = std::vector<float>(60 * 6), sin = cos;
  Angles() {
    for (std::size_t i = 0; i < cos.size(); ++i) {
      cos[i] = std::cos(0.2F * static_cast<float>(i));
      sin[i] = std::sin(0.2F * static_cast<float>(i));
    }
  }
  Rotary rotary() const {
    return {.cos = view(cos.data(), {60, 6}), .sin = view(sin.data(), {60, 6})};
  }
};

/// f32 caches hold turned keys unrounded: codes are theirs.
TEST(CodedCache, KeysAreTurnedBeforeTheyAreRounded) {
  const Angles angles;
  for (const Dtype dtype : kCodes) {
    CacheCase problem{.seqlens = {40, 7}, .num_new = 7, .page_size = 3};
    CacheMemory turned(problem);
    problem.k_dtype = problem.v_dtype = dtype;
    CacheMemory memory(problem);
    for (CacheMemory* each : {&turned, &memory}) {
      const AttentionDecode args = each->args();
      append_to_cache({.cache = args.cache, .append = args.append, .rotary = angles.rotary()});
    }
    const TensorView numbers = turned.k.view();
    const TensorView codes = memory.k.view();
    std::int64_t num_rows = 0;
    for (std::int64_t row = 0; row < numbers.size(0) * numbers.size(1); ++row) {
      const auto* from = static_cast<const float*>(numbers.data()) + row * numbers.stride(1);
      if (!std::isfinite(from[0])) continue;  // a row of nobody
      const std::span head(from, static_cast<std::size_t>(numbers.size(3)));
      const float scale = quant::row_scale(head, dtype);
      const auto* const scales = static_cast<const float*>(memory.k_scale.view().data());
      ASSERT_EQ(scales[row], scale) << row;
      const auto* bytes = static_cast<const std::uint8_t*>(codes.data()) + row * codes.stride(1);
      for (std::size_t d = 0; d < head.size(); ++d)
        ASSERT_EQ(bytes[d], quant::code_bits(head[d] * (1 / scale), dtype)) << row << " " << d;
      ++num_rows;
    }
    EXPECT_EQ(num_rows, 47);
  }
}

/// The oracle reads the cache as it was before, and rounds the new tokens by rules of its own.
TEST(CodedCache, AppendAndAttentionTogetherMeetTheOracle) {
  for (const Dtype dtype : kCodes) {
    for (const std::int64_t page_size : {0, 16}) {
      CacheCase problem{.seqlens = {150, 30, 33}, .seqlen_q = 3, .num_new = 3};
      problem.k_dtype = problem.v_dtype = dtype;
      problem.page_size = page_size;
      problem.has_left_padding = problem.has_sinks = true;
      problem.has_given_scales = dtype == Dtype::e4m3 && page_size == 0;
      problem.score = softcap(4.0F);
      CacheMemory memory(problem);
      const AttentionDecode args = memory.args();
      const reference::DecodeResult expected = reference::attention_decode(args);
      attention_decode(args);
      const std::vector<double> out = values_of(memory.out.view());
      // As of f32 caches: decode_test.cpp. Numbers of codes are rounded to f32 besides.
      for (std::size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected.out[i], 2e-5) << i;
      const std::vector<double> lse = values_of(memory.lse.view());
      for (std::size_t i = 0; i < lse.size(); ++i) ASSERT_NEAR(lse[i], expected.lse[i], 2e-5) << i;
    }
  }
}

TEST(CodedCache, NaNAndInfinityAreSeenByThoseWhoSeeTheirRow) {
  for (const Dtype dtype : kCodes) {
    for (const float what : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      for (const bool is_key : {false, true}) {
        CacheCase problem{.seqlens = {20, 20}, .seqlen_q = 3, .num_new = 3};
        problem.k_dtype = problem.v_dtype = dtype;
        CacheMemory memory(problem);
        // Of the last token of sequence 1, which its last query alone sees.
        GuardedTensor& tokens = is_key ? memory.new_k : memory.new_v;
        const std::int64_t width = tokens.view().size(3);
        tokens.set((1 * 3 + 2) * width + 1, what);
        attention_decode(memory.args());
        const std::vector<double> out = values_of(memory.out.view());
        const std::size_t row = static_cast<std::size_t>(problem.num_heads_q * problem.head_dim_v);
        for (std::size_t i = 0; i < out.size(); ++i)
          ASSERT_EQ(std::isnan(out[i]), i + row >= out.size()) << fovea::name(dtype) << " " << i;
      }
    }
  }
}

TEST(CodedCache, RowsOfZerosAndOfDenormalsAreNumbers) {
  for (const Dtype dtype : kCodes) {
    for (const float what : {0.0F, 0x1p-140F, -0x1p-126F, 3e38F}) {
      GuardedTensor tokens(make_spec(Dtype::f32, std::array<std::int64_t, 4>{1, 1, 1, 4}));
      tokens.fill([&](std::int64_t i) { return i == 2 ? 0 : what; });
      GuardedTensor k(make_spec(dtype, std::array<std::int64_t, 4>{1, 1, 1, 4}));
      GuardedTensor scale(make_spec(Dtype::f32, std::array<std::int64_t, 3>{1, 1, 1}));
      GuardedTensor v(k.view().spec()), v_scale(scale.view().spec());
      const std::int32_t length = 0;
      append_to_cache({.cache = {.k = k.mutable_view(),
                                 .v = v.mutable_view(),
                                 .seqlens = view(&length, {1}),
                                 .k_scale = scale.mutable_view(),
                                 .v_scale = v_scale.mutable_view()},
                       .append = {.k = tokens.view(), .v = tokens.view()}});
      const double step = values_of(scale.view())[0];
      ASSERT_GE(step, 0x1p-126);
      const std::vector<double> codes = values_of(k.view());
      for (std::size_t d = 0; d < 4; ++d) {
        const double exact = d == 2 ? 0 : what;
        EXPECT_NEAR(codes[d] * step, exact, std::abs(exact) / 127 / 2 + 0x1p-127) << what;
      }
    }
  }
}

// ---- what it costs ----

double relative_error(const std::vector<double>& got, const std::vector<double>& exact) {
  double error = 0;
  double size = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    error += (got[i] - exact[i]) * (got[i] - exact[i]);
    size += exact[i] * exact[i];
  }
  return std::sqrt(error / size);
}

/// Normal numbers, each row rounded by itself: docs/guides/quantization.md has these figures.
TEST(CodedCache, ErrorsAreThoseOfTheGuide) {
  struct Allowed {
    Dtype dtype;
    double error;
  };
  for (const Allowed& each : {Allowed{Dtype::i8, .0100}, Allowed{Dtype::e4m3, .0400}}) {
    CacheCase problem{.seqlens = {2048, 2048}, .seqlen_q = 4};
    problem.num_heads_q = 8;
    problem.num_heads_kv = 2;
    problem.head_dim_qk = problem.head_dim_v = 128;
    CacheMemory exact(problem);
    attention_decode(exact.args());
    problem.k_dtype = problem.v_dtype = each.dtype;
    CacheMemory memory(problem);
    attention_decode(memory.args());
    const double error = relative_error(values_of(memory.out.view()), values_of(exact.out.view()));
    RecordProperty(std::string(fovea::name(each.dtype)), std::to_string(error));
    EXPECT_LT(error, each.error) << fovea::name(each.dtype);
    EXPECT_GT(error, each.error / 2) << fovea::name(each.dtype);
  }
}

}  // namespace
}  // namespace fovea::testing
