#include "kernels/backward/backward_cases.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include "support/features.hpp"

namespace fovea::testing {
namespace {

GradientCase started(std::string label, Dtype dtype) {
  GradientCase problem{.forward = plain_case(dtype)};
  problem.forward.label = std::move(label);
  problem.forward.wants_row_max = false;
  problem.wants_captured = false;
  return problem;
}

/// Several tiles of queries and of keys, a tail in both, rows that see nothing.
GradientCase several_tiles(std::string label, Dtype dtype, std::int64_t head_dim) {
  GradientCase problem = started(std::move(label), dtype);
  Case& forward = problem.forward;
  forward.batch = 1;
  forward.seqlen_q = 150;
  forward.seqlen_kv = 141;
  forward.num_heads_q = forward.num_heads_kv = 1;
  forward.head_dim_qk = forward.head_dim_v = head_dim;
  forward.mask = causal();
  return problem;
}

void add_features(Dtype dtype, std::vector<GradientCase>& cases) {
  for (const Feature& feature : features()) {
    if (feature.group == "products" || feature.is_long) continue;  // of CPUs
    GradientCase problem =
        started(std::string(feature.name) + "_" + std::string(name(dtype)), dtype);
    feature.add(problem.forward);
    problem.forward.wants_lse = true;
    cases.push_back(std::move(problem));
  }
}

void add_packed(Dtype dtype, std::vector<GradientCase>& cases) {
  GradientCase packed = started("packed_edges_" + std::string(name(dtype)), dtype);
  // Nothing on one side, on both, a row, tiles and one less and more; rows of nobody.
  packed.forward.sequences = {{5, 0},   {0, 0},     {0, 7},    {1, 1},
                              {63, 65}, {129, 128}, {64, 127}, {37, 33}};
  packed.forward.trailing_rows = 5;
  packed.forward.mask = causal();
  packed.forward.has_sinks = true;
  packed.forward.num_heads_q = 2;
  packed.forward.num_heads_kv = 1;
  cases.push_back(std::move(packed));
}

}  // namespace

std::vector<GradientCase> backward_cases() {
  std::vector<GradientCase> cases;
  for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
    add_features(dtype, cases);
    add_packed(dtype, cases);
    cases.push_back(several_tiles("several_tiles_" + std::string(name(dtype)), dtype, 64));
  }
  GradientCase mixed = several_tiles("mixed_dtypes", Dtype::bf16, 40);
  mixed.forward.out_dtype = Dtype::f32;
  mixed.dout_dtype = Dtype::f16;
  mixed.gradient_dtype = Dtype::f32;
  mixed.has_dlse = false;
  cases.push_back(std::move(mixed));
  return cases;
}

GradientCase backward_case(const std::string& label) {
  for (GradientCase& each : backward_cases())
    if (each.forward.label == label) return each;
  throw std::out_of_range(label);
}

}  // namespace fovea::testing
