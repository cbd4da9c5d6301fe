// New tokens of a cache: where they land, how they are turned, and that a cache grown token by token means the same as
// the whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "reference/attention_forward.hpp"
#include "support/cache_case.hpp"
#include "support/compare.hpp"
#include "support/drawn_spec.hpp"
#include "support/random.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

constexpr Dtype kFloats[] = {Dtype::f32, Dtype::f16, Dtype::bf16};

/// The same cache with its new tokens in it.
CacheCase grown(CacheCase problem) {
  problem.num_new = 0;
  problem.packed_new.clear();
  return problem;
}

TEST(Append, WritesNewRowsBehindEachSequenceAndNothingElse) {
  for (const std::int64_t page_size : {0, 1, 3, 16}) {
    for (const Dtype dtype : kFloats) {
      CacheCase problem{.seqlens = {40, 7, 18}, .num_new = 7};
      problem.page_size = page_size;
      problem.k_dtype = dtype;
      problem.has_left_padding = true;
      problem.has_heads_first = page_size == 16;
      problem.has_page_list = page_size == 3;
      CacheMemory memory(problem), expected(grown(problem));
      const AttentionDecode args = memory.args();
      append_to_cache({.cache = args.cache, .append = args.append});
      EXPECT_EQ(memory.damage(), "");
      EXPECT_TRUE(bits_of(memory.k.view()) == bits_of(expected.k.view())) << page_size;
      EXPECT_TRUE(bits_of(memory.v.view()) == bits_of(expected.v.view())) << page_size;
    }
  }
}

TEST(Append, PackedTokensLandBehindTheirSequences) {
  for (const std::int64_t page_size : {0, 3, 16}) {
    CacheCase problem{.seqlens = {40, 7, 18, 5}};
    problem.packed_new = {5, 0, 18, 1};
    problem.page_size = page_size;
    problem.has_page_list = page_size == 3;
    problem.has_left_padding = page_size != 16;
    CacheMemory memory(problem), expected(grown(problem));
    const AttentionDecode args = memory.args();
    append_to_cache({.cache = args.cache, .append = args.append});
    EXPECT_EQ(memory.damage(), "");
    EXPECT_TRUE(bits_of(memory.k.view()) == bits_of(expected.k.view())) << page_size;
    EXPECT_TRUE(bits_of(memory.v.view()) == bits_of(expected.v.view())) << page_size;
  }
}

TEST(Append, DecodeAppendsBeforeItAttends) {
  for (const std::int64_t page_size : {0, 3, 16}) {
    for (const std::int64_t num_new : {1, 4}) {
      CacheCase problem{.seqlens = {40, 4, 130}, .seqlen_q = 4, .num_new = num_new};
      problem.page_size = page_size;
      problem.has_batch_idx = page_size == 0;
      problem.has_page_list = page_size == 16;
      CacheMemory memory(problem);
      attention_decode(memory.args());
      EXPECT_EQ(memory.damage(), "");
      EXPECT_TRUE(bits_of(memory.k.view()) == bits_of(CacheMemory(grown(problem)).k.view()));
      for (std::int64_t i = 0; i < problem.batch(); ++i) {
        const AttentionForward dense = memory.dense(i);
        attention_forward(dense);
        EXPECT_TRUE(memory.out_bits(i) == bits_of(dense.out)) << i;
        EXPECT_TRUE(memory.lse_bits(i) == bits_of(dense.lse)) << i;
      }
    }
  }
}

/// Rows of 12 whose first 8 columns are the values.
TEST(Append, ValuesThatAreTheFirstColumnsOfKeysAreWrittenWithThem) {
  for (const std::int64_t page_size : {0, 3, 16}) {
    for (const bool is_packed : {false, true}) {
      CacheCase problem{.seqlens = {40, 4, 130}, .seqlen_q = 4};
      problem.page_size = page_size;
      problem.num_heads_kv = 1;
      problem.head_dim_qk = 12;
      problem.head_dim_v = 8;
      problem.has_latent_values = true;
      if (is_packed) problem.packed_q = problem.packed_new = {5, 4, 0};
      if (!is_packed) problem.num_new = 4;
      CacheMemory memory(problem);
      attention_decode(memory.args());
      EXPECT_EQ(memory.damage(), "");
      EXPECT_TRUE(bits_of(memory.k.view()) == bits_of(CacheMemory(grown(problem)).k.view()));
      for (std::int64_t i = 0; i < problem.batch(); ++i) {
        const AttentionForward dense = memory.dense(i);
        attention_forward(dense);
        EXPECT_TRUE(memory.out_bits(i) == bits_of(dense.out)) << i;
      }
    }
  }
}

TEST(Append, KeysAndValuesMayShareAnAllocation) {
  // [pages, 2, page_size, heads, head_dim]: keys and values of a page side by side.
  constexpr std::int64_t kPages = 4, kRows = 3, kDim = 8;
  std::vector<float> memory(kPages * 2 * kRows * kDim, std::nanf(""));
  const auto half = [&](std::int64_t offset) {
    return view(memory.data() + offset, {kPages, kRows, 1, kDim},
                {2 * kRows * kDim, kDim, kDim, 1});
  };
  std::vector<float> q(5 * kDim), k(q), v(q), out(q), expected(q);
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i] = std::sin(static_cast<float>(i));
    k[i] = std::cos(static_cast<float>(2 * i));
    v[i] = std::sin(static_cast<float>(3 * i));
  }
  const std::int32_t table[] = {2, 0, -1}, length = 0;
  const auto tokens = [](auto& x) { return view(x.data(), {1, 5, 1, kDim}); };
  attention_decode({.q = tokens(q),
                    .cache = {.k = half(0),
                              .v = half(kRows * kDim),
                              .page_table = view(table, {1, 3}),
                              .seqlens = view(&length, {1})},
                    .append = {.k = tokens(k), .v = tokens(v)},
                    .out = tokens(out)});
  attention_forward(
      {.q = tokens(q), .k = tokens(k), .v = tokens(v), .out = tokens(expected), .mask = causal()});
  EXPECT_EQ(out, expected);
}

TEST(Append, TokensTakeTheDtypeOfTheCache) {
  const std::vector<double> values = {1.0009765625, -3.14159, 60000, 1e-3};
  for (const Dtype from : kFloats) {
    for (const Dtype to : kFloats) {
      const GuardedTensor tokens = tensor_of(from, {1, 1, 1, 4}, values);
      GuardedTensor k(make_spec(to, std::array<std::int64_t, 4>{1, 2, 1, 4}));
      GuardedTensor v(make_spec(to, std::array<std::int64_t, 4>{1, 2, 1, 4}));
      k.poison();
      v.poison();
      const std::int32_t length = 1;
      append_to_cache(
          {.cache = {.k = k.mutable_view(), .v = v.mutable_view(), .seqlens = view(&length, {1})},
           .append = {.k = tokens.view(), .v = tokens.view()}});
      const std::vector<double> got = values_of(v.view());
      for (std::size_t d = 0; d < 4; ++d) {
        EXPECT_TRUE(std::isnan(got[d]));
        const double exact = values_of(tokens.view())[d];
        EXPECT_NEAR(got[4 + d], exact, rounding(to, exact))
            << fovea::name(from) << " to " << fovea::name(to);
      }
    }
  }
}

// ---- rotation ----

constexpr std::int64_t kHeadDim = 24, kMaxPositions = 50, kTokens = 3, kHeads = 2;
constexpr std::int64_t kLengths[] = {30, 0};  // before the append

struct RotaryTables {
  GuardedTensor cos, sin;

  RotaryTables(Dtype dtype, std::int64_t rotary_dim) {
    const std::int64_t half = rotary_dim / 2;
    const auto table = [&](std::uint64_t stream) {
      return GuardedTensor(drawn_spec(dtype, std::array{kMaxPositions, half},
                                      Random(static_cast<std::uint64_t>(half), stream),
                                      Strides::of_input));
    };
    cos = table(1);
    sin = table(2);
    const auto angle = [half](std::int64_t i) {
      const double exponent = static_cast<double>(i % half) / static_cast<double>(half);
      return static_cast<double>(i / half) * std::pow(10000.0, -exponent);
    };
    cos.fill([&](std::int64_t i) { return std::cos(angle(i)); });
    sin.fill([&](std::int64_t i) { return std::sin(angle(i)); });
  }

  Rotary rotary(bool is_interleaved) const {
    return {.cos = cos.view(), .sin = sin.view(), .is_interleaved = is_interleaved};
  }
};

/// The formula of kv_cache.hpp on one head, in fp64 of the given tables.
std::vector<double> turned(const std::vector<double>& row, const RotaryTables& tables,
                           std::int64_t position, bool is_interleaved) {
  const std::vector<double> cos = values_of(tables.cos.view()), sin = values_of(tables.sin.view());
  const auto half = static_cast<std::size_t>(tables.cos.view().size(1));
  std::vector<double> result = row;
  for (std::size_t j = 0; j < half; ++j) {
    const std::size_t first = is_interleaved ? 2 * j : j;
    const std::size_t second = is_interleaved ? 2 * j + 1 : j + half;
    const std::size_t at = static_cast<std::size_t>(position) * half + j;
    result[first] = row[first] * cos[at] - row[second] * sin[at];
    result[second] = row[first] * sin[at] + row[second] * cos[at];
  }
  return result;
}

/// A cache of two slots in which nothing but lengths matters, and tokens for it.
struct RotaryMemory {
  GuardedTensor k, v, tokens;
  std::int64_t lengths[2] = {kLengths[0], kLengths[1]};

  explicit RotaryMemory(Dtype dtype, std::int64_t num_heads = kHeads) {
    const TensorSpec spec =
        make_spec(dtype, std::array{std::int64_t{2}, kMaxPositions, num_heads, kHeadDim});
    k = GuardedTensor(spec);
    v = GuardedTensor(spec);
    const Random random(3, 1);
    k.fill([&](std::int64_t i) { return random.normal(-1 - i); });
    v.fill([&](std::int64_t i) { return random.normal(100'000 + i); });
    tokens =
        GuardedTensor(make_spec(dtype, std::array{std::int64_t{2}, kTokens, num_heads, kHeadDim}));
    tokens.fill([&](std::int64_t i) { return random.normal(i); });
  }

  KvCache cache() {
    return {.k = k.mutable_view(), .v = v.mutable_view(), .seqlens = view(lengths, {2})};
  }
  /// A head of cache.k.
  std::vector<double> key(std::int64_t slot, std::int64_t row, std::int64_t head) const {
    const std::vector<double> all = values_of(k.view());
    const std::int64_t heads = k.view().size(2);
    const auto at = all.begin() + ((slot * kMaxPositions + row) * heads + head) * kHeadDim;
    return {at, at + kHeadDim};
  }
  std::vector<double> token(std::int64_t sequence, std::int64_t index, std::int64_t head) const {
    const std::vector<double> all = values_of(tokens.view());
    const std::int64_t heads = k.view().size(2);
    const auto at = all.begin() + ((sequence * kTokens + index) * heads + head) * kHeadDim;
    return {at, at + kHeadDim};
  }
};

struct RotaryVariant {
  Dtype dtype, table_dtype;
  std::int64_t rotary_dim;
  bool is_interleaved, has_positions;
};

void expect_turned_keys(const RotaryVariant& variant) {
  SCOPED_TRACE(std::string(fovea::name(variant.dtype)) + ", rotary_dim " +
               std::to_string(variant.rotary_dim) +
               (variant.is_interleaved ? " interleaved" : " in halves") +
               (variant.has_positions ? ", positions" : ""));
  const RotaryTables tables(variant.table_dtype, variant.rotary_dim);
  RotaryMemory memory(variant.dtype);
  std::int32_t positions[2][kTokens] = {{7, 0, 49}, {1, 1, 2}};
  Rotary rotary = tables.rotary(variant.is_interleaved);
  if (variant.has_positions) rotary.positions = view(&positions[0][0], {2, kTokens});
  append_to_cache({.cache = memory.cache(),
                   .append = {.k = memory.tokens.view(), .v = memory.tokens.view()},
                   .rotary = rotary});
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const std::int64_t position = variant.has_positions ? positions[i][t] : kLengths[i] + t;
      for (std::int64_t head = 0; head < kHeads; ++head) {
        const std::vector<double> token = memory.token(i, t, head);
        const std::vector<double> expected =
            turned(token, tables, position, variant.is_interleaved);
        const std::vector<double> got = memory.key(i, kLengths[i] + t, head);
        for (std::size_t d = 0; d < got.size(); ++d) {
          // Two products and a sum in fp32, of numbers below 8; one rounding to the cache's dtype.
          const double allowed = d < static_cast<std::size_t>(variant.rotary_dim)
                                     ? 3 * 8 * 0x1p-24 + rounding(variant.dtype, expected[d])
                                     : 0;
          EXPECT_NEAR(got[d], expected[d], allowed) << "token " << t << " element " << d;
        }
      }
    }
  }
}

TEST(Rotary, KeysAreTurnedByTheirPositions) {
  for (const Dtype dtype : kFloats) {
    for (const std::int64_t rotary_dim : {std::int64_t{2}, std::int64_t{16}, kHeadDim}) {
      for (const bool is_interleaved : {false, true}) {
        for (const bool has_positions : {false, true}) {
          expect_turned_keys({dtype, Dtype::f32, rotary_dim, is_interleaved, has_positions});
          expect_turned_keys({dtype, dtype, rotary_dim, is_interleaved, has_positions});
        }
      }
    }
  }
}

/// Queries turned as if they were keys at the same places.
GuardedTensor turned_queries(const RotaryMemory& queries, const Rotary& rotary) {
  RotaryMemory scratch(queries.tokens.view().dtype(), queries.tokens.view().size(2));
  append_to_cache({.cache = scratch.cache(),
                   .append = {.k = queries.tokens.view(), .v = queries.tokens.view()},
                   .rotary = rotary});
  std::vector<double> rows;
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t head = 0; head < queries.tokens.view().size(2); ++head) {
        const std::vector<double> row = scratch.key(i, kLengths[i] + t, head);
        rows.insert(rows.end(), row.begin(), row.end());
      }
    }
  }
  const TensorSpec spec = queries.tokens.view().spec();
  return tensor_of(spec.dtype, {spec.shape[0], spec.shape[1], spec.shape[2], spec.shape[3]}, rows);
}

TEST(Rotary, QueriesAreTurnedAsTheKeysBesideThem) {
  for (const Dtype dtype : kFloats) {
    for (const bool is_interleaved : {false, true}) {
      const RotaryTables tables(Dtype::f32, 16);
      const Rotary rotary = tables.rotary(is_interleaved);
      RotaryMemory keys(dtype), queries(dtype, 2 * kHeads);
      const GuardedTensor q = turned_queries(queries, rotary);
      const TensorSpec out_spec = queries.tokens.view().spec();
      GuardedTensor out(out_spec), expected(out_spec);
      attention_decode({.q = queries.tokens.view(),
                        .cache = keys.cache(),
                        .append = {.k = keys.tokens.view(), .v = keys.tokens.view()},
                        .rotary = rotary,
                        .out = out.mutable_view()});
      RotaryMemory plain(dtype);
      append_to_cache({.cache = plain.cache(),
                       .append = {.k = keys.tokens.view(), .v = keys.tokens.view()},
                       .rotary = rotary});
      for (std::int64_t& length : plain.lengths) length += kTokens;
      attention_decode({.q = q.view(), .cache = plain.cache(), .out = expected.mutable_view()});
      EXPECT_TRUE(bits_of(out.view()) == bits_of(expected.view())) << fovea::name(dtype);
    }
  }
}

/// [2, kTokens, ...] as one packed tensor.
TensorView as_packed(const TensorView& tokens) {
  return {tokens.data(),
          make_spec(tokens.dtype(), std::array{2 * kTokens, tokens.size(2), kHeadDim})};
}

TEST(Rotary, PackedTokensAreTurnedByTheSamePositions) {
  const RotaryTables tables(Dtype::f32, 16);
  const std::int64_t offsets[] = {0, kTokens, 2 * kTokens};
  const std::int32_t positions[2][kTokens] = {{7, 0, 49}, {1, 1, 2}};
  for (const bool has_positions : {false, true}) {
    RotaryMemory dense(Dtype::bf16), packed(Dtype::bf16);
    const RotaryMemory queries(Dtype::bf16, 2 * kHeads);
    GuardedTensor expected(queries.tokens.view().spec()), out(queries.tokens.view().spec());
    AttentionDecode args{.q = queries.tokens.view(),
                         .cache = dense.cache(),
                         .append = {.k = dense.tokens.view(), .v = dense.tokens.view()},
                         .rotary = tables.rotary(true),
                         .out = expected.mutable_view()};
    if (has_positions) args.rotary->positions = view(&positions[0][0], {2, kTokens});
    attention_decode(args);
    args.q = as_packed(queries.tokens.view());
    args.cache = packed.cache();
    args.append = {.k = as_packed(packed.tokens.view()), .v = as_packed(packed.tokens.view())};
    if (has_positions) args.rotary->positions = view(&positions[0][0], {2 * kTokens});
    args.out = TensorView(out.mutable_view().mutable_data(), args.q.spec());
    args.cu_seqlens_q = view(offsets, {3});
    attention_decode(args);
    EXPECT_TRUE(bits_of(packed.k.view()) == bits_of(dense.k.view())) << has_positions;
    EXPECT_TRUE(bits_of(out.view()) == bits_of(expected.view())) << has_positions;
  }
}

TEST(Rotary, QueriesWithoutAppendStandAtTheEnd) {
  // The same queries after their keys were appended apart: positions are the same.
  const RotaryTables tables(Dtype::f32, 16);
  const Rotary rotary = tables.rotary(false);
  RotaryMemory fused(Dtype::f32), apart(Dtype::f32);
  const RotaryMemory queries(Dtype::f32);
  GuardedTensor out(queries.tokens.view().spec()), expected(queries.tokens.view().spec());
  attention_decode({.q = queries.tokens.view(),
                    .cache = fused.cache(),
                    .append = {.k = fused.tokens.view(), .v = fused.tokens.view()},
                    .rotary = rotary,
                    .out = expected.mutable_view()});
  append_to_cache({.cache = apart.cache(),
                   .append = {.k = apart.tokens.view(), .v = apart.tokens.view()},
                   .rotary = rotary});
  for (std::int64_t& length : apart.lengths) length += kTokens;
  attention_decode({.q = queries.tokens.view(),
                    .cache = apart.cache(),
                    .rotary = rotary,
                    .out = out.mutable_view()});
  EXPECT_TRUE(bits_of(out.view()) == bits_of(expected.view()));
}

// ---- a cache that grows ----

/// Runs a sequence through a paged cache in chunks; out [1, seqlen, heads, head_dim_v] row-major.
GuardedTensor run_in_chunks(const CacheCase& whole, std::int64_t chunk, CpuTarget target) {
  CacheMemory source(whole);
  const AttentionForward dense = source.dense(0, target);
  const std::int64_t seqlen = whole.seqlens[0];
  const std::int64_t page_size = 16, num_pages = (seqlen + page_size - 1) / page_size;
  GuardedTensor k(make_spec(
      whole.k_dtype, std::array{num_pages, page_size, whole.num_heads_kv, whole.head_dim_qk}));
  GuardedTensor v(make_spec(
      whole.v_dtype, std::array{num_pages, page_size, whole.num_heads_kv, whole.head_dim_v}));
  std::vector<std::int32_t> table(static_cast<std::size_t>(num_pages));
  for (std::int64_t i = 0; i < num_pages; ++i)
    table[static_cast<std::size_t>(i)] = static_cast<std::int32_t>((i * 7 + 3) % num_pages);
  EXPECT_NE(num_pages % 7, 0) << "the table repeats a page";
  GuardedTensor out(dense.out.spec());
  const auto rows = [](const TensorView& view, std::int64_t begin, std::int64_t count) {
    TensorSpec spec = view.spec();
    spec.shape[1] = count;
    const std::int64_t bytes =
        begin * view.stride(1) * static_cast<std::int64_t>(size_bytes(view.dtype()));
    const auto* data = static_cast<const std::byte*>(view.data()) + bytes;
    if (view.is_mutable())
      return TensorView(const_cast<void*>(static_cast<const void*>(data)), spec);
    return TensorView(static_cast<const void*>(data), spec);
  };
  for (std::int64_t begin = 0; begin < seqlen; begin += chunk) {
    const std::int64_t count = std::min(chunk, seqlen - begin);
    const auto length = static_cast<std::int32_t>(begin);
    attention_decode(
        {.q = rows(dense.q, begin, count),
         .cache = {.k = k.mutable_view(),
                   .v = v.mutable_view(),
                   .page_table = view(table.data(), {1, num_pages}),
                   .seqlens = view(&length, {1})},
         .append = {.k = rows(dense.k, begin, count), .v = rows(dense.v, begin, count)},
         .out = rows(out.mutable_view(), begin, count),
         .cpu_target = target});
  }
  return out;
}

CacheCase sequence_of(std::int64_t seqlen, Dtype dtype) {
  CacheCase problem{.seqlens = {seqlen}, .seqlen_q = seqlen};
  problem.q_dtype = problem.k_dtype = problem.v_dtype = dtype;
  return problem;
}

TEST(GrowingCache, TokenByTokenEqualsPrefill) {
  for (const Dtype dtype : kFloats) {
    for (const CpuTarget target : targets_for(dtype)) {
      SCOPED_TRACE(std::string(fovea::name(target)) + " " + std::string(fovea::name(dtype)));
      const CacheCase problem = sequence_of(150, dtype);
      CacheMemory memory(problem);
      const AttentionForward dense = memory.dense(0, target);
      const reference::ForwardResult expected = reference::attention_forward(dense);
      const Tolerances allowed =
          tolerances(dense, expected, compute_dtype_on(target, dtype, ComputeDtype::automatic));
      const std::vector<double> values = values_of(run_in_chunks(problem, 1, target).view());
      for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_NEAR(values[i], expected.out[i], allowed.out.allowed(expected.out[i])) << i;
    }
  }
}

TEST(GrowingCache, ChunksOfOneClassOfRowsHaveTheSameBits) {
  // docs/design/contract.md, "Bits". One row a query: up to 3 are read row by row on every target, 9 and more on none.
  // No chunk leaves a remainder.
  for (const Dtype dtype : kFloats) {
    for (const CpuTarget target : targets_for(dtype)) {
      SCOPED_TRACE(std::string(fovea::name(target)) + " " + std::string(fovea::name(dtype)));
      CacheCase problem = sequence_of(180, dtype);
      problem.num_heads_kv = problem.num_heads_q;
      const auto bits = [&](std::int64_t chunk) {
        return bits_of(run_in_chunks(problem, chunk, target).view());
      };
      const std::vector<std::uint64_t> few = bits(1);
      EXPECT_TRUE(bits(2) == few);
      EXPECT_TRUE(bits(3) == few);
      const std::vector<std::uint64_t> whole = bits(180);
      for (const std::int64_t chunk : {9, 10, 30, 60, 90})
        EXPECT_TRUE(bits(chunk) == whole) << chunk;
    }
  }
}

TEST(GrowingCache, ChunksAcrossASplitHaveTheSameBits) {
  // Keys are split at 2048: rows on both sides of it, in calls that see one split and calls that see two.
  for (const CpuTarget target : targets_for(Dtype::f32)) {
    SCOPED_TRACE(std::string(fovea::name(target)));
    CacheCase problem = sequence_of(2100, Dtype::f32);
    problem.num_heads_kv = problem.num_heads_q = 1;
    problem.head_dim_qk = problem.head_dim_v = 8;
    const auto bits = [&](std::int64_t chunk) {
      return bits_of(run_in_chunks(problem, chunk, target).view());
    };
    EXPECT_TRUE(bits(3) == bits(2));
    EXPECT_TRUE(bits(15) == bits(10));
  }
}

}  // namespace
}  // namespace fovea::testing
