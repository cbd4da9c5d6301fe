#include "kernels/backward/backward_cases.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "cuda/backward/sm100.hpp"
#include "cuda/backward/sm80.hpp"
#include "support/features.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

/// What labels of blackwell_backward_plan end in.
constexpr std::string_view kAwaiting = "_awaiting";

GradientCase started(std::string label, Dtype dtype) {
  GradientCase problem{.forward = plain_case(dtype)};
  problem.forward.label = std::move(label);
  problem.forward.wants_row_max = false;
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

/// Every tile of the table, and what meets registers there: tails, groups, programs, dropout.
void add_tiles(std::vector<GradientCase>& cases) {
  for (const std::int64_t head_dim : {64, 96, 128, 192, 256}) {
    const std::string tail = "_d" + std::to_string(head_dim);
    GradientCase grouped = several_tiles("grouped_f16" + tail, Dtype::f16, head_dim);
    grouped.forward.num_heads_q = 2;
    grouped.forward.has_sinks = true;
    cases.push_back(grouped);
    GradientCase full = several_tiles("full_bf16" + tail, Dtype::bf16, head_dim);
    full.forward.mask = {};
    full.has_dlse = false;
    cases.push_back(full);
  }
  GradientCase unequal = several_tiles("unequal_bf16", Dtype::bf16, 192);
  unequal.forward.head_dim_v = 128;
  unequal.gradient_dtype = Dtype::f32;
  cases.push_back(unequal);
  GradientCase wide = several_tiles("wide_f32", Dtype::f32, 512);
  wide.forward.seqlen_q = 19;
  wide.forward.seqlen_kv = 35;
  cases.push_back(wide);
  for (const std::int64_t head_dim : {64, 128}) {
    const std::string tail = "_d" + std::to_string(head_dim);
    GradientCase dropped = several_tiles("dropped_bf16" + tail, Dtype::bf16, head_dim);
    dropped.forward.dropout = kSomeDropped;
    dropped.forward.num_heads_q = 2;
    cases.push_back(dropped);
    dropped.forward.label = "programs_bf16" + tail;
    dropped.forward.score = softcap(2);
    dropped.forward.reads_dropout_seed = true;
    dropped.forward.has_dropout_places = head_dim == 128;
    dropped.forward.mask = window(40, 7);
    cases.push_back(dropped);
  }
}

/// A bias of 10^5 and more, where lse of f32 has no digits left for P; the lowest float in whole rows.
void add_large_biases(std::vector<GradientCase>& cases) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
    GradientCase large = several_tiles("large_bias_" + std::string(name(dtype)), dtype, 64);
    large.forward.has_sinks = dtype == Dtype::f32;
    const TensorView table = large.forward.capture(Dtype::f32, {3}, [](std::int64_t i) {
      return i == 0 ? 131072.0 : i == 1 ? std::numeric_limits<float>::lowest() : 0.0;
    });
    large.forward.score = parse_score_mod("q_idx % 3 == 1 ? table[1] : score + table[q_idx % 3]",
                                          {.tensors = {{"table", table}}});
    cases.push_back(large);
  }
}

/// The same kernels on Turing: both sums of keys in one walk and in two, copies that wait in registers and copies that
/// are waited for, rows read by elements, passes, groups, programs.
void add_turing(std::vector<GradientCase>& cases) {
  for (const std::int64_t head_dim : {64, 128, 256}) {
    GradientCase grouped =
        several_tiles("turing_d" + std::to_string(head_dim), Dtype::f16, head_dim);
    grouped.forward.num_heads_q = head_dim == 64 ? 2 : 1;
    grouped.forward.has_sinks = true;
    cases.push_back(std::move(grouped));
  }
  GradientCase gathered = several_tiles("turing_gathered_d56", Dtype::f16, 56);
  gathered.forward.layout = Layout::odd_offset;
  gathered.has_nan_rows = true;
  cases.push_back(std::move(gathered));
  GradientCase packed = several_tiles("turing_packed_d96", Dtype::f16, 96);
  packed.forward.sequences = {{5, 0}, {0, 7}, {1, 1}, {63, 65}, {129, 128}};
  packed.forward.trailing_rows = 5;
  packed.forward.dropout = kSomeDropped;
  packed.forward.score = softcap(2);
  cases.push_back(std::move(packed));
  GradientCase f32 = started("turing_bf16", Dtype::bf16);
  f32.forward.mask = causal();
  cases.push_back(std::move(f32));
}

void add_nan_rows(std::vector<GradientCase>& cases) {
  for (const std::int64_t head_dim : {64, 128, 256}) {
    GradientCase nan =
        several_tiles("nan_rows_bf16_d" + std::to_string(head_dim), Dtype::bf16, head_dim);
    nan.has_nan_rows = true;
    cases.push_back(nan);
    if (head_dim != 64) continue;
    nan.forward.label = "nan_rows_f32";
    nan.forward.dtype = Dtype::f32;
    cases.push_back(nan);
  }
}

// ---- gradients of captured data ----

/// Several tiles of queries and of keys of two grouped heads in two sequences; what hides keys is the mask's.
GradientCase capturing(std::string label, Dtype dtype, std::int64_t head_dim = 64) {
  GradientCase problem = several_tiles(std::move(label), dtype, head_dim);
  problem.forward.batch = 2;
  problem.forward.seqlen_q = 70;
  problem.forward.seqlen_kv = 75;
  problem.forward.num_heads_q = 2;
  return problem;
}

TensorView captured_normal(Case& problem, Dtype dtype, const std::vector<std::int64_t>& shape,
                           std::uint64_t stream) {
  const Random random(problem.seed, stream);
  return problem.capture(
      dtype, shape, [&](std::int64_t i) { return random.normal(i); }, Strides::of_any_values);
}

/// Every broadcast shape, some of which have an element for each pair and some do not.
void add_biases(std::vector<GradientCase>& cases) {
  const auto add = [&](std::string label, const std::vector<std::int64_t>& shape) {
    GradientCase problem = capturing("bias_" + std::move(label), Dtype::bf16);
    problem.forward.score = bias(captured_normal(problem.forward, Dtype::bf16, shape, 60));
    cases.push_back(std::move(problem));
  };
  add("of_pairs", {70, 75});
  add("of_heads", {2, 70, 75});
  add("of_all", {2, 2, 70, 75});
  add("of_batch", {2, 1, 70, 75});
  add("of_keys", {2, 1, 1, 75});
  add("of_queries", {1, 2, 70, 1});
  add("of_more_keys", {2, 72, 140});  // beyond the lengths: 0
  add("unmasked", {70, 130});  // a whole tile, and pairs beyond the lengths that no mask hides
  cases.back().forward.mask = {};
  // Of a program that is no word: the last stands for all beyond.
  GradientCase fewer = capturing("bias_of_fewer_keys", Dtype::bf16);
  fewer.forward.score = parse_score_mod(
      "score + bias[q_idx, kv_idx]",
      {.tensors = {{"bias", captured_normal(fewer.forward, Dtype::bf16, {70, 40}, 60)}}});
  cases.push_back(std::move(fewer));
  GradientCase of_keys = capturing("bias_of_kv_heads", Dtype::f16);  // dimensions in another order
  of_keys.forward.num_heads_q = 4;
  of_keys.forward.num_heads_kv = 2;
  of_keys.forward.score = parse_score_mod(
      "score + bias[kv_idx, kv_head, q_idx]",
      {.tensors = {{"bias", captured_normal(of_keys.forward, Dtype::f16, {75, 2, 70}, 60)}}});
  cases.push_back(std::move(of_keys));
  GradientCase plain = capturing("bias_f32_to_f16", Dtype::f32);
  plain.forward.score = bias(captured_normal(plain.forward, Dtype::f32, {2, 70, 75}, 60));
  plain.gradient_dtype = Dtype::f16;
  cases.push_back(std::move(plain));
}

ScoreMod by_distance(Case& problem, std::int64_t width, std::uint64_t stream) {
  const Arguments x = arguments();
  return relative_bias(captured_normal(problem, Dtype::f32, {problem.num_heads_q, width}, stream),
                       x.q_idx - x.kv_idx + Expr(static_cast<int>(width / 2)));
}

void add_formulas(Dtype dtype, std::vector<GradientCase>& cases) {
  const auto add = [&](const std::string& label, const auto& program) {
    GradientCase problem = capturing(label + "_" + std::string(name(dtype)), dtype);
    problem.forward.score = program(problem.forward);
    if (label == "distances") problem.forward.mask = {};  // both sides of the diagonal
    cases.push_back(std::move(problem));
  };
  add("distances", [](Case& c) { return by_distance(c, 16, 61); });
  add("slopes", [](Case& c) {
    return parse_score_mod("score + slopes[q_head] * (kv_idx - q_idx) / 16",
                           {.tensors = {{"slopes", captured_normal(c, Dtype::f32, {2}, 62)}}});
  });
  add("temperature", [](Case& c) {
    return parse_score_mod("score * (1 + exp(t))",
                           {.tensors = {{"t", captured_normal(c, Dtype::f32, {}, 63)}}});
  });
  add("capped_table", [](Case& c) { return softcap(3) | by_distance(c, 200, 64); });
  add("two_places", [](Case& c) {
    return parse_score_mod(
        "score + table[q_head, kv_idx % 7] * bias[q_idx] + table[kv_head, 3] + bias[batch] * gain",
        {.tensors = {{"table", captured_normal(c, Dtype::f16, {2, 9}, 65)},
                     {"bias", captured_normal(c, Dtype::f32, {70}, 66)}},
         .scalars = {CapturedScalar::of("gain", 0.5)}});
  });
  add("by_the_score", [](Case& c) {
    return parse_score_mod("score + table[int(score * 4)] + table[int(floor(score)) + 5]",
                           {.tensors = {{"table", captured_normal(c, Dtype::f32, {11}, 67)}}});
  });
}

/// What a walk over pairs meets besides: packing, dropout, NaN, widths, dtypes, nothing at all.
void add_surroundings(std::vector<GradientCase>& cases) {
  const auto add = [&](GradientCase problem) {
    Case& c = problem.forward;
    c.score = parse_score_mod(
        "score + bias[q_head, q_idx, kv_idx] + slopes[q_head] * abs(q_idx - kv_idx) / 16",
        {.tensors = {
             {"bias", captured_normal(c, Dtype::bf16,
                                      {c.num_heads_q, c.max_seqlen_q(), c.max_seqlen_kv()}, 68)},
             {"slopes", captured_normal(c, Dtype::f32, {c.num_heads_q}, 69)}}});
    cases.push_back(std::move(problem));
  };
  for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
    const std::string tail = "_" + std::string(name(dtype));
    GradientCase packed = capturing("captured_packed" + tail, dtype);
    packed.forward.sequences = {{5, 0}, {0, 7}, {1, 1}, {63, 65}, {65, 64}};
    packed.forward.trailing_rows = 5;
    packed.forward.has_sinks = true;
    add(std::move(packed));
    GradientCase dropped = capturing("captured_dropped" + tail, dtype);
    dropped.forward.dropout = kSomeDropped;
    dropped.forward.has_dropout_places = true;
    dropped.forward.has_sinks = true;
    add(std::move(dropped));
    GradientCase nan = capturing("captured_nan" + tail, dtype);
    nan.has_nan_rows = true;
    add(std::move(nan));
    GradientCase windowed = capturing("captured_window" + tail, dtype, 40);
    windowed.forward.mask = window(20, 3);
    add(std::move(windowed));
  }
  add(capturing("turing_captured", Dtype::f16));
  for (const std::int64_t head_dim : {128, 256, 512}) {
    GradientCase wide = capturing("captured_d" + std::to_string(head_dim), Dtype::bf16, head_dim);
    wide.forward.batch = 1;
    wide.forward.seqlen_q = head_dim == 512 ? 9 : 67;
    wide.forward.seqlen_kv = head_dim == 512 ? 19 : 35;
    add(std::move(wide));
  }
  GradientCase rounded = capturing("captured_rounded_out", Dtype::f32);  // delta is summed again
  rounded.forward.out_dtype = Dtype::bf16;
  add(std::move(rounded));
  GradientCase one = capturing("captured_one_key", Dtype::f16);
  one.forward.seqlen_kv = 1;
  one.forward.mask = {};
  add(std::move(one));
  GradientCase tile = capturing("captured_a_tile", Dtype::f16);
  tile.forward.seqlen_q = tile.forward.seqlen_kv = 64;
  tile.gradient_dtype = Dtype::f32;
  add(std::move(tile));
}

}  // namespace

std::vector<GradientCase> captured_cases() {
  std::vector<GradientCase> cases;
  add_biases(cases);
  for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) add_formulas(dtype, cases);
  add_surroundings(cases);
  return cases;
}

std::vector<GradientCase> backward_cases() {
  std::vector<GradientCase> cases;
  for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
    add_features(dtype, cases);
    add_packed(dtype, cases);
    cases.push_back(several_tiles("several_tiles_" + std::string(name(dtype)), dtype, 64));
  }
  add_tiles(cases);
  add_large_biases(cases);
  add_nan_rows(cases);
  add_turing(cases);
  GradientCase mixed = several_tiles("mixed_dtypes", Dtype::bf16, 40);
  mixed.forward.out_dtype = Dtype::f32;
  mixed.dout_dtype = Dtype::f16;
  mixed.gradient_dtype = Dtype::f32;
  mixed.has_dlse = false;
  cases.push_back(std::move(mixed));
  for (GradientCase& each : captured_cases()) cases.push_back(std::move(each));
  return cases;
}

cuda::DeviceTraits device_of(const std::string& label) {
  return label.starts_with("turing_") ? cuda::typical_device(7, 5) : cuda::typical_device(8, 0);
}

cuda::BackwardPlan plan_of_owners(const GradientProblem& problem,
                                  const cuda::DeviceTraits& device) {
  return cuda::Sm80Backward::refuses(problem, device)
             ? cuda::choose_backward(problem, device)
             : cuda::choose_backward_by(cuda::Sm80Backward::kName, problem, device);
}

namespace {

struct HopperPosed {
  std::string label;
  std::int64_t head_dim, seqlen_q, seqlen_kv, num_heads_q = 1, num_heads_kv = 1;
  MaskMod mask{};
  Dtype dtype = Dtype::bf16;
};

GradientCase hopper_case(const HopperPosed& posed) {
  GradientCase problem = started(posed.label, posed.dtype);
  Case& forward = problem.forward;
  forward.batch = 1;
  forward.seqlen_q = posed.seqlen_q;
  forward.seqlen_kv = posed.seqlen_kv;
  forward.num_heads_q = posed.num_heads_q;
  forward.num_heads_kv = posed.num_heads_kv;
  forward.head_dim_qk = forward.head_dim_v = posed.head_dim;
  forward.mask = posed.mask;
  return problem;
}

GradientCase hopper_packed(std::string label, std::int64_t head_dim) {
  GradientCase packed = hopper_case({std::move(label), head_dim, 1, 1, 2, 1, causal()});
  packed.forward.sequences = {{1, 1}, {63, 65}, {129, 150}, {64, 257}, {37, 133}};
  return packed;
}

/// NaN and infinity that some rows do not see: in keys that all mask, in one element of such a key, in rows that see
/// nothing, in rows of dout and q that see some keys of their tiles, behind the end of a sequence.
void add_hidden_nan(std::vector<GradientCase>& cases) {
  for (const HopperPosed& posed : std::vector<HopperPosed>{
           {"blind_rows_d64", 64, 150, 141, 2, 1, causal()},
           {"blind_rows_d128_any_order", 128, 300, 141, 1, 1, causal()},
           {"hidden_end_d128", 128, 150, 270, 2, 1, causal(Align::top_left)},
           {"hidden_end_d64_f16", 64, 140, 200, 1, 1, causal(Align::top_left), Dtype::f16},
           {"hidden_keys_d128", 128, 140, 270, 2, 2,
            causal() && mask_mod([](auto x) { return x.kv_idx % 3 != 1; })},
           {"hidden_keys_d64_f16", 64, 150, 200, 1, 1,
            window(40, 7) && mask_mod([](auto x) { return x.kv_idx / 64 != 1; }), Dtype::f16}}) {
    cases.push_back(hopper_case(posed));
  }
  for (const std::int64_t head_dim : {64, 128}) {
    GradientCase key =
        hopper_case({"nan_of_a_hidden_key_d" + std::to_string(head_dim), head_dim, 150, 141, 2, 1,
                     mask_mod([](auto x) { return x.kv_idx != 77; })});
    key.forward.poisons_hidden_keys = false;
    key.nan_key = 77;
    cases.push_back(std::move(key));
    GradientCase rows =
        hopper_case({"nan_rows_d" + std::to_string(head_dim), head_dim, 150, 141, 2, 1, causal()});
    rows.has_nan_rows = true;
    cases.push_back(rows);
    GradientCase packed = hopper_packed("packed_edges_d" + std::to_string(head_dim), head_dim);
    packed.forward.sequences = {{5, 0},   {0, 0},     {0, 7},    {1, 1},
                                {63, 65}, {129, 128}, {64, 127}, {37, 33}};
    packed.forward.trailing_rows = 5;
    packed.forward.has_sinks = true;
    cases.push_back(std::move(packed));
  }
}

GradientCase hopper_documents(std::string label, std::int64_t head_dim, std::int64_t seqlen) {
  GradientCase problem = hopper_case({std::move(label), head_dim, seqlen, seqlen, 2, 1});
  problem.forward.batch = 2;
  const TensorView ids = problem.forward.capture(
      Dtype::i32, {2, seqlen}, [seqlen](std::int64_t i) { return i % seqlen / 70; });
  problem.forward.mask = documents(ids) && causal();
  return problem;
}

/// Forward's words, in tiles that end inside a group of four keys.
void add_hopper_dropout(std::vector<GradientCase>& cases) {
  const auto add = [&](const HopperPosed& posed, const ScoreMod& score = {}) {
    GradientCase problem = hopper_case(posed);
    problem.wants_captured = false;
    problem.forward.dropout = kSomeDropped;
    problem.forward.score = score;
    problem.forward.reads_dropout_seed = posed.head_dim == 64;
    problem.forward.has_dropout_places = !score.is_identity() || posed.seqlen_kv == 203;
    cases.push_back(std::move(problem));
  };
  add({"dropped_d128", 128, 150, 270, 2, 1});
  add({"dropped_d128_any_order", 128, 200, 141, 2, 2, causal()});
  add({"dropped_d64", 64, 200, 270, 2, 1, causal()});
  add({"dropped_d64_f16_any_order", 64, 150, 203, 2, 2, {}, Dtype::f16});
  add({"dropped_softcap_d128", 128, 200, 200, 2, 2, window(40, 7)}, softcap(2));
  add({"dropped_softcap_d64", 64, 150, 270, 2, 1}, softcap(2));
  GradientCase packed = hopper_packed("packed_dropped_d64", 64);
  packed.forward.dropout = kSomeDropped;
  cases.push_back(std::move(packed));
  GradientCase all = hopper_case({"all_dropped_d64", 64, 70, 141});
  all.forward.dropout = {.p = 1, .seed = 7};
  cases.push_back(std::move(all));
}

/// Programs with and without a slope, of one register or many, on whole tiles, cut ones and masked ones.
void add_hopper_programs(std::vector<GradientCase>& cases) {
  const auto add = [&](const HopperPosed& posed, const auto& program) {
    GradientCase problem = hopper_case(posed);
    problem.wants_captured = false;
    problem.forward.score = program(problem.forward);
    cases.push_back(std::move(problem));
  };
  const auto slopes = [](Case& c) { return captured_normal(c, Dtype::f32, {c.num_heads_q}, 70); };
  const auto distances = [&](Case& c) { return alibi(slopes(c)); };
  const auto line = [&](Case& c) {
    return parse_score_mod("score + slopes[q_head] * (kv_idx - q_idx) / 16",
                           {.tensors = {{"slopes", slopes(c)}}});
  };
  const auto cap = [](Case&) { return softcap(2); };
  const auto all = [&](Case& c) { return softcap(3) | by_distance(c, 90, 71) | line(c); };
  add({"alibi_d128", 128, 200, 300, 2, 1, causal()}, distances);
  add({"alibi_d64", 64, 300, 390, 2, 2}, distances);
  add({"line_d128_any_order", 128, 150, 200, 2, 2}, line);
  add({"line_d64_f16", 64, 300, 200, 2, 1, causal(), Dtype::f16}, line);
  add({"softcap_d128", 128, 200, 300, 2, 1, causal()}, cap);
  add({"softcap_d128_full", 128, 310, 390, 2, 2}, cap);
  add({"softcap_d64_any_order", 64, 150, 200, 2, 1}, cap);
  add({"softcap_d64_window", 64, 200, 200, 2, 2, window(70, 3)}, cap);
  add({"programs_d128_any_order", 128, 140, 270, 2, 1, causal()}, all);
  add({"programs_d64_f16", 64, 140, 270, 2, 1, {}, Dtype::f16}, all);
  // Slopes of 0 and of both signs; a slope that is infinite where the score is hidden.
  add({"squares_d128", 128, 140, 140, 1, 1, causal()},
      [](Case&) { return parse_score_mod("score * score / 4 + abs(score)"); });
  // A key in three is hidden by the bias alone, and so are all keys of some rows; these rows hold NaN.
  add({"hiding_bias_d128", 128, 150, 141}, [](Case& c) {
    return bias(c.capture(Dtype::f32, {150, 141}, [](std::int64_t i) {
      const bool is_hidden = i % 141 % 3 == 1 || i / 141 % 50 == 7;
      return is_hidden ? -std::numeric_limits<double>::infinity()
                       : 0.01 * static_cast<double>(i % 89);
    }));
  });
  // Rows whose lse has no digits left for P.
  add({"large_bias_d64", 64, 150, 200, 1, 1, causal()}, [](Case& c) {
    const TensorView table = c.capture(Dtype::f32, {150}, [](std::int64_t i) {
      return i == 40 ? 131072.0 : i == 70 ? -2048.0 : 0.0;
    });
    return parse_score_mod("score + table[q_idx]", {.tensors = {{"table", table}}});
  });
  GradientCase packed = hopper_packed("packed_programs_d128", 128);
  packed.wants_captured = false;
  packed.forward.score = all(packed.forward);
  cases.push_back(std::move(packed));
}

/// Biases that learn, whose gradient is dS: of all heads or of each, of sequences together, by any dimensions, beyond
/// the lengths; hidden pairs, NaN, rows whose lse has no digits, dropout, another program beside.
void add_learned_biases(std::vector<GradientCase>& cases) {
  const auto add = [&](const HopperPosed& posed, const std::string& program,
                       const std::vector<std::int64_t>& shape) -> GradientCase& {
    GradientCase problem = hopper_case(posed);
    problem.forward.batch = 2;
    problem.forward.score = parse_score_mod(
        program, {.tensors = {{"bias", captured_normal(problem.forward, posed.dtype, shape, 72)}}});
    return cases.emplace_back(std::move(problem));
  };
  const char* const of_heads = "score + bias[q_head, q_idx, kv_idx]";
  add({"learned_bias_d128", 128, 70, 141, 2, 1}, of_heads, {2, 70, 141});
  add({"learned_bias_d64_any_order", 64, 140, 141, 2, 2, causal()}, of_heads, {2, 192, 270});
  add({"learned_bias_d64_f16", 64, 70, 141, 4, 2, causal(Align::top_left), Dtype::f16},
      "bias[kv_idx, kv_head, q_idx] + score", {141, 2, 70})
      .gradient_dtype = Dtype::f16;
  add({"learned_bias_of_all_d64", 64, 70, 141, 2, 1, window(40, 7)},
      "score + bias[batch, q_head, q_idx, kv_idx]", {2, 2, 70, 141});
  add({"learned_bias_of_pairs_d64", 64, 70, 141, 2, 1,
       mask_mod([](auto x) { return x.kv_idx % 3 != 1 && x.q_idx / 64 != x.kv_idx / 64; })},
      "score + bias[q_idx, kv_idx]", {70, 141})
      .gradient_dtype = Dtype::f32;
  add({"learned_bias_nan_rows_d64", 64, 70, 70, 1, 1, causal()}, of_heads, {1, 70, 70})
      .has_nan_rows = true;
  add({"learned_bias_dropped_d64", 64, 70, 70, 1, 1}, of_heads, {1, 70, 70}).forward.dropout =
      kSomeDropped;
  GradientCase large = hopper_case({"learned_large_bias_d64", 64, 80, 70, 1, 1, causal()});
  const auto of_row = [](std::int64_t i) {
    const std::int64_t row = i / 70;
    return row == 40 ? 131072.0 : row == 70 ? -2048.0 : 0.01 * static_cast<double>(i % 89);
  };
  large.forward.score = bias(large.forward.capture(Dtype::f32, {80, 70}, of_row));
  cases.push_back(std::move(large));
}

}  // namespace

std::vector<GradientCase> hopper_backward_cases() {
  std::vector<GradientCase> cases;
  for (const HopperPosed& posed : std::vector<HopperPosed>{
           {"full_d128", 128, 150, 200, 2, 1},
           {"full_d128_any_order", 128, 150, 200, 2, 1},
           {"full_d128_long", 128, 310, 700, 2, 1},  // walks begin at 5 of 5 tiles, two at the same
           {"full_d64_long", 64, 610, 390, 2, 2},    // at 4 of 5
           {"causal_d128", 128, 200, 300, 2, 2, causal()},
           {"causal_d128_f16_any_order", 128, 200, 300, 1, 1, causal(), Dtype::f16},
           {"full_d64_f16", 64, 200, 150, 1, 1, {}, Dtype::f16},
           {"causal_d64", 64, 300, 300, 2, 1, causal()},
           {"causal_d64_any_order", 64, 300, 300, 2, 1, causal()},
           {"window_d96", 96, 300, 300, 1, 1, window(70, 3)},
           {"one_key", 128, 70, 1},
           {"one_query", 64, 1, 300},
           {"no_query", 64, 0, 300},
           {"no_key", 64, 70, 0}}) {
    cases.push_back(hopper_case(posed));
  }
  cases.push_back(hopper_packed("packed_d128", 128));
  cases.push_back(hopper_packed("packed_d64_any_order", 64));
  cases.push_back(hopper_documents("documents_d64", 64, 200));
  cases.push_back(hopper_documents("documents_d128_any_order", 128, 200));
  add_hidden_nan(cases);
  add_hopper_programs(cases);
  add_learned_biases(cases);
  add_hopper_dropout(cases);
  GradientCase f32 = hopper_case({"f32_gradients", 64, 140, 200, 2, 1, causal()});
  f32.gradient_dtype = Dtype::f32;
  cases.push_back(std::move(f32));
  return cases;
}

std::vector<GradientCase> wide_backward_cases() {
  std::vector<GradientCase> cases;
  const auto add = [&](const HopperPosed& posed, std::int64_t head_dim_v = 0) -> GradientCase& {
    GradientCase& problem = cases.emplace_back(hopper_case(posed));
    problem.wants_captured = false;
    if (head_dim_v > 0) problem.forward.head_dim_v = head_dim_v;
    return problem;
  };
  add({"full_d256", 256, 140, 200, 1, 1});
  add({"full_d192_128", 192, 200, 70, 2, 1}, 128);
  add({"causal_d256_f16", 256, 141, 141, 1, 1, causal(), Dtype::f16});
  add({"window_d200_136", 200, 150, 150, 1, 1, window(70, 3)}, 136);  // padded
  add({"full_d64_256", 64, 70, 130}, 256);
  cases.push_back(hopper_documents("documents_d192", 192, 100));
  add({"one_key_d256", 256, 70, 1});
  add({"no_query_d192", 192, 0, 70});
  add({"no_key_d192", 192, 70, 0});
  cases.push_back(hopper_packed("packed_edges_d192_128", 192));
  GradientCase& edges = cases.back();
  edges.forward.head_dim_v = 128;
  edges.forward.sequences = {{5, 0}, {0, 0}, {0, 7}, {1, 1}, {63, 65}, {70, 133}};
  edges.forward.trailing_rows = 5;
  edges.forward.has_sinks = true;
  add({"blind_rows_d256", 256, 100, 70, 1, 1, causal()});
  add({"hidden_keys_d192_128", 192, 70, 141, 1, 1,
       causal() && mask_mod([](auto x) { return x.kv_idx % 3 != 1; })},
      128);
  GradientCase& key = add({"nan_of_a_hidden_key_d256", 256, 70, 141, 1, 1,
                           mask_mod([](auto x) { return x.kv_idx != 77; })});
  key.forward.poisons_hidden_keys = false;
  key.nan_key = 77;
  add({"nan_rows_d192", 192, 100, 100, 1, 1, causal()}).has_nan_rows = true;
  Case& all = add({"programs_d256", 256, 70, 141, 2, 1, causal()}).forward;
  all.score = softcap(3) | by_distance(all, 90, 71) |
              parse_score_mod("score + slopes[q_head] * (kv_idx - q_idx) / 16",
                              {.tensors = {{"slopes", captured_normal(all, Dtype::f32, {2}, 70)}}});
  // Slopes of 0 and of both signs; a slope that is infinite where the score is hidden.
  add({"squares_d192", 192, 70, 70, 1, 1, causal()}).forward.score =
      parse_score_mod("score * score / 4 + abs(score)");
  // A key in three is hidden by the bias alone, and so are all keys of some rows.
  Case& biased = add({"hiding_bias_d256", 256, 75, 70}).forward;
  biased.score = bias(biased.capture(Dtype::f32, {75, 70}, [](std::int64_t i) {
    const bool is_hidden = i % 70 % 3 == 1 || i / 70 % 50 == 7;
    return is_hidden ? -std::numeric_limits<double>::infinity()
                     : 0.01 * static_cast<double>(i % 89);
  }));
  // Rows whose lse has no digits left for P, and nothing that would be computed again.
  Case& large = add({"large_bias_d192", 192, 70, 70, 1, 1, causal()}).forward;
  const TensorView table = large.capture(
      Dtype::f32, {70}, [](std::int64_t i) { return i % 3 == 0 ? -131072.0 : -2048.0; });
  large.score = parse_score_mod("score + table[q_idx]", {.tensors = {{"table", table}}});
  const auto drop = [](GradientCase& problem, const ScoreMod& score = {}) {
    problem.forward.dropout = kSomeDropped;
    problem.forward.score = score;
  };
  drop(add({"dropped_d256", 256, 70, 141, 2, 1, causal()}));
  drop(add({"dropped_softcap_d192_128", 192, 70, 141, 1, 1}, 128), softcap(2));
  cases.back().forward.reads_dropout_seed = true;
  cases.back().forward.has_dropout_places = true;
  add({"f32_gradients_d192", 192, 20, 30, 2, 1, causal()}).gradient_dtype = Dtype::f32;
  return cases;
}

std::vector<GradientCase> one_walk_cases() {
  const std::vector<std::string> labels = {"full_d128",
                                           "full_d128_any_order",
                                           "full_d64_long",
                                           "causal_d64",
                                           "window_d96",
                                           "one_key",
                                           "one_query",
                                           "no_query",
                                           "no_key",
                                           "documents_d64",
                                           "hidden_keys_d128",
                                           "nan_of_a_hidden_key_d64",
                                           "nan_rows_d128",
                                           "packed_edges_d64",
                                           "packed_edges_d128",
                                           "programs_d128_any_order",
                                           "hiding_bias_d128",
                                           "large_bias_d64",
                                           "dropped_d128",
                                           "dropped_d64_f16_any_order",
                                           "packed_dropped_d64",
                                           "f32_gradients"};
  const std::vector<std::string> wide_labels = {"full_d192_128", "window_d200_136",
                                                "blind_rows_d256", "programs_d256"};
  std::vector<GradientCase> cases;
  const auto take = [&](std::vector<GradientCase> from, const std::vector<std::string>& names,
                        const char* tail) {
    for (GradientCase& each : from) {
      if (std::ranges::find(names, each.forward.label) == names.end()) continue;
      each.forward.label += tail;
      // Bits of f32 tell in which order three tiles and more were summed.
      if (each.forward.seqlen_kv > 256) each.gradient_dtype = Dtype::f32;
      cases.push_back(std::move(each));
    }
  };
  take(hopper_backward_cases(), labels, "");
  take(wide_backward_cases(), wide_labels, "_any_order");
  return cases;
}

std::vector<GradientCase> blackwell_backward_cases() {
  const std::vector<std::string> labels = {
      "full_d128",             // staggered, dq by who adds last
      "full_d128_any_order",   // by finish_queries
      "full_d64_long",         // walks begin at different tiles
      "causal_d128",           // dq by the last keys that see a tile
      "causal_d64_any_order",  // a group of heads
      "window_d96",            // padded
      "one_key",
      "one_query",
      "no_query",
      "no_key",
      "packed_edges_d64",  // sequences without rows, rows of nobody
      "packed_d128",
      "documents_d64",     // a mask in parts
      "hidden_keys_d128",  // evaluated pair by pair
      "nan_rows_d128",
      "programs_d128_any_order",  // with slopes
      "line_d64_f16",
      "large_bias_d64",  // rows without digits are computed again
      "dropped_d64",
      "dropped_softcap_d128",
      "f32_gradients"};
  std::vector<GradientCase> cases;
  for (GradientCase& each : hopper_backward_cases()) {
    if (std::ranges::find(labels, each.forward.label) == labels.end()) continue;
    if (each.forward.label == "causal_d128") {
      cases.push_back(each);
      cases.back().forward.label += kAwaiting;
    }
    cases.push_back(std::move(each));
  }
  return cases;
}

bool is_short_blackwell_backward(std::string_view label) {
  constexpr std::array<std::string_view, 5> kShort = {"causal_d128_awaiting", "packed_edges_d64",
                                                      "one_key", "no_query", "no_key"};
  return std::ranges::find(kShort, label) != kShort.end();
}

cuda::BackwardPlan blackwell_backward_plan(const std::string& label,
                                           const GradientProblem& problem) {
  cuda::DeviceTraits device = cuda::typical_device(10, 0);
  device.l2_bytes = 1 << 18;  // heads come in several sections
  device.num_sms = 1;         // a CTA computes several tiles again
  cuda::BackwardPlan plan = cuda::choose_backward_by(cuda::Sm100Backward::kName, problem, device);
  auto spec = plan.steps.front().spec.as<cuda::Sm100BackwardSpec>();
  spec.awaits_keys = label.ends_with(kAwaiting);
  plan.steps.front().spec = spec;
  return plan;
}

bool is_in_any_order(const GradientCase& problem) {
  return problem.forward.label.ends_with("any_order");
}

GradientCase backward_case(const std::string& label) {
  for (GradientCase& each : backward_cases())
    if (each.forward.label == label) return each;
  throw std::out_of_range(label);
}

}  // namespace fovea::testing
