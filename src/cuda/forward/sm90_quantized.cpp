#include "cuda/forward/sm90_quantized.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "fovea/mask.hpp"

#include "cuda/forward/quantized_recipe.hpp"
#include "expr/passes.hpp"
#include "expr/softcap.hpp"

namespace fovea::cuda {
namespace {

constexpr std::int32_t kRowsOfGroup = 64;
/// Rows of codes are one panel of 128 bytes.
constexpr std::int64_t kMostHeadDim = 128;

/// Wider rows of Q are held in registers that sums of codes do not leave: ptxas spills up to 360 bytes, some of them in
/// loops.
constexpr std::int64_t kMostRotatedBesideSums = 64;

/// Where it was measured to be faster than our 16 bits, rounding included: so many queries and keys, and head dims that
/// have no narrower tile in 16 bits. docs/kernels/attention_quantized_sm90.md.
constexpr std::int64_t kFewestToPay = 16384;
constexpr std::int64_t kFewestToPayOfSums =
    4096;  // where codes are summed too, and nothing is masked or scores are capped
constexpr std::int64_t kWidestOfNarrow = 96;

/// Half of a square, whichever way it is aligned.
bool is_causal(const ForwardProblem& f) {
  const MaskMod& mask = f.problem.mask;
  return f.seqlen_q == f.seqlen_kv && (mask == causal() || mask == causal(Align::top_left));
}

/// c * tanh(score / c) by tanh.approx: where codes are summed, and the greatest score is not an output.
bool has_fast_cap(const Problem& p) {
  return sums_codes(p.quant) && !p.wants_row_max &&
         expr::cap_of(expr::simplify(p.score.expr().shared())) != nullptr;
}

std::size_t codes_at(const Sm90ForwardSpec& spec, const ForwardProblem& f) {
  const auto bytes = static_cast<std::int64_t>(Sm90Forward::scratch_bytes(spec, f));
  return part_bytes(bytes);
}

}  // namespace

std::optional<Refusal> Sm90ForwardQuantized::refuses(const ForwardProblem& f,
                                                     const DeviceTraits& device) {
  if (auto refusal = refuses_recipe(f.problem.quant)) return refusal;
  if (f.is_cached) return Refusal{"keys lie in a cache; expected tensors"};
  if (auto refusal = refuses_many_rows(without_recipe(f), device)) return refusal;
  if (auto refusal = refuses_head_dims(f, kMostHeadDim)) return refusal;
  const std::int64_t widest = std::max(f.head_dim_qk, f.head_dim_v);
  if (sums_codes(f.problem.quant) && f.problem.quant.hadamard && widest > kMostRotatedBesideSums) {
    return Refusal{
        fmt::format("quant.hadamard beside quant.pv e4m3 and a head dim of {}; expected at most "
                    "{}, whose rows leave registers for sums",
                    widest, kMostRotatedBesideSums)};
  }
  if (sums_codes(f.problem.quant) && f.problem.dropout.p > 0)
    return Refusal{"dropout beside quant.pv e4m3, whose row sums are of what is multiplied"};
  if (num_quantizing_ctas(f) > std::int64_t{0x7fffffff}) return Refusal{"more than 2^31 tiles"};
  return std::nullopt;
}

std::string Sm90ForwardQuantized::why_slower(const ForwardProblem& f) {
  const Problem& p = f.problem;
  if (std::min(f.head_dim_qk, f.head_dim_v) <= kWidestOfNarrow) {
    return fmt::format("head dims are {} and {}; it is faster with more than {}", f.head_dim_qk,
                       f.head_dim_v, kWidestOfNarrow);
  }
  const bool is_full = p.mask.is_all_visible();
  const bool has_cap = has_fast_cap(p);
  if (f.is_varlen || !(is_full || is_causal(f)) || !(p.score.is_identity() || has_cap) ||
      p.dropout.p > 0) {
    return "it is faster with dense tensors, no mask or a causal one of equal lengths, no dropout "
           "and no score program but, of quant.pv e4m3 without row_max, a cap";
  }
  const bool pays_early = sums_codes(p.quant) && (is_full || has_cap);
  const std::int64_t fewest = pays_early ? kFewestToPayOfSums : kFewestToPay;
  for (const auto& [name, length] : {std::pair{"kv", f.seqlen_kv}, std::pair{"q", f.seqlen_q}}) {
    if (length < fewest) {
      return fmt::format("seqlen_{} is {}; {} it is faster from {} on", name, length,
                         is_full ? "without a mask" : "causal", fewest);
    }
  }
  return "";
}

Sm90ForwardSpec Sm90ForwardQuantized::choose(const ForwardProblem& f, const DeviceTraits&) {
  Sm90ForwardSpec spec = choose_many_rows(f);
  spec.multiplies_codes = true;
  spec.sums_codes = sums_codes(f.problem.quant);
  spec.rotates = f.problem.quant.hadamard;
  spec.smooths_v = f.problem.quant.smooth_v != Smoothing::none;
  // Not the narrower panels that 16-bit elements may have: 64 or 128 codes, and values beside them.
  spec.head_dim_qk = static_cast<std::int32_t>(panels_of(f.head_dim_qk));
  spec.head_dim_v = static_cast<std::int32_t>(panels_of(f.head_dim_v));
  spec.tile_kv = kQuantizedTile;
  spec.tile_q = 2 * kRowsOfGroup;  // with three groups scales and units of codes spill
  spec.num_warps = 4 * 3;
  return spec;
}

std::vector<Sm90ForwardSpec> Sm90ForwardQuantized::alternatives(const ForwardProblem& f,
                                                                const DeviceTraits& device) {
  Sm90ForwardSpec deeper = choose(f, device);
  ++deeper.stages;
  if (sm90_forward_layout(deeper).bytes > device.shared_bytes_per_cta) return {};
  return {deeper};
}

std::size_t Sm90ForwardQuantized::scratch_bytes(const Sm90ForwardSpec& spec,
                                                const ForwardProblem& f) {
  return codes_at(spec, f) + quantized_bytes(quantize_kv_spec(spec), f);
}

Sm90Launch Sm90ForwardQuantized::prepare(const ForwardProblem& f, const ForwardPlan& plan,
                                         const AttentionForward& args, const GrownCache* cache,
                                         void* workspace, const TensorMapEncoder& encode) {
  Sm90Launch launch = Sm90Forward::prepare(f, plan, args, cache, workspace, encode);
  if (launch.num_ctas == 0) return launch;
  const auto& spec = plan.spec.as<Sm90ForwardSpec>();
  launch.quantize = quantize_kv_launch(quantize_kv_spec(spec), f, launch.common.params,
                                       static_cast<std::byte*>(workspace) + codes_at(spec, f));
  launch.params.k = map_of_key_codes(encode, launch.quantize);
  launch.params.quantized = launch.quantize.params.k.beside;
  if (!spec.sums_codes) return launch;
  launch.params.v = map_of_value_codes(encode, launch.quantize);
  launch.params.values = launch.quantize.params.v.beside;
  return launch;
}

}  // namespace fovea::cuda
