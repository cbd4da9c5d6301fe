#include "kernels/forward_cases.hpp"

#include <utility>

#include "support/features.hpp"

namespace fovea::testing {

namespace {

Case started(std::string label, Dtype dtype) {
  Case problem = plain_case(dtype);
  problem.label = std::move(label);
  return problem;
}

/// Two row tiles, three kv tiles with both stages used again, a tail in both.
Case several_tiles(std::string label, std::int64_t head_dim) {
  Case problem = started(std::move(label), Dtype::bf16);
  problem.batch = 1;
  problem.seqlen_q = 140;
  problem.seqlen_kv = 150;
  problem.head_dim_qk = problem.head_dim_v = head_dim;
  problem.mask = causal();
  return problem;
}

}  // namespace

std::vector<Case> kernel_cases() {
  std::vector<Case> cases;
  for (const Feature& feature : features()) {
    if (feature.group == "products") continue;  // of CPUs
    Case problem = started(std::string(feature.name), Dtype::bf16);
    feature.add(problem);
    cases.push_back(std::move(problem));
  }
  cases.push_back(started("plain_f16", Dtype::f16));
  cases.push_back(started("plain_f32", Dtype::f32));
  cases.push_back(several_tiles("several_tiles_d64", 64));
  cases.push_back(several_tiles("several_tiles_d128", 128));
  cases.push_back(several_tiles("several_tiles_d256", 256));
  // 600 keys: three splits of 256, the last one cut.
  Case split = started("split", Dtype::bf16);
  split.seqlen_q = 2;
  split.seqlen_kv = 600;
  split.num_heads_q = 6;
  split.mask = causal();
  split.has_sinks = true;
  cases.push_back(std::move(split));
  return cases;
}

}  // namespace fovea::testing
