#include "fovea/mask.hpp"

#include "kernels/forward_cases.hpp"

namespace fovea::testing {
namespace {

/// 70 queries are one row tile, of which most rows see nothing where there are fewer keys. 0 and 1 keys; a tile of 128
/// and a key; two tiles and a page that is cut.
CacheCase base_case(std::int64_t page_size, std::int64_t head_dim) {
  CacheCase problem;
  problem.seqlens = {0, 1, 129, 300};
  problem.seqlen_q = 70;
  problem.q_dtype = problem.k_dtype = problem.v_dtype = Dtype::bf16;
  problem.head_dim_qk = problem.head_dim_v = head_dim;
  problem.page_size = page_size;
  return problem;
}

}  // namespace

std::vector<NamedCacheCase> hopper_cache_cases() {
  CacheCase small = base_case(8, 128);
  small.score = softcap(3);
  small.mask = chunked(50);
  CacheCase common = base_case(16, 128);
  common.has_sinks = true;
  // Two row tiles of 192 rows, the second cut; pages that begin and end where tiles do.
  CacheCase narrow = base_case(32, 64);
  narrow.seqlen_q = 200;
  narrow.seqlens = {256, 200, 391};
  narrow.num_heads_q = 4;
  narrow.num_heads_kv = 2;
  narrow.has_heads_first = true;
  narrow.q_dtype = narrow.k_dtype = narrow.v_dtype = Dtype::f16;
  narrow.index_dtype = Dtype::i64;
  // Tiles of 96 keys: boxes of 32 rows of a page of 64.
  CacheCase wide = base_case(64, 192);
  wide.seqlens = {97, 191, 192};
  wide.mask = window(60, 20);
  wide.has_sinks = true;
  CacheCase unequal = base_case(128, 192);
  unequal.head_dim_v = 72;
  unequal.score = parse_score_mod("score + float(q_head + 1) / 16 * (kv_idx - q_idx)");
  // Narrower boxes; values of a page that the end cuts are cleared there.
  CacheCase middle = base_case(16, 96);
  middle.seqlens = {385, 200, 130, 192};
  CacheCase widest = base_case(256, 256);
  widest.seqlens = {520, 64, 257};
  widest.mask = MaskMod();
  // Some rows see it, others do not.
  CacheCase poisoned = base_case(16, 64);
  poisoned.seqlens = {300, 120};
  poisoned.seqlen_q = 140;
  poisoned.mask = window(90, 0);
  poisoned.nan_key = 110;
  // Slots in another order; keys begin at any row of one, and end where the next sequence's padding begins.
  CacheCase slots = base_case(0, 128);
  slots.has_batch_idx = true;
  slots.has_left_padding = true;
  slots.has_sinks = true;
  CacheCase slots_poisoned = poisoned;
  slots_poisoned.page_size = 0;
  slots_poisoned.has_heads_first = true;
  // Chunks of prompts beside single tokens, in listed pages.
  CacheCase packed = base_case(16, 128);
  packed.seqlens = {300, 65, 129, 150, 0, 200};
  packed.packed_q = {150, 1, 1, 0, 3, 70};
  packed.packed_new = packed.packed_q;
  packed.packed_new[4] = 0;
  packed.has_page_list = packed.has_max_seqlen_q = packed.has_sinks = true;
  packed.index_dtype = Dtype::i64;
  CacheCase listed = base_case(16, 64);
  listed.has_page_list = true;
  listed.seqlens = {0, 65, 129, 300};
  // The same in slots, which keys begin inside of.
  CacheCase packed_slots = packed;
  packed_slots.has_page_list = false;
  packed_slots.page_size = 0;
  packed_slots.has_batch_idx = packed_slots.has_left_padding = true;
  return {{"hopper_packed_pages", packed},      {"hopper_listed_pages", listed},
          {"hopper_pages_of_8", small},         {"hopper_pages_of_16", common},
          {"hopper_pages_of_32", narrow},       {"hopper_pages_of_64", wide},
          {"hopper_pages_of_128", unequal},     {"hopper_pages_of_256", widest},
          {"hopper_pages_d96", middle},         {"hopper_pages_nan", poisoned},
          {"hopper_slots_left_padding", slots}, {"hopper_slots_nan", slots_poisoned},
          {"hopper_packed_slots", packed_slots}};
}

std::vector<NamedCacheCase> hopper_copied_cache_cases() {
  CacheCase single = base_case(1, 128);
  single.has_left_padding = true;
  single.score = softcap(3);
  single.has_sinks = true;
  // Two row tiles; keys begin inside a page, and pages end inside of a block of 8 rows.
  CacheCase odd = base_case(11, 96);
  odd.seqlen_q = 200;
  odd.seqlens = {256, 200, 391};
  odd.num_heads_q = 4;
  odd.num_heads_kv = 2;
  odd.has_left_padding = true;
  odd.has_heads_first = true;
  odd.q_dtype = odd.k_dtype = odd.v_dtype = Dtype::f16;
  odd.index_dtype = Dtype::i64;
  CacheCase padded = base_case(16, 192);
  padded.head_dim_v = 72;
  padded.has_left_padding = true;
  padded.mask = window(60, 20);
  padded.seqlens = {0, 33, 129, 300};
  CacheCase poisoned = base_case(7, 128);
  poisoned.seqlens = {300, 120};
  poisoned.seqlen_q = 140;
  poisoned.mask = window(90, 0);
  poisoned.nan_key = 110;
  // Chunks of prompts beside single tokens, in listed pages.
  CacheCase packed = base_case(3, 128);
  packed.seqlens = {300, 65, 129, 150, 33, 200};
  packed.packed_q = {150, 20, 20, 0, 30, 70};
  packed.has_page_list = packed.has_max_seqlen_q = packed.has_sinks = true;
  return {{"hopper_copied_pages_of_1", single},
          {"hopper_copied_pages_of_11", odd},
          {"hopper_copied_left_padding", padded},
          {"hopper_copied_pages_nan", poisoned},
          {"hopper_copied_packed_pages", packed}};
}

}  // namespace fovea::testing
