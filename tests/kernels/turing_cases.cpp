#include <string>
#include <utility>
#include <vector>

#include "kernels/forward_cases.hpp"
#include "support/features.hpp"

namespace fovea::testing {

namespace {

/// Two row tiles, three kv tiles, a tail in both.
Case turing_case(std::string label, std::int64_t head_dim) {
  Case problem = plain_case(Dtype::f16);
  problem.label = std::move(label);
  problem.batch = 1;
  problem.seqlen_q = 140;
  problem.seqlen_kv = 150;
  problem.head_dim_qk = problem.head_dim_v = head_dim;
  problem.mask = causal();
  return problem;
}

}  // namespace

std::vector<Case> turing_cases() {
  std::vector<Case> cases = {turing_case("turing_d64", 64), turing_case("turing_d128", 128),
                             turing_case("turing_d256", 256)};
  // Columns behind head_dim, rows read by elements, four passes.
  Case gathered = turing_case("turing_gathered_d120", 120);
  gathered.layout = Layout::odd_offset;
  gathered.has_infinite_values = true;
  cases.push_back(std::move(gathered));
  Case packed = turing_case("turing_packed_d64", 64);
  packed.sequences = {{5, 0}, {64, 64}, {0, 70}, {131, 131}, {1, 1}, {65, 200}};
  packed.trailing_rows = 3;
  packed.score = softcap(2);
  packed.dropout = kSomeDropped;
  packed.has_sinks = true;
  cases.push_back(std::move(packed));
  // Three splits of 256 keys, the last one cut; infinity in partial states.
  Case split = turing_case("turing_split", 128);
  split.seqlen_q = 2;
  split.seqlen_kv = 600;
  split.num_heads_q = 6;
  split.num_heads_kv = 1;
  split.has_infinite_values = true;
  cases.push_back(std::move(split));
  Case f32 = turing_case("turing_bf16", 40);
  f32.dtype = Dtype::bf16;
  cases.push_back(std::move(f32));
  return cases;
}

std::vector<NamedCacheCase> turing_cache_cases() {
  CacheCase decode;
  decode.seqlens = {600, 17, 256, 0};
  decode.num_heads_q = 4;
  decode.q_dtype = decode.k_dtype = decode.v_dtype = Dtype::f16;
  decode.head_dim_qk = 64;
  decode.head_dim_v = 32;
  decode.page_size = 5;
  return {{"turing_pages", decode}};
}

}  // namespace fovea::testing
