// Problems of sm90/attention_quantized: Q and K in eight bits. See forward_cases.hpp.
#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/forward_cases.hpp"
#include "support/features.hpp"

namespace fovea::testing {
namespace {

/// Two row tiles.
Case base_case(const char* label, std::int64_t head_dim) {
  return rounded_case(label, head_dim, 205);
}

/// Programs, which read scores and not codes.
std::vector<Case> program_cases() {
  Case capped = base_case("quantized_softcap", 64);
  capped.score = softcap(3);
  capped.has_sinks = true;
  capped.wants_row_max = true;
  Case line = base_case("quantized_alibi", 128);
  const TensorView slopes =
      line.capture(Dtype::f32, {2}, [](std::int64_t i) { return i == 0 ? 0.01 : 0.004; });
  line.score = alibi(slopes);
  line.mask = causal();
  Case formula = base_case("quantized_program", 64);
  formula.score = parse_score_mod("score * abs(score) + 0.01 * float(kv_idx % 7)");
  formula.mask = parse_mask_mod("(q_idx + kv_idx) % 5 != 0");
  Case negative = base_case("quantized_negative_scale", 128);
  negative.softmax_scale = -0.07F;
  return {capped, line, formula, negative};
}

/// Behind the first tile come some without a maximum: where logarithms are made by the program's own
/// last fma, codes are too. One line is bent, in the last two tiles of keys that are visited.
std::vector<Case> unmasked_program_cases(const char* stem, const Quantization& quant) {
  std::vector<Case> cases;
  const auto add = [&](const char* name, std::int64_t head_dim) -> Case& {
    Case& problem = cases.emplace_back(base_case(name, head_dim));
    problem.label = std::string(stem) + name;
    problem.quant = quant;
    problem.seqlen_kv = 700;
    problem.wants_row_max = false;
    return problem;
  };
  Case& bent = add("_bent_line", 128);
  const TensorView slopes =
      bent.capture(Dtype::f32, {2}, [](std::int64_t i) { return i == 0 ? 0.002 : -0.001; });
  bent.score = alibi(slopes, Align::top_left);
  Case& straight = add("_line", 64);
  straight.score = parse_score_mod("score + 0.001 * float(kv_idx - q_idx) + 0.25 * float(q_head)");
  Case& capped = add("_capped", 128);
  capped.score = softcap(2);
  Case& formula = add("_formula", 64);
  formula.score = parse_score_mod("0.2 * score * abs(score)");
  return cases;
}

/// P and V too.
std::vector<Case> coded_cases() {
  const Quantization fast = parse_quantization("fast");
  const auto coded = [&](const char* label, std::int64_t head_dim) {
    Case problem = base_case(label, head_dim);
    problem.quant = fast;
    return problem;
  };
  std::vector<Case> cases;
  for (Case program : program_cases()) {
    if (program.label != "quantized_softcap" && program.label != "quantized_alibi") continue;
    program.label.replace(0, std::string_view("quantized").size(), "coded");
    program.quant = fast;
    cases.push_back(std::move(program));
  }
  std::ranges::move(unmasked_program_cases("coded", fast), std::back_inserter(cases));
  // Of odd rows alone, behind tiles without a maximum.
  Case nan = coded("coded_nan_scores", 64);
  nan.seqlen_kv = 700;
  nan.wants_row_max = false;
  cases.push_back(with_nan_scores(std::move(nan)));
  cases.push_back(with_extreme_scores(coded("coded_extreme", 128)));
  Case full_128 = coded("coded_full_d128", 128);
  full_128.batch = 2;
  full_128.seqlen_kv = 700;  // codes without a maximum behind the first tile
  Case causal_128 = coded("coded_causal_d128", 128);
  causal_128.mask = causal();
  causal_128.has_sinks = true;
  causal_128.wants_row_max = true;
  Case full_64 = coded("coded_full_d64", 64);
  full_64.dtype = Dtype::f16;
  full_64.seqlen_kv = 1100;
  Case window_64 = coded("coded_window_d64", 64);
  window_64.mask = causal() && window(150, 0);
  // A mask that is a table, columns that nobody has, sums in f32.
  Case padded = coded("coded_padded", 72);
  padded.head_dim_v = 40;
  padded.layout = Layout::bhsd;
  padded.out_dtype = Dtype::f32;
  const TensorView table =
      padded.capture(Dtype::boolean, {205, 270}, [](std::int64_t i) { return i * 7 % 11 < 5; });
  padded.mask = parse_mask_mod("seen[q_idx, kv_idx]", {.tensors = {{"seen", table}}});
  Case infinite = coded("coded_infinite", 128);
  infinite.mask = causal();
  infinite.has_infinite_values = true;
  Case packed = coded("coded_packed", 64);
  packed.sequences = {{0, 0}, {1, 1}, {140, 300}, {70, 0}, {0, 9}, {200, 128}, {3, 257}};
  packed.trailing_rows = 3;
  packed.mask = causal();
  packed.has_sinks = true;
  packed.has_infinite_values = true;
  Case few = coded("coded_few", 64);
  few.seqlen_q = 3;
  few.seqlen_kv = 41;
  Case none = coded("coded_no_keys", 128);
  none.seqlen_kv = 0;
  none.seqlen_q = 70;
  // Scores climb by more octaves than codes have.
  Case heavy = coded("coded_heavy", 128);
  heavy.distribution = Distribution::heavy_tailed;
  heavy.seqlen_kv = 700;
  heavy.softmax_scale = 1;
  cases.insert(cases.end(), {full_128, causal_128, full_64, window_64, padded, infinite, packed,
                             few, none, heavy});
  return cases;
}

/// Codes of V without its mean: beside sinks, of sequences and heads, in columns that nobody has, in f32.
std::vector<Case> cases_of_means() {
  std::vector<Case> cases;
  for (Case& coded : coded_cases()) {
    if (coded.label != "coded_full_d128" && coded.label != "coded_packed" &&
        coded.label != "coded_padded")
      continue;
    coded.label.replace(0, std::string_view("coded").size(), "smooth");
    coded.quant = parse_quantization("fast,smooth_v=sequence");
    cases.push_back(std::move(coded));
  }
  return cases;
}

/// Rows that are rotated before they are rounded: all their channels are mixed, those of eight, and beside values
/// without their mean.
std::vector<Case> cases_of_rotations() {
  Case causal_128 = base_case("rotated_causal_d128", 128);
  causal_128.mask = causal();
  causal_128.wants_row_max = true;
  causal_128.has_sinks = true;
  Case padded = base_case("rotated_padded", 72);
  padded.head_dim_v = 40;
  padded.out_dtype = Dtype::f32;
  for (Case* problem : {&causal_128, &padded})
    problem->quant = parse_quantization("accurate,hadamard=yes");
  std::vector<Case> cases{causal_128, padded};
  for (Case& smooth : cases_of_means()) {
    if (smooth.label != "smooth_packed") continue;
    smooth.label = "rotated_packed";
    smooth.quant.hadamard = true;
    cases.push_back(std::move(smooth));
  }
  return cases;
}

}  // namespace

std::vector<Case> hopper_quantized_cases() {
  std::vector<Case> cases = program_cases();
  std::ranges::move(unmasked_program_cases("quantized", parse_quantization("accurate")),
                    std::back_inserter(cases));
  Case full_128 = base_case("quantized_full_d128", 128);
  full_128.batch = 2;
  cases.push_back(full_128);
  Case causal_128 = base_case("quantized_causal_d128", 128);
  causal_128.mask = causal();
  causal_128.wants_row_max = true;
  causal_128.has_sinks = true;
  cases.push_back(causal_128);
  Case full_64 = base_case("quantized_full_d64", 64);
  full_64.dtype = Dtype::f16;
  full_64.seqlen_kv = 1100;  // optimistic steps behind the first
  cases.push_back(full_64);
  Case causal_64 = base_case("quantized_causal_d64", 64);
  causal_64.mask = causal() && window(150, 0);
  cases.push_back(causal_64);
  // One value for each piece of 16 x 8 scores and more: masked by pieces.
  Case coarse = base_case("quantized_coarse_mask", 64);
  const TensorView pieces =
      coarse.capture(Dtype::boolean, {2, 16, 32}, [](std::int64_t i) { return i * 5 % 7 < 3; });
  coarse.mask =
      parse_mask_mod("sel[q_head, q_idx // 16, kv_idx // 16]", {.tensors = {{"sel", pieces}}});
  cases.push_back(coarse);
  // Narrower panels than those of codes are not taken.
  Case middle = base_case("quantized_d96", 96);
  cases.push_back(middle);
  Case padded = base_case("quantized_padded", 72);
  padded.head_dim_v = 40;
  padded.layout = Layout::bhsd;
  padded.out_dtype = Dtype::f32;
  cases.push_back(padded);
  // Values hold NaN and infinity: sums are computed again, in passes.
  Case infinite = base_case("quantized_infinite", 128);
  infinite.mask = causal();
  infinite.has_infinite_values = true;
  infinite.dropout = kSomeDropped;
  cases.push_back(infinite);
  // Tiles and means of each sequence: one has no keys, one no queries, one ends a tile; rows behind them are nobody's.
  Case packed = base_case("quantized_packed", 64);
  packed.sequences = {{0, 0}, {1, 1}, {140, 300}, {70, 0}, {0, 9}, {200, 128}, {3, 257}};
  packed.trailing_rows = 3;
  packed.mask = causal();
  packed.has_sinks = true;
  cases.push_back(packed);
  // Fewer keys than the sample has, and fewer rows than a group.
  Case few = base_case("quantized_few", 64);
  few.seqlen_q = 3;
  few.seqlen_kv = 41;
  cases.push_back(few);
  Case none = base_case("quantized_no_keys", 128);
  none.seqlen_kv = 0;
  none.seqlen_q = 70;
  cases.push_back(none);
  // Scores climb by more than a softmax without a maximum bears.
  Case heavy = base_case("quantized_heavy", 128);
  heavy.distribution = Distribution::heavy_tailed;
  heavy.seqlen_kv = 700;
  heavy.softmax_scale = 1;
  cases.push_back(heavy);
  std::ranges::copy(coded_cases(), std::back_inserter(cases));
  std::ranges::copy(cases_of_means(), std::back_inserter(cases));
  std::ranges::copy(cases_of_rotations(), std::back_inserter(cases));
  return cases;
}

}  // namespace fovea::testing
