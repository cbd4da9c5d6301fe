#include "cpu/quantized/attention_quantized_backward.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <vector>

#include "core/scalar_io.hpp"
#include "core/shape.hpp"
#include "cpu/features.hpp"
#include "cpu/quantized/attention_quantized.hpp"
#include "cpu/quantized/operands.hpp"
#include "cpu/tasks.hpp"
#include "quant/hadamard.hpp"

namespace fovea::cpu {
namespace {

TensorSpec in_f32(const TensorSpec& spec) { return make_spec(Dtype::f32, shape_of(spec)); }

std::size_t num_floats(const TensorSpec& spec) {
  return static_cast<std::size_t>(spec.num_elements());
}

GradientProblem without_recipe(const GradientProblem& g) {
  GradientProblem plain = g;
  Problem& p = plain.forward.problem;
  for (TensorSpec* spec : {&p.q, &p.k, &p.v, &p.out}) *spec = in_f32(*spec);
  p.quant = {};
  p.compute_dtype = ComputeDtype::f32;
  p.cpu_target = f32_target(wanted_target(g.forward));  // gradients multiply no codes
  return plain;
}

std::size_t num_statistics(const ForwardProblem& f) {
  return static_cast<std::size_t>(f.total_q * f.num_heads_q);
}

/// Operands as f32 numbers, dense in the shapes of the call's, and what forward makes of them.
struct RoundedMemory {
  QuantizedOperands codes;
  float *q = nullptr, *k = nullptr, *v = nullptr, *out = nullptr, *lse = nullptr;
  std::byte* steps = nullptr;  // of forward, then of backward

  static RoundedMemory carve(Carver& carver, const ForwardProblem& f,
                             const RoundedGradients& rounded) {
    RoundedMemory m{.codes = QuantizedOperands::carve(carver, f, {})};
    const Problem& p = rounded.problem.forward.problem;
    m.q = carver.take<float>(num_floats(p.q));
    m.k = carver.take<float>(num_floats(p.k));
    m.v = carver.take<float>(num_floats(p.v));
    m.out = carver.take<float>(num_floats(p.out));
    m.lse = carver.take<float>(num_statistics(f));
    m.steps = carver.take<std::byte>(
        std::max(rounded.forward.workspace_bytes, rounded.backward.workspace_bytes));
    return m;
  }
};

/// Codes become numbers again: rows of one sequence and head.
class NumbersAgain {
 public:
  NumbersAgain(const ForwardProblem& f, const AttentionForward& args, const RoundedMemory& memory)
      : f_(f), quant_(f.problem.quant), args_(args), memory_(memory) {}

  void queries(const Sequence& s, std::int64_t head) const {
    const std::int64_t first = operand_rows(f_, s).q;
    const float* const means = memory_.codes.q_mean;
    const auto mean_of = [&](std::int64_t n) {
      const std::size_t block = memory_.codes.q.at(head, first + n - n % quant_.block_q);
      return means == nullptr ? nullptr : means + block * static_cast<std::size_t>(f_.head_dim_qk);
    };
    rows_again({Rows(args_.q), memory_.codes.q, memory_.q, f_.num_heads_q}, s,
               {.head = head, .source = s.q_begin, .first = first, .count = s.seqlen_q}, mean_of);
  }

  void keys(const Sequence& s, std::int64_t head) const {
    const auto mean_of = [&](std::int64_t /*n*/) {
      return memory_.codes.k_mean + (s.index * f_.num_heads_kv + head) * f_.head_dim_qk;
    };
    rows_again(
        {Rows(args_.k), memory_.codes.k, memory_.k, f_.num_heads_kv}, s,
        {.head = head, .source = s.kv_begin, .first = operand_rows(f_, s).kv, .count = s.seqlen_kv},
        mean_of);
  }

  void values(const Sequence& s, std::int64_t head) const {
    const std::int64_t width = f_.head_dim_v;
    const OperandRows first = operand_rows(f_, s);
    const QuantizedOperands& codes = memory_.codes;
    const float* const mean = codes.v_mean + (s.index * f_.num_heads_kv + head) * width;
    for (std::int64_t n = 0; n < s.seqlen_kv; ++n) {
      const std::span<float> row = row_of(memory_.v, first.kv + n, head, f_.num_heads_kv, width);
      load(Rows(args_.v), s, s.kv_begin + n, head, row);
      if (quant_.pv == QuantFormat::none) continue;
      const std::int64_t tile = first.tile + n / quant_.block_kv;
      const float* const scale = codes.v_scale + (tile * f_.num_heads_kv + head) * width;
      const std::uint16_t* const of_row =
          codes.v_wide + (head * codes.num_kv_rows + first.kv + n) * width;
      for (std::int64_t d = 0; d < width; ++d) {
        float& x = row[static_cast<std::size_t>(d)];
        if (std::isfinite(x)) x = number(of_row[d], codes.v_dtype) * scale[d] + mean[d];
      }
    }
  }

 private:
  /// q or k: the call's rows, their codes, and where numbers go.
  struct Operand {
    Rows given;
    const RowCodes& codes;
    float* numbers;
    std::int64_t num_heads;
  };
  /// Rows of one head, from `source` on in the call and from `first` on in codes and numbers.
  struct HeadOfRows {
    std::int64_t head = 0, source = 0, first = 0, count = 0;
  };

  template <typename MeanOf>
  void rows_again(const Operand& operand, const Sequence& s, const HeadOfRows& rows,
                  const MeanOf& mean_of) const {
    for (std::int64_t n = 0; n < rows.count; ++n) {
      const std::span<float> row =
          row_of(operand.numbers, rows.first + n, rows.head, operand.num_heads, f_.head_dim_qk);
      load(operand.given, s, rows.source + n, rows.head, row);
      if (quant_.qk == QuantFormat::none) continue;
      restore(operand.codes, operand.codes.at(rows.head, rows.first + n), mean_of(n), row);
    }
  }

  static float number(std::uint16_t code, Dtype dtype) {
    return dtype == Dtype::f16 ? static_cast<float>(float16::from_bits(code))
                               : static_cast<float>(bfloat16::from_bits(code));
  }

  static std::span<float> row_of(float* rows, std::int64_t row, std::int64_t head,
                                 std::int64_t num_heads, std::int64_t width) {
    return {rows + (row * num_heads + head) * width, static_cast<std::size_t>(width)};
  }

  /// As the call gives it.
  static void load(const Rows& rows, const Sequence& s, std::int64_t n, std::int64_t head,
                   std::span<float> row) {
    const std::byte* const from = rows.at(s.batch_offset, n, head);
    for (std::size_t d = 0; d < row.size(); ++d)
      row[d] = load_scalar(from, rows.dtype, static_cast<std::int64_t>(d) * rows.col_stride);
  }

  /// A row of q or k, unless it holds what is not finite.
  void restore(const RowCodes& codes, std::size_t at, const float* mean,
               std::span<float> row) const {
    if (codes.is_plain[at] != 0) return;
    for (std::size_t d = 0; d < row.size(); ++d)
      row[d] = number(codes.wide[at * row.size() + d], Dtype::bf16) * codes.scale[at];
    if (quant_.hadamard) quant::rotate_back(row);
    if (mean == nullptr) return;
    for (std::size_t d = 0; d < row.size(); ++d) row[d] += mean[d];
  }

  const ForwardProblem& f_;
  const Quantization& quant_;
  const AttentionForward& args_;
  const RoundedMemory& memory_;
};

void round_all(const ForwardProblem& f, const AttentionForward& args, const RoundedMemory& memory,
               Executor& executor) {
  const OperandRounding rounding(f, args, rounding_steps(best_f32_target()), memory.codes);
  const NumbersAgain numbers(f, args, memory);
  const bool rounds_qk = f.problem.quant.qk != QuantFormat::none;
  run_tasks(executor, f.num_sequences * f.num_heads_kv, [&](int /*worker*/, std::int64_t task) {
    const Sequence s = sequence_at(f, args, task / f.num_heads_kv);
    const std::int64_t head = task % f.num_heads_kv;
    if (rounds_qk) rounding.measure_keys(s, head);
    rounding.measure_values(s, head);
    for (std::int64_t piece = 0; piece < rounding.num_key_pieces(); ++piece) {
      if (rounds_qk) rounding.round_keys(s, head, piece);
      rounding.round_values(s, head, piece);
    }
    numbers.keys(s, head);
    numbers.values(s, head);
  });
  run_tasks(executor, f.num_sequences * f.num_heads_q, [&](int /*worker*/, std::int64_t task) {
    const Sequence s = sequence_at(f, args, task / f.num_heads_q);
    const std::int64_t head = task % f.num_heads_q;
    for (std::int64_t piece = 0; rounds_qk && piece < rounding.num_query_pieces(); ++piece)
      rounding.round_queries(s, head, piece);
    numbers.queries(s, head);
  });
}

/// The call's forward at the rounded operands, without a recipe.
AttentionForward rounded_call(const AttentionForward& args, const RoundedMemory& memory) {
  AttentionForward call = args;
  const auto in_place_of = [](float* data, const TensorView& view) {
    return TensorView(static_cast<void*>(data), in_f32(view.spec()));
  };
  call.q = in_place_of(memory.q, args.q);
  call.k = in_place_of(memory.k, args.k);
  call.v = in_place_of(memory.v, args.v);
  call.out = in_place_of(memory.out, args.out);
  call.lse = in_place_of(memory.lse, args.lse);
  call.row_max = {};
  call.quant = {};
  call.q_scale = call.k_scale = call.v_scale = {};
  return call;
}

}  // namespace

BackwardPlan try_plan_quantized_backward(const GradientProblem& problem, int num_threads) {
  auto rounded = std::make_shared<RoundedGradients>();
  rounded->problem = without_recipe(problem);
  rounded->forward = try_plan_forward(rounded->problem.forward, num_threads);
  rounded->backward = try_plan_backward(rounded->problem, num_threads);
  const bool has_forward = !rounded->forward.candidate.empty();
  BackwardPlan plan;
  plan.spec = rounded->backward.spec;
  plan.candidate = has_forward ? rounded->backward.candidate : "";
  plan.refused = has_forward ? rounded->backward.refused : rounded->forward.refused;
  plan.sums_delta = rounded->backward.sums_delta;
  plan.num_workers = num_threads;
  Carver carver(nullptr);
  RoundedMemory::carve(carver, problem.forward, *rounded);
  plan.workspace_bytes = carver.used();
  plan.rounded = std::move(rounded);
  return plan;
}

void attention_quantized_backward(const GradientProblem& problem, const BackwardPlan& plan,
                                  const AttentionBackward& args, std::byte* workspace,
                                  Executor& executor) {
  const RoundedGradients& rounded = *plan.rounded;
  Carver carver(workspace);
  const RoundedMemory memory = RoundedMemory::carve(carver, problem.forward, rounded);
  round_all(problem.forward, args.forward, memory, executor);
  AttentionBackward call = args;
  call.forward = rounded_call(args.forward, memory);
  attention_forward(rounded.problem.forward, rounded.forward, call.forward, memory.steps, executor);
  attention_backward(rounded.problem, rounded.backward, call, memory.steps, executor);
}

}  // namespace fovea::cpu
