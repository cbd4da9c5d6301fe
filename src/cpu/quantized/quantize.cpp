#include "cpu/quantized/quantize.hpp"

#include <array>
#include <cstdint>

#include "fovea/attention.hpp"

#include "cpu/features.hpp"
#include "cpu/quantized/operands.hpp"
#include "cpu/tasks.hpp"
#include "quant/formats.hpp"
#include "quant/groups.hpp"

namespace fovea::cpu {
namespace {

/// A call that has this tensor alone.
ForwardProblem problem_of(const TensorView& x, const Quantization& quant) {
  return {.problem = {.quant = quant},
          .num_sequences = x.size(0),
          .seqlen_q = x.size(1),
          .seqlen_kv = x.size(1),
          .total_q = x.size(0) * x.size(1),
          .num_heads_q = x.size(2),
          .num_heads_kv = x.size(2),
          .head_dim_qk = x.size(3),
          .head_dim_v = x.size(3)};
}

Sequence sequence_of(const TensorView& x, std::int64_t batch) {
  return {.index = batch, .batch_offset = batch, .seqlen_q = x.size(1), .seqlen_kv = x.size(1)};
}

/// i8, or the bits of e4m3 as u8.
void store_code(const TensorView& codes, const std::array<std::int64_t, 4>& at, float code) {
  std::int64_t offset = 0;
  for (int dim = 0; dim < 4; ++dim) offset += at[static_cast<std::size_t>(dim)] * codes.stride(dim);
  if (codes.dtype() == Dtype::i8) {
    static_cast<std::int8_t*>(codes.mutable_data())[offset] = static_cast<std::int8_t>(code);
  } else {
    static_cast<std::uint8_t*>(codes.mutable_data())[offset] = quant::e4m3_bits(code);
  }
}

float& element(const TensorView& view, std::initializer_list<std::int64_t> at) {
  std::int64_t offset = 0;
  int dim = 0;
  for (const std::int64_t index : at) offset += index * view.stride(dim++);
  return static_cast<float*>(view.mutable_data())[offset];
}

/// Rows of one head: codes as they lie, scales by their groups.
struct HeadOfRows {
  const TensorView& codes;
  const TensorView& scales;
  std::int64_t batch = 0, head = 0;
  std::int64_t (*group_of)(const Quantization& quant, std::int64_t n) = nullptr;
};

void store_rows(const HeadOfRows& to, const ForwardProblem& f, const RowCodes& from) {
  for (std::int64_t group = 0; group < to.scales.size(2); ++group)
    element(to.scales, {to.batch, to.head, group}) = quant::kLeastScale;  // of groups without rows
  for (std::int64_t n = 0; n < f.seqlen_q; ++n) {
    const std::size_t row = from.at(to.head, to.batch * f.seqlen_q + n);
    element(to.scales, {to.batch, to.head, to.group_of(f.problem.quant, n)}) = from.scale[row];
    const std::uint16_t* const codes = from.wide + row * static_cast<std::size_t>(f.head_dim_qk);
    for (std::int64_t d = 0; d < f.head_dim_qk; ++d)
      store_code(to.codes, {to.batch, n, to.head, d},
                 static_cast<float>(bfloat16::from_bits(codes[d])));
  }
}

/// Where a row of v stands among 16 of ValueLayout::columns.
constexpr std::int64_t column_place(std::int64_t n) {
  constexpr std::array<std::int64_t, 16> kPlaces{0, 1, 4, 5, 8,  9,  12, 13,
                                                 2, 3, 6, 7, 10, 11, 14, 15};
  return n - n % 16 + kPlaces[static_cast<std::size_t>(n % 16)];
}

void store_values(const QuantizeV& args, const ForwardProblem& f, const QuantizedOperands& from,
                  std::int64_t batch, std::int64_t head) {
  const bool is_transposed = args.layout == ValueLayout::columns;
  for (std::int64_t d = 0; d < f.head_dim_v; ++d) {
    const std::int64_t padded = is_transposed ? args.codes.size(3) : 0;
    for (std::int64_t n = 0; n < padded; ++n) store_code(args.codes, {batch, head, d, n}, 0);
    for (std::int64_t n = 0; n < f.seqlen_kv; ++n) {
      const std::int64_t row = head * from.num_kv_rows + batch * f.seqlen_kv + n;
      const auto code =
          static_cast<float>(bfloat16::from_bits(from.v_wide[row * f.head_dim_v + d]));
      const std::array<std::int64_t, 4> at = is_transposed
                                                 ? std::array{batch, head, d, column_place(n)}
                                                 : std::array{batch, n, head, d};
      store_code(args.codes, at, code);
    }
    const std::int64_t first = operand_rows(f, sequence_of(args.v, batch)).tile;
    for (std::int64_t tile = 0; tile < args.scales.size(2); ++tile) {
      element(args.scales, {batch, head, tile, d}) =
          from.v_scale[((first + tile) * f.num_heads_kv + head) * f.head_dim_v + d];
    }
  }
}

void store_mean(const TensorView& mean, const ForwardProblem& f, const float* from,
                std::int64_t batch, std::int64_t head) {
  if (!mean) return;
  const std::int64_t width = mean.size(2);
  for (std::int64_t d = 0; d < width; ++d)
    element(mean, {batch, head, d}) = from[(batch * f.num_heads_kv + head) * width + d];
}

template <typename CarveMember>
AlignedBytes memory_of(const CarveMember& carve) {
  Carver counting(nullptr);
  carve(counting);
  AlignedBytes memory(counting.used());
  Carver carver(memory.data());
  carve(carver);
  return memory;
}

/// f(batch, head) for all of x.
template <typename F>
void for_each_head(const TensorView& x, Executor& executor, const F& f) {
  run_tasks(executor, x.size(0) * x.size(2),
            [&](int /*worker*/, std::int64_t task) { f(task / x.size(2), task % x.size(2)); });
}

const RoundingSteps& best_steps() { return rounding_steps(best_f32_target()); }

}  // namespace

void quantize_q(const QuantizeQ& args, Executor& executor) {
  const ForwardProblem f = problem_of(args.q, args.quant);
  QuantizedOperands to;
  const AlignedBytes memory =
      memory_of([&](Carver& carver) { to.carve_queries(carver, f, /*as_bytes=*/false); });
  const AttentionForward call{.q = args.q};
  const OperandRounding rounding(f, call, best_steps(), to);
  for_each_head(args.q, executor, [&](std::int64_t batch, std::int64_t head) {
    for (std::int64_t piece = 0; piece < rounding.num_query_pieces(); ++piece)
      rounding.round_queries(sequence_of(args.q, batch), head, piece);
    store_rows({args.codes, args.scales, batch, head, quant::q_group}, f, to.q);
    if (!args.means) return;
    for (std::int64_t block = 0; block < args.means.size(2); ++block) {
      const std::size_t row = to.q.at(head, batch * f.seqlen_q + block * args.quant.block_q);
      const float* const mean = to.q_mean + row * static_cast<std::size_t>(f.head_dim_qk);
      for (std::int64_t d = 0; d < f.head_dim_qk; ++d)
        element(args.means, {batch, head, block, d}) = mean[d];
    }
  });
}

void quantize_k(const QuantizeK& args, Executor& executor) {
  const ForwardProblem f = problem_of(args.k, args.quant);
  QuantizedOperands to;
  const AlignedBytes memory =
      memory_of([&](Carver& carver) { to.carve_keys(carver, f, /*as_bytes=*/false); });
  const AttentionForward call{.k = args.k};
  const OperandRounding rounding(f, call, best_steps(), to);
  for_each_head(args.k, executor, [&](std::int64_t batch, std::int64_t head) {
    const Sequence sequence = sequence_of(args.k, batch);
    rounding.measure_keys(sequence, head);
    for (std::int64_t piece = 0; piece < rounding.num_key_pieces(); ++piece)
      rounding.round_keys(sequence, head, piece);
    store_rows({args.codes, args.scales, batch, head, quant::k_group}, f, to.k);
    store_mean(args.mean, f, to.k_mean, batch, head);
  });
}

void quantize_v(const QuantizeV& args, Executor& executor) {
  const ForwardProblem f = problem_of(args.v, args.quant);
  QuantizedOperands to;
  const AlignedBytes memory =
      memory_of([&](Carver& carver) { to.carve_values(carver, f, /*as_bytes=*/false); });
  const AttentionForward call{.v = args.v};
  const OperandRounding rounding(f, call, best_steps(), to);
  for_each_head(args.v, executor, [&](std::int64_t batch, std::int64_t head) {
    const Sequence sequence = sequence_of(args.v, batch);
    rounding.measure_values(sequence, head);
    for (std::int64_t piece = 0; piece < rounding.num_key_pieces(); ++piece)
      rounding.round_values(sequence, head, piece);
    store_values(args, f, to, batch, head);
    store_mean(args.mean, f, to.v_mean, batch, head);
  });
}

}  // namespace fovea::cpu
