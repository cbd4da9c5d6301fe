// Problems of sm90/decode: see forward_cases.hpp.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "cuda/forward/choices.hpp"
#include "cuda/forward/sm90_decode.hpp"
#include "kernels/choice_cases.hpp"
#include "kernels/forward_cases.hpp"
#include "support/features.hpp"

namespace fovea::testing {

namespace {

/// Of more rows than a warp has: problems that sm90/attention_forward has too.
constexpr std::array kManyRows = {
    "rows_64",          "rows_54_window",           "rows_33_programs",     "rows_20_dropout",
    "rows_24_infinite", "rows_24_infinite_dropout", "rows_32_small_values", "rows_33_extreme"};
/// Of caches.
constexpr std::array kManyRowsOfCaches = {"few_pages_of_16", "few_slots",  "few_pages_nan",
                                          "few_slots_nan",   "few_packed", "few_packed_slots",
                                          "few_packed_heads"};

/// Its label from the kernel's name on.
std::string_view case_of_hopper(std::string_view label) {
  return label.substr(label.find('_') + 1);
}

bool is_one_of(const auto& labels, std::string_view label) {
  return std::ranges::find(labels, label) != labels.end();
}

}  // namespace

std::vector<Case> decode_cases() {
  // Three splits of 256 keys, the last one cut in its second slice. Two heads of two queries are rows of one CTA.
  Case base = plain_case(Dtype::bf16);
  base.seqlen_q = 2;
  base.seqlen_kv = 531;
  base.num_heads_q = 4;
  base.num_heads_kv = 2;
  base.head_dim_qk = base.head_dim_v = 64;
  const auto with = [&base](std::string label) {
    Case problem = base;
    problem.label = "few_rows_" + std::move(label);
    return problem;
  };
  std::vector<Case> cases = {with("full"),
                             with("heavy"),
                             with("window"),
                             with("strided"),
                             with("dropout"),
                             with("programs"),
                             with("nothing_visible"),
                             with("infinite_values"),
                             with("infinite_values_capped"),
                             with("infinite_values_dropout_seed"),
                             with("infinite_values_climbing")};
  cases[1].distribution = Distribution::heavy_tailed;
  cases[1].dtype = Dtype::f16;
  cases[1].head_dim_qk = 72;
  cases[1].head_dim_v = 40;
  cases[1].has_sinks = true;
  cases[2].mask = window(300, 0);
  cases[3].out_layout = Layout::strided_dim;
  cases[3].mask = causal();
  cases[4].dropout = kSomeDropped;
  cases[4].has_dropout_places = true;
  Case& programs = cases[5];
  const TensorView slopes =
      programs.capture(Dtype::f32, {4}, [](std::int64_t i) { return 0.5 / double(i + 1); });
  const TensorView documents = programs.capture(
      Dtype::i32, {2, 531}, [](std::int64_t i) { return double(i % 531 / (60 + i / 531 * 30)); });
  const Captures captures{.tensors = {{"slopes", slopes}, {"doc", documents}}};
  programs.score = parse_score_mod("score + slopes[q_head] * (kv_idx - q_idx)", captures);
  programs.mask = parse_mask_mod("doc[batch, q_idx + 529] == doc[batch, kv_idx]", captures);
  cases[6].mask = mask_mod([](auto x) { return x.kv_idx < 0; });
  // Rows see some of them: which sums are infinite, and which are both. Small: each row goes key by key.
  for (Case* infinite : {&cases[7], &cases[8], &cases[9], &cases[10]}) {
    infinite->has_infinite_values = true;
    infinite->batch = 1;
    infinite->num_heads_q = 2;
    infinite->num_heads_kv = 1;
    infinite->seqlen_kv = 300;
  }
  cases[7].mask = window(200, 0);
  cases[7].dropout = kSomeDropped;
  cases[8].score = softcap(3);
  cases[9].mask = window(200, 0);
  cases[9].dropout = kSomeDropped;
  cases[9].reads_dropout_seed = true;
  cases[8].dtype = Dtype::f16;
  cases[8].head_dim_qk = cases[8].head_dim_v = 72;
  // Keys on the right leave those on the left no weight that a float has: infinity stays in the sum.
  cases[10].score = parse_score_mod("score + 2 * kv_idx");
  cases[10].head_dim_qk = cases[10].head_dim_v = 104;
  // Five rows of each of three kv heads: splits of 512 keys, the last one of 7.
  Case long_splits = with("long_splits");
  long_splits.batch = 1;
  long_splits.seqlen_q = 1;
  long_splits.seqlen_kv = 1031;
  long_splits.num_heads_q = 15;
  long_splits.num_heads_kv = 3;
  cases.push_back(std::move(long_splits));
  Case extreme = with("extreme");
  extreme.seqlen_q = 6;
  extreme.num_heads_q = 2;
  cases.push_back(with_extreme_scores(std::move(extreme)));
  std::ranges::move(decode_choice_cases(), std::back_inserter(cases));
  for (Case& many : hopper_few_rows_cases()) {
    const std::string label(case_of_hopper(many.label));
    if (!is_one_of(kManyRows, label)) continue;
    many.label = "few_" + label;
    cases.push_back(std::move(many));
  }
  // Two groups: four splits of 512 keys, and two, the last one cut. 16 rows, two of each computing warp.
  Case groups = with("groups");
  groups.batch = 1;
  groups.seqlen_q = 8;
  groups.seqlen_kv = 2571;
  groups.num_heads_q = 6;
  groups.num_heads_kv = 3;
  groups.has_sinks = true;
  // Some rows go key by key, one of two splits.
  Case infinite = groups;
  infinite.label = "few_rows_groups_infinite_values";
  infinite.seqlen_kv = 600;
  infinite.num_heads_q = 3;
  infinite.has_infinite_values = true;
  infinite.mask = window(580, 0);
  infinite.dropout = kSomeDropped;
  Case extreme_groups = groups;
  extreme_groups.label = "few_rows_groups_extreme";
  extreme_groups.num_heads_q = 3;
  // Of a warpgroup: of 63 rows some are nobody's; values are one panel of two.
  Case many_rows = groups;
  many_rows.label = "few_rows_groups_of_63";
  many_rows.seqlen_q = 9;
  many_rows.num_heads_q = 21;
  many_rows.head_dim_qk = 128;
  Case many_infinite = infinite;
  many_infinite.label = "few_rows_groups_of_17_infinite_values";
  many_infinite.seqlen_q = 17;
  for (Case* each : {&groups, &many_rows, &infinite, &many_infinite, &extreme_groups}) {
    // Who folds splits: a CTA that takes several, the combine kernel, a cluster.
    for (const char* who : {"groups", "splits", "cluster"}) {
      Case problem = *each;
      problem.label.replace(problem.label.find("groups"), 6, who);
      cases.push_back(each == &extreme_groups ? with_extreme_scores(std::move(problem))
                                              : std::move(problem));
    }
  }
  return cases;
}

std::vector<NamedCacheCase> decode_cache_cases() {
  CacheCase base;
  // Nothing; one key; a slice of 16, a tile of 64 and a split of 256 keys, one more and one less; primes.
  base.seqlens = {0, 1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 523};
  base.num_heads_q = 16;
  base.num_heads_kv = 2;
  base.q_dtype = base.k_dtype = base.v_dtype = Dtype::bf16;
  base.head_dim_qk = base.head_dim_v = 128;
  base.page_size = 16;
  CacheCase odd_pages = base;
  odd_pages.page_size = 24;  // boxes of 8 keys
  odd_pages.index_dtype = Dtype::i64;
  odd_pages.num_heads_q = 5;
  odd_pages.num_heads_kv = 1;
  odd_pages.seqlen_q = 3;
  odd_pages.seqlens = {523, 3, 31};
  odd_pages.q_dtype = odd_pages.k_dtype = odd_pages.v_dtype = Dtype::f16;
  odd_pages.head_dim_qk = 128;  // one panel and two, either way
  odd_pages.head_dim_v = 64;
  odd_pages.mask = window(270, 0);
  odd_pages.has_sinks = true;
  CacheCase small_pages = odd_pages;
  small_pages.page_size = 8;
  small_pages.head_dim_qk = 64;
  small_pages.head_dim_v = 128;
  small_pages.num_heads_q = 1;
  small_pages.seqlen_q = 8;
  small_pages.seqlens = {8, 300, 17};
  // 16 rows, as many as there may be.
  CacheCase many_rows = base;
  many_rows.page_size = 64;
  many_rows.num_heads_q = 4;
  many_rows.num_heads_kv = 1;
  many_rows.seqlen_q = 4;
  many_rows.seqlens = {523, 8, 71};
  CacheCase slots = many_rows;
  slots.page_size = 0;
  slots.has_batch_idx = slots.has_left_padding = slots.has_heads_first = true;
  // Padded in the tile.
  CacheCase padded = base;
  padded.seqlens = {300, 1, 17, 200};
  padded.num_heads_q = 6;
  padded.head_dim_qk = padded.head_dim_v = 40;
  padded.has_sinks = true;
  // Of packed queries those of each sequence, at most 16 rows; some have none.
  CacheCase packed = many_rows;
  packed.seqlens = {523, 8, 71, 0, 300, 17};
  packed.packed_q = {1, 0, 4, 2, 1, 3};
  packed.packed_new = packed.packed_q;
  packed.packed_new[3] = 0;
  packed.has_max_seqlen_q = packed.has_sinks = packed.has_page_list = true;
  packed.page_size = 16;
  CacheCase packed_slots = packed;
  packed_slots.has_page_list = false;
  packed_slots.page_size = 0;
  packed_slots.has_batch_idx = packed_slots.has_left_padding = true;
  packed_slots.nan_key = 260;
  packed_slots.mask = window(270, 0);
  packed_slots.index_dtype = Dtype::i64;
  CacheCase listed = small_pages;
  listed.has_page_list = true;
  // Around a split of 512 keys and a group of four; nothing.
  CacheCase groups = many_rows;
  groups.page_size = 16;
  groups.num_heads_q = 6;
  groups.num_heads_kv = 3;
  groups.head_dim_qk = groups.head_dim_v = 64;
  groups.seqlens = {511, 513, 2048, 2049, 0};
  std::vector<NamedCacheCase> cases = {
      {"decode_groups", groups},         {"decode_splits", groups},
      {"decode_cluster", groups},        {"decode_cluster_packed", packed_slots},
      {"decode_packed", packed},         {"decode_packed_slots", packed_slots},
      {"decode_listed_pages", listed},   {"decode_pages_of_16", base},
      {"decode_pages_of_24", odd_pages}, {"decode_pages_of_8", small_pages},
      {"decode_pages_of_64", many_rows}, {"decode_slots", slots},
      {"decode_padded", padded}};
  for (NamedCacheCase& many : hopper_few_rows_cache_cases()) {
    const std::string label(case_of_hopper(many.label));
    if (is_one_of(kManyRowsOfCaches, label)) cases.push_back({"decode_" + label, many.problem});
  }
  // 17 rows, one more than mma.sync multiplies; boxes of 8 keys, of one panel and of two.
  CacheCase many_odd_pages = odd_pages;
  many_odd_pages.seqlen_q = 17;
  many_odd_pages.num_heads_q = 1;
  CacheCase many_small_pages = small_pages;
  many_small_pages.num_heads_q = 4;  // 32 rows
  many_small_pages.nan_key = 290;
  CacheCase many_groups = groups;
  many_groups.num_heads_q = 24;  // 32 rows
  cases.push_back({"decode_pages_of_24_many_rows", many_odd_pages});
  cases.push_back({"decode_pages_of_8_many_rows", many_small_pages});
  for (const char* who : {"groups", "splits", "cluster"})
    cases.push_back({fmt::format("decode_{}_many_rows", who), many_groups});
  return cases;
}

}  // namespace fovea::testing
