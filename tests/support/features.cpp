#include "support/features.hpp"

#include <cmath>
#include <iterator>
#include <limits>

#include "fovea/mask.hpp"

#include "support/random.hpp"

namespace fovea::testing {

namespace {

void see(Case& problem, const MaskMod& mask) { problem.mask = problem.mask && mask; }
void then(Case& problem, const ScoreMod& score) { problem.score = problem.score | score; }

/// A tensor of normal numbers, another for every feature (stream) of a case.
TensorView capture_normal(Case& problem, const std::vector<std::int64_t>& shape,
                          std::uint64_t stream) {
  const Random random(problem.seed, stream);
  return problem.capture(
      Dtype::f32, shape, [&](std::int64_t i) { return random.normal(i); }, Strides::of_any_values);
}

/// Ids that rise along a row, a few -1 among them.
TensorView capture_segments(Case& problem, std::int64_t seqlen, std::uint64_t stream) {
  const Random random(problem.seed, stream);
  constexpr std::int64_t kNumDocuments = 3;
  return problem.capture(Dtype::i32, {problem.num_sequences(), seqlen},
                         [&](std::int64_t i) -> double {
                           if (random.uniform(i) < 0.1) return -1;
                           return static_cast<double>(i % seqlen * kNumDocuments / seqlen);
                         });
}

void add_packed(Case& problem) {
  // 0: an empty sequence on either side; 1: decode; 129: one key more than a tile.
  problem.sequences = {{5, 0}, {1, 40}, {0, 3}, {7, 129}};
  problem.trailing_rows = 2;
}

void add_packed_i64(Case& problem) {
  problem.sequences = {{6, 11}, {9, 130}};
  problem.cu_seqlens_dtype = Dtype::i64;
}

void add_relative_bias(Case& problem) {
  const TensorView table = capture_normal(problem, {problem.num_heads_q, 16}, 20);
  then(problem, relative_bias(table, aligned_q_idx() - arguments().kv_idx + 8));
}

void add_dense_mask(Case& problem) {
  const Random random(problem.seed, 21);
  see(problem,
      dense_mask(problem.capture(
          Dtype::boolean, {problem.num_heads_q, problem.max_seqlen_q(), problem.max_seqlen_kv()},
          [&](std::int64_t i) { return random.uniform(i) < 0.7 ? 1 : 0; })));
}

void add_tile_mask(Case& problem) {
  const Random random(problem.seed, 24);
  constexpr std::int64_t kTileQ = 6, kTileKv = 8;
  const std::int64_t q_tiles = (problem.max_seqlen_q() + kTileQ - 1) / kTileQ;
  const std::int64_t kv_tiles = (problem.max_seqlen_kv() + kTileKv - 1) / kTileKv;
  see(problem,
      tile_mask(problem.capture(Dtype::boolean, {problem.num_heads_q, q_tiles, kv_tiles},
                                [&](std::int64_t i) { return random.uniform(i) < 0.4 ? 1 : 0; }),
                kTileQ, kTileKv));
}

void add_documents(Case& problem) {
  const TensorView q_ids = capture_segments(problem, problem.max_seqlen_q(), 22);
  const TensorView kv_ids = capture_segments(problem, problem.max_seqlen_kv(), 23);
  see(problem, documents(q_ids, kv_ids));
}

void add_prefix_lm(Case& problem) {
  see(problem, prefix_lm(problem.capture(Dtype::i64, {problem.num_sequences()}, [](std::int64_t i) {
        return static_cast<double>(7 + 5 * i);
      })));
}

void add_tree(Case& problem) {
  const std::int64_t words = (problem.max_seqlen_q() + 31) / 32;
  const Random random(problem.seed, 24);
  see(problem,
      tree(problem.capture(Dtype::i32, {problem.max_seqlen_q(), words}, [&](std::int64_t i) {
        return static_cast<double>(static_cast<std::int32_t>(random.bits(i)));
      })));
}

void add_minus_infinity_bias(Case& problem) {
  const Random random(problem.seed, 25);
  then(problem,
       bias(problem.capture(Dtype::f32, {1, 1, problem.max_seqlen_kv()}, [&](std::int64_t i) {
         return random.uniform(i) < 0.3 ? -std::numeric_limits<double>::infinity()
                                        : random.normal(i);
       })));
}

void add_score_text(Case& problem) {
  Captures captures;
  captures.tensors = {{"slopes", capture_normal(problem, {problem.num_heads_q}, 26)}};
  captures.scalars = {CapturedScalar::of("gain", 0.75)};
  then(problem, parse_score_mod("score * gain - abs(slopes[q_head]) * log(1 + abs(q_idx - kv_idx)) "
                                "+ sigmoid(float(kv_idx % 7)) * (batch + 1)",
                                captures));
}

void add_mask_text(Case& problem) {
  Captures captures;
  captures.scalars = {CapturedScalar::of("stride", 5)};
  see(problem, parse_mask_mod("(q_idx ^ kv_idx) & 3 != 0 || kv_idx // stride == q_idx // stride "
                              "|| kv_head == 1 && kv_idx % 2 == 0",
                              captures));
}

constexpr Feature kFeatures[] = {
    {"packed", "shape", add_packed},
    {"packed_i64", "shape", add_packed_i64},
    {"more_queries_than_keys", "shape",
     [](Case& c) {
       c.seqlen_q = 33;
       c.seqlen_kv = 12;
     }},
    {"decode", "shape",
     [](Case& c) {
       c.seqlen_q = 1;
       c.seqlen_kv = 300;
     }},
    // Two splits of keys, the first of 2,048; rows few enough to be walked with their keys, or in lanes of a panel.
    {"splits", "shape",
     [](Case& c) {
       c.batch = 1;
       c.seqlen_q = 2;
       c.seqlen_kv = 2051;
     },
     true},
    {"splits_of_panels", "shape",
     [](Case& c) {
       c.batch = 1;
       c.seqlen_kv = 2051;
     },
     true},
    // Two panels of any target, the second of one row; two tiles of keys.
    {"panels", "shape", [](Case& c) { c.seqlen_q = 65; }, true},
    {"gqa", "heads",
     [](Case& c) {
       c.num_heads_q = 6;
       c.num_heads_kv = 2;
     }},
    {"mqa", "heads",
     [](Case& c) {
       c.num_heads_q = 5;
       c.num_heads_kv = 1;
     }},
    {"unequal_head_dims", "head_dim",
     [](Case& c) {
       c.head_dim_qk = 24;
       c.head_dim_v = 7;
     }},
    {"wide_values", "head_dim", [](Case& c) { c.head_dim_v = 80; }},

    {"bhsd", "layout", [](Case& c) { c.layout = c.out_layout = Layout::bhsd; }},
    {"padded", "layout", [](Case& c) { c.layout = c.out_layout = Layout::padded; }},
    {"odd_offset", "layout", [](Case& c) { c.layout = c.out_layout = Layout::odd_offset; }},
    {"strided_dim", "layout", [](Case& c) { c.layout = c.out_layout = Layout::strided_dim; }},
    {"reversed", "layout", [](Case& c) { c.layout = Layout::reversed; }},
    {"shared_batch", "layout", [](Case& c) { c.layout = Layout::shared_batch; }},
    {"shared_head", "layout", [](Case& c) { c.layout = Layout::shared_head; }},

    {"other_out_dtype", "",
     [](Case& c) { c.out_dtype = c.dtype == Dtype::f32 ? Dtype::bf16 : Dtype::f32; }},
    {"f32_products", "products", [](Case& c) { c.compute_dtype = ComputeDtype::f32; }},
    {"bf16_products", "products", [](Case& c) { c.compute_dtype = ComputeDtype::bf16; }},
    {"heavy_tailed", "", [](Case& c) { c.distribution = Distribution::heavy_tailed; }},
    {"negative_scale", "scale", [](Case& c) { c.softmax_scale = -0.25F; }},
    {"zero_scale", "scale", [](Case& c) { c.softmax_scale = 0.F; }},
    {"no_statistics", "", [](Case& c) { c.wants_lse = c.wants_row_max = false; }},
    {"sinks", "", [](Case& c) { c.has_sinks = true; }},
    {"dropout", "dropout", [](Case& c) { c.dropout = kSomeDropped; }},
    {"dropout_seed", "dropout",
     [](Case& c) {
       c.dropout = kSomeDropped;
       c.reads_dropout_seed = true;
     }},
    {"dropout_places", "dropout",
     [](Case& c) {
       c.dropout = kSomeDropped;
       c.has_dropout_places = true;
     }},
    {"dropout_all", "dropout", [](Case& c) { c.dropout = {.p = 1, .seed = 7, .offset = 0}; }},

    {"softcap", "", [](Case& c) { then(c, softcap(2)); }},
    {"alibi", "", [](Case& c) { then(c, alibi(capture_normal(c, {c.num_heads_q}, 10))); }},
    {"bias", "",
     [](Case& c) {
       then(c, bias(capture_normal(c, {c.num_heads_q, c.max_seqlen_q(), c.max_seqlen_kv()}, 11)));
     }},
    {"broadcast_bias", "",
     [](Case& c) {
       then(c, bias(capture_normal(c, {c.num_heads_q, 1, 1}, 12)));
     }},
    {"relative_bias", "", add_relative_bias},
    {"minus_infinity_bias", "", add_minus_infinity_bias},
    {"score_text", "", add_score_text},

    {"causal", "", [](Case& c) { see(c, causal()); }},
    {"causal_top_left", "", [](Case& c) { see(c, causal(Align::top_left)); }},
    {"window", "", [](Case& c) { see(c, window(9, 2)); }},
    {"right_window", "", [](Case& c) { see(c, window(std::nullopt, 3, Align::top_left)); }},
    {"dense_mask", "", add_dense_mask},
    {"tile_mask", "", add_tile_mask},
    {"documents", "", add_documents},
    {"prefix_lm", "", add_prefix_lm},
    {"chunked", "", [](Case& c) { see(c, chunked(10)); }},
    {"dilated", "", [](Case& c) { see(c, dilated(3)); }},
    {"tree", "", add_tree},
    {"streaming", "", [](Case& c) { see(c, streaming(4, 20)); }},
    {"not_causal", "", [](Case& c) { see(c, !causal()); }},
    {"nothing_visible", "", [](Case& c) { see(c, mask_mod([](auto x) { return x.kv_idx < 0; })); }},
    {"mask_text", "", add_mask_text},
};

}  // namespace

std::span<const Feature> features() { return kFeatures; }

Case plain_case(Dtype dtype) {
  return {.label = "plain",
          .batch = 2,
          .seqlen_q = 9,
          .seqlen_kv = 133,
          .num_heads_q = 2,
          .num_heads_kv = 2,
          .head_dim_qk = 16,
          .head_dim_v = 16,
          .dtype = dtype};
}

}  // namespace fovea::testing
