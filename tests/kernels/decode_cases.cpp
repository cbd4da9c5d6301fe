// Problems of sm90/decode: see forward_cases.hpp.
#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/choices.hpp"
#include "cuda/decode_sm90.hpp"
#include "kernels/choice_cases.hpp"
#include "kernels/forward_cases.hpp"
#include "support/features.hpp"

namespace fovea::testing {

namespace {

/// Of more than 16 rows or of wide heads, by teams of warps: two of 2 warps, one of 4, two of 1.
void add_wide_decode_cases(const Case& base, std::vector<Case>& cases) {
  const auto add = [&](const char* label, std::int64_t seqlen_q, std::int64_t group) -> Case& {
    Case& problem = cases.emplace_back(base);
    problem.label = label;
    problem.batch = 1;
    problem.seqlen_q = seqlen_q;
    problem.num_heads_kv = 1;
    problem.num_heads_q = group;
    return problem;
  };
  // One row of the second warp; keys hidden from all hold NaN, so sums are computed again.
  Case& capped = add("rows_17_softcap_window", 17, 1);
  capped.score = softcap(2);
  capped.mask = window(300, 0);
  capped.layout = capped.out_layout = Layout::strided_dim;
  // A warp of four without rows.
  Case& heavy = add("rows_48_heavy", 16, 3);
  heavy.dtype = Dtype::f16;
  heavy.distribution = Distribution::heavy_tailed;
  heavy.head_dim_qk = 72;
  heavy.head_dim_v = 40;
  heavy.has_sinks = true;
  heavy.mask = causal();
  Case& programs = add("rows_64_programs", 32, 2);
  const TensorView slopes =
      programs.capture(Dtype::f32, {2}, [](std::int64_t i) { return 0.5 / double(i + 1); });
  const TensorView documents =
      programs.capture(Dtype::i32, {1, 531}, [](std::int64_t i) { return double(i / 90); });
  const Captures captures{.tensors = {{"slopes", slopes}, {"doc", documents}}};
  programs.score = parse_score_mod("score + slopes[q_head] * (kv_idx - q_idx)", captures);
  programs.mask = parse_mask_mod("doc[batch, q_idx + 250] == doc[batch, kv_idx]", captures);
  Case& dropped = add("rows_33_dropout", 33, 1);
  dropped.dropout = {.p = 0.3F, .seed = 7, .offset = 1};
  dropped.mask = window(200, 0);
  Case& wide = add("rows_31_head_dim_256", 31, 1);
  wide.head_dim_qk = 192;
  wide.head_dim_v = 256;
  wide.mask = causal();
  wide.seqlen_kv = 300;
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
  std::vector<Case> cases = {with("full"),           with("heavy"),   with("window"),
                             with("strided"),        with("dropout"), with("programs"),
                             with("nothing_visible")};
  cases[1].distribution = Distribution::heavy_tailed;
  cases[1].dtype = Dtype::f16;
  cases[1].head_dim_qk = 72;
  cases[1].head_dim_v = 40;
  cases[1].has_sinks = true;
  cases[2].mask = window(300, 0);
  cases[3].layout = cases[3].out_layout = Layout::strided_dim;
  cases[3].mask = causal();
  cases[4].dropout = {.p = 0.3F, .seed = 7, .offset = 1};
  Case& programs = cases[5];
  const TensorView slopes =
      programs.capture(Dtype::f32, {4}, [](std::int64_t i) { return 0.5 / double(i + 1); });
  const TensorView documents = programs.capture(
      Dtype::i32, {2, 531}, [](std::int64_t i) { return double(i % 531 / (60 + i / 531 * 30)); });
  const Captures captures{.tensors = {{"slopes", slopes}, {"doc", documents}}};
  programs.score = parse_score_mod("score + slopes[q_head] * (kv_idx - q_idx)", captures);
  programs.mask = parse_mask_mod("doc[batch, q_idx + 529] == doc[batch, kv_idx]", captures);
  cases[6].mask = mask_mod([](auto x) { return x.kv_idx < 0; });
  add_wide_decode_cases(base, cases);
  std::ranges::move(decode_choice_cases(), std::back_inserter(cases));
  return cases;
}

namespace {

/// As add_wide_decode_cases; chunks of a prefill, causal from the bottom right, are rows of one CTA.
void add_wide_decode_cache_cases(const CacheCase& base, std::vector<NamedCacheCase>& cases) {
  const auto add = [&](const char* label, std::int64_t seqlen_q, std::int64_t group,
                       std::vector<std::int64_t> seqlens) -> CacheCase& {
    CacheCase& problem = cases.emplace_back(label, base).problem;
    problem.seqlen_q = seqlen_q;
    problem.num_heads_kv = 1;
    problem.num_heads_q = group;
    problem.head_dim_qk = problem.head_dim_v = 64;
    problem.seqlens = std::move(seqlens);
    return problem;
  };
  // Around slices of 32 keys, tiles of 64, pages of 16 and splits.
  add("decode_rows_32", 4, 8, {0, 1, 31, 32, 33, 65, 257, 523});
  CacheCase& odd = add("decode_rows_17", 1, 17, {23, 24, 25, 300});
  odd.page_size = 24;
  odd.q_dtype = odd.k_dtype = odd.v_dtype = Dtype::f16;
  odd.head_dim_qk = odd.head_dim_v = 40;
  odd.has_sinks = true;
  CacheCase& single_keys = add("decode_rows_48", 16, 3, {1, 16, 300});
  single_keys.page_size = 1;
  single_keys.index_dtype = Dtype::i64;
  single_keys.mask = window(270, 0);
  single_keys.has_left_padding = true;
  // Slices of 64 keys, one team.
  add("decode_rows_64", 8, 8, {63, 65, 523}).page_size = 64;
  // Of 16 splits at most, nine of 512 keys.
  CacheCase& slots = add("decode_rows_33", 33, 1, {4100, 33});
  slots.head_dim_qk = slots.head_dim_v = 32;
  slots.page_size = 0;
  slots.has_batch_idx = slots.has_left_padding = slots.has_heads_first = true;
  slots.score = parse_score_mod("score + 0.25 * (kv_idx - q_idx)");
  CacheCase& wide = add("decode_head_dim_256", 3, 5, {0, 1, 17, 300});
  wide.head_dim_qk = wide.head_dim_v = 256;
  CacheCase& unequal = add("decode_head_dim_192_128", 31, 2, {25, 300});
  unequal.page_size = 24;
  unequal.q_dtype = unequal.k_dtype = unequal.v_dtype = Dtype::f16;
  unequal.head_dim_qk = 192;
  unequal.head_dim_v = 128;
}

}  // namespace

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
  odd_pages.page_size = 3;
  odd_pages.index_dtype = Dtype::i64;
  odd_pages.num_heads_q = 5;
  odd_pages.num_heads_kv = 1;
  odd_pages.seqlen_q = 3;
  odd_pages.seqlens = {523, 3, 31};
  odd_pages.q_dtype = odd_pages.k_dtype = odd_pages.v_dtype = Dtype::f16;
  odd_pages.head_dim_qk = odd_pages.head_dim_v = 64;
  odd_pages.mask = window(270, 0);
  odd_pages.has_sinks = true;
  CacheCase single_keys = odd_pages;
  single_keys.page_size = 1;
  single_keys.num_heads_q = 1;
  single_keys.seqlen_q = 8;
  single_keys.seqlens = {8, 300, 17};
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
  // Padded in the tile, and pages that begin with rows that are no keys.
  CacheCase padded = base;
  padded.seqlens = {300, 1, 17, 200};
  padded.num_heads_q = 6;
  padded.head_dim_qk = padded.head_dim_v = 40;
  padded.has_sinks = padded.has_left_padding = true;
  std::vector<NamedCacheCase> cases = {{"decode_pages_of_16", base},
                                       {"decode_pages_of_3", odd_pages},
                                       {"decode_pages_of_1", single_keys},
                                       {"decode_pages_of_64", many_rows},
                                       {"decode_slots", slots},
                                       {"decode_padded", padded}};
  add_wide_decode_cache_cases(base, cases);
  return cases;
}

cuda::ForwardPlan streaming_plan(const std::string& label, const ForwardProblem& problem,
                                 const cuda::DeviceTraits& device) {
  cuda::ForwardPlan plan = plan_of(label, problem, device);
  if (plan.candidate == cuda::kSm90Decode) return plan;
  const cuda::Candidate& wide = cuda::candidate_named(cuda::kSm90DecodeWide);
  if (const auto refusal = wide.refuses(problem, device))
    throw std::logic_error(label + ": " + refusal->reason);
  return plan_choice(problem, device, {&wide, wide.choose(problem, device)});
}

}  // namespace fovea::testing
