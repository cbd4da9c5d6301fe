// Problems of sm80/attention_forward_short: a sequence's keys in one, two and three stages, rows of one head and of
// several, and all that a copy may leave out. See forward_cases.hpp.
#include <algorithm>
#include <utility>

#include "kernels/forward_cases.hpp"
#include "support/features.hpp"

namespace fovea::testing {

Case short_case(const char* label, Lengths lengths, std::int64_t head_dim) {
  Case problem = plain_case(Dtype::bf16);
  problem.label = label;
  problem.batch = 1;
  problem.seqlen_q = lengths.q;
  problem.seqlen_kv = lengths.kv;
  problem.head_dim_qk = problem.head_dim_v = head_dim;
  problem.wants_row_max = false;
  return problem;
}

namespace {

/// Rows and keys that meet the edges of stages and tiles; some sequences lack one or both. Trailing rows hold NaN,
/// which no copy of the last sequence's cut tile may bring.
Case packed(const char* label, std::int64_t head_dim) {
  Case problem = short_case(label, {}, head_dim);
  problem.sequences = {{0, 0},   {1, 1}, {77, 77}, {80, 80},  {81, 81},
                       {96, 97}, {5, 0}, {0, 70},  {37, 128}, {kMostPacked, kMostPacked}};
  problem.trailing_rows = 3;
  problem.mask = causal();
  return problem;
}

Case with_programs(Case problem) {
  const std::int64_t seqlen = problem.seqlen_kv;
  const TensorView bias = problem.capture(
      Dtype::f16, {seqlen}, [](std::int64_t i) { return double(i * 7 % 11) / 4 - 1; });
  const TensorView documents = problem.capture(
      Dtype::i32, {seqlen}, [](std::int64_t i) { return double(i < 60 ? 0 : i / 40); });
  const Captures captures{.tensors = {{"bias", bias}, {"doc", documents}}};
  problem.score = parse_score_mod("score + bias[kv_idx]", captures);
  problem.mask = parse_mask_mod("doc[q_idx] == doc[kv_idx]", captures);
  return problem;
}

}  // namespace

std::vector<Case> short_cases() {
  Case one_stage = short_case("short_d64", {77, 77}, 64);
  one_stage.batch = 2;
  one_stage.wants_row_max = true;
  // Two row tiles, two stages of 64; the first row tile sees the first alone.
  Case two_stages = short_case("short_causal_d128", {100, 128}, 128);
  two_stages.mask = causal(Align::top_left);
  two_stages.has_sinks = true;
  // Of three stages no row tile sees all; keys that nobody sees are NaN.
  Case three_stages = short_case("short_window_d32", {200, 281}, 32);
  three_stages.mask = window(30, 10);
  Case padded = short_case("short_padded_f16", {49, 49}, 72);
  padded.head_dim_v = 40;
  padded.dtype = Dtype::f16;
  Case by_elements = short_case("short_by_elements", {33, 101}, 24);
  by_elements.layout = by_elements.out_layout = Layout::odd_offset;
  by_elements.mask = causal();
  // 4 heads of 20 rows.
  Case group = short_case("short_group", {20, 77}, 64);
  group.num_heads_q = 8;
  group.num_heads_kv = 2;
  group.mask = causal();
  Case f32_out = short_case("short_f32_out", {100, 125}, 64);
  f32_out.out_dtype = Dtype::f32;
  f32_out.softmax_scale = -0.25F;
  Case dropped = short_case("short_dropout", {90, 126}, 64);
  dropped.score = softcap(2);
  dropped.dropout = kSomeDropped;
  dropped.reads_dropout_seed = true;
  dropped.has_dropout_places = true;
  Case infinite = short_case("short_infinite", {90, 120}, 64);
  infinite.mask = causal();
  infinite.has_infinite_values = true;
  Case sinks = packed("short_packed_d64", 64);
  sinks.has_sinks = true;
  sinks.cu_seqlens_dtype = Dtype::i64;
  Case extreme = with_extreme_scores(short_case("short_extreme", {60, 128}, 64));
  return {one_stage,
          two_stages,
          three_stages,
          padded,
          by_elements,
          group,
          f32_out,
          dropped,
          infinite,
          sinks,
          packed("short_packed_d128", 128),
          with_programs(short_case("short_programs", {123, 123}, 64)),
          extreme,
          short_case("short_no_keys", {40, 0}, 64)};
}

ForwardProblem planned_for_short(ForwardProblem problem, std::int64_t most_packed) {
  if (!problem.is_varlen) return problem;
  problem.problem.seqlen_q = problem.problem.seqlen_kv = up_to(most_packed);
  problem.seqlen_q = problem.seqlen_kv = most_packed;
  return problem;
}

}  // namespace fovea::testing
