// Validation of the KV cache: each refusal with its whole message, and what lies behind the end of a sequence is never
// looked at.
#include "problem/decode.hpp"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "unit/problem/problems.hpp"

namespace fovea::testing {
namespace {

/// Three sequences of 4, 0 and 9 rows, two new tokens each; 4 slots of 16 rows, or 8 pages of 4.
struct CacheCall {
  std::vector<float> k = std::vector<float>(4 * 16 * 2 * 8), v = std::vector<float>(4 * 16 * 2 * 6);
  std::vector<float> new_k = std::vector<float>(3 * 2 * 2 * 8),
                     new_v = std::vector<float>(3 * 2 * 2 * 6);
  std::vector<std::int32_t> seqlens = {4, 0, 9}, batch_idx = {3, 0, 1};
  std::vector<std::int64_t> left_padding = {1, 0, 2};
  std::vector<std::int32_t> table = {7, 0, -1, 1 << 30, 2, -7, -1, -1, 4, 5, 6, -1};
  std::vector<float> cos = std::vector<float>(16 * 4), sin = std::vector<float>(16 * 4);
  std::vector<std::int32_t> positions = {0, 1, 2, 3, 14, 15};

  KvCache contiguous() {
    return {.k = view(k.data(), {4, 16, 2, 8}),
            .v = view(v.data(), {4, 16, 2, 6}),
            .seqlens = view(seqlens.data(), {3})};
  }
  KvCache paged() {
    return {.k = view(k.data(), {16, 4, 2, 8}),
            .v = view(v.data(), {16, 4, 2, 6}),
            .page_table = view(table.data(), {3, 4}),
            .seqlens = view(seqlens.data(), {3})};
  }
  /// The same pages by offsets and a list: two entries of sequence 0, two of sequence 1, four of sequence 2.
  std::vector<std::int64_t> indptr = {0, 2, 4, 8};
  std::vector<std::int32_t> indices = {7, 0, 2, -7, 4, 5, 6, -1, 1 << 30};
  KvCache listed() {
    KvCache cache = paged();
    cache.page_table = {};
    cache.page_indptr = view(indptr.data(), {4});
    cache.page_indices = view(indices.data(), {9});
    return cache;
  }
  Append append() {
    return {.k = view(new_k.data(), {3, 2, 2, 8}), .v = view(new_v.data(), {3, 2, 2, 6})};
  }
  Rotary rotary() { return {.cos = view(cos.data(), {16, 4}), .sin = view(sin.data(), {16, 4})}; }
};

std::string refusal_of(const KvCache& cache, const Append& append = {},
                       const std::optional<Rotary>& rotary = {}) {
  return refusal([&] { validate_cache(cache, append, rotary, 3, "run"); });
}

TEST(KvCacheDoor, ReturnsTheLongestSequenceAfterTheAppend) {
  CacheCall call;
  EXPECT_EQ(validate_cache(call.contiguous(), {}, {}, 3, "run"), 9);
  EXPECT_EQ(validate_cache(call.paged(), call.append(), {}, 3, "run"), 11);
  KvCache padded = call.contiguous();
  padded.left_padding = view(call.left_padding.data(), {3});
  EXPECT_EQ(validate_cache(padded, call.append(), {}, 3, "run"), 9);
}

/// The same cache in codes: of rows by default, 4 slots of 16 rows.
struct CodedCall : CacheCall {
  std::vector<std::int8_t> k_codes = std::vector<std::int8_t>(k.size()),
                           v_codes = std::vector<std::int8_t>(v.size());
  std::vector<float8_e4m3> k_small = std::vector<float8_e4m3>(k.size());
  std::vector<float> scales = std::vector<float>(4 * 16 * 2, 0.5F), more_scales = scales;

  KvCache cache() {
    KvCache cache = contiguous();
    cache.k = view(k_codes.data(), {4, 16, 2, 8});
    cache.v = view(v_codes.data(), {4, 16, 2, 6});
    cache.k_scale = view(scales.data(), {4, 16, 2});
    cache.v_scale = view(more_scales.data(), {4, 16, 2});
    return cache;
  }
  KvCache with_given(const TensorView& scale) {
    KvCache result = cache();
    result.k = view(k_small.data(), {4, 16, 2, 8});
    result.k_scale = scale;
    return result;
  }
};

TEST(KvCacheDoor, CodesHaveScales) {
  CodedCall call;
  EXPECT_EQ(refusal_of(call.cache(), call.append(), call.rotary()), "(not refused)");
  EXPECT_EQ(refusal_of(call.with_given(view(call.scales.data(), {3, 2})), call.append()),
            "(not refused)");
  EXPECT_EQ(refusal_of(call.with_given(view(call.scales.data(), {1}))), "(not refused)");
  KvCache mixed = call.cache();
  mixed.v = view(call.v.data(), {4, 16, 2, 6});
  mixed.v_scale = {};
  EXPECT_EQ(refusal_of(mixed), "(not refused)");
  mixed.v_scale = view(call.scales.data(), {1});
  EXPECT_EQ(
      refusal_of(mixed),
      "run: cache.v_scale is given and cache.v is f32; expected none, only codes have scales");
  KvCache missing = call.cache();
  missing.k_scale = {};
  EXPECT_EQ(refusal_of(missing),
            "run: cache.k is i8 and cache.k_scale is missing; expected f32 [4, 16, 2], a scale for "
            "each row and head, or of e4m3 a given one: [3, 2] or [1]");
  KvCache short_scales = call.cache();
  short_scales.k_scale = view(call.scales.data(), {4, 15, 2});
  EXPECT_EQ(refusal_of(short_scales),
            "run: cache.k_scale is f32 [4, 15, 2]; expected f32 [4, 16, 2]");
}

TEST(KvCacheDoor, ScalesThatAreGivenAreOfE4m3AndAboveZero) {
  CodedCall call;
  KvCache of_int8 = call.cache();
  of_int8.v_scale = view(call.scales.data(), {3, 2});
  EXPECT_EQ(refusal_of(of_int8),
            "run: cache.v_scale is f32 [3, 2] and cache.v is i8; expected a scale for each row and "
            "head: int8 has no NaN, which the scale of its row shows");
  call.scales[3] = 0;
  EXPECT_EQ(refusal_of(call.with_given(view(call.scales.data(), {3, 2}))),
            "run: cache.k_scale[1, 1] is 0; expected a finite number above 0");
  // Of rows nobody looks at them: they may be those of no row.
  EXPECT_EQ(refusal_of(call.cache()), "(not refused)");
}

TEST(KvCacheDoor, CodesOfNoOtherKindAreTaken) {
  CodedCall call;
  KvCache cache = call.cache();
  const TensorSpec u8 = make_spec(Dtype::u8, std::array<std::int64_t, 4>{4, 16, 2, 8});
  cache.k = TensorView(static_cast<void*>(call.k_codes.data()), u8);
  EXPECT_EQ(refusal_of(cache),
            "run: cache.k is u8; expected f32, f16 or bf16, or codes: i8 or e4m3");
  cache = call.cache();
  cache.v = view(call.k_codes.data(), {4, 16, 2, 6}, {256, 16, 8, 1});
  EXPECT_EQ(refusal_of(cache),
            "run: cache.v is the first columns of cache.k, which is i8; expected f32, f16 or bf16, "
            "or values of their own: codes of keys have the scale of the whole key");
}

TEST(KvCacheDoor, ScalesOfRowsAreWrittenWithThem) {
  CodedCall call;
  KvCache shared = call.cache();
  shared.v_scale = shared.k_scale;
  EXPECT_EQ(refusal([&] { validate_append(shared, call.append(), {}, "run"); }),
            "run: cache.v_scale overlaps cache.k_scale; expected memory of its own");
  EXPECT_EQ(refusal([&] { validate_append(call.cache(), call.append(), {}, "run"); }),
            "(not refused)");
  KvCache fixed = call.cache();
  fixed.k_scale = view(static_cast<const float*>(call.scales.data()), {4, 16, 2});
  EXPECT_EQ(refusal_of(fixed, call.append()),
            "run: cache.k_scale is read-only; expected a view of writable memory");
}

TEST(KvCacheDoor, EntriesBehindTheEndMayBeAnything) {
  CacheCall call;
  EXPECT_EQ(refusal_of(call.paged(), call.append()), "(not refused)");
  // Pages of left padding alone are not looked at either.
  call.table[8] = 1 << 30;
  call.left_padding[2] = 4;
  KvCache cache = call.paged();
  EXPECT_EQ(refusal_of(cache),
            "run: cache.page_table[2, 0] is 1073741824; expected 0 to 15, a page of cache.k, since "
            "sequence 2 has 9 rows");
  cache.left_padding = view(call.left_padding.data(), {3});
  EXPECT_EQ(refusal_of(cache), "(not refused)");
}

TEST(KvCacheDoor, PagesInUseOutOfRangeAreRefused) {
  for (const std::int32_t page : {-1, 16}) {
    CacheCall call;
    call.table[1] = page;  // of sequence 0: four rows fill page 0, new tokens start page 1
    EXPECT_EQ(refusal_of(call.paged()), "(not refused)");
    EXPECT_EQ(refusal_of(call.paged(), call.append()),
              "run: cache.page_table[0, 1] is " + std::to_string(page) +
                  "; expected 0 to 15, a page of cache.k, since sequence 0 has 6 rows");
  }
}

TEST(KvCacheDoor, SequencesThatOutgrowTheirRoomAreRefused) {
  CacheCall call;
  call.seqlens[2] = 14;
  call.table[11] = 9;
  EXPECT_EQ(refusal_of(call.contiguous(), call.append()), "(not refused)");
  EXPECT_EQ(refusal_of(call.paged(), call.append()), "(not refused)");
  call.seqlens[2] = 15;
  EXPECT_EQ(refusal_of(call.contiguous(), call.append()),
            "run: cache.seqlens[2] is 15 and 2 more are appended; expected at most 16 rows in all, "
            "the capacity of a slot");
  EXPECT_EQ(refusal_of(call.paged(), call.append()),
            "run: cache.seqlens[2] is 15 and 2 more are appended; expected at most 16 rows in all, "
            "4 pages of 4 rows");
  call.seqlens[2] = 17;
  EXPECT_EQ(refusal_of(call.contiguous()),
            "run: cache.seqlens[2] is 17; expected at most 16 rows in all, the capacity of a slot");
}

TEST(KvCacheDoor, PagesMayBeListedBehindOffsets) {
  CacheCall call;
  EXPECT_EQ(refusal_of(call.listed(), call.append()), "(not refused)");
  EXPECT_EQ(validate_cache(call.listed(), call.append(), {}, 3, "run"), 11);
  EXPECT_EQ(cache_capacity(call.listed(), 1), 8);
  EXPECT_EQ(cache_capacity(call.listed(), 2), 16);
  EXPECT_EQ(cache_row(call.listed(), 2, 9).slot, 6);
}

TEST(KvCacheDoor, ListedPagesAreRefusedByTheirPlace) {
  CacheCall call;
  call.indices[5] = 16;
  EXPECT_EQ(
      refusal_of(call.listed()),
      "run: cache.page_indices[5] is 16; expected 0 to 15, a page of cache.k, since sequence 2 "
      "has 9 rows");
  call.indices[5] = 5;
  call.indices[2] = 6;
  EXPECT_EQ(refusal_of(call.listed(), call.append()),
            "run: cache.page_indices[6] is 6, as cache.page_indices[2]; expected a page of its own "
            "for every place that tokens are appended to");
  call.indices[2] = 2;
  call.seqlens[0] = 7;
  EXPECT_EQ(refusal_of(call.listed(), call.append()),
            "run: cache.seqlens[0] is 7 and 2 more are appended; expected at most 8 rows in all, 2 "
            "pages of 4 rows");
}

TEST(KvCacheDoor, OffsetsOfPagesAreRefusedBeforeTheyAreFollowed) {
  CacheCall call;
  const auto with = [&](std::vector<std::int64_t> indptr) {
    call.indptr = std::move(indptr);
    return refusal_of(call.listed());
  };
  EXPECT_EQ(with({1, 2, 4, 8}),
            "run: cache.page_indptr[0] is 1 after 0; expected offsets from 0 that never decrease");
  EXPECT_EQ(with({0, 5, 4, 8}),
            "run: cache.page_indptr[2] is 4 after 5; expected offsets from 0 that never decrease");
  EXPECT_EQ(with({0, 2, 4, 10}),
            "run: cache.page_indptr ends at 10; expected at most 9, the entries of "
            "cache.page_indices");
  call.indptr = {0, 2, 4, 8};
  KvCache cache = call.listed();
  cache.page_indices = {};
  EXPECT_EQ(refusal_of(cache),
            "run: cache.page_indices is missing; expected i32 or i64 [num_indices]");
  cache = call.listed();
  cache.page_indptr = view(call.seqlens.data(), {3});
  EXPECT_EQ(refusal_of(cache), "run: cache.page_indptr is i32 [3]; expected i32 or i64 [4]");
  cache = call.listed();
  cache.page_table = call.paged().page_table;
  EXPECT_EQ(
      refusal_of(cache),
      "run: cache.page_table is given beside cache.page_indptr or cache.page_indices; expected "
      "the table, or both of them");
  cache = call.listed();
  cache.batch_idx = view(call.batch_idx.data(), {3});
  EXPECT_EQ(
      refusal_of(cache),
      "run: cache.batch_idx is given beside cache.page_indptr; expected one of them, it already "
      "names each sequence's pages");
}

TEST(KvCacheDoor, LengthsBelowTheirPaddingAreRefused) {
  CacheCall call;
  call.seqlens[1] = -1;
  EXPECT_EQ(refusal_of(call.contiguous()), "run: cache.seqlens[1] is -1; expected at least 0");
  call.seqlens[1] = 0;
  call.left_padding[1] = 1;
  KvCache cache = call.contiguous();
  cache.left_padding = view(call.left_padding.data(), {3});
  EXPECT_EQ(refusal_of(cache), "run: cache.seqlens[1] is 0; expected at least 1, its left padding");
  call.left_padding[1] = -2;
  EXPECT_EQ(refusal_of(cache), "run: cache.left_padding[1] is -2; expected >= 0");
}

TEST(KvCacheDoor, SlotsOutOfRangeAreRefused) {
  CacheCall call;
  KvCache cache = call.contiguous();
  cache.batch_idx = view(call.batch_idx.data(), {3});
  EXPECT_EQ(refusal_of(cache, call.append()), "(not refused)");
  call.batch_idx[1] = 4;
  EXPECT_EQ(refusal_of(cache),
            "run: cache.batch_idx[1] is 4; expected 0 to 3, the slots of cache.k");
  CacheCall small;
  cache = small.contiguous();
  cache.k = view(small.k.data(), {2, 16, 2, 8});
  cache.v = view(small.v.data(), {2, 16, 2, 6});
  EXPECT_EQ(refusal_of(cache),
            "run: cache.k has 2 slots for a batch of 3; expected a slot for every sequence");
}

TEST(KvCacheDoor, TwoAppendsToOnePlaceAreRefused) {
  CacheCall call;
  KvCache cache = call.contiguous();
  cache.batch_idx = view(call.batch_idx.data(), {3});
  call.batch_idx[2] = 3;
  EXPECT_EQ(refusal_of(cache), "(not refused)");
  EXPECT_EQ(refusal_of(cache, call.append()),
            "run: cache.batch_idx[2] is 3, as cache.batch_idx[0]; expected a slot of its own for "
            "every sequence that tokens are appended to");
  call.table[10] = 2;  // rows 9 and 10 of sequence 2 beside rows 0 and 1 of sequence 1
  EXPECT_EQ(refusal_of(call.paged()), "(not refused)");
  EXPECT_EQ(
      refusal_of(call.paged(), call.append()),
      "run: cache.page_table[2, 2] is 2, as cache.page_table[1, 0]; expected a page of its own "
      "for every place that tokens are appended to");
}

TEST(KvCacheDoor, TensorsOfAnotherShapeAreRefused) {
  CacheCall call;
  KvCache cache = call.contiguous();
  cache.v = view(call.v.data(), {4, 12, 2, 6});
  EXPECT_EQ(refusal_of(cache), "run: cache.v is f32 [4, 12, 2, 6]; expected f32 [4, 16, 2, 6]");
  cache.v = {};
  EXPECT_EQ(refusal_of(cache),
            "run: cache.v is missing; expected rank 4: [slots, capacity, num_heads_kv, head_dim]");
  cache = call.paged();
  cache.k = view(call.k.data(), {4, 2, 8});
  EXPECT_EQ(refusal_of(cache),
            "run: cache.k is f32 [4, 2, 8]; expected rank 4: [num_pages, page_size, num_heads_kv, "
            "head_dim]");
  cache = call.paged();
  cache.page_table = view(call.table.data(), {2, 6});
  EXPECT_EQ(refusal_of(cache),
            "run: cache.page_table is i32 [2, 6]; expected i32 or i64 [3, max_pages]");
  cache = call.paged();
  cache.batch_idx = view(call.batch_idx.data(), {3});
  EXPECT_EQ(
      refusal_of(cache),
      "run: cache.batch_idx is given beside cache.page_table; expected one of them, the rows of "
      "the table already name each sequence's pages");
  cache = call.contiguous();
  cache.seqlens = {};
  EXPECT_EQ(refusal_of(cache), "run: cache.seqlens is missing; expected i32 or i64 [3]");
  cache.seqlens = TensorView(view(call.cos.data(), {3}));
  EXPECT_EQ(refusal_of(cache), "run: cache.seqlens is f32 [3]; expected i32 or i64 [3]");
}

TEST(KvCacheDoor, NewTokensThatDoNotFitAreRefused) {
  CacheCall call;
  Append append = call.append();
  append.v = {};
  EXPECT_EQ(refusal_of(call.contiguous(), append),
            "run: append.k is given without append.v; expected both or neither");
  append = call.append();
  append.k = view(call.new_k.data(), {3, 2, 1, 16});
  EXPECT_EQ(refusal_of(call.contiguous(), append),
            "run: append.k is f32 [3, 2, 1, 16]; expected f32 [3, 2, 2, 8]");
  KvCache cache = call.contiguous();
  cache.v = view(static_cast<const float*>(call.v.data()), {4, 16, 2, 6});
  EXPECT_EQ(refusal_of(cache), "(not refused)");
  EXPECT_EQ(refusal_of(cache, call.append()),
            "run: cache.v is read-only; expected a view of writable memory");
}

TEST(KvCacheDoor, NewValuesAreThoseOfTheKeysWhereTheCacheHasThemOnce) {
  CacheCall call;
  KvCache cache = call.contiguous();
  cache.v = cache.k;
  Append append = call.append();
  EXPECT_EQ(refusal_of(cache, append),
            "run: append.v is given and cache.v is the first columns of cache.k; expected append.k "
            "alone, whose first columns become the values");
  append.v = {};
  EXPECT_EQ(refusal_of(cache, append), "(not refused)");
  EXPECT_EQ(refusal_of(cache, append, call.rotary()),
            "run: rotary is given, append.k has the values in its first columns, and rotary would "
            "turn them; expected keys and queries whose last columns are turned already");
  append.k = {};
  append.v = call.append().v;
  EXPECT_EQ(refusal_of(cache, append),
            "run: append.v is given and cache.v is the first columns of cache.k; expected append.k "
            "alone, whose first columns become the values");
}

TEST(KvCacheDoor, RotationsOutOfRangeAreRefused) {
  CacheCall call;
  Rotary rotary = call.rotary();
  EXPECT_EQ(refusal_of(call.contiguous(), call.append(), rotary), "(not refused)");
  rotary.cos = view(call.cos.data(), {10, 4});
  EXPECT_EQ(refusal_of(call.contiguous(), call.append(), rotary),
            "run: rotary.sin is f32 [16, 4]; expected f32 [10, 4]");
  rotary.sin = view(call.sin.data(), {10, 4});
  EXPECT_EQ(
      refusal_of(call.contiguous(), call.append(), rotary),
      "run: rotary.cos has 10 rows; expected at least 11, since sequence 2 has a new token at "
      "position 10");
  rotary.positions = view(call.positions.data(), {3, 2});
  EXPECT_EQ(refusal_of(call.contiguous(), call.append(), rotary),
            "run: rotary.positions[2, 0] is 14; expected 0 to 9, the rows of rotary.cos");
  rotary = call.rotary();
  rotary.positions = view(call.positions.data(), {2, 3});
  EXPECT_EQ(refusal_of(call.contiguous(), call.append(), rotary),
            "run: rotary.positions is i32 [2, 3]; expected i32 or i64 [3, 2]");
  rotary = {.cos = view(call.cos.data(), {10, 5}), .sin = view(call.sin.data(), {10, 5})};
  EXPECT_EQ(refusal_of(call.contiguous(), {}, rotary),
            "run: rotary.cos is f32 [10, 5], for a rotary_dim of 2 x 5; expected at most 8, the "
            "head_dim_qk of cache.k");
}

// ---- packed queries and new tokens ----

/// Queries of 2, 0 and 3 tokens in a tensor of 6 rows, new tokens alike.
struct PackedCall : CacheCall {
  std::vector<float> q = std::vector<float>(6 * 4 * 8), out = std::vector<float>(6 * 4 * 6);
  std::vector<std::int32_t> offsets = {0, 2, 2, 5};
  std::vector<std::int64_t> new_offsets = {0, 2, 2, 5};

  Append packed_append() {
    return {.k = view(new_k.data(), {6, 2, 8}),
            .v = view(new_v.data(), {6, 2, 6}),
            .cu_seqlens = view(new_offsets.data(), {4})};
  }
  AttentionDecode args() {
    return {.q = view(q.data(), {6, 4, 8}),
            .cache = contiguous(),
            .append = packed_append(),
            .out = view(out.data(), {6, 4, 6}),
            .mask = MaskMod(),
            .cu_seqlens_q = view(offsets.data(), {4})};
  }
};

std::string refusal_of(const AttentionDecode& args) {
  return refusal([&] {
    const std::int64_t batch = decode_batch(args, "run");
    validate_query_offsets(args, "run");
    validate_cache(args.cache, args.append, args.rotary, batch, "run");
    const Problem problem = decode_problem(args, 2048, 1, "run");
    validate_decode(validate_decode_problem(problem, cache_layout(args), "run"), args, "run");
  });
}

TEST(PackedDecode, OffsetsSayWhoGainsWhat) {
  PackedCall call;
  EXPECT_EQ(refusal_of(call.args()), "(not refused)");
  EXPECT_EQ(validate_cache(call.contiguous(), call.packed_append(), {}, 3, "run"), 12);
  const SequenceRows rows = new_tokens(call.packed_append());
  EXPECT_EQ(rows.total(3), 5);
  EXPECT_EQ(rows.count(1), 0);
  for (std::int64_t row = 0; row < 5; ++row) {
    const SequenceRows::Token token = rows.token(row, 3);
    EXPECT_EQ(token.sequence, row < 2 ? 0 : 2);
    EXPECT_EQ(token.index, row < 2 ? row : row - 2);
  }
}

TEST(PackedDecode, SequencesThatGainNothingMaySharePlaces) {
  PackedCall call;
  AttentionDecode args = call.args();
  call.batch_idx = {3, 3, 1};
  args.cache.batch_idx = view(call.batch_idx.data(), {3});
  EXPECT_EQ(refusal_of(args), "(not refused)");
  call.new_offsets = {0, 2, 3, 5};
  EXPECT_EQ(refusal_of(args),
            "run: cache.batch_idx[1] is 3, as cache.batch_idx[0]; expected a slot of its own for "
            "every sequence that tokens are appended to");
}

TEST(PackedDecode, OffsetsThatLieAreRefused) {
  const std::pair<std::function<void(PackedCall&, AttentionDecode&)>, std::string> faults[] = {
      {[](PackedCall& c, AttentionDecode&) { c.offsets[0] = 1; },
       "run: cu_seqlens_q starts at 1; expected 0"},
      {[](PackedCall& c, AttentionDecode&) { c.offsets[2] = 1; },
       "run: cu_seqlens_q[2] is 1 after 2; expected offsets that never decrease"},
      {[](PackedCall& c, AttentionDecode&) { c.offsets[3] = 7; },
       "run: cu_seqlens_q ends at 7; expected at most 6, the packed rows"},
      {[](PackedCall&, AttentionDecode& a) { a.max_seqlen_q = 2; },
       "run: cu_seqlens_q gives sequence 2 a length of 3; expected at most 2, max_seqlen_q"},
      {[](PackedCall&, AttentionDecode& a) { a.max_seqlen_q = -1; },
       "run: max_seqlen_q is -1; expected 0 or more"},
      {[](PackedCall& c, AttentionDecode& a) {
         a.cu_seqlens_q = TensorView(view(c.cos.data(), {4}));
       },
       "run: cu_seqlens_q is f32 [4]; expected i32 or i64 [batch + 1]"},
      {[](PackedCall& c, AttentionDecode& a) { a.cu_seqlens_q = view(c.offsets.data(), {0}); },
       "run: cu_seqlens_q is i32 [0]; expected i32 or i64 [batch + 1]"},
      {[](PackedCall& c, AttentionDecode& a) {
         a.q = view(c.q.data(), {1, 6, 4, 8});
       },
       "run: q is f32 [1, 6, 4, 8]; expected rank 3: [total_q, num_heads_q, head_dim_qk] (packed: "
       "cu_seqlens_q is given)"},
      {[](PackedCall&, AttentionDecode& a) { a.cu_seqlens_q = {}; },
       "run: q is f32 [6, 4, 8]; expected rank 4: [batch, seqlen_q, num_heads_q, head_dim_qk]"},
      {[](PackedCall& c, AttentionDecode& a) {
         a.lse = view(c.cos.data(), {6, 4});
       },
       "run: lse is f32 [6, 4]; expected f32 [4, 6]"},
      {[](PackedCall& c, AttentionDecode&) { c.new_offsets[1] = 3; },
       "run: append.cu_seqlens[2] is 2 after 3; expected offsets that never decrease"},
      {[](PackedCall&, AttentionDecode& a) { a.append.cu_seqlens = {}; },
       "run: append.k is f32 [6, 2, 8]; expected rank 4: [batch, seqlen_new, num_heads_kv, "
       "head_dim_qk], or packed, with cu_seqlens"},
      {[](PackedCall& c, AttentionDecode& a) { a.append.k = c.append().k; },
       "run: append.k is f32 [3, 2, 2, 8]; expected rank 3: [total_new, num_heads_kv, "
       "head_dim_qk] (packed: append.cu_seqlens is given)"},
      {[](PackedCall&, AttentionDecode& a) { a.append.k = a.append.v = {}; },
       "run: append.cu_seqlens is given without append.k; expected new tokens"},
      {[](PackedCall& c, AttentionDecode&) { c.seqlens[2] = 14; },
       "run: cache.seqlens[2] is 14 and 3 more are appended; expected at most 16 rows in all, the "
       "capacity of a slot"},
      {[](PackedCall& c, AttentionDecode& a) {
         a.out = view(c.out.data(), {6, 4, 6});
         a.cu_seqlens_q = view(reinterpret_cast<const std::int32_t*>(c.out.data()), {4});
       },
       "run: out overlaps cu_seqlens_q; expected memory of its own"},
  };
  for (const auto& [spoil, expected] : faults) {
    PackedCall call;
    AttentionDecode args = call.args();
    spoil(call, args);
    EXPECT_EQ(refusal_of(args), expected);
  }
  PackedCall dense;
  AttentionDecode args = dense.args();
  args.q = view(dense.q.data(), {3, 2, 4, 8});
  args.cu_seqlens_q = {};
  args.max_seqlen_q = 2;
  EXPECT_EQ(refusal_of(args),
            "run: max_seqlen_q is given without cu_seqlens_q; expected packed queries");
}

TEST(PackedDecode, PositionsServeAQueryAndTheNewTokenInItsPlace) {
  PackedCall call;
  AttentionDecode args = call.args();
  args.rotary = call.rotary();
  EXPECT_EQ(refusal_of(args), "(not refused)");
  call.positions = {0, 1, 13, 14, 15, 99};  // the last one of nobody
  args.rotary->positions = view(call.positions.data(), {6});
  EXPECT_EQ(refusal_of(args), "(not refused)");
  call.positions[3] = 16;
  EXPECT_EQ(refusal_of(args),
            "run: rotary.positions[3] is 16; expected 0 to 15, the rows of rotary.cos");
  args.append = {};
  EXPECT_EQ(refusal_of(args),
            "run: rotary.positions[3] is 16; expected 0 to 15, the rows of rotary.cos");
  args.rotary->positions = view(call.positions.data(), {3, 2});
  EXPECT_EQ(refusal_of(args),
            "run: rotary.positions is i32 [3, 2]; expected i32 or i64 [6], one for every query");
  args = call.args();
  args.rotary = call.rotary();
  args.rotary->positions = view(call.positions.data(), {6});
  call.positions[3] = 15;
  call.new_offsets = {0, 1, 2, 5};
  EXPECT_EQ(refusal_of(args),
            "run: rotary.positions is given, and append.cu_seqlens[1] is 1 where cu_seqlens_q has "
            "2; expected equal offsets: a position serves a query and a new token");
  args.rotary->positions = {};
  EXPECT_EQ(refusal_of(args), "(not refused)");
}

TEST(PackedDecode, OffsetsDoNotAskForAnotherPlanButTheirBoundDoes) {
  PackedCall call;
  const auto key = [&](const AttentionDecode& args) {
    return decode_key(decode_problem(args, 2048, 1, "run"), cache_layout(args));
  };
  const AttentionDecode args = call.args();
  const expr::Digest before = key(args);
  call.offsets = {0, 0, 1, 1};
  EXPECT_EQ(key(args), before);
  AttentionDecode bounded = args;
  bounded.max_seqlen_q = 3;
  EXPECT_NE(key(bounded), before);
  bounded.max_seqlen_q = 6;
  const expr::Digest whole = key(bounded);
  bounded.max_seqlen_q = 100;  // more than there are
  EXPECT_EQ(key(bounded), whole);
}

TEST(KvCacheDoor, RotationsWiderThanAnyHeadAreRefused) {
  std::vector<float> rows(1200);
  const std::int32_t length = 0;
  const TensorView row = view(rows.data(), {1, 1, 1, 1200});
  const TensorView table = view(rows.data(), {2, 300});
  EXPECT_EQ(
      refusal([&] {
        validate_cache({.k = row, .v = row, .seqlens = view(&length, {1})}, {},
                       Rotary{.cos = table, .sin = table}, 1, "run");
      }),
      "run: rotary.cos is f32 [2, 300], for a rotary_dim of 2 x 300; expected at most 512, the "
      "widest head");
}

/// The same tensor at an address of a GPU, which faults where the host reads it.
TensorView there(const TensorView& host) {
  if (!host) return host;
  TensorSpec spec = host.spec();
  spec.device = Device::cuda(0);
  return {reinterpret_cast<void*>(std::uintptr_t{4096}), spec};
}

KvCache there(const KvCache& host) {
  return {.k = there(host.k),
          .v = there(host.v),
          .page_table = there(host.page_table),
          .seqlens = there(host.seqlens),
          .batch_idx = there(host.batch_idx),
          .left_padding = there(host.left_padding),
          .page_indptr = there(host.page_indptr),
          .page_indices = there(host.page_indices)};
}

TEST(KvCacheDoor, WhatTensorsOfAGpuHoldIsNotRead) {
  CacheCall call;
  const Append append{.k = there(call.append().k), .v = there(call.append().v)};
  Rotary rotary{.cos = there(call.rotary().cos), .sin = there(call.rotary().sin)};
  EXPECT_EQ(validate_cache(there(call.paged()), append, rotary, 3, "run"), 4 * 4);
  rotary.positions = there(view(call.positions.data(), {3, 2}));
  KvCache slots = call.contiguous();
  slots.batch_idx = view(call.batch_idx.data(), {3});
  slots.left_padding = view(call.left_padding.data(), {3});
  EXPECT_EQ(validate_cache(there(slots), append, rotary, 3, "run"), 16);
  // As many as all pages of the list hold.
  EXPECT_EQ(validate_cache(there(call.listed()), append, rotary, 3, "run"), 9 * 4);
  PackedCall packed;
  Append tokens = packed.packed_append();
  tokens = {.k = there(tokens.k), .v = there(tokens.v), .cu_seqlens = there(tokens.cu_seqlens)};
  rotary.positions = there(view(call.positions.data(), {6}));
  EXPECT_EQ(validate_cache(there(packed.contiguous()), tokens, rotary, 3, "run"), 16);
}

TEST(KvCacheDoor, ShapesOnAGpuAreHeldToTheSameRules) {
  CacheCall call;
  KvCache cache = there(call.contiguous());
  cache.seqlens = call.contiguous().seqlens;
  EXPECT_EQ(refusal_of(cache),
            "run: cache.seqlens lives on cpu; expected memory of cuda:0, the device of the plan");
  cache.seqlens = there(view(call.seqlens.data(), {2}));
  EXPECT_EQ(refusal_of(cache), "run: cache.seqlens is i32 [2]; expected i32 or i64 [3]");
  cache = there(call.contiguous());
  const TensorView k = there(view(call.new_k.data(), {3, 17, 2, 8}));
  const TensorView v = there(view(call.new_v.data(), {3, 17, 2, 6}));
  EXPECT_EQ(refusal_of(cache, {.k = k, .v = v}),
            "run: append.k has 17 new tokens; expected at most 16, the capacity of a slot");
}

TEST(KvCacheDoor, LengthsOfCachesDoNotAskForAnotherPlan) {
  CacheCall call;
  std::vector<float> q(3 * 4 * 8), out(3 * 4 * 6);
  const auto key = [&](const KvCache& cache) {
    const AttentionDecode args{.q = view(q.data(), {3, 1, 4, 8}),
                               .cache = cache,
                               .out = view(out.data(), {3, 1, 4, 6}),
                               .mask = MaskMod()};
    const Problem problem = decode_problem(args, 2048, 1, "run");
    EXPECT_EQ(refusal([&] { validate_decode_problem(problem, cache_layout(args), "run"); }),
              "(not refused)");
    return decode_key(problem, cache_layout(args));
  };
  const expr::Digest before = key(call.contiguous());
  call.seqlens = {1, 2, 3};
  EXPECT_EQ(key(call.contiguous()), before);
  const expr::Digest of_pages = key(call.paged());
  EXPECT_NE(of_pages, before);
  // What the layout of a cache asks of kernels does.
  KvCache larger = call.paged();
  larger.k = view(call.k.data(), {8, 8, 2, 8});
  larger.v = view(call.v.data(), {8, 8, 2, 6});
  EXPECT_NE(key(larger), of_pages);
  KvCache padded = call.paged();
  padded.left_padding = view(call.left_padding.data(), {3});
  EXPECT_NE(key(padded), of_pages);
  KvCache latent = call.contiguous();
  latent.v = view(call.k.data(), {4, 16, 2, 6}, {256, 16, 8, 1});
  EXPECT_NE(key(latent), before);
}

TEST(KvCacheDoor, KeysAndValuesMayLieSideBySideInOneBuffer) {
  CacheCall call;
  std::vector<float> both(4 * 16 * 2 * 2 * 8);
  KvCache cache = call.contiguous();
  cache.k = view(both.data(), {4, 16, 2, 8}, {512, 32, 16, 1});
  cache.v = view(both.data() + 8, {4, 16, 2, 6}, {512, 32, 16, 1});
  const auto refusal_of_append = [&] {
    return refusal([&] { validate_append(cache, call.append(), {}, "run"); });
  };
  EXPECT_EQ(refusal_of_append(), "(not refused)");
  cache.v = view(both.data() + 7, {4, 16, 2, 6}, {512, 32, 16, 1});
  EXPECT_EQ(refusal_of_append(), "run: cache.v overlaps cache.k; expected memory of its own");
}

TEST(KvCacheDoor, SequencesThatCannotBeCountedAreRefused) {
  // All of them one place in memory: looking at each would take a year.
  float row = 0;
  const std::int32_t zero = 0;
  constexpr std::int64_t kBatch = std::int64_t{1} << 50;
  const KvCache cache = {.k = view(&row, {kBatch, 1, 1, 1}, {0, 0, 0, 0}),
                         .v = view(&row, {kBatch, 1, 1, 1}, {0, 0, 0, 0}),
                         .seqlens = view(&zero, {kBatch}, {0})};
  EXPECT_EQ(refusal([&] { validate_cache(cache, {}, {}, kBatch, "run"); }),
            "run: batch is 1125899906842624; expected at most 2147483647");
}

TEST(KvCacheDoor, PositionsFitIn32BitsWhateverTheRoom) {
  // One page of 2^20 rows, 2^12 times in the table: room for 2^32 rows.
  float row = 0;
  const std::int32_t page = 0;
  std::vector<std::int64_t> seqlens = {(std::int64_t{1} << 31) - 1};
  const KvCache cache = {.k = view(&row, {1, 1 << 20, 1, 1}, {0, 0, 0, 0}),
                         .v = view(&row, {1, 1 << 20, 1, 1}, {0, 0, 0, 0}),
                         .page_table = view(&page, {1, 1 << 12}, {0, 0}),
                         .seqlens = view(seqlens.data(), {1})};
  const auto refusal_of_cache = [&] {
    return refusal([&] { validate_cache(cache, {}, {}, 1, "run"); });
  };
  EXPECT_EQ(refusal_of_cache(), "(not refused)");
  seqlens[0] += 1;
  EXPECT_EQ(refusal_of_cache(),
            "run: cache.seqlens[0] is 2147483648; expected at most 2147483647 rows in all, 4096 "
            "pages of 1048576 rows");
}

}  // namespace
}  // namespace fovea::testing
