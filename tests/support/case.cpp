#include "support/case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "problem/input_codes.hpp"
#include "reference/evaluate.hpp"
#include "support/random.hpp"

namespace fovea::testing {

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// [batch, seqlen, heads, head_dim]; a packed tensor has batch 1 and loses that dimension at the
/// end.
struct Shape4 {
  std::int64_t batch = 1, seqlen = 1, heads = 1, head_dim = 1;
};

std::array<std::int64_t, 4> strides_of(const Shape4& shape, Layout layout) {
  const std::int64_t d = shape.head_dim;
  const auto bshd = [&](std::int64_t row, std::int64_t dim) {
    return std::array{shape.seqlen * shape.heads * row, shape.heads * row, row, dim};
  };
  switch (layout) {
    case Layout::bshd:
      return bshd(d, 1);
    case Layout::bhsd:
      return {shape.heads * shape.seqlen * d, d, shape.seqlen * d, 1};
    case Layout::padded:
      return bshd(d + 24, 1);
    case Layout::odd_offset:
      return bshd(d + 1, 1);
    case Layout::strided_dim:
      return bshd(3 * d, 3);
    case Layout::reversed: {
      const auto forward = bshd(d, 1);
      return {forward[0], -forward[1], forward[2], -1};
    }
    case Layout::shared_batch: {
      const auto own = bshd(d, 1);
      return {0, own[1], own[2], own[3]};
    }
    case Layout::shared_head:
      return {shape.seqlen * d, d, 0, 1};
  }
  return {};
}

GuardedTensor tensor_of(Dtype dtype, const Shape4& shape, Layout layout, bool is_packed) {
  const std::array<std::int64_t, 4> extents{shape.batch, shape.seqlen, shape.heads, shape.head_dim};
  const std::array<std::int64_t, 4> strides = strides_of(shape, layout);
  const std::size_t first = is_packed ? 1 : 0;
  const TensorSpec spec =
      make_spec(dtype, std::span(extents).subspan(first), std::span(strides).subspan(first));
  return GuardedTensor(spec, layout == Layout::odd_offset ? 1 : 0);
}

/// [batch, heads, seqlen] or packed [heads, total].
GuardedTensor statistic_of(const Case& problem, const Shape4& shape, std::uint64_t stream) {
  const std::array<std::int64_t, 3> extents{shape.batch, shape.heads, shape.seqlen};
  return GuardedTensor(problem.drawn(Dtype::f32,
                                     std::span(extents).subspan(problem.is_packed() ? 1 : 0),
                                     stream, Strides::of_output));
}

GuardedTensor cu_seqlens_of(const Case& problem, std::int64_t Lengths::*side,
                            std::uint64_t stream) {
  const std::array<std::int64_t, 1> shape{problem.num_sequences() + 1};
  GuardedTensor result(problem.drawn(problem.cu_seqlens_dtype, shape, stream, Strides::of_input));
  std::int64_t total = 0;
  result.fill([&](std::int64_t i) {
    if (i > 0) total += problem.sequences[static_cast<std::size_t>(i - 1)].*side;
    return static_cast<double>(total);
  });
  return result;
}

double sample(const Random& random, Distribution distribution, std::int64_t index) {
  const double value = random.normal(index);
  if (distribution == Distribution::normal) return value;
  constexpr double kTailShare = 0.005, kTailFactor = 21;
  return random.uniform(-1 - index) < kTailShare ? kTailFactor * value : value;
}

void fill_with_samples(GuardedTensor& tensor, const Case& problem, std::uint64_t stream,
                       int exponent = 0) {
  const Random random(problem.seed, stream);
  tensor.fill([&](std::int64_t i) {
    return std::ldexp(sample(random, problem.distribution, i), exponent);
  });
}

}  // namespace

std::string_view name(Layout layout) {
  constexpr std::string_view kNames[] = {"bshd",        "bhsd",     "padded",       "odd_offset",
                                         "strided_dim", "reversed", "shared_batch", "shared_head"};
  return kNames[static_cast<int>(layout)];
}

Lengths Case::lengths(std::int64_t sequence) const {
  return is_packed() ? sequences[static_cast<std::size_t>(sequence)] : Lengths{seqlen_q, seqlen_kv};
}

std::int64_t Case::max_seqlen_q() const {
  std::int64_t longest = 0;
  for (std::int64_t i = 0; i < num_sequences(); ++i) longest = std::max(longest, lengths(i).q);
  return longest;
}

std::int64_t Case::max_seqlen_kv() const {
  std::int64_t longest = 0;
  for (std::int64_t i = 0; i < num_sequences(); ++i) longest = std::max(longest, lengths(i).kv);
  return longest;
}

TensorView Case::capture(Dtype element, const std::vector<std::int64_t>& shape,
                         const std::function<double(std::int64_t)>& value, Strides strides) {
  const std::uint64_t stream = kCapturedLayout + captured.size();
  captured.push_back(std::make_shared<GuardedTensor>(drawn(element, shape, stream, strides)));
  captured.back()->fill(value);
  return captured.back()->view();
}

TensorSpec Case::drawn(Dtype element, std::span<const std::int64_t> shape, std::uint64_t stream,
                       Strides strides) const {
  return drawn_spec(element, shape, Random(mixed(seed) + layout_seed, stream), strides);
}

std::string Case::describe() const {
  std::string lengths_text = fmt::format("batch {} seqlens {}/{}", batch, seqlen_q, seqlen_kv);
  if (is_packed()) {
    lengths_text = "packed";
    for (const Lengths& each : sequences) lengths_text += fmt::format(" {}/{}", each.q, each.kv);
    lengths_text += fmt::format(" +{} rows", trailing_rows);
  }
  std::string text = fmt::format(
      "{}: {} {} heads {}/{} dims {}/{} {}->{} {} seed {}", label, fovea::name(dtype), lengths_text,
      num_heads_q, num_heads_kv, head_dim_qk, head_dim_v, name(layout), name(out_layout),
      distribution == Distribution::normal ? "normal" : "heavy-tailed", seed);
  if (layout_seed != 0) text += fmt::format(" layouts {}", layout_seed);
  if (out_dtype) text += fmt::format(" out {}", fovea::name(*out_dtype));
  if (softmax_scale) text += fmt::format(" scale {}", *softmax_scale);
  if (has_sinks) text += " sinks";
  if (!quant.is_none()) text += fmt::format(" quant {}", print(quant));
  if (dropout.p > 0) text += fmt::format(" dropout {} seed {}", dropout.p, dropout.seed);
  if (reads_dropout_seed) text += " in memory";
  if (has_dropout_places) text += " of a part";
  if (!score.is_identity()) text += "; score: " + score.to_string();
  if (!mask.is_all_visible()) text += "; mask: " + mask.to_string();
  return text;
}

GuardedTensor tensor_like(const TensorSpec& shape, Dtype dtype, Layout layout) {
  const bool is_packed = shape.rank == 3;
  const auto extent = [&](std::size_t dim) {
    return dim == 0 && is_packed ? 1 : shape.shape[dim - (is_packed ? 1 : 0)];
  };
  return tensor_of(dtype, {extent(0), extent(1), extent(2), extent(3)}, layout, is_packed);
}

void set_row(GuardedTensor& tensor, const RowOfHead& which, double value) {
  const TensorView view = tensor.view();
  const int seq = view.rank() == 3 ? 0 : 1;
  const std::int64_t batch_offset = view.rank() == 3 ? 0 : which.batch * view.stride(0);
  for (std::int64_t dim = 0; dim < view.size(seq + 2); ++dim) {
    tensor.set(batch_offset + which.row * view.stride(seq) + which.head * view.stride(seq + 1) +
                   dim * view.stride(seq + 2),
               value);
  }
}

namespace {

/// Beyond 32 bits, and below zero: what is added wraps.
constexpr std::int64_t kSeedInMemory = (std::int64_t{1} << 40) + 5, kOffsetInMemory = -3;

}  // namespace

CaseMemory::CaseMemory(const Case& problem) : problem_(problem) {
  const bool is_packed = problem.is_packed();
  Shape4 q_shape{problem.batch, problem.seqlen_q, problem.num_heads_q, problem.head_dim_qk};
  Shape4 kv_shape{problem.batch, problem.seqlen_kv, problem.num_heads_kv, problem.head_dim_qk};
  if (is_packed) {
    q_shape.batch = kv_shape.batch = 1;
    q_shape.seqlen = kv_shape.seqlen = problem.trailing_rows;
    for (const Lengths& each : problem.sequences) {
      q_shape.seqlen += each.q;
      kv_shape.seqlen += each.kv;
    }
    cu_seqlens_q = cu_seqlens_of(problem, &Lengths::q, kCuSeqlensQLayout);
    cu_seqlens_kv = cu_seqlens_of(problem, &Lengths::kv, kCuSeqlensKvLayout);
  }
  Shape4 v_shape = kv_shape;
  v_shape.head_dim = problem.head_dim_v;
  Shape4 out_shape = q_shape;
  out_shape.head_dim = problem.head_dim_v;
  q = tensor_of(problem.dtype, q_shape, problem.layout, is_packed);
  k = tensor_of(problem.dtype, kv_shape, problem.layout, is_packed);
  v = tensor_of(problem.dtype, v_shape, problem.layout, is_packed);
  out = tensor_of(problem.out_dtype.value_or(default_out_dtype(problem.dtype)), out_shape,
                  problem.out_layout, is_packed);
  if (problem.wants_lse) lse = statistic_of(problem, q_shape, kLseLayout);
  if (problem.wants_row_max) row_max = statistic_of(problem, q_shape, kRowMaxLayout);
  fill_inputs();
}

/// Every batch entry, head and query stands elsewhere, and so does every four keys.
void CaseMemory::fill_dropout_places() {
  std::vector<std::int64_t> places;
  for (std::int64_t i = 0; i < problem_.batch; ++i) places.push_back(2 * i + 1);
  for (std::int64_t i = 0; i < problem_.num_heads_q; ++i) places.push_back(i + 3);
  for (std::int64_t i = 0; i < problem_.seqlen_q; ++i)
    places.push_back(3 * (problem_.seqlen_q - i));
  for (std::int64_t i = 0; i < problem_.seqlen_kv; ++i)
    places.push_back(4 * (problem_.seqlen_kv - i / 4) + i % 4);
  const std::array shape{static_cast<std::int64_t>(places.size())};
  dropout_places = GuardedTensor(make_spec(Dtype::i32, shape));
  dropout_places.fill([&](std::int64_t i) { return places[static_cast<std::size_t>(i)]; });
}

void CaseMemory::fill_inputs() {
  // Codes of numbers about as large by the scales of fill_scales.
  const int exponent = problem_.dtype == Dtype::e4m3 ? 7 : 0;
  fill_with_samples(q, problem_, 0, exponent);
  fill_with_samples(k, problem_, 1, exponent);
  fill_with_samples(v, problem_, 2, exponent + problem_.value_exponent);
  if (problem_.has_sinks) {
    const std::array<std::int64_t, 1> shape{problem_.num_heads_q};
    sinks = GuardedTensor(problem_.drawn(Dtype::f32, shape, kSinksLayout, Strides::of_input));
    const Random random(problem_.seed, 3);
    sinks.fill([&](std::int64_t i) { return random.normal(i); });
  }
  if (problem_.reads_dropout_seed) {
    const std::array<std::int64_t, 1> shape{1};
    dropout_seed =
        GuardedTensor(problem_.drawn(Dtype::i64, shape, kDropoutSeedLayout, Strides::of_input));
    dropout_offset =
        GuardedTensor(problem_.drawn(Dtype::i64, shape, kDropoutOffsetLayout, Strides::of_input));
    dropout_seed.fill([](std::int64_t) { return kSeedInMemory; });
    dropout_offset.fill([](std::int64_t) { return kOffsetInMemory; });
  }
  if (problem_.has_dropout_places && !problem_.is_packed()) fill_dropout_places();
  fill_scales();
  poison_trailing_rows();
  if (problem_.poisons_hidden_keys) poison_hidden_keys();
  if (problem_.has_infinite_values) set_infinite_values();
  if (problem_.has_huge_value) set_huge_value();
  for (GuardedTensor* input : {&q, &k, &v}) input->seal();
}

/// About the greatest magnitude of a normal sample over that of e4m3: some numbers are saturated.
void CaseMemory::fill_scales() {
  if (problem_.quant.scales != ScaleSource::given) return;
  const std::array<std::int64_t, 2> shape{problem_.num_sequences(), problem_.num_heads_kv};
  const Random random(problem_.seed, 4);
  for (GuardedTensor* scale : {&q_scale, &k_scale, &v_scale}) {
    *scale = GuardedTensor(problem_.drawn(Dtype::f32, shape, kScaleLayout, Strides::of_input));
    scale->fill([&](std::int64_t i) { return (2.5 + random.uniform(i)) / 448; });
  }
}

void CaseMemory::poison_trailing_rows() {
  for (GuardedTensor* input : {&q, &k, &v}) {
    const TensorView view = input->view();
    for (std::int64_t i = 1; i <= (problem_.is_packed() ? problem_.trailing_rows : 0); ++i) {
      for (std::int64_t head = 0; head < view.size(1); ++head) {
        set_row(*input, {.batch = 0, .row = view.size(0) - i, .head = head}, kNaN);
      }
    }
  }
}

void CaseMemory::poison_hidden_keys() {
  const bool is_shared =
      problem_.layout == Layout::shared_batch || problem_.layout == Layout::shared_head;
  if (problem_.mask.is_all_visible() || is_shared) return;
  reference::Evaluator mask(problem_.mask);
  const std::int64_t group = problem_.num_heads_q / problem_.num_heads_kv;
  std::int64_t kv_begin = 0;
  const auto is_seen = [&](reference::Position at) {
    for (at.q_head = at.kv_head * group; at.q_head < (at.kv_head + 1) * group; ++at.q_head) {
      for (at.q_idx = at.seqlen_q - 1; at.q_idx >= 0; --at.q_idx) {
        if (mask(at) != 0) return true;
      }
    }
    return false;
  };
  for (std::int64_t sequence = 0; sequence < problem_.num_sequences(); ++sequence) {
    const Lengths lengths = problem_.lengths(sequence);
    reference::Position at{.batch = sequence, .seqlen_q = lengths.q, .seqlen_kv = lengths.kv};
    for (at.kv_head = 0; at.kv_head < problem_.num_heads_kv; ++at.kv_head) {
      for (at.kv_idx = 0; at.kv_idx < lengths.kv; ++at.kv_idx) {
        if (is_seen(at)) continue;
        const RowOfHead row{.batch = sequence, .row = kv_begin + at.kv_idx, .head = at.kv_head};
        const double infinity = problem_.dtype == Dtype::e4m3 ? kNaN : kInfinity;  // it has none
        set_row(k, row, at.kv_idx % 2 == 0 ? kNaN : infinity);
        set_row(v, row, at.kv_idx % 2 == 0 ? -infinity : kNaN);
      }
    }
    if (problem_.is_packed()) kv_begin += lengths.kv;
  }
}

void CaseMemory::set_infinite_values() {
  struct Special {
    std::int64_t eighth, col;
    double value;
  };
  // The first column gets both signs, so a row that sees both has NaN.
  constexpr std::array<Special, 5> kSpecial = {Special{1, 0, kInfinity},
                                               {3, 0, -kInfinity},
                                               {5, 1, kNaN},
                                               {7, 2, -kInfinity},
                                               {8, 3, kInfinity}};
  const TensorView view = v.view();
  for (const Special& each : kSpecial) {
    const std::int64_t row = (problem_.seqlen_kv - 1) * each.eighth / 8;
    for (std::int64_t sequence = 0; sequence < problem_.batch; ++sequence) {
      v.set(sequence * view.stride(0) + row * view.stride(1) + each.col * view.stride(3),
            each.value);
    }
  }
}

void CaseMemory::set_huge_value() {
  const TensorView view = v.view();
  v.set((problem_.seqlen_kv - 1) / 2 * view.stride(1) + view.stride(3), 0x1p+124);
}

AttentionForward CaseMemory::args(CpuTarget target) {
  AttentionForward args{.q = q.view(), .k = k.view(), .v = v.view(), .out = out.mutable_view()};
  args.lse = lse.mutable_view();
  args.row_max = row_max.mutable_view();
  args.score = problem_.score;
  args.mask = problem_.mask;
  args.softmax_scale = problem_.softmax_scale;
  args.sinks = sinks.view();
  args.quant = problem_.quant;
  args.q_scale = q_scale.view();
  args.k_scale = k_scale.view();
  args.v_scale = v_scale.view();
  args.dropout = problem_.dropout;
  if (problem_.reads_dropout_seed) {
    args.dropout.seed -= static_cast<std::uint64_t>(kSeedInMemory);
    args.dropout.offset -= static_cast<std::uint64_t>(kOffsetInMemory);
    args.dropout_seed = dropout_seed.view();
    args.dropout_offset = dropout_offset.view();
  }
  args.dropout_places = dropout_places.view();
  args.cu_seqlens_q = cu_seqlens_q.view();
  args.cu_seqlens_kv = cu_seqlens_kv.view();
  args.compute_dtype = problem_.compute_dtype;
  args.cpu_target = target;
  return args;
}

void CaseMemory::poison_outputs() {
  for (GuardedTensor* output : {&out, &lse, &row_max}) output->poison();
}

std::string CaseMemory::damage() const {
  struct Named {
    const GuardedTensor* tensor;
    std::string_view name;
  };
  std::string found;
  for (const Named& input : {Named{&q, "q"},
                             {&k, "k"},
                             {&v, "v"},
                             {&sinks, "sinks"},
                             {&q_scale, "q_scale"},
                             {&k_scale, "k_scale"},
                             {&v_scale, "v_scale"},
                             {&cu_seqlens_q, "cu_seqlens_q"},
                             {&cu_seqlens_kv, "cu_seqlens_kv"},
                             {&dropout_seed, "dropout_seed"},
                             {&dropout_offset, "dropout_offset"},
                             {&dropout_places, "dropout_places"}}) {
    if (!input.tensor->is_unchanged()) found += fmt::format("input {} was written\n", input.name);
  }
  for (const auto& each : problem_.captured) {
    if (!each->is_unchanged()) found += "a captured tensor was written\n";
  }
  for (const Named& output : {Named{&out, "out"}, {&lse, "lse"}, {&row_max, "row_max"}}) {
    if (!output.tensor->has_intact_guards())
      found += fmt::format("wrote outside of {}\n", output.name);
  }
  return found;
}

}  // namespace fovea::testing
