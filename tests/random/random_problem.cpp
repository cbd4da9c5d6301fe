#include "random/random_problem.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include "fovea/mask.hpp"

#include "quant/check.hpp"
#include "reference/attention_forward.hpp"
#include "support/compare.hpp"
#include "support/features.hpp"
#include "support/gradient_compare.hpp"
#include "support/random.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

// Products of a problem: some ten milliseconds of the oracle.
constexpr std::int64_t kMaxProducts = 600'000;

/// Draws in order from one number.
class Draws {
 public:
  explicit Draws(std::uint64_t number) : random_(number, 500) {}

  /// In [0, count).
  std::int64_t below(std::int64_t count) { return random_.below(count, next_++); }
  std::int64_t between(std::int64_t least, std::int64_t most) {
    return least + below(most - least + 1);
  }
  bool is_true(double probability) { return random_.uniform(next_++) < probability; }
  template <typename T>
  T element(std::initializer_list<T> list) {
    return list.begin()[below(static_cast<std::int64_t>(list.size()))];
  }
  template <typename T>
  T element_of(const std::vector<T>& list) {
    return list[static_cast<std::size_t>(below(static_cast<std::int64_t>(list.size())))];
  }

 private:
  Random random_;
  std::int64_t next_ = 0;
};

/// None, few, and around vectors, panels, tiles of 128 keys and splits of 2,048.
std::int64_t draw_length(Draws& draw) {
  if (draw.is_true(0.04)) return 0;
  if (draw.is_true(0.4)) return draw.between(1, 20);
  if (draw.is_true(0.5)) return draw.between(1, 300);
  return std::max<std::int64_t>(
      1, draw.element<std::int64_t>({16, 32, 48, 64, 96, 128, 192, 256, 384, 512}) +
             draw.between(-1, 1));
}

std::int64_t draw_head_dim(Draws& draw) {
  if (draw.is_true(0.6)) return draw.between(1, 40);
  if (draw.is_true(0.7))
    return draw.element<std::int64_t>({48, 64, 72, 80, 96, 128, 160, 192, 256});
  return draw.between(41, 576);
}

Dtype draw_dtype(Draws& draw) { return draw.element({Dtype::f32, Dtype::f16, Dtype::bf16}); }

void draw_sequences(Draws& draw, Case& problem) {
  const std::int64_t count = draw.between(1, 5);
  for (std::int64_t i = 0; i < count; ++i)
    problem.sequences.push_back({draw_length(draw), draw_length(draw)});
  // Programs capture tensors of the longest lengths, and one without elements is refused where a row could be.
  for (std::int64_t Lengths::*side : {&Lengths::q, &Lengths::kv})
    problem.sequences[0].*side = std::max<std::int64_t>(1, problem.sequences[0].*side);
  problem.trailing_rows = draw.is_true(0.5) ? draw.between(1, 4) : 0;
  if (draw.is_true(0.5)) problem.cu_seqlens_dtype = Dtype::i64;
}

void draw_shape(Draws& draw, Case& problem) {
  problem.batch = draw.between(1, 3);
  problem.seqlen_q = draw_length(draw);
  problem.seqlen_kv = draw_length(draw);
  if (draw.is_true(0.04)) {  // keys of several splits
    problem.batch = 1;
    problem.seqlen_q = draw.between(1, 6);
    problem.seqlen_kv = draw.between(2000, 4200);
  } else if (draw.is_true(0.25)) {
    draw_sequences(draw, problem);
  }
  problem.num_heads_kv = draw.between(1, 4);
  problem.num_heads_q = problem.num_heads_kv * draw.element<std::int64_t>({1, 1, 2, 3, 4, 7});
  problem.head_dim_qk = draw_head_dim(draw);
  problem.head_dim_v = draw.is_true(0.5) ? problem.head_dim_qk : draw_head_dim(draw);
}

std::int64_t num_products(const Case& problem) {
  std::int64_t scores = 0;
  for (std::int64_t i = 0; i < problem.num_sequences(); ++i)
    scores += problem.lengths(i).q * problem.lengths(i).kv;
  return scores * problem.num_heads_q * (problem.head_dim_qk + problem.head_dim_v);
}

/// What is large in many ways at once is made small in one after another.
void bound_work(Draws& draw, Case& problem, std::int64_t most) {
  while (num_products(problem) > most) {
    switch (draw.below(4)) {
      case 0:
        problem.num_heads_q = problem.num_heads_kv =
            std::max<std::int64_t>(1, problem.num_heads_kv / 2);
        break;
      case 1:
        problem.batch = 1;
        if (problem.sequences.size() > 1) problem.sequences.pop_back();
        break;
      case 2:
        problem.seqlen_q -= problem.seqlen_q / 2;
        for (Lengths& each : problem.sequences) each.q -= each.q / 2;
        break;
      default:
        problem.head_dim_qk -= problem.head_dim_qk / 4;
        problem.head_dim_v -= problem.head_dim_v / 4;
        break;
    }
  }
}

void draw_numbers(Draws& draw, Case& problem) {
  problem.dtype = draw_dtype(draw);
  if (draw.is_true(0.3)) problem.out_dtype = draw_dtype(draw);
  constexpr auto kNumInputs = static_cast<std::int64_t>(std::size(kInputLayouts));
  constexpr auto kNumOutputs = static_cast<std::int64_t>(std::size(kOutputLayouts));
  if (draw.is_true(0.6)) problem.layout = kInputLayouts[draw.below(kNumInputs)];
  if (draw.is_true(0.6)) problem.out_layout = kOutputLayouts[draw.below(kNumOutputs)];
  if (draw.is_true(0.25)) problem.distribution = Distribution::heavy_tailed;
  if (draw.is_true(0.2)) problem.softmax_scale = draw.element({0.F, 1.F, -0.3F, 0.1F, 4.F});
  problem.wants_row_max = draw.is_true(0.7);
  problem.wants_lse = draw.is_true(0.8);
  if (draw.is_true(0.2)) {
    problem.dropout = {.p = draw.element({0.1F, 0.5F, 0.9F, 1.F}),
                       .seed = static_cast<std::uint64_t>(draw.below(1000)),
                       .offset = static_cast<std::uint64_t>(draw.below(10))};
  }
}

/// Up to four of the programs and masks that tests know, in their order.
void draw_features(Draws& draw, Case& problem) {
  const std::int64_t count = draw.below(5);
  std::vector<std::size_t> chosen;
  for (std::int64_t i = 0; i < count; ++i) {
    chosen.push_back(
        static_cast<std::size_t>(draw.below(static_cast<std::int64_t>(features().size()))));
  }
  std::ranges::sort(chosen);
  chosen.erase(std::ranges::unique(chosen).begin(), chosen.end());
  for (const std::size_t index : chosen) {
    const Feature& feature = features()[index];
    if (feature.group.empty() || feature.group == "scale") feature.add(problem);
  }
}

bool shares_memory(const Case& problem) {
  return problem.layout == Layout::shared_batch || problem.layout == Layout::shared_head;
}

void draw_non_finite(Draws& draw, Case& problem) {
  const bool is_fit = !problem.is_packed() && !shares_memory(problem) && problem.seqlen_kv > 0 &&
                      problem.batch > 0 && problem.head_dim_v >= 4;
  if (is_fit && draw.is_true(0.06)) problem.has_infinite_values = true;
}

/// Packed queries, and new tokens: as many, packed by offsets of their own, or as many of each sequence.
void draw_packed(Draws& draw, CacheCase& c) {
  for (std::int64_t i = 0; i < c.batch(); ++i)
    c.packed_q.push_back(draw.element<std::int64_t>({0, 1, 1, 1, 3, 17}));
  c.has_max_seqlen_q = draw.is_true(0.5);
  if (c.num_new == 0) return;
  const std::int64_t how = draw.below(3);
  if (how == 0) return;
  for (std::int64_t i = 0; i < c.batch(); ++i) {
    std::int64_t& seqlen = c.seqlens[static_cast<std::size_t>(i)];
    seqlen -= c.num_new;
    c.packed_new.push_back(how == 1 ? c.queries(i) : draw.below(4));
    seqlen += c.packed_new.back();
  }
  c.num_new = 0;
}

CacheCase draw_cache(Draws& draw) {
  CacheCase c;
  const std::int64_t batch = draw.between(1, 4);
  c.num_new = draw.is_true(0.5) ? draw.between(1, 5) : 0;
  for (std::int64_t i = 0; i < batch; ++i) c.seqlens.push_back(c.num_new + draw_length(draw));
  if (draw.is_true(0.05)) c.seqlens.back() = draw.between(2000, 4200);
  c.seqlen_q = draw.element<std::int64_t>({1, 1, 1, 2, 5, 17});
  if (draw.is_true(0.4)) draw_packed(draw, c);
  c.num_heads_kv = draw.between(1, 3);
  c.num_heads_q = c.num_heads_kv * draw.element<std::int64_t>({1, 2, 4, 7});
  c.head_dim_qk = draw_head_dim(draw);
  c.head_dim_v = draw.is_true(0.5) ? c.head_dim_qk : draw_head_dim(draw);
  c.q_dtype = draw_dtype(draw);
  c.k_dtype = draw.is_true(0.7) ? c.q_dtype : draw_dtype(draw);
  c.v_dtype = draw.is_true(0.7) ? c.k_dtype : draw_dtype(draw);
  c.index_dtype = draw.element({Dtype::i32, Dtype::i64});
  if (draw.is_true(0.6)) c.page_size = draw.element<std::int64_t>({1, 3, 16, 64, 127, 128, 256});
  c.has_heads_first = draw.is_true(0.3);
  c.has_page_list = c.page_size > 0 && draw.is_true(0.3);
  c.has_batch_idx = c.page_size == 0 && draw.is_true(0.5);
  c.has_left_padding = draw.is_true(0.3);
  c.has_sinks = draw.is_true(0.3);
  c.has_drawn_tokens = draw.is_true(0.5);
  if (draw.is_true(0.3))
    c.mask = draw.element({MaskMod(), window(9, 2), causal() && window(70, std::nullopt)});
  if (draw.is_true(0.2)) c.score = softcap(2);
  if (draw.is_true(0.1)) c.nan_key = draw.below(40);
  const auto cost = [&] {
    std::int64_t keys = 0;
    for (std::int64_t i = 0; i < c.batch(); ++i)
      keys += c.seqlens[static_cast<std::size_t>(i)] * c.queries(i);
    return keys * c.num_heads_q * (c.head_dim_qk + c.head_dim_v);
  };
  while (cost() > kMaxProducts) {
    if (c.packed_q.empty() ? c.seqlen_q > 1 : std::ranges::max(c.packed_q) > 1) {
      c.seqlen_q = 1;
      for (std::int64_t& length : c.packed_q) length = std::min<std::int64_t>(length, 1);
    } else if (c.num_heads_kv > 1) {
      c.num_heads_q /= c.num_heads_kv;
      c.num_heads_kv = 1;
    } else {
      c.head_dim_qk -= c.head_dim_qk / 2;
      c.head_dim_v -= c.head_dim_v / 2;
      if (c.head_dim_qk == 1 && c.head_dim_v == 1) break;
    }
  }
  return c;
}

/// Recipes on the CPU with every feature, and what no named one has.
Quantization draw_recipe(Draws& draw) {
  return parse_quantization(draw.element<std::string_view>(
      {"accurate", "fast", "int8", "sage1", "sage2", "nvfp4", "mxfp4", "accurate,hadamard=yes",
       "fast,smooth_v=sequence",
       "qk=int8,q_scales=warp,block_q=32,warp_q=8,k_scales=block,block_kv=32",
       "int8,v_scales=channel,block_kv=256", "qk=e4m3,smooth_k=sequence"}));
}

void draw_recipe_of(Draws& draw, Case& problem) {
  problem.quant = draw_recipe(draw);
  // Scores of a few products in four bits have so few values that probabilities meet a tie of their codes together.
  if (problem.quant.qk == QuantFormat::e2m1 && problem.head_dim_qk < 8)
    problem.quant = parse_quantization("int8");
  if (!quant::obstacle(problem.quant, problem.head_dim_qk).empty()) problem.quant.hadamard = false;
}

/// Of a forward call: a recipe, what dropout reads in memory, a plan of longer sequences.
void draw_more(Draws& draw, RandomProblem& problem) {
  Case& of = problem.dense.forward;
  if (of.dropout.p > 0) {
    of.reads_dropout_seed = draw.is_true(0.3);
    of.has_dropout_places = !of.is_packed() && draw.is_true(0.3);
  }
  // A plan of longer sequences refuses tensors that have no elements for programs to read.
  if (of.max_seqlen_q() > 0 && of.max_seqlen_kv() > 0 && draw.is_true(0.3)) {
    problem.longest = {of.max_seqlen_q() + draw.below(300), of.max_seqlen_kv() + draw.below(3000)};
  }
  if (of.has_infinite_values || of.compute_dtype != ComputeDtype::automatic || !draw.is_true(0.2))
    return;
  draw_recipe_of(draw, of);
  const std::vector<CpuTarget> targets = targets_for(of);
  if (targets.empty()) {
    of.quant = {};
  } else {
    problem.target = draw.element_of(targets);
  }
}

TensorView capture_normal(CacheCase& c, const std::vector<std::int64_t>& shape) {
  const auto tensor = std::make_shared<GuardedTensor>(make_spec(Dtype::f32, shape));
  const Random random(c.seed, 600 + c.captured.size());
  tensor->fill([&](std::int64_t i) { return random.normal(i); });
  c.captured.push_back(tensor);
  return tensor->view();
}

/// Of programs what tests of dense calls know; all sequences share what they read.
void draw_cached_programs(Draws& draw, CacheCase& c) {
  std::int64_t max_q = 0;
  for (std::int64_t i = 0; i < c.batch(); ++i) max_q = std::max(max_q, c.queries(i));
  const std::int64_t max_kv = std::max<std::int64_t>(1, std::ranges::max(c.seqlens));
  max_q = std::max<std::int64_t>(1, max_q);
  if (draw.is_true(0.3))
    c.score = c.score | bias(capture_normal(c, {draw.is_true(0.5) ? 1 : c.num_heads_q,
                                                draw.is_true(0.3) ? 1 : max_q, max_kv}));
  if (draw.is_true(0.3)) c.score = c.score | alibi(capture_normal(c, {c.num_heads_q}));
  if (draw.is_true(0.2)) {
    const TensorView table = capture_normal(c, {c.num_heads_q, 16});
    c.score = c.score | relative_bias(table, aligned_q_idx() - arguments().kv_idx + 8);
  }
  if (draw.is_true(0.2)) {
    c.score = c.score | parse_score_mod(
                            "score * gain + sigmoid(float(kv_idx % 7)) * float(q_head - "
                            "kv_head) + float(q_idx - seqlen_q) / float(1 + seqlen_kv)",
                            {.scalars = {CapturedScalar::of("gain", 0.75)}});
  }
  if (draw.is_true(0.2)) c.mask = c.mask && dilated(3);
  if (draw.is_true(0.2)) c.mask = c.mask && streaming(4, 20);
  if (draw.is_true(0.2)) {
    c.mask = c.mask && parse_mask_mod(
                           "kv_idx < 3 || kv_idx % 2 == kv_head % 2 || kv_idx >= "
                           "seqlen_kv - 5");
  }
}

/// Keys that sequences have in common; dense queries then want evenly spaced rows.
void draw_shared_prefix(Draws& draw, CacheCase& c) {
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t i = 0; i < c.batch(); ++i) {
    const std::int64_t seqlen = c.seqlens[static_cast<std::size_t>(i)];
    most = std::min(most, seqlen - std::max(c.queries(i), c.new_tokens(i)));
  }
  if (most <= 0 || c.packed_new != std::vector<std::int64_t>() || !draw.is_true(0.5)) return;
  c.shared_prefix = draw.between(1, most);
  c.has_drawn_tokens = c.has_drawn_tokens && !c.packed_q.empty();
  if (c.batch() > 1 && draw.is_true(0.5)) c.groups = {0, draw.between(0, c.batch())};
}

void draw_more(Draws& draw, CacheCase& c) {
  if (draw.is_true(0.3)) draw_cached_programs(draw, c);
  if (draw.is_true(0.2)) c.k_dtype = draw.element({Dtype::i8, Dtype::e4m3});
  if (draw.is_true(0.2)) c.v_dtype = draw.element({Dtype::i8, Dtype::e4m3});
  if (draw.is_true(0.3)) draw_shared_prefix(draw, c);
  c.plan_room = draw.is_true(0.3) ? draw.below(5000) : -1;
}

/// What a cache of bf16 alone is multiplied in depends on the machine; everything else in f32.
ComputeDtype compute_dtype_of(const CacheCase& c, const AttentionForward& dense) {
  if (c.k_dtype != c.q_dtype || c.v_dtype != c.q_dtype) return ComputeDtype::f32;
  return explain(problem_of(dense)).compute_dtype == "bf16" ? ComputeDtype::bf16
                                                            : ComputeDtype::f32;
}

std::string decode_difference(const RandomProblem& problem, Executor& executor) {
  CacheMemory memory(problem.cache);
  const CpuTarget target = problem.target.value_or(CpuTarget::automatic);
  AttentionDecode args = memory.args(target);
  args.executor = &executor;
  PoisonedWorkspace workspace(0);
  if (problem.cache.plan_room >= 0) {
    const std::int64_t longest = std::ranges::max(problem.cache.seqlens);
    const DecodePlan plan = plan_decode(args, longest + problem.cache.plan_room);
    workspace = PoisonedWorkspace(plan.workspace_bytes());
    args.workspace = workspace.span();
    plan.run(args);
  } else {
    attention_decode(args);
  }
  std::string found = memory.damage() + memory.damage_of_nobody();
  if (!workspace.has_intact_guards()) found += "wrote outside of workspace\n";
  for (std::int64_t i = 0; i < problem.cache.batch(); ++i) {
    AttentionForward dense = memory.dense(i, target);
    const reference::ForwardResult expected = reference::attention_forward(dense);
    const Tolerances allowed = tolerances(dense, expected, compute_dtype_of(problem.cache, dense));
    const std::string sequence = fmt::format(" of sequence {}", i);
    found += difference({"out" + sequence, memory.rows_of(args.out, i), expected.out, allowed.out});
    found += difference({"lse" + sequence, memory.lse_of(args.lse, i), expected.lse, allowed.lse});
  }
  return found;
}

std::string listed(const std::vector<std::int64_t>& lengths) {
  return lengths.empty() ? "" : fmt::format(" packed {}", fmt::join(lengths, " "));
}

std::string describe(const CacheCase& c) {
  return fmt::format(
      "decode: seqlens {} q {}{} new {}{} heads {}/{} dims {}/{} {}/{}/{} page_size {}{}{}{}{}{}{} "
      "layouts "
      "{} nan_key {} prefix {}{} room {} score {} mask {}",
      fmt::join(c.seqlens, " "), c.seqlen_q, listed(c.packed_q), c.num_new, listed(c.packed_new),
      c.num_heads_q, c.num_heads_kv, c.head_dim_qk, c.head_dim_v, fovea::name(c.q_dtype),
      fovea::name(c.k_dtype), fovea::name(c.v_dtype), c.page_size, c.has_page_list ? " listed" : "",
      c.has_heads_first ? " heads first" : "", c.has_batch_idx ? " batch_idx" : "",
      c.has_left_padding ? " left padding" : "", c.has_sinks ? " sinks" : "",
      c.has_drawn_tokens ? " drawn tokens" : "", c.layout_seed, c.nan_key, c.shared_prefix,
      listed(c.groups), c.plan_room, c.score.to_string(), c.mask.to_string());
}

std::string difference_of(const RandomProblem& problem, Executor& executor) {
  std::vector<CpuTarget> targets;
  if (problem.target) targets = {*problem.target};
  switch (problem.operation) {
    case Operation::forward:
      return difference_from_oracle(
          problem.dense.forward,
          {.targets = targets, .executor = &executor, .longest = problem.longest});
    case Operation::backward:
      return backward_difference(problem.dense, {.targets = targets, .executor = &executor});
    case Operation::jvp:
      return jvp_difference(problem.dense);
    case Operation::decode:
      break;
  }
  const std::string found = decode_difference(problem, executor);
  return found.empty() ? found : found + "  in " + describe(problem.cache) + "\n";
}

}  // namespace

RandomProblem random_problem(std::uint64_t number) {
  Draws draw(number);
  RandomProblem problem;
  problem.operation = draw.element({Operation::forward, Operation::forward, Operation::forward,
                                    Operation::backward, Operation::decode, Operation::jvp});
  problem.num_threads = static_cast<int>(draw.element<std::int64_t>({1, 2, 2, 3}));
  if (problem.operation == Operation::decode) {
    problem.cache = draw_cache(draw);
    problem.cache.seed = problem.cache.page_seed = problem.cache.layout_seed = number;
    draw_more(draw, problem.cache);
    return problem;
  }
  Case& of = problem.dense.forward;
  of.label = fmt::format("random {}", number);
  of.seed = number;
  draw_shape(draw, of);
  draw_numbers(draw, of);
  const bool is_forward = problem.operation == Operation::forward;
  bound_work(draw, of, is_forward ? kMaxProducts : kMaxProducts / 4);
  draw_features(draw, of);
  if (is_forward) {
    draw_non_finite(draw, of);
    problem.target = draw.element_of(targets_for(of.dtype, of.compute_dtype));
    draw_more(draw, problem);
    return problem;
  }
  problem.dense.has_dlse = of.wants_lse && draw.is_true(0.7);
  problem.dense.wants_captured = draw.is_true(0.7);
  if (draw.is_true(0.3)) problem.dense.gradient_dtype = draw_dtype(draw);
  if (draw.is_true(0.3)) problem.dense.dout_dtype = draw_dtype(draw);
  if (draw.is_true(0.7)) problem.target = draw.element_of(gradient_targets_for(of.dtype));
  if (problem.operation == Operation::backward && draw.is_true(0.2)) {
    draw_recipe_of(draw, of);
    problem.target = draw.element_of(targets_for(Dtype::f32));
  }
  return problem;
}

std::string difference_from_oracle(const RandomProblem& problem) {
  const std::unique_ptr<Executor> executor = make_thread_pool(problem.num_threads);
  try {
    return difference_of(problem, *executor);
  } catch (const std::exception& error) {
    const bool is_decode = problem.operation == Operation::decode;
    return fmt::format("threw: {}\n  in {}\n", error.what(),
                       is_decode ? describe(problem.cache) : problem.dense.describe());
  }
}

}  // namespace fovea::testing
