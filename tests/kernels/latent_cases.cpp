// Problems of sm90/decode_latent: see forward_cases.hpp.
#include "fovea/mask.hpp"

#include "kernels/forward_cases.hpp"

namespace fovea::testing {
namespace {

CacheCase base_case(std::int64_t num_heads, std::int64_t page_size) {
  CacheCase problem;
  problem.num_heads_q = num_heads;
  problem.num_heads_kv = 1;
  problem.head_dim_qk = 576;
  problem.head_dim_v = 512;
  problem.has_latent_values = true;
  problem.page_size = page_size;
  problem.q_dtype = problem.k_dtype = problem.v_dtype = Dtype::bf16;
  return problem;
}

}  // namespace

std::vector<NamedCacheCase> latent_cache_cases() {
  // Nothing; one key; a tile of 64 keys and a split of 512, one more and one less; three splits.
  CacheCase base = base_case(16, 64);
  base.seqlens = {0, 1, 63, 64, 65, 511, 512, 513, 1100};
  // Two row tiles of 64 heads.
  CacheCase many_heads = base_case(128, 16);
  many_heads.q_dtype = many_heads.k_dtype = many_heads.v_dtype = Dtype::f16;
  many_heads.index_dtype = Dtype::i64;
  many_heads.seqlens = {130, 3, 200};
  many_heads.has_sinks = true;
  // Rows of a tile that are nobody's; splits of 2,048 keys.
  CacheCase long_splits = base_case(40, 128);
  long_splits.seqlens = {2113, 5};
  // Boxes of 8 keys; twelve queries of five heads in a tile, three there.
  CacheCase odd_pages = base_case(5, 24);
  odd_pages.seqlen_q = 3;
  odd_pages.seqlens = {523, 3, 31};
  odd_pages.mask = window(270, 0);
  odd_pages.score = softcap(3);
  odd_pages.has_sinks = true;
  // Three row tiles of eight queries; the first sees less than the last, and of five keys nothing.
  CacheCase many_queries = base_case(8, 32);
  many_queries.seqlen_q = 19;
  many_queries.seqlens = {150, 19, 5};
  CacheCase slots = base_case(6, 0);
  slots.num_heads_kv = 2;
  slots.seqlen_q = 2;
  slots.seqlens = {150, 64, 7};
  slots.has_batch_idx = slots.has_left_padding = slots.has_heads_first = true;
  slots.score = parse_score_mod("score + float(q_head + 1) / 16 * (kv_idx - q_idx)");
  // Some rows see it, others do not.
  CacheCase poisoned = base_case(16, 64);
  poisoned.seqlen_q = 5;
  poisoned.seqlens = {300, 120};
  poisoned.mask = window(182, 0);
  poisoned.nan_key = 115;
  return {{"latent_pages_of_64", base},
          {"latent_pages_of_16", many_heads},
          {"latent_pages_of_128", long_splits},
          {"latent_pages_of_24", odd_pages},
          {"latent_pages_of_32", many_queries},
          {"latent_slots", slots},
          {"latent_nan", poisoned}};
}

std::vector<Case> latent_cases() {
  Case plain;
  plain.label = "latent_dense_row_max";
  plain.batch = 2;
  plain.seqlen_q = 5;
  plain.seqlen_kv = 150;
  plain.num_heads_q = 32;
  plain.head_dim_qk = 576;
  plain.head_dim_v = 512;
  plain.dtype = Dtype::bf16;
  plain.mask = causal();
  plain.has_sinks = true;
  Case none = plain;
  none.label = "latent_dense_no_keys";
  none.batch = 1;
  none.seqlen_kv = 0;
  none.wants_row_max = false;
  // A scale that no exponent takes.
  Case steep = plain;
  steep.label = "latent_dense_steep";
  steep.batch = 1;
  steep.distribution = Distribution::heavy_tailed;
  steep.softmax_scale = -0.2F;
  steep.wants_row_max = false;
  return {plain, none, steep};
}

AttentionForward with_latent_values(AttentionForward args) {
  TensorSpec spec = args.k.spec();
  spec.shape[static_cast<std::size_t>(spec.rank - 1)] = args.v.size(args.v.rank() - 1);
  args.v = {args.k.data(), spec};
  return args;
}

}  // namespace fovea::testing
