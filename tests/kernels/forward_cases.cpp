#include "kernels/forward_cases.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <limits>
#include <numbers>
#include <string>
#include <utility>

#include "kernels/choice_cases.hpp"
#include "problem/decode.hpp"
#include "problem/forward.hpp"
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

/// Sums that are not finite are computed in four passes: stored by chunks, by elements, as f32, as partial states.
/// Infinity reaches a row at keys that are dropped too.
std::vector<Case> infinite_values() {
  std::vector<Case> cases = {several_tiles("infinite_values_d128", 128),
                             several_tiles("infinite_values_f16_padded", 72),
                             several_tiles("infinite_values_f32_out", 64)};
  cases[1].dtype = Dtype::f16;
  cases[2].out_dtype = Dtype::f32;
  Case program = several_tiles("infinite_values_softcap", 64);
  program.score = softcap(3);
  cases.push_back(std::move(program));
  Case split = started("infinite_values_split", Dtype::bf16);
  split.seqlen_q = 2;
  split.seqlen_kv = 600;
  split.mask = causal();
  cases.push_back(split);
  // Beside the last split, the first has no weight left.
  Case faint = split;
  faint.label = "infinite_values_faint_split";
  faint.score = score_mod([](auto x) { return select(x.kv_idx < 256, x.score - 1000, x.score); });
  cases.push_back(std::move(faint));
  split.label = "infinite_values_split_dropout";
  split.dropout = kSomeDropped;
  cases.push_back(std::move(split));
  Case dropped = several_tiles("infinite_values_dropout", 64);
  dropped.dropout = kSomeDropped;
  cases.push_back(dropped);
  dropped.label = "infinite_values_dropout_f32";
  dropped.dtype = Dtype::f32;
  dropped.has_dropout_places = true;
  cases.push_back(std::move(dropped));
  // Scores climb, so that later tiles leave earlier ones no weight that a float has: infinity stays in the sum.
  Case climbing = several_tiles("infinite_values_climbing_f32", 64);
  climbing.score = parse_score_mod("score + 4 * kv_idx");
  climbing.dtype = Dtype::f32;
  cases.push_back(std::move(climbing));
  for (Case& each : cases) each.has_infinite_values = true;
  return cases;
}

/// V's columns in parts, a launch each: two whole ones, also over splits; the second cut, by elements; three, odd, in
/// f32.
std::vector<Case> wide_heads() {
  Case latent = several_tiles("wide_heads_576_512", 512);
  latent.head_dim_qk = 576;
  latent.wants_row_max = true;
  latent.has_sinks = true;
  Case split = started("wide_heads_split", Dtype::bf16);
  split.seqlen_q = 1;
  split.seqlen_kv = 600;
  split.num_heads_q = 6;
  split.num_heads_kv = 1;
  split.head_dim_qk = 576;
  split.head_dim_v = 512;
  Case cut = several_tiles("wide_heads_40_300", 40);
  cut.head_dim_v = 300;
  cut.dtype = Dtype::f16;
  cut.dropout = kSomeDropped;
  cut.has_dropout_places = true;
  cut.out_layout = Layout::strided_dim;
  Case column = several_tiles("wide_heads_264_513", 264);
  column.head_dim_v = 513;
  column.out_dtype = Dtype::f32;
  column.seqlen_q = 40;
  Case infinite = split;
  infinite.label = "wide_heads_infinite";
  infinite.seqlen_q = 2;
  infinite.mask = causal();
  infinite.has_infinite_values = true;
  return {latent, split, cut, column, infinite};
}

}  // namespace

Case with_extreme_scores(Case problem) {
  constexpr std::int64_t kKinds = 6;
  constexpr double kGreatest = std::numeric_limits<float>::max();
  const std::int64_t keys = problem.seqlen_kv;
  const TensorView table = problem.capture(Dtype::f32, {kKinds, keys}, [=](std::int64_t i) {
    const std::int64_t key = i % keys;
    switch (i / keys) {
      case 0:
        return key % 5 == 0 ? 0 : -kGreatest;
      case 1:
        return key >= keys * 3 / 4 ? 0 : -kGreatest;
      case 2:
        return key < keys / 3 ? 0 : -kGreatest;
      case 3:
        return -kGreatest;
      case 4:
        return key % 2 == 0 ? -kGreatest : -0.75 * kGreatest;
      default:
        return key % 3 == 2 ? kGreatest : 0;
    }
  });
  const std::string kind = "q_idx % " + std::to_string(kKinds);
  problem.score =
      parse_score_mod("score + table[" + kind + ", kv_idx]", {.tensors = {{"table", table}}});
  return problem;
}

std::vector<Lengths> many_sequences(std::int64_t count) {
  std::vector<Lengths> sequences;
  for (std::int64_t i = 0; i < count; ++i)
    sequences.push_back(i == count - 2 ? Lengths{130, 131} : Lengths{i * 7 % 5, 1 + i * 3 % 7});
  return sequences;
}

std::vector<Case> kernel_cases() {
  std::vector<Case> cases;
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
    Case extreme = several_tiles("extreme_" + std::string(name(dtype)), 64);
    extreme.dtype = dtype;
    extreme.has_sinks = dtype == Dtype::f16;
    extreme.wants_row_max = dtype == Dtype::bf16;
    cases.push_back(with_extreme_scores(std::move(extreme)));
  }
  Case split_extreme = started("extreme_split", Dtype::bf16);
  split_extreme.seqlen_q = 7;
  split_extreme.seqlen_kv = 600;
  cases.push_back(with_extreme_scores(std::move(split_extreme)));
  for (const Feature& feature : features()) {
    if (feature.group == "products" || feature.is_long) continue;  // of CPUs
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
  Case many = started("packed_many", Dtype::f16);
  many.sequences = many_sequences(257);
  many.trailing_rows = 3;
  many.mask = causal();
  cases.push_back(many);
  many.label = "packed_many_f32";
  many.dtype = Dtype::f32;
  many.sequences = many_sequences(33);
  cases.push_back(std::move(many));
  std::ranges::move(wide_heads(), std::back_inserter(cases));
  std::ranges::move(infinite_values(), std::back_inserter(cases));
  std::ranges::move(sm80_choice_cases(), std::back_inserter(cases));
  std::ranges::move(quickest_cases(), std::back_inserter(cases));
  return cases;
}

namespace {

Case hopper_case(std::string label, std::int64_t head_dim) {
  Case problem = started(std::move(label), Dtype::bf16);
  problem.batch = 1;
  problem.seqlen_q = 205;   // two tiles of 128 or of 192 rows, the second cut
  problem.seqlen_kv = 270;  // three tiles of 128 keys, the last cut
  problem.num_heads_q = problem.num_heads_kv = 1;
  problem.head_dim_qk = problem.head_dim_v = head_dim;
  problem.wants_row_max = false;
  return problem;
}

/// Two q heads to a kv head, sinks, and full kv tiles behind partial ones.
Case program_case(std::string label, std::int64_t head_dim) {
  Case problem = hopper_case(std::move(label), head_dim);
  problem.num_heads_q = 2;
  problem.seqlen_kv = 390;  // four tiles of 128, the last of 6 keys
  problem.has_sinks = true;
  return problem;
}

/// Scores that are a line along the keys, whose loads keys or rows share, or that come near a cap; masks that load.
std::vector<Case> hopper_program_cases() {
  std::vector<Case> cases;
  const auto add = [&](Case problem, const char* score, const char* mask) {
    const TensorView slopes =
        problem.capture(Dtype::f32, {2}, [](std::int64_t i) { return i == 1 ? -0.125 : 0.5; });
    const TensorView documents = problem.capture(
        Dtype::i32, {2, 390}, [](std::int64_t i) { return double(i % 390 / (90 + i / 390 * 30)); });
    const TensorView bias = problem.capture(
        Dtype::f16, {390}, [](std::int64_t i) { return double(i * 7 % 11) / 4 - 1; });
    const TensorView is_real =
        problem.capture(Dtype::boolean, {2, 390}, [](std::int64_t i) { return i % 5 != 3; });
    const Captures captures{
        .tensors = {{"slopes", slopes}, {"doc", documents}, {"bias", bias}, {"is_real", is_real}}};
    problem.score = parse_score_mod(score, captures);
    problem.mask = parse_mask_mod(mask, captures);
    cases.push_back(std::move(problem));
  };
  constexpr const char* kLine = "score + slopes[q_head] * (kv_idx - q_idx)";
  constexpr const char* kDocuments = "doc[batch, q_idx] == doc[batch, kv_idx]";
  // Full where the first part says so: careful steps and optimistic ones.
  constexpr const char* kMostly =
      "kv_idx < 256 || doc[batch, q_idx] == doc[batch, kv_idx] && is_real[batch, kv_idx]";
  add(program_case("hopper_line_d128", 128), kLine, "kv_idx <= q_idx + (seqlen_kv - seqlen_q)");
  Case maxima = program_case("hopper_line_row_max_d256", 256);
  maxima.wants_row_max = true;
  add(std::move(maxima), kLine, kMostly);
  Case documents = program_case("hopper_documents_d128", 128);
  documents.batch = 2;
  add(std::move(documents), "score", kDocuments);
  add(program_case("hopper_documents_d64", 64), kLine, kMostly);
  add(program_case("hopper_parts_d192", 192), "score * bias[kv_idx] - bias[q_idx]", kMostly);
  add(program_case("hopper_parts_d64", 64), "score + slopes[q_head] * bias[kv_idx] * float(q_idx)",
      "kv_idx > 2");
  add(program_case("hopper_cap_d128", 128), "30 * tanh(score / 30)", kMostly);
  Case wild = program_case("hopper_cap_f16_heavy", 64);
  wild.distribution = Distribution::heavy_tailed;
  wild.dtype = Dtype::f16;
  add(std::move(wild), "2 * tanh(score / 2)", kDocuments);
  return cases;
}

/// Tiles of keys octaves above those before them, or below: a reference that stays, follows by whole octaves, jumps,
/// and jumps less far than the scores do (common/optimistic_softmax.cuh).
Case climbing_case(std::string label, std::int64_t head_dim, bool is_descending) {
  Case problem = hopper_case(std::move(label), head_dim);
  problem.seqlen_q = 70;
  problem.seqlen_kv = 1100;
  const TensorView climb = problem.capture(Dtype::f32, {9}, [=](std::int64_t i) {
    constexpr std::array kOctaves{0., 90., 170., 185., 310., 525., 535., 1500., 1520.};
    return std::numbers::ln2 * kOctaves[static_cast<std::size_t>(is_descending ? 8 - i : i)];
  });
  problem.score = parse_score_mod("score + climb[kv_idx // 128]", {.tensors = {{"climb", climb}}});
  return problem;
}

/// Sequences whose keys and queries meet the edges of tiles of 64, 128 and 192 rows; trailing rows hold NaN, so the
/// last sequence's cut tiles do too.
Case packed_hopper_case(std::string label, std::int64_t head_dim, std::vector<Lengths> sequences) {
  Case problem = hopper_case(std::move(label), head_dim);
  problem.sequences = std::move(sequences);
  return problem;
}

void add_packed_hopper_cases(std::vector<Case>& cases) {
  // Nothing, one row, a group's rows and one less and more, tiles and one less and more; primes.
  Case edges = packed_hopper_case("hopper_packed_d128", 128,
                                  {{0, 0},
                                   {1, 1},
                                   {63, 63},
                                   {64, 64},
                                   {65, 65},
                                   {127, 127},
                                   {128, 128},
                                   {129, 129},
                                   {37, 211}});
  edges.mask = causal();
  cases.push_back(std::move(edges));
  // Tiles of 192 rows; rows without keys, keys without rows, sinks that trailing rows do not have.
  Case slim = packed_hopper_case("hopper_packed_d64", 64,
                                 {{5, 0}, {191, 129}, {0, 70}, {193, 1}, {192, 128}});
  slim.trailing_rows = 3;
  slim.num_heads_q = 2;
  slim.has_sinks = true;
  slim.cu_seqlens_dtype = Dtype::i64;
  cases.push_back(std::move(slim));
  // Groups that the sequence's end cuts are stored row by row.
  Case middle =
      packed_hopper_case("hopper_packed_d96", 96, {{5, 0}, {70, 129}, {193, 1}, {129, 270}});
  middle.trailing_rows = 3;
  middle.mask = causal();
  cases.push_back(std::move(middle));
  cases.push_back(packed_hopper_case("hopper_packed_no_keys", 128, {{70, 0}, {0, 0}, {3, 0}}));
  // Keys far from the window are NaN, at the start of a sequence too: the neighbour's cut tile reads them.
  Case window_case =
      packed_hopper_case("hopper_packed_window", 192, {{70, 101}, {20, 300}, {130, 140}});
  window_case.head_dim_v = 72;
  window_case.mask = window(50, 20);
  cases.push_back(std::move(window_case));
  Case wide = packed_hopper_case("hopper_packed_d256", 256, {{131, 67}, {9, 130}});
  wide.trailing_rows = 140;  // more than a tile
  wide.mask = causal();
  cases.push_back(std::move(wide));
  Case dropped = packed_hopper_case("hopper_packed_dropout", 128, {{131, 131}, {65, 200}, {3, 1}});
  dropped.trailing_rows = 2;
  dropped.dropout = kSomeDropped;
  dropped.wants_row_max = true;
  dropped.mask = causal();
  dropped.score = softcap(2);
  dropped.dtype = Dtype::f16;
  cases.push_back(dropped);
  dropped.label = "hopper_packed_dropout_seed";
  dropped.reads_dropout_seed = true;
  cases.push_back(std::move(dropped));
  Case many = packed_hopper_case("hopper_packed_many", 128, many_sequences(257));
  many.dtype = Dtype::f16;
  cases.push_back(std::move(many));
  Case programs = packed_hopper_case("hopper_packed_programs", 64, {{150, 150}, {7, 133}});
  programs.trailing_rows = 1;
  programs.num_heads_q = 2;
  const TensorView slopes =
      programs.capture(Dtype::f32, {2}, [](std::int64_t i) { return 0.5 / double(i + 1); });
  const TensorView documents = programs.capture(
      Dtype::i32, {2, 150}, [](std::int64_t i) { return double(i % 150 / (60 + i / 150 * 30)); });
  const Captures captures{.tensors = {{"slopes", slopes}, {"doc", documents}}};
  programs.score = parse_score_mod("score + slopes[q_head] * (kv_idx - q_idx)", captures);
  programs.mask = parse_mask_mod(
      "doc[batch, q_idx] == doc[batch, kv_idx] && kv_idx - q_idx <= seqlen_kv - seqlen_q",
      captures);
  cases.push_back(std::move(programs));
}

/// What the passes over row tiles that are computed again must tell apart: both signs, in all orders of the loop and
/// with all ways to store.
void add_infinite_hopper_cases(std::vector<Case>& cases) {
  const auto add = [&cases](Case problem) {
    problem.has_infinite_values = true;
    cases.push_back(std::move(problem));
  };
  for (const std::int64_t head_dim : {64, 128, 256}) {
    Case masked = hopper_case("hopper_infinite_d" + std::to_string(head_dim), head_dim);
    masked.seqlen_q = masked.seqlen_kv = 390;  // several row tiles of a CTA are computed again
    masked.mask = causal();
    masked.has_sinks = true;
    add(std::move(masked));
  }
  add(hopper_case("hopper_infinite_full", 128));
  Case padded = hopper_case("hopper_infinite_f16_padded", 72);
  padded.dtype = Dtype::f16;
  padded.mask = window(90, 0);
  add(std::move(padded));
  // Scores that come less the reference, and scores of minus infinity.
  Case line = hopper_case("hopper_infinite_line", 128);
  line.score = parse_score_mod("score + 4.0 * (kv_idx - q_idx)");
  line.mask = causal();
  add(std::move(line));
  Case capped = hopper_case("hopper_infinite_cap", 64);
  capped.score = softcap(2);
  capped.mask = causal();
  add(std::move(capped));
  for (const std::int64_t head_dim : {64, 128, 256}) {
    Case dropped = hopper_case("hopper_infinite_dropout_d" + std::to_string(head_dim), head_dim);
    dropped.dropout = kSomeDropped;
    dropped.has_dropout_places = head_dim == 128;
    dropped.mask = causal();
    add(std::move(dropped));
  }
  Case hiding = hopper_case("hopper_infinite_hiding_score", 64);
  hiding.score = parse_score_mod("kv_idx % 3 == 1 ? -inf : score");
  add(std::move(hiding));
  // Powers of 2^80 times such a value are no floats.
  for (const std::int64_t head_dim : {128, 256}) {
    Case huge = hopper_case("hopper_huge_value_d" + std::to_string(head_dim), head_dim);
    huge.mask = causal();
    huge.has_huge_value = true;
    add(std::move(huge));
  }
}

}  // namespace

std::vector<Case> hopper_cases() {
  std::vector<Case> cases = hopper_program_cases();
  add_infinite_hopper_cases(cases);
  for (const std::int64_t head_dim : {64, 128, 256}) {
    Case extreme = hopper_case("hopper_extreme_d" + std::to_string(head_dim), head_dim);
    extreme.seqlen_kv = 1100;  // optimistic steps behind the first
    extreme.dtype = head_dim == 64 ? Dtype::f16 : Dtype::bf16;
    if (head_dim == 256) extreme.mask = causal();
    extreme.has_sinks = head_dim == 128;
    cases.push_back(with_extreme_scores(std::move(extreme)));
  }
  // Of a whole row, beside a line along the keys.
  Case extreme_line = hopper_case("hopper_extreme_line", 64);
  const TensorView offsets = extreme_line.capture(Dtype::f32, {3}, [](std::int64_t i) {
    return i == 0 ? 0 : i == 1 ? std::numeric_limits<float>::lowest() : 2.0;
  });
  extreme_line.score = parse_score_mod("score + 0.001 * float(kv_idx - q_idx) + offsets[q_idx % 3]",
                                       {.tensors = {{"offsets", offsets}}});
  cases.push_back(std::move(extreme_line));
  for (const std::int64_t head_dim : {64, 96, 128, 256}) {
    Case full = hopper_case("hopper_full_d" + std::to_string(head_dim), head_dim);
    if (head_dim == 96) full.seqlen_kv = 1030;  // up to 1,024 two groups compute
    cases.push_back(std::move(full));
    Case masked = hopper_case("hopper_causal_d" + std::to_string(head_dim), head_dim);
    masked.mask = causal();
    cases.push_back(std::move(masked));
  }
  // Beside powers of 2^-80 these leave the range of floats below.
  for (const auto& [head_dim, exponent] : {std::pair{64, -60}, {128, -66}, {256, -120}}) {
    Case small = hopper_case("hopper_small_values_d" + std::to_string(head_dim), head_dim);
    small.value_exponent = exponent;
    if (head_dim == 128) small.mask = causal();
    small.has_sinks = head_dim == 64;
    cases.push_back(std::move(small));
  }
  // The first row of the second row tile sees nothing of the first kv tile that it visits, and all of the next.
  for (const std::int64_t head_dim : {64, 128}) {
    Case late = hopper_case("hopper_late_row_d" + std::to_string(head_dim), head_dim);
    late.seqlen_kv = late.seqlen_q - 1;
    late.mask = causal();
    const TensorView slopes = late.capture(Dtype::f32, {1}, [](std::int64_t) { return 2.0; });
    late.score = head_dim == 64 ? softcap(30) : alibi(slopes);
    cases.push_back(std::move(late));
  }
  // Sums leave it above: the pass by a softmax that can have no large powers.
  Case large = climbing_case("hopper_large_values_climbing", 128, false);
  large.value_exponent = 40;
  cases.push_back(std::move(large));
  Case unequal = hopper_case("hopper_unequal_padded", 192);
  unequal.head_dim_v = 72;
  unequal.mask = window(100, 20);
  cases.push_back(std::move(unequal));
  // 96 and 64 columns: one swizzle for both, whose panels are 32.
  Case narrow = hopper_case("hopper_unequal_narrow", 80);
  narrow.seqlen_kv = 1100;
  narrow.head_dim_v = 40;
  narrow.mask = window(100, 20);
  narrow.has_infinite_values = true;
  cases.push_back(std::move(narrow));
  Case heavy = hopper_case("hopper_heavy", 64);
  heavy.distribution = Distribution::heavy_tailed;
  heavy.seqlen_kv = 700;
  cases.push_back(std::move(heavy));
  for (const std::int64_t head_dim : {64, 128, 256}) {
    const std::string tail = "_d" + std::to_string(head_dim);
    cases.push_back(climbing_case("hopper_climbing" + tail, head_dim, false));
    cases.push_back(climbing_case("hopper_descending" + tail, head_dim, true));
  }
  // Every tile has a mask.
  Case masked_climb = climbing_case("hopper_climbing_masked", 96, true);
  masked_climb.mask = parse_mask_mod("kv_idx % 7 != 3");
  cases.push_back(std::move(masked_climb));
  Case steep = climbing_case("hopper_climbing_f16", 128, false);
  steep.dtype = Dtype::f16;
  cases.push_back(std::move(steep));
  Case careful = climbing_case("hopper_climbing_row_max", 64, false);
  careful.wants_row_max = true;
  cases.push_back(std::move(careful));
  Case f16 = hopper_case("hopper_f16_heavy_grouped", 128);
  f16.dtype = Dtype::f16;
  f16.distribution = Distribution::heavy_tailed;
  f16.num_heads_q = 2;
  f16.has_sinks = true;
  f16.mask = causal();
  cases.push_back(std::move(f16));
  // More rows than keys: the first ones see nothing.
  Case empty = hopper_case("hopper_empty_rows", 64);
  empty.seqlen_q = 300;
  empty.seqlen_kv = 130;
  empty.mask = causal();
  cases.push_back(std::move(empty));
  // TMA knows no tensor without rows.
  Case no_keys = hopper_case("hopper_no_keys", 64);
  no_keys.seqlen_kv = 0;
  no_keys.has_sinks = true;
  cases.push_back(std::move(no_keys));
  Case maxima = hopper_case("hopper_row_max", 128);
  maxima.wants_row_max = true;
  maxima.mask = causal();
  maxima.has_sinks = true;
  maxima.distribution = Distribution::heavy_tailed;
  cases.push_back(std::move(maxima));
  Case dropped = hopper_case("hopper_dropout", 64);
  dropped.dropout = kSomeDropped;
  dropped.num_heads_q = 2;
  cases.push_back(dropped);
  dropped.label = "hopper_dropout_places";
  dropped.has_dropout_places = true;
  cases.push_back(std::move(dropped));
  Case nothing_kept = hopper_case("hopper_dropout_all", 128);
  nothing_kept.dropout = {.p = 1, .seed = 7, .offset = 0};
  cases.push_back(std::move(nothing_kept));
  Case programs = hopper_case("hopper_programs", 64);
  programs.batch = 2;
  programs.num_heads_q = 2;
  const TensorView slopes =
      programs.capture(Dtype::f32, {2}, [](std::int64_t i) { return 0.5 / double(i + 1); });
  const TensorView documents = programs.capture(
      Dtype::i32, {2, 270}, [](std::int64_t i) { return double(i % 270 / (60 + i / 270 * 30)); });
  const Captures captures{.tensors = {{"slopes", slopes}, {"doc", documents}}};
  programs.score = parse_score_mod("score + slopes[q_head] * (kv_idx - q_idx)", captures);
  programs.mask = parse_mask_mod("doc[batch, q_idx] == doc[batch, kv_idx]", captures);
  cases.push_back(std::move(programs));
  add_packed_hopper_cases(cases);
  std::ranges::move(hopper_choice_cases(), std::back_inserter(cases));
  return cases;
}

std::int64_t longest(const CacheCase& problem) {
  return *std::max_element(problem.seqlens.begin(), problem.seqlens.end());
}

std::vector<NamedCacheCase> kernel_cache_cases() {
  CacheCase decode;
  // 600: three splits; 17: one page and a row; 256: a split, exactly; 0: nothing.
  decode.seqlens = {600, 17, 256, 0};
  decode.num_heads_q = 4;
  decode.q_dtype = decode.k_dtype = decode.v_dtype = Dtype::bf16;
  decode.head_dim_qk = 64;
  decode.head_dim_v = 32;
  decode.page_size = 16;
  CacheCase odd_pages = decode;
  odd_pages.page_size = 5;
  odd_pages.index_dtype = Dtype::i64;
  odd_pages.has_sinks = true;
  CacheCase slots = decode;
  slots.page_size = 0;
  slots.has_batch_idx = slots.has_left_padding = slots.has_heads_first = true;
  CacheCase prefill = decode;
  prefill.seqlen_q = 70;
  prefill.seqlens = {200, 70};
  CacheCase plain = decode;
  plain.q_dtype = plain.k_dtype = plain.v_dtype = Dtype::f32;
  // Multi-head latent attention; 270: two splits.
  CacheCase latent = decode;
  latent.seqlens = {270, 17};
  latent.head_dim_qk = 576;
  latent.head_dim_v = 512;
  latent.has_latent_values = true;
  // Sequences of a few queries and of none: splits, new tokens, pages behind offsets.
  CacheCase packed = decode;
  packed.seqlens = {600, 17, 256, 0, 31, 300};
  packed.packed_q = {1, 3, 0, 2, 1, 5};
  packed.packed_new = packed.packed_q;
  packed.packed_new[3] = 0;
  packed.has_max_seqlen_q = packed.has_page_list = packed.has_left_padding = true;
  packed.has_sinks = true;
  packed.mask = causal() && parse_mask_mod("(kv_idx + q_idx) % 5 != 1");
  CacheCase packed_slots = slots;
  packed_slots.packed_q = {4, 1, 0, 1};
  packed_slots.packed_new = packed_slots.packed_q;
  packed_slots.packed_new[3] = 0;
  packed_slots.has_max_seqlen_q = true;
  // Chunks beside single tokens: tiles of rows are counted over all sequences.
  CacheCase chunks = packed;
  chunks.packed_q = {1, 17, 100, 0, 1, 70};
  chunks.packed_new = {1, 17, 100, 0, 1, 70};
  chunks.index_dtype = Dtype::i64;
  CacheCase chunks_of_slots = chunks;
  chunks_of_slots.has_page_list = false;
  chunks_of_slots.page_size = 0;
  chunks_of_slots.has_batch_idx = true;
  CacheCase packed_f32 = packed;
  packed_f32.q_dtype = packed_f32.k_dtype = packed_f32.v_dtype = Dtype::f32;
  CacheCase chunks_f32 = chunks;
  chunks_f32.q_dtype = chunks_f32.k_dtype = chunks_f32.v_dtype = Dtype::f32;
  chunks_f32.has_page_list = false;
  return {{"packed_decode", packed},
          {"packed_decode_slots", packed_slots},
          {"packed_chunks", chunks},
          {"packed_chunks_of_slots", chunks_of_slots},
          {"packed_decode_f32", packed_f32},
          {"packed_chunks_f32", chunks_f32},
          {"paged_decode", decode},
          {"odd_pages", odd_pages},
          {"slots", slots},
          {"paged_prefill", prefill},
          {"paged_decode_f32", plain},
          {"paged_latent", latent}};
}

ForwardProblem problem_of_case(const Case& each) {
  CaseMemory memory(each);
  return validate(problem_of(memory.args()), "test");
}

ForwardProblem problem_of_cache(const CacheCase& each) {
  CacheMemory memory(each);
  const AttentionDecode args = memory.args();
  return validate_decode_problem(decode_problem(args, longest(each), 1, "test"), cache_layout(args),
                                 "test");
}

}  // namespace fovea::testing
