// Problems of sm90/attention_forward with few rows: heads share a tile, keys are split. See forward_cases.hpp.
#include "kernels/forward_cases.hpp"
#include "support/features.hpp"

namespace fovea::testing {
namespace {

/// 531 keys: of 17 to 32 rows two splits, the last one cut in its first tile.
Case base_case(const char* label, std::int64_t seqlen_q, std::int64_t num_heads_q,
               std::int64_t num_heads_kv) {
  Case problem = plain_case(Dtype::bf16);
  problem.label = label;
  problem.seqlen_q = seqlen_q;
  problem.seqlen_kv = 531;
  problem.num_heads_q = num_heads_q;
  problem.num_heads_kv = num_heads_kv;
  problem.head_dim_qk = problem.head_dim_v = 64;
  return problem;
}

CacheCase base_cache(std::int64_t seqlen_q, std::int64_t num_heads_q, std::int64_t num_heads_kv,
                     std::int64_t page_size) {
  CacheCase problem;
  problem.seqlen_q = seqlen_q;
  problem.num_heads_q = num_heads_q;
  problem.num_heads_kv = num_heads_kv;
  problem.q_dtype = problem.k_dtype = problem.v_dtype = Dtype::bf16;
  problem.head_dim_qk = problem.head_dim_v = 64;
  problem.page_size = page_size;
  return problem;
}

}  // namespace

std::vector<Case> hopper_few_rows_cases() {
  // Every row of the tile is somebody's.
  Case full = base_case("hopper_rows_64", 8, 8, 1);
  full.seqlen_kv = 1051;  // three splits
  // Ten rows of each of six heads: four rows are nobody's, and queries of a head end before the ten.
  Case odd = base_case("hopper_rows_54_window", 9, 6, 1);
  odd.seqlen_kv = 1051;  // the second split is cut, and some rows see none of the first
  odd.dtype = Dtype::f16;
  odd.mask = window(300, 0);
  odd.has_sinks = true;
  odd.distribution = Distribution::heavy_tailed;
  // One head a tile: programs may read what they like.
  Case programs = base_case("hopper_rows_33_programs", 33, 2, 2);
  const TensorView slopes =
      programs.capture(Dtype::f32, {2}, [](std::int64_t i) { return 0.5 / double(i + 1); });
  const TensorView documents = programs.capture(
      Dtype::i32, {2, 531}, [](std::int64_t i) { return double(i % 531 / (90 + i / 531 * 30)); });
  const Captures captures{.tensors = {{"slopes", slopes}, {"doc", documents}}};
  programs.score = parse_score_mod("score + slopes[q_head] * (kv_idx - q_idx)", captures);
  programs.mask = parse_mask_mod("doc[batch, q_idx + 250] == doc[batch, kv_idx]", captures);
  Case dropped = base_case("hopper_rows_20_dropout", 5, 4, 1);
  dropped.dropout = kSomeDropped;
  dropped.score = softcap(2);
  dropped.mask = causal();
  // One buffer of Q, tiles of 64 keys; heads padded in the tile.
  Case wide = base_case("hopper_rows_31_wide", 31, 4, 2);
  wide.head_dim_qk = 200;
  wide.head_dim_v = 136;
  wide.wants_row_max = true;
  wide.mask = causal();
  // More splits than half a warp has lanes, columns for half of them in the second round.
  Case many = base_case("hopper_rows_4_many_splits", 2, 2, 1);
  many.batch = 1;
  many.seqlen_kv = 4400;
  many.head_dim_qk = many.head_dim_v = 192;
  Case nothing = base_case("hopper_rows_nothing_visible", 2, 16, 2);
  nothing.head_dim_qk = nothing.head_dim_v = 192;
  nothing.mask = mask_mod([](auto x) { return x.kv_idx < 0; });
  Case infinite = base_case("hopper_rows_24_infinite", 12, 4, 2);
  infinite.mask = causal();
  infinite.has_infinite_values = true;
  Case infinite_dropped = infinite;
  infinite_dropped.label = "hopper_rows_24_infinite_dropout";
  infinite_dropped.dropout = kSomeDropped;
  Case small = base_case("hopper_rows_32_small_values", 8, 4, 1);
  small.value_exponent = -66;
  Case extreme = base_case("hopper_rows_33_extreme", 33, 2, 2);
  extreme.seqlen_kv = 1051;
  extreme = with_extreme_scores(std::move(extreme));
  return {full,    odd,      programs,         dropped, wide,   many,
          nothing, infinite, infinite_dropped, small,   extreme};
}

std::vector<NamedCacheCase> hopper_few_rows_cache_cases() {
  // Nothing; a tile of 128 and a split of 512, one less and one more; three splits.
  CacheCase pages = base_cache(4, 8, 1, 16);
  pages.head_dim_qk = pages.head_dim_v = 128;
  pages.seqlens = {0, 127, 128, 129, 512, 513, 1100};
  CacheCase slots = base_cache(7, 6, 2, 0);
  slots.seqlens = {0, 1, 511, 600, 64};
  slots.has_batch_idx = true;
  slots.has_left_padding = true;
  slots.has_heads_first = true;
  slots.mask = window(270, 0);
  slots.has_sinks = true;
  slots.index_dtype = Dtype::i64;
  slots.q_dtype = slots.k_dtype = slots.v_dtype = Dtype::f16;
  CacheCase wide = base_cache(3, 5, 1, 8);
  wide.head_dim_qk = wide.head_dim_v = 256;
  wide.seqlens = {0, 65, 300};
  wide.score = parse_score_mod("score + 0.25 * (kv_idx - q_idx)");
  // Some rows see it, others do not.
  CacheCase poisoned = base_cache(6, 4, 1, 16);
  poisoned.seqlens = {300, 1030};
  poisoned.nan_key = 297;
  CacheCase slot_poisoned = poisoned;
  slot_poisoned.page_size = 0;
  // Packed queries: of each sequence those it has, up to 64 rows; behind them in the tile are the next one's. Some have
  // none, some no keys.
  CacheCase packed = base_cache(0, 4, 1, 16);
  packed.seqlens = {1100, 8, 71, 0, 530, 17};
  packed.packed_q = {9, 0, 16, 2, 1, 3};
  packed.packed_new = packed.packed_q;
  packed.packed_new[3] = 0;
  packed.has_max_seqlen_q = packed.has_sinks = packed.has_page_list = true;
  packed.mask = causal();
  CacheCase packed_slots = packed;
  packed_slots.num_heads_q = 6;  // ten queries a tile: four of its rows are nobody's
  packed_slots.packed_q = packed_slots.packed_new = {10, 0, 7, 2, 1, 3};
  packed_slots.packed_new[3] = 0;
  packed_slots.has_page_list = false;
  packed_slots.page_size = 0;
  packed_slots.has_batch_idx = packed_slots.has_left_padding = true;
  packed_slots.nan_key = 3;
  packed_slots.mask = window(270, 0);
  packed_slots.index_dtype = Dtype::i64;
  packed_slots.q_dtype = packed_slots.k_dtype = packed_slots.v_dtype = Dtype::f16;
  // A head a tile, up to 33 queries of it; 32 splits at most.
  CacheCase packed_heads = base_cache(0, 2, 2, 0);
  packed_heads.seqlens = {40, 600};
  packed_heads.packed_q = {20, 5};
  packed_heads.has_max_seqlen_q = true;
  packed_heads.score = parse_score_mod("score + 0.25 * (q_head + 1) * (kv_idx - q_idx)");
  return {{"hopper_few_pages_of_16", pages},
          {"hopper_few_slots", slots},
          {"hopper_few_wide", wide},
          {"hopper_few_pages_nan", poisoned},
          {"hopper_few_slots_nan", slot_poisoned},
          {"hopper_few_packed", packed},
          {"hopper_few_packed_slots", packed_slots},
          {"hopper_few_packed_heads", packed_heads}};
}

}  // namespace fovea::testing
