// Problems over caches of codes: see forward_cases.hpp.
#include <string>
#include <vector>

#include "kernels/forward_cases.hpp"

namespace fovea::testing {
namespace {

CacheCase base_case(Dtype k, Dtype v, std::int64_t page_size) {
  CacheCase problem;
  problem.num_heads_q = 4;
  problem.num_heads_kv = 2;
  problem.head_dim_qk = problem.head_dim_v = 64;
  problem.q_dtype = Dtype::bf16;
  problem.k_dtype = k;
  problem.v_dtype = v;
  problem.page_size = page_size;
  return problem;
}

/// The same over codes of e4m3, which have a NaN themselves, by scales of the call, which have none.
CacheCase of_codes_with_nan(CacheCase problem) {
  problem.k_dtype = problem.v_dtype = Dtype::e4m3;
  problem.has_given_scales = true;
  return problem;
}

/// Two row tiles, of which some rows see the key that is not finite.
CacheCase poisoned_chunk(CacheCase problem) {
  problem.seqlens = {300, 120};
  problem.seqlen_q = 140;
  problem.mask = window(90, 0);
  problem.nan_key = 110;
  return problem;
}

/// Chunks of prompts, single tokens, a sequence of which nobody asks, and one whose queries see no key.
CacheCase packed_chunks(CacheCase problem) {
  problem.head_dim_qk = problem.head_dim_v = 64;
  problem.seqlens = {300, 65, 129, 150, 0, 200};
  problem.packed_q = {150, 1, 1, 0, 3, 70};
  problem.packed_new = {150, 1, 1, 0, 0, 70};
  problem.has_max_seqlen_q = problem.has_sinks = true;
  return problem;
}

}  // namespace

std::vector<NamedCacheCase> coded_cache_cases() {
  // Few rows of f16: splits. Tiles of 32 keys, rows behind padding, heads of a row apart.
  CacheCase slots = base_case(Dtype::e4m3, Dtype::i8, 0);
  slots.q_dtype = Dtype::f16;
  slots.seqlen_q = 3;
  slots.seqlens = {290, 31, 32, 33};
  slots.head_dim_qk = slots.head_dim_v = 128;
  slots.has_batch_idx = slots.has_left_padding = slots.has_heads_first = true;
  slots.mask = window(40, 0);
  slots.has_sinks = true;
  CacheCase given = base_case(Dtype::e4m3, Dtype::e4m3, 16);
  given.seqlens = {300, 65, 5};
  given.has_given_scales = given.has_page_list = true;
  given.head_dim_v = 96;
  given.index_dtype = Dtype::i64;
  // Rows of no whole 16 bytes, pages of no whole tile: codes are read one by one.
  CacheCase gathered = base_case(Dtype::i8, Dtype::e4m3, 3);
  gathered.seqlens = {70, 7};
  gathered.seqlen_q = 2;
  gathered.head_dim_qk = 40;
  gathered.head_dim_v = 23;
  gathered.score = softcap(3);
  // More rows than a CTA has, of a program that scales scores one by one.
  CacheCase many_rows = base_case(Dtype::i8, Dtype::e4m3, 8);
  many_rows.seqlens = {150, 70, 40};
  many_rows.seqlen_q = 40;
  many_rows.score = parse_score_mod("score + float(q_head + 1) / 16 * (kv_idx - q_idx)");
  // Chunks of prompts beside single tokens, and what they append.
  CacheCase packed = base_case(Dtype::e4m3, Dtype::e4m3, 16);
  packed.seqlens = {90, 3, 71, 0};
  packed.packed_q = packed.packed_new = {40, 1, 3, 0};
  packed.has_sinks = true;
  // Of values some rows see it, others do not: passes.
  CacheCase poisoned = base_case(Dtype::i8, Dtype::i8, 16);
  poisoned.seqlens = {120, 90};
  poisoned.seqlen_q = 5;
  poisoned.mask = window(30, 0);
  poisoned.nan_key = 87;
  const CacheCase poisoned_codes = of_codes_with_nan(poisoned);
  CacheCase wide = base_case(Dtype::i8, Dtype::i8, 16);
  wide.seqlens = {70, 33};
  wide.head_dim_qk = 192;
  wide.head_dim_v = 256;
  return {{"coded_slots", slots},
          {"coded_given_scales", given},
          {"coded_gathered", gathered},
          {"coded_many_rows", many_rows},
          {"coded_packed", packed},
          {"coded_nan_in_scales", poisoned},
          {"coded_nan_in_codes", poisoned_codes},
          {"coded_wide", wide}};
}

std::vector<NamedCacheCase> coded_decode_cases() {
  // Nothing; one key; a slice of 16 keys, a round of four warps, a split of 256, one more and one less.
  CacheCase base = base_case(Dtype::i8, Dtype::i8, 16);
  base.seqlens = {0, 1, 15, 16, 17, 63, 65, 255, 257, 523};
  // As many rows as there may be, splits of 512 keys, pages of no whole slice.
  CacheCase many_rows = base_case(Dtype::e4m3, Dtype::i8, 24);
  many_rows.num_heads_q = 8;
  many_rows.seqlen_q = 4;
  many_rows.head_dim_qk = 128;
  many_rows.seqlens = {1030, 8, 71};
  many_rows.mask = window(270, 0);
  many_rows.has_sinks = true;
  many_rows.index_dtype = Dtype::i64;
  CacheCase slots = base_case(Dtype::i8, Dtype::e4m3, 0);
  slots.head_dim_v = 128;
  slots.seqlens = {523, 8, 71};
  slots.has_batch_idx = slots.has_left_padding = slots.has_heads_first = true;
  slots.score = parse_score_mod("score + float(q_head + 1) / 16 * (kv_idx - q_idx)");
  CacheCase given = base_case(Dtype::e4m3, Dtype::e4m3, 16);
  given.head_dim_qk = given.head_dim_v = 128;
  given.seqlens = {300, 65, 5};
  given.has_given_scales = given.has_page_list = true;
  CacheCase packed = base_case(Dtype::i8, Dtype::i8, 16);
  packed.seqlens = {523, 8, 71, 0, 300, 17};
  packed.packed_q = {1, 0, 4, 2, 1, 3};
  packed.packed_new = {1, 0, 4, 0, 1, 3};
  packed.has_max_seqlen_q = packed.has_sinks = true;
  // Some rows see it, others do not.
  CacheCase poisoned = base_case(Dtype::i8, Dtype::i8, 16);
  poisoned.seqlens = {300, 120};
  poisoned.seqlen_q = 5;
  poisoned.mask = window(182, 0);
  poisoned.nan_key = 115;
  const CacheCase poisoned_codes = of_codes_with_nan(poisoned);
  return {{"coded_decode_pages_of_16", base},
          {"coded_decode_pages_of_24", many_rows},
          {"coded_decode_slots", slots},
          {"coded_decode_given_scales", given},
          {"coded_decode_packed", packed},
          {"coded_decode_nan_in_scales", poisoned},
          {"coded_decode_nan_in_codes", poisoned_codes}};
}

std::vector<NamedCacheCase> hopper_coded_cases() {
  std::vector<NamedCacheCase> cases = coded_decode_cases();
  for (NamedCacheCase& each : cases) each.label = "hopper_" + each.label;
  const auto add = [&cases](const std::string& label, const CacheCase& problem) {
    cases.push_back({"hopper_coded_" + label, problem});
  };
  // Around a slice of 32 keys, a box of 128 and a split of 256; nothing.
  CacheCase slots = base_case(Dtype::i8, Dtype::i8, 0);
  slots.head_dim_qk = slots.head_dim_v = 128;
  slots.seqlens = {0, 1, 31, 33, 96, 127, 129, 255, 257, 523};
  slots.has_batch_idx = true;
  add("slots_of_all_lengths", slots);
  // Of some boxes not all slices are seen.
  CacheCase half = base_case(Dtype::e4m3, Dtype::i8, 0);
  half.q_dtype = Dtype::f16;
  half.head_dim_qk = 128;
  half.seqlen_q = 3;
  half.seqlens = {523, 290, 40};
  half.mask = window(70, 0);
  half.has_left_padding = half.has_sinks = true;
  add("f16", half);
  // Boxes of 8 keys, four of a slice.
  CacheCase pages_of_8 = half;
  pages_of_8.page_size = 8;
  pages_of_8.has_left_padding = false;
  pages_of_8.head_dim_qk = 64;
  pages_of_8.head_dim_v = 128;
  pages_of_8.k_dtype = Dtype::i8;
  pages_of_8.v_dtype = Dtype::e4m3;
  add("f16_pages_of_8", pages_of_8);
  // What f16 has no numbers for: queries, and scales of values, which rise and fall by 2^60.
  CacheCase rising = base_case(Dtype::i8, Dtype::i8, 64);
  rising.seqlens = {300, 64};
  rising.q_magnitude = 0x1p60;
  rising.value_growth = 0.2;
  CacheCase falling = base_case(Dtype::e4m3, Dtype::e4m3, 0);
  falling.seqlens = {300, 64};
  falling.q_magnitude = 0x1p-60;
  falling.value_growth = -0.2;
  add("rising_values", rising);
  // So slowly that sums before a rise still count; a warp has two slices of a split.
  CacheCase climbing = base_case(Dtype::i8, Dtype::i8, 0);
  climbing.num_heads_q = 6;
  climbing.num_heads_kv = 3;
  climbing.seqlen_q = 4;
  climbing.seqlens = {520};
  climbing.value_growth = 0.01;
  add("climbing_values", climbing);
  add("falling_values", falling);
  // Maxima that rise by more than their slack, each row's where others' do not.
  CacheCase growing = climbing;
  growing.score = parse_score_mod("score * 16.0");
  growing.value_growth = 0;
  add("growing_scores", growing);
  // Two groups of splits of 512 keys, and what is less than one.
  CacheCase groups = base_case(Dtype::i8, Dtype::e4m3, 0);
  groups.num_heads_q = 6;
  groups.num_heads_kv = 3;
  groups.seqlen_q = 4;
  groups.seqlens = {2081, 511, 0};
  add("groups", groups);
  add("splits", groups);
  // The same of more rows than an n of mma.sync has: sixteen of a warp.
  const auto add_many = [&add](const std::string& label, CacheCase problem, std::int64_t seqlen_q) {
    problem.seqlen_q = seqlen_q;
    add("many_rows_" + label, problem);
  };
  add_many("f16", half, 5);
  add_many("rising_values", rising, 5);
  add_many("climbing_values", climbing, 6);
  add_many("falling_values", falling, 5);
  add_many("groups", groups, 5);
  add_many("splits", groups, 5);
  // No more than one query has: rows that do not exist, and splits that are groups' all the same.
  CacheCase one_row = groups;
  one_row.num_heads_q = 3;
  one_row.seqlen_q = 1;
  one_row.seqlens = {2081, 300};
  add("one_row_groups", one_row);
  // A row of two splits goes key by key.
  CacheCase poisoned = groups;
  poisoned.seqlens = {1060};
  poisoned.nan_key = 530;
  poisoned.mask = window(527, 0);
  add("groups_nan", poisoned);
  return cases;
}

std::vector<NamedCacheCase> hopper_chunk_cases() {
  // Nothing; one key; a tile of 128 and a key; tiles enough for all buffers to be used again. Most rows of short
  // sequences see nothing.
  const auto chunk = [](Dtype k, Dtype v, std::int64_t page_size) {
    CacheCase problem = base_case(k, v, page_size);
    problem.seqlens = {0, 1, 129, 650};
    problem.seqlen_q = 70;
    problem.head_dim_qk = problem.head_dim_v = 128;
    return problem;
  };
  CacheCase pages = chunk(Dtype::i8, Dtype::i8, 16);
  pages.has_sinks = true;
  // Two row tiles; keys begin at any row of a slot, and end where the next sequence's padding begins.
  CacheCase slots = chunk(Dtype::e4m3, Dtype::i8, 0);
  slots.q_dtype = Dtype::f16;
  slots.seqlens = {300, 391, 128};
  slots.seqlen_q = 200;
  slots.head_dim_qk = 64;
  slots.mask = window(100, 0);
  slots.has_batch_idx = slots.has_left_padding = slots.has_heads_first = true;
  // Keys begin inside a page; panels of 64 codes that rows do not fill.
  CacheCase odd_pages = chunk(Dtype::i8, Dtype::e4m3, 11);
  odd_pages.seqlens = {256, 200, 391};
  odd_pages.head_dim_qk = 96;
  odd_pages.head_dim_v = 16;
  odd_pages.has_left_padding = true;
  odd_pages.index_dtype = Dtype::i64;
  odd_pages.score = parse_score_mod("score + float(q_head + 1) / 16 * (kv_idx - q_idx)");
  // Scales of whole heads of a sequence.
  CacheCase given = chunk(Dtype::e4m3, Dtype::e4m3, 1);
  given.seqlens = {300, 130};
  given.head_dim_v = 80;
  given.has_given_scales = given.has_page_list = true;
  given.score = softcap(3);
  given.mask = MaskMod();
  // Chunks of prompts beside single tokens, and what they append.
  const CacheCase packed = packed_chunks(chunk(Dtype::i8, Dtype::i8, 16));
  // Of values some rows see it, others do not: passes.
  const CacheCase poisoned = poisoned_chunk(chunk(Dtype::i8, Dtype::i8, 16));
  CacheCase poisoned_codes = of_codes_with_nan(poisoned);
  poisoned_codes.page_size = 0;
  // Scales that one fma does not take.
  CacheCase huge = chunk(Dtype::i8, Dtype::i8, 16);
  huge.seqlens = {300};
  huge.value_growth = 0.4;
  return {{"hopper_chunk_pages", pages},
          {"hopper_chunk_slots", slots},
          {"hopper_chunk_odd_pages", odd_pages},
          {"hopper_chunk_given_scales", given},
          {"hopper_chunk_packed", packed},
          {"hopper_chunk_huge_scales", huge},
          {"hopper_chunk_nan_in_scales", poisoned},
          {"hopper_chunk_nan_in_codes", poisoned_codes}};
}

std::vector<NamedCacheCase> hopper_converted_cases() {
  std::vector<NamedCacheCase> cases;
  for (NamedCacheCase each : hopper_chunk_cases()) {
    each.label = "hopper_converted" + each.label.substr(std::string("hopper_chunk").size());
    each.problem.has_left_padding = false;
    if (!each.problem.mask.is_all_visible()) each.problem.mask = causal();
    cases.push_back(each);
  }
  return cases;
}

std::vector<NamedCacheCase> hopper_rounded_cache_cases() {
  std::vector<NamedCacheCase> cases;
  const auto add = [&](const std::string& label, CacheCase problem, const char* recipe) {
    problem.quant = parse_quantization(recipe);
    cases.push_back({"hopper_rounded_" + label, problem});
  };
  // Nothing; one key, whose tile holds no other; a tile of 128 and a key; five tiles, more than are buffered.
  const auto chunk = [](Dtype k, Dtype v, std::int64_t page_size) {
    CacheCase problem = base_case(k, v, page_size);
    problem.seqlens = {0, 1, 129, 530};
    problem.seqlen_q = 70;
    problem.head_dim_qk = problem.head_dim_v = 128;
    return problem;
  };
  CacheCase pages = chunk(Dtype::i8, Dtype::i8, 16);
  pages.has_sinks = true;
  add("pages", pages, "fast");
  add("pages_accurate", pages, "accurate");
  // Keys begin at any row of a slot; panels of codes that rows do not fill; two row tiles.
  CacheCase slots = chunk(Dtype::e4m3, Dtype::i8, 0);
  slots.q_dtype = Dtype::f16;
  slots.seqlens = {300, 391, 128};
  slots.seqlen_q = 140;
  slots.head_dim_qk = 48;
  slots.head_dim_v = 64;
  slots.mask = window(100, 0);
  slots.has_batch_idx = slots.has_left_padding = slots.has_heads_first = true;
  add("slots", slots, "fast");
  add("slots_accurate", slots, "accurate");
  // Keys begin inside a page of no power of two, whose list has room for more.
  CacheCase odd_pages = chunk(Dtype::i8, Dtype::e4m3, 11);
  odd_pages.seqlens = {256, 200, 391};
  odd_pages.head_dim_qk = 64;
  odd_pages.has_left_padding = odd_pages.has_page_list = true;
  odd_pages.index_dtype = Dtype::i64;
  odd_pages.score = parse_score_mod("score + float(q_head + 1) / 16 * (kv_idx - q_idx)");
  add("odd_pages", odd_pages, "fast,smooth_v=sequence");
  // Scales of whole heads of a sequence; rows of q and k are rotated.
  CacheCase given = chunk(Dtype::e4m3, Dtype::e4m3, 1);
  given.seqlens = {300, 130};
  given.head_dim_qk = given.head_dim_v = 64;
  given.has_given_scales = true;
  given.mask = MaskMod();
  add("given_scales", given, "fast,hadamard=yes");
  // Chunks of prompts beside single tokens, what they append, and sequences that nobody asks for.
  const CacheCase packed = packed_chunks(chunk(Dtype::i8, Dtype::i8, 16));
  add("packed", packed, "fast");
  add("packed_accurate", packed, "accurate");
  // Of values some rows see it, others do not: passes, which look them up in the cache.
  const CacheCase poisoned = poisoned_chunk(chunk(Dtype::i8, Dtype::i8, 16));
  add("nan_in_scales", poisoned, "fast");
  CacheCase poisoned_codes = of_codes_with_nan(poisoned);
  poisoned_codes.page_size = 0;
  poisoned_codes.has_left_padding = true;
  add("nan_in_codes", poisoned_codes, "fast");
  add("nan_in_codes_accurate", poisoned_codes, "accurate");
  // Elements, and beside codes.
  CacheCase elements = chunk(Dtype::bf16, Dtype::bf16, 16);
  elements.nan_key = 100;
  add("elements", elements, "fast");
  CacheCase beside = chunk(Dtype::i8, Dtype::bf16, 0);
  beside.head_dim_v = 64;
  add("elements_beside_codes", beside, "accurate");
  return cases;
}

}  // namespace fovea::testing
