// Problems of sm80/attention_quantized: Q and K in eight bits, all else as sm80/attention_forward has it. See
// forward_cases.hpp.
#include <algorithm>
#include <iterator>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/forward_cases.hpp"
#include "support/features.hpp"

namespace fovea::testing {
namespace {

/// Two row tiles.
Case base_case(const char* label, std::int64_t head_dim) {
  return rounded_case(label, head_dim, 140);
}

/// Programs, which read scores and not codes.
std::vector<Case> program_cases() {
  Case capped = base_case("rounded_softcap", 64);
  capped.batch = 2;
  capped.score = softcap(3);
  capped.has_sinks = true;
  capped.wants_row_max = true;
  Case line = base_case("rounded_alibi", 128);
  const TensorView slopes =
      line.capture(Dtype::f32, {2}, [](std::int64_t i) { return i == 0 ? 0.02 : 0.005; });
  line.score = alibi(slopes);
  line.mask = causal();
  line.dropout = kSomeDropped;
  line.reads_dropout_seed = true;
  Case negative = base_case("rounded_negative_scale", 64);
  negative.softmax_scale = -0.07F;
  negative.mask = parse_mask_mod("(q_idx + kv_idx) % 5 != 0");
  return {capped, line, negative};
}

/// What a copy finds: rows anywhere, none, more than 128 columns, tiles of sequences.
std::vector<Case> layout_cases() {
  Case padded = base_case("rounded_padded", 72);
  padded.head_dim_v = 40;
  padded.layout = Layout::bhsd;
  padded.out_dtype = Dtype::f32;
  const TensorView table =
      padded.capture(Dtype::boolean, {140, 270}, [](std::int64_t i) { return i * 7 % 11 < 5; });
  padded.mask = parse_mask_mod("seen[q_idx, kv_idx]", {.tensors = {{"seen", table}}});
  // Columns that are no multiple of 8, in rows at odd addresses.
  Case by_elements = base_case("rounded_by_elements", 29);
  by_elements.layout = by_elements.out_layout = Layout::odd_offset;
  by_elements.mask = causal();
  // One stage: keys are copied over while their scores are in registers.
  Case wide = base_case("rounded_wide_values", 128);
  wide.head_dim_v = 160;
  // Tiles and means of each sequence: one has no keys, one no queries, one ends a tile; rows behind them are nobody's.
  Case packed = base_case("rounded_packed", 64);
  packed.sequences = {{0, 0}, {1, 1}, {140, 300}, {70, 0}, {0, 9}, {200, 128}, {3, 257}};
  packed.trailing_rows = 3;
  packed.mask = causal();
  packed.has_sinks = true;
  // Rows of a group share a tile, and keys are split.
  Case few = base_case("rounded_few", 128);
  few.seqlen_q = 3;
  few.seqlen_kv = 531;
  few.num_heads_q = 4;
  few.num_heads_kv = 2;
  few.has_sinks = true;
  few.wants_row_max = true;
  few.mask = causal();
  Case none = base_case("rounded_no_keys", 128);
  none.seqlen_kv = 0;
  none.seqlen_q = 70;
  return {padded, by_elements, wide, packed, few, none};
}

/// Scores climb by more octaves than an origin leaves alone, and than codes have.
Case heavy_case() {
  Case heavy = base_case("rounded_heavy", 128);
  heavy.distribution = Distribution::heavy_tailed;
  heavy.seqlen_kv = 400;
  heavy.softmax_scale = 1;
  return heavy;
}

/// P and V too.
Case coded(Case problem) {
  problem.label.replace(0, std::string_view("rounded").size(), "summed");
  problem.quant = parse_quantization("fast");
  return problem;
}

std::vector<Case> coded_cases() {
  std::vector<Case> cases;
  for (const Case& layout : layout_cases()) {
    if (layout.label == "rounded_wide_values") continue;  // beyond what it sums
    Case& problem = cases.emplace_back(coded(layout));
    problem.has_infinite_values =
        problem.label == "summed_by_elements" || problem.label == "summed_packed";
  }
  for (const Case& program : program_cases()) cases.push_back(coded(program));
  cases.push_back(with_nan_scores(coded(base_case("rounded_nan_scores", 64))));
  cases.push_back(with_extreme_scores(coded(base_case("rounded_extreme", 64))));
  Case full_128 = coded(base_case("rounded_full_d128", 128));
  full_128.batch = 2;
  Case causal_128 = coded(base_case("rounded_causal_d128", 128));
  causal_128.mask = causal();
  causal_128.has_sinks = true;
  causal_128.wants_row_max = true;
  Case full_64 = coded(base_case("rounded_full_d64", 64));
  full_64.dtype = Dtype::f16;
  full_64.seqlen_kv = 400;
  Case window_64 = coded(base_case("rounded_window_d64", 64));
  window_64.mask = causal() && window(150, 0);
  Case documents = coded(base_case("rounded_documents", 64));
  const TensorView ids =
      documents.capture(Dtype::i32, {270}, [](std::int64_t i) { return i / 90; });
  documents.mask = parse_mask_mod("ids[q_idx] == ids[kv_idx]", {.tensors = {{"ids", ids}}});
  Case infinite = coded(base_case("rounded_infinite", 64));
  infinite.seqlen_q = 70;
  infinite.mask = causal();
  infinite.dropout = kSomeDropped;
  infinite.has_infinite_values = true;
  cases.insert(cases.end(), {full_128, causal_128, full_64, window_64, documents, infinite,
                             coded(heavy_case())});
  return cases;
}

Case by_recipe(const char* recipe, std::string_view label, Case problem) {
  problem.label.replace(0, std::string_view("rounded").size(), label);
  problem.quant = parse_quantization(recipe);
  return problem;
}

/// Codes of P are exponentials, rounded. Whatever goes with one of these recipes goes with the other: each has half of
/// the layouts and programs, and what only its scales could break.
std::vector<Case> exponential_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* recipe, std::string_view label, Case problem) -> Case& {
    return cases.emplace_back(by_recipe(recipe, label, std::move(problem)));
  };
  for (const Case& layout : layout_cases()) {
    if (layout.label == "rounded_wide_values") continue;  // beyond what it sums
    // Scales of one row, of no rows, of rows that end a tile; NaN and infinity in values.
    if (layout.label == "rounded_packed") {
      add("sage2", "lanes", layout).has_infinite_values = true;
      add("fp8_static", "given", layout).has_infinite_values = true;
    }
    if (layout.label == "rounded_by_elements" || layout.label == "rounded_no_keys")
      add("sage2", "lanes", layout);
    if (layout.label == "rounded_padded") add("fp8_static", "given", layout);
    // Rows of a group share a tile; keys are not split, for a row's codes depend on those before.
    if (layout.label == "rounded_few") {
      add("sage2", "lanes", layout);
      add("fp8_static", "given", layout);
    }
  }
  for (const Case& program : program_cases()) {
    if (program.label == "rounded_alibi") add("sage2", "lanes", program);
    if (program.label != "rounded_alibi") add("fp8_static", "given", program);
  }
  Case full_128 = base_case("rounded_full_d128", 128);
  full_128.batch = 2;
  add("sage2", "lanes", full_128);
  Case causal_128 = base_case("rounded_causal_d128", 128);
  causal_128.batch = 2;
  causal_128.mask = causal();
  causal_128.has_sinks = true;
  causal_128.wants_row_max = true;
  add("fp8_static", "given", causal_128);
  Case full_64 = base_case("rounded_full_d64", 64);
  full_64.dtype = Dtype::f16;
  full_64.seqlen_kv = 400;
  add("sage2", "lanes", full_64);
  add("fp8_static", "given", full_64);
  Case infinite = base_case("rounded_infinite", 64);
  infinite.seqlen_q = 70;
  infinite.mask = causal();
  infinite.dropout = kSomeDropped;
  infinite.has_infinite_values = true;
  add("sage2", "lanes", infinite);
  // All scores are 0: their lse knows no other rounding than that of its logarithm.
  Case level = base_case("rounded_level", 64);
  level.softmax_scale = 0;
  add("sage2", "lanes", level);
  add("sage2", "lanes", heavy_case());
  add("fp8_static", "given", heavy_case());
  cases.push_back(
      with_nan_scores(by_recipe("fp8_static", "given", base_case("rounded_nan_scores", 64))));
  cases.push_back(
      with_extreme_scores(by_recipe("sage2", "lanes", base_case("rounded_extreme", 64))));
  return cases;
}

/// Of several sequences and heads of a key head, with sinks.
Case grouped_case(const char* label) {
  Case grouped = base_case(label, 128);
  grouped.batch = 2;
  grouped.num_heads_q = 4;
  grouped.num_heads_kv = 2;
  grouped.mask = causal();
  grouped.has_sinks = true;
  return grouped;
}

/// q, k and v that come as codes: what reads them, whole and by bytes, at places of sequences, and NaN among them.
std::vector<Case> cases_of_codes() {
  std::vector<Case> cases;
  const auto add = [&](Case problem) -> Case& {
    problem.dtype = Dtype::e4m3;
    return cases.emplace_back(by_recipe("fp8_static", "codes", std::move(problem)));
  };
  for (const Case& layout : layout_cases()) {
    if (layout.label == "rounded_packed") add(layout).has_infinite_values = true;
    if (layout.label == "rounded_by_elements") add(layout);
  }
  add(grouped_case("rounded_causal_d128")).out_dtype = Dtype::f16;
  Case infinite = base_case("rounded_infinite", 64);
  infinite.batch = 2;
  infinite.mask = causal();
  infinite.has_infinite_values = true;
  add(infinite).out_dtype = Dtype::f32;
  return cases;
}

/// Rows and keys that share scales otherwise, other means of K, P and V in f16: what SageAttention's functions have for
/// GPUs of 8.x, and what its words change.
std::vector<Case> cases_of_groups() {
  std::vector<Case> cases;
  const auto add = [&](const char* recipe, Case problem) -> Case& {
    return cases.emplace_back(by_recipe(recipe, "groups", std::move(problem)));
  };
  add("sage2,block_q=128,warp_q=32,block_kv=64,v_max=2.25", grouped_case("rounded_threads"));
  const std::vector<Case> layouts = layout_cases();
  Case packed = *std::ranges::find(layouts, "rounded_packed", &Case::label);
  packed.label = "rounded_warps";
  packed.has_infinite_values = true;
  add("sage2,block_q=128,warp_q=32,block_kv=64,q_scales=warp,k_scales=block,smooth_k=none", packed);
  add("sage2,q_scales=warp,k_scales=block", base_case("rounded_narrow_warps", 64));
  // Row 130 of two blocks of 64 and one that is cut; scores that a program reads.
  Case half = base_case("rounded_half", 64);
  half.dtype = Dtype::f16;
  half.mask = causal() && window(150, 0);
  half.score = softcap(3);
  half.wants_row_max = true;
  add("sage1,block_q=64", half);
  Case few = *std::ranges::find(layouts, "rounded_few", &Case::label);
  few.label = "rounded_half_few";
  few.dtype = Dtype::f16;
  add("sage1,q_scales=thread,k_scales=thread,smooth_k=none,row_sums=exact", few);
  Case by_elements = *std::ranges::find(layouts, "rounded_by_elements", &Case::label);
  by_elements.label = "rounded_blocks";
  add("accurate,q_scales=block,k_scales=block,block_kv=64,smooth_k=sequence", by_elements);
  return cases;
}

/// V without its mean, which comes back times what a row's keys weigh: beside sinks, of sequences and heads, of rows
/// that see nothing, in splits, in columns that nobody has, and NaN among them.
std::vector<Case> cases_of_means() {
  std::vector<Case> cases;
  const auto add = [&](const char* recipe, std::string_view label, Case problem) -> Case& {
    return cases.emplace_back(by_recipe(recipe, label, std::move(problem)));
  };
  const std::vector<Case> layouts = layout_cases();
  const auto layout = [&](const char* label) {
    return *std::ranges::find(layouts, label, &Case::label);
  };
  const char* lanes = "sage2,smooth_v=sequence";
  add(lanes, "smooth_lanes", grouped_case("rounded_causal_d128")).out_dtype = Dtype::f32;
  add(lanes, "smooth_lanes", layout("rounded_packed")).has_infinite_values = true;
  const char* rows = "fast,smooth_v=sequence";
  add(rows, "smooth_rows", layout("rounded_padded"));
  add(rows, "smooth_rows", layout("rounded_few"));
  Case& full = add(rows, "smooth_rows", base_case("rounded_full_d64", 64));
  full.dtype = Dtype::f16;
  const char* half = "sage1,smooth_v=sequence";
  Case& packed = add(half, "smooth_half", layout("rounded_packed"));
  packed.dtype = Dtype::f16;
  packed.has_infinite_values = true;
  add(half, "smooth_half", layout("rounded_by_elements")).dtype = Dtype::f16;
  return cases;
}

}  // namespace

Case rounded_case(const char* label, std::int64_t head_dim, std::int64_t seqlen_q) {
  Case problem = plain_case(Dtype::bf16);
  problem.label = label;
  problem.batch = 1;
  problem.seqlen_q = seqlen_q;
  problem.seqlen_kv = 270;
  problem.num_heads_q = 2;
  problem.num_heads_kv = 1;
  problem.head_dim_qk = problem.head_dim_v = head_dim;
  problem.wants_row_max = false;
  problem.quant = parse_quantization("accurate");
  return problem;
}

Case with_nan_scores(Case problem) {
  const std::int64_t keys = problem.seqlen_kv;
  const TensorView bias = problem.capture(Dtype::f32, {2, keys}, [=](std::int64_t i) {
    return i == keys + keys / 2 ? std::numeric_limits<double>::quiet_NaN()
                                : 0.01 * static_cast<double>(i % 7);
  });
  problem.score = parse_score_mod("score + bias[q_idx % 2, kv_idx]", {.tensors = {{"bias", bias}}});
  return problem;
}

cuda::DeviceTraits rounding_device(const Quantization& quant) {
  return cuda::typical_device(8, quant.pv == QuantFormat::e4m3 ? 9 : 0);
}

std::vector<Case> sm80_quantized_cases() {
  std::vector<Case> cases = program_cases();
  for (const Case& each : layout_cases()) cases.push_back(each);
  Case full_128 = base_case("rounded_full_d128", 128);
  full_128.batch = 2;
  cases.push_back(full_128);
  Case causal_128 = base_case("rounded_causal_d128", 128);
  causal_128.batch = 2;
  causal_128.mask = causal();
  causal_128.wants_row_max = true;
  causal_128.has_sinks = true;
  cases.push_back(causal_128);
  Case window_64 = base_case("rounded_window_d64", 64);
  window_64.dtype = Dtype::f16;
  window_64.mask = causal() && window(150, 0);
  cases.push_back(window_64);
  // Values hold NaN and infinity: sums are computed again, in passes.
  Case infinite = base_case("rounded_infinite", 64);
  infinite.seqlen_q = 70;
  infinite.mask = causal();
  infinite.has_infinite_values = true;
  infinite.dropout = kSomeDropped;
  cases.push_back(infinite);
  cases.push_back(heavy_case());
  std::ranges::copy(coded_cases(), std::back_inserter(cases));
  std::ranges::copy(exponential_cases(), std::back_inserter(cases));
  std::ranges::copy(cases_of_codes(), std::back_inserter(cases));
  std::ranges::copy(cases_of_groups(), std::back_inserter(cases));
  std::ranges::copy(cases_of_means(), std::back_inserter(cases));
  return cases;
}

}  // namespace fovea::testing
