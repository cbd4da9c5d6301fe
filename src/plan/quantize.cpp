// The entry points of quantisers: everything is checked before anything is written.
#include "fovea/quantize.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/ceil_div.hpp"
#include "core/check.hpp"
#include "core/float_environment.hpp"
#include "cpu/quantized/quantize.hpp"
#include "plan/plan.hpp"
#include "problem/tensor_checks.hpp"
#include "quant/check.hpp"
#include "quant/groups.hpp"

namespace fovea {
namespace {

/// A tensor that is rounded, and what is written.
struct Quantizer {
  std::string_view name;  // "q"
  const TensorView& x;
  const Quantization& quant;
  QuantFormat format = QuantFormat::none;
  std::string_view field;  // "qk"
};

void check_operand(const Quantizer& q, const TensorChecks& checks) {
  if (!q.x || q.x.rank() != 4 || !is_float(q.x.dtype())) {
    checks.refuse(
        fmt::format("{} is {}; expected f32, f16 or bf16 [batch, seqlen, heads, head_dim]", q.name,
                    q.x ? to_string(q.x.spec()) : "missing"));
  }
  checks.check_memory({q.name, q.x});
  if (const std::string reason = quant::obstacle(q.quant, q.x.size(3)); !reason.empty())
    checks.refuse(reason);
  if (q.format != QuantFormat::int8 && q.format != QuantFormat::e4m3) {
    checks.refuse(
        fmt::format("quant is {}, which does not round {} to codes of eight bits; expected "
                    "quant.{} int8 or e4m3",
                    print(q.quant), q.name, q.field));
  }
  if (q.quant.scales == ScaleSource::given)
    checks.refuse("quant.scales is given; expected measured: scales are what is written");
}

void check_codes(const Quantizer& q, const TensorView& codes,
                 const std::vector<std::int64_t>& shape, const TensorChecks& checks) {
  checks.check({"codes", codes, true}, q.format == QuantFormat::int8 ? Dtype::i8 : Dtype::u8,
               shape);
}

void check_mean(std::string_view name, const TensorView& mean, bool is_written,
                const std::vector<std::int64_t>& shape, const TensorChecks& checks) {
  if (static_cast<bool>(mean) != is_written) {
    checks.refuse(fmt::format("{} is {}; expected {}", name, mean ? "given" : "missing",
                              is_written ? "a tensor to write, the recipe subtracts means"
                                         : "none, the recipe subtracts no means"));
  }
  if (mean) checks.check({name, mean, true}, Dtype::f32, shape);
}

void check_overlap(const Quantizer& q, const TensorView& codes, const TensorView& scales,
                   const TensorView& mean, const TensorChecks& checks) {
  OverlapCheck overlap;
  overlap.add_input(q.name, q.x);
  overlap.add_output("codes", codes);
  overlap.add_output("scales", scales);
  overlap.add_output("mean", mean);
  overlap.refuse_overlap(checks);
}

std::vector<std::int64_t> shape_of(const TensorView& x) {
  return {x.size(0), x.size(1), x.size(2), x.size(3)};
}

Executor& executor_of(Executor* given) {
  return given != nullptr ? *given : Runtime::process_default().executor();
}

/// [batch, heads, head_dim, padded], as long as the caller likes.
std::vector<std::int64_t> columns_of(const TensorView& v, const TensorView& codes,
                                     const TensorChecks& checks) {
  const std::int64_t padded = codes.rank() == 4 ? codes.size(3) : 0;
  if (padded % 16 != 0 || padded < v.size(1)) {
    checks.refuse(
        fmt::format("codes is {}; expected a last extent that is a multiple of 16 and at least {}",
                    to_string(codes.spec()), v.size(1)));
  }
  return {v.size(0), v.size(2), v.size(3), padded};
}

void require_recipe(std::string_view where, const Quantization& quant) {
  if (const std::string reason = quant::obstacle(quant); !reason.empty())
    invalid(std::string(where), reason);
}

}  // namespace

std::int64_t num_q_scales(const Quantization& quant, std::int64_t seqlen_q) {
  require_recipe("num_q_scales", quant);
  return quant::num_q_groups(quant, seqlen_q);
}
std::int64_t num_k_scales(const Quantization& quant, std::int64_t seqlen_kv) {
  require_recipe("num_k_scales", quant);
  return quant::num_k_groups(quant, seqlen_kv);
}

void quantize_q(const QuantizeQ& args) {
  const FloatEnvironment environment;
  const TensorChecks checks("quantize_q");
  const Quantization& quant = args.quant;
  const Quantizer q{"q", args.q, quant, quant.qk, "qk"};
  check_operand(q, checks);
  const std::int64_t batch = args.q.size(0), rows = args.q.size(1), heads = args.q.size(2);
  check_codes(q, args.codes, shape_of(args.q), checks);
  checks.check({"scales", args.scales, true}, Dtype::f32,
               std::array{batch, heads, num_q_scales(quant, rows)});
  check_mean("means", args.means, quant.smooth_q != Smoothing::none,
             {batch, heads, ceil_div(rows, quant.block_q), args.q.size(3)}, checks);
  check_overlap(q, args.codes, args.scales, args.means, checks);
  cpu::quantize_q(args, executor_of(args.executor));
}

void quantize_k(const QuantizeK& args) {
  const FloatEnvironment environment;
  const TensorChecks checks("quantize_k");
  const Quantization& quant = args.quant;
  const Quantizer k{"k", args.k, quant, quant.qk, "qk"};
  check_operand(k, checks);
  const std::int64_t batch = args.k.size(0), heads = args.k.size(2);
  check_codes(k, args.codes, shape_of(args.k), checks);
  checks.check({"scales", args.scales, true}, Dtype::f32,
               std::array{batch, heads, num_k_scales(quant, args.k.size(1))});
  check_mean("mean", args.mean, quant.smooth_k != Smoothing::none, {batch, heads, args.k.size(3)},
             checks);
  check_overlap(k, args.codes, args.scales, args.mean, checks);
  cpu::quantize_k(args, executor_of(args.executor));
}

void quantize_v(const QuantizeV& args) {
  const FloatEnvironment environment;
  const TensorChecks checks("quantize_v");
  const Quantization& quant = args.quant;
  const Quantizer v{"v", args.v, quant, quant.pv, "pv"};
  check_operand(v, checks);
  const std::int64_t batch = args.v.size(0), heads = args.v.size(2), head_dim = args.v.size(3);
  const bool has_tiles =
      quant.v_scales == ScaleGranularity::block || quant.v_scales == ScaleGranularity::tile_channel;
  const std::int64_t tiles = has_tiles ? ceil_div(args.v.size(1), quant.block_kv) : 1;
  check_codes(
      v, args.codes,
      args.layout == ValueLayout::rows ? shape_of(args.v) : columns_of(args.v, args.codes, checks),
      checks);
  checks.check({"scales", args.scales, true}, Dtype::f32,
               std::array{batch, heads, tiles, head_dim});
  check_mean("mean", args.mean, quant.smooth_v != Smoothing::none, {batch, heads, head_dim},
             checks);
  check_overlap(v, args.codes, args.scales, args.mean, checks);
  cpu::quantize_v(args, executor_of(args.executor));
}

}  // namespace fovea
