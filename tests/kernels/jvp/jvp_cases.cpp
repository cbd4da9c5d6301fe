#include "kernels/jvp/jvp_cases.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "kernels/backward/backward_cases.hpp"

namespace fovea::testing {
namespace {

/// Of captured_cases(), whose other labels say what the walk of gradients meets and that of tangents does not.
constexpr std::array<std::string_view, 12> kCaptured = {
    "bias_of_all",          "distances_bf16",        "slopes_f32",      "temperature_bf16",
    "temperature_f32",      "capped_table_bf16",     "two_places_bf16", "two_places_f32",
    "captured_packed_bf16", "captured_dropped_bf16", "captured_d512",   "captured_one_key"};

void add_gradients(std::vector<GradientCase>& cases) {
  const std::vector<GradientCase> captured = captured_cases();
  for (GradientCase& each : backward_cases()) {
    const std::string& label = each.forward.label;
    const bool is_captured = std::ranges::any_of(
        captured, [&](const GradientCase& other) { return other.forward.label == label; });
    if (!is_captured || std::ranges::find(kCaptured, label) != kCaptured.end())
      cases.push_back(std::move(each));
  }
}

GradientCase relabelled(const std::string& from, std::string to) {
  GradientCase problem = backward_case(from);
  problem.forward.label = std::move(to);
  return problem;
}

/// Every tangent alone: kernels have no room for the others.
void add_directions(std::vector<GradientCase>& cases) {
  for (const std::string dtype : {"bf16", "f32"}) {
    for (const std::string moves : {"q", "k", "v", "captured"}) {
      GradientCase problem = relabelled("capped_table_" + dtype, "only_" + moves + "_" + dtype);
      problem.moves_q = moves == "q";
      problem.moves_k = moves == "k";
      problem.moves_v = moves == "v";
      problem.wants_captured = moves == "captured";
      cases.push_back(std::move(problem));
    }
  }
}

void add_dtypes(std::vector<GradientCase>& cases) {
  GradientCase others = relabelled("several_tiles_bf16", "tangents_of_f16");
  others.forward.out_dtype = Dtype::f32;
  others.tangent_dtype = Dtype::f16;
  cases.push_back(std::move(others));
  GradientCase rounded = relabelled("several_tiles_f32", "tangents_of_bf16");
  rounded.forward.out_dtype = Dtype::f16;
  rounded.tangent_dtype = Dtype::bf16;
  cases.push_back(std::move(rounded));
}

/// NaN in keys, values and their tangents that no row sees, between others that rows see: tensor cores would multiply
/// it by 0.
void add_hidden_nan(std::vector<GradientCase>& cases) {
  for (const std::string from : {"several_tiles_bf16", "grouped_f16_d256", "several_tiles_f32"}) {
    GradientCase hidden = relabelled(from, "hidden_keys_in_" + from);
    hidden.forward.mask = causal() && mask_mod([](auto x) { return x.kv_idx % 3 != 1; });
    cases.push_back(std::move(hidden));
  }
}

/// A tile of keys, one more and less; one query, one key, none.
void add_edges(std::vector<GradientCase>& cases) {
  for (const auto& [q, kv] : {std::pair{1, 1}, {64, 32}, {65, 33}, {63, 64}, {5, 0}, {0, 5}}) {
    GradientCase edge =
        relabelled("full_bf16_d128", "edge_" + std::to_string(q) + "_" + std::to_string(kv));
    edge.forward.seqlen_q = q;
    edge.forward.seqlen_kv = kv;
    cases.push_back(std::move(edge));
  }
}

}  // namespace

std::vector<GradientCase> jvp_cases() {
  std::vector<GradientCase> cases;
  add_gradients(cases);
  add_directions(cases);
  add_dtypes(cases);
  add_hidden_nan(cases);
  add_edges(cases);
  return cases;
}

ComputeDtype products_of(const GradientCase& problem) {
  return problem.forward.dtype == Dtype::f32 ? ComputeDtype::f32 : ComputeDtype::bf16;
}

}  // namespace fovea::testing
