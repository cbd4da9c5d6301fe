#include "cuda/forward/sm90_quantized.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "fovea/mask.hpp"

#include "cuda/forward/quantized_recipe.hpp"
#include "cuda/params/tensor_maps.hpp"
#include "cuda/params/tensor_params.hpp"
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
/// have no narrower tile in 16 bits, or of those one. docs/kernels/attention_quantized_sm90.md.
constexpr std::int64_t kFewestToPay = 16384;
constexpr std::int64_t kFewestToPayOfSums =
    4096;  // where codes are summed too, and nothing is masked or scores are capped
constexpr std::int64_t kWidestOfNarrow = 96;
constexpr std::int64_t kNarrowOfSums = 64;  // where codes are summed too, without mask or program

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

/// Head dims that have narrower tiles in 16 bits.
bool is_narrow(const ForwardProblem& f) {
  return std::min(f.head_dim_qk, f.head_dim_v) <= kWidestOfNarrow;
}

/// Those of them that pay all the same.
bool pays_although_narrow(const ForwardProblem& f) {
  const Problem& p = f.problem;
  return f.head_dim_qk == kNarrowOfSums && f.head_dim_v == kNarrowOfSums && sums_codes(p.quant) &&
         p.mask.is_all_visible() && p.score.is_identity();
}

/// Keys are read from a cache by eights.
constexpr std::int64_t kCodesAtOnce = 8;
/// What a call may want of workspace for the keys and values of all sequences, as long as they may be.
constexpr std::size_t kMostBytes = std::size_t{1} << 32;

/// As the kernel sees a cache whose keys have been rounded: numbers of q's dtype in slots.
ForwardProblem problem_of_rounded(ForwardProblem f) {
  f = without_recipe(std::move(f));
  if (!f.is_cached) return f;
  f.problem.k.dtype = f.problem.v.dtype = f.problem.q.dtype;
  f.is_paged = false;
  f.cache.page_size = 0;
  f.cache.has_left_padding = false;
  return f;
}

std::optional<Refusal> refuses_cache(const ForwardProblem& f) {
  if (auto refusal = refuses_shared_tiles(f)) return refusal;
  for (const auto& [label, head_dim] :
       {std::pair{"head_dim_qk", f.head_dim_qk}, std::pair{"head_dim_v", f.head_dim_v}}) {
    if (head_dim % kCodesAtOnce != 0) {
      return Refusal{
          fmt::format("{} is {}; expected a multiple of {}", label, head_dim, kCodesAtOnce)};
    }
  }
  for (const auto& [label, spec] : {std::pair{"k", &f.problem.k}, std::pair{"v", &f.problem.v}}) {
    if (codes_of(spec->dtype) != Codes::none || spec->dtype == f.problem.q.dtype) continue;
    return Refusal{fmt::format("{} is {} and q is {}; expected that, or codes", label,
                               name(spec->dtype), name(f.problem.q.dtype))};
  }
  return std::nullopt;
}

std::optional<Refusal> refuses_rounded_bytes(const ForwardProblem& f) {
  const Sm90ForwardSpec spec = Sm90ForwardQuantized::choose(f, {});
  const std::size_t bytes = quantized_bytes(quantize_kv_spec(spec), f);
  if (bytes <= kMostBytes) return std::nullopt;
  return Refusal{
      fmt::format("rounded keys and values take {} bytes of workspace, as long as sequences may "
                  "be; expected at most {}",
                  bytes, kMostBytes)};
}

std::size_t codes_at(const Sm90ForwardSpec& spec, const ForwardProblem& f) {
  const auto bytes = static_cast<std::int64_t>(Sm90Forward::scratch_bytes(spec, f));
  return part_bytes(bytes);
}

std::size_t notes_at(const Sm90ForwardSpec& spec, const ForwardProblem& f) {
  return codes_at(spec, f) + quantized_bytes(quantize_kv_spec(spec), f);
}

}  // namespace

std::optional<Refusal> Sm90ForwardQuantized::refuses(const ForwardProblem& f,
                                                     const DeviceTraits& device) {
  if (auto refusal = refuses_recipe(f.problem.quant)) return refusal;
  if (f.is_cached)
    if (auto refusal = refuses_cache(f)) return refusal;
  if (auto refusal = refuses_many_rows(problem_of_rounded(f), device)) return refusal;
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
  if (f.is_cached) return refuses_rounded_bytes(f);
  return std::nullopt;
}

std::string Sm90ForwardQuantized::why_slower(const ForwardProblem& f) {
  const Problem& p = f.problem;
  if (is_narrow(f) && !pays_although_narrow(f)) {
    return fmt::format(
        "head dims are {} and {}; it is faster with more than {} or, of quant.pv e4m3 without mask "
        "and score program, with {}",
        f.head_dim_qk, f.head_dim_v, kWidestOfNarrow, kNarrowOfSums);
  }
  const bool is_full = p.mask.is_all_visible();
  const bool has_cap = has_fast_cap(p);
  if (f.is_varlen || !(is_full || is_causal(f)) || !(p.score.is_identity() || has_cap) ||
      p.dropout.p > 0) {
    return "it is faster with dense tensors, no mask or a causal one of equal lengths, no dropout "
           "and no score program but, of quant.pv e4m3 without row_max, a cap";
  }
  const bool pays_early = sums_codes(p.quant) && (is_full || has_cap) && !is_narrow(f);
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
  if (!f.is_cached) return spec;
  spec.k_codes = codes_of(f.problem.k.dtype);
  spec.v_codes = codes_of(f.problem.v.dtype);
  return spec;
}

std::vector<Sm90ForwardSpec> Sm90ForwardQuantized::alternatives(const ForwardProblem& f,
                                                                const DeviceTraits& device) {
  Sm90ForwardSpec deeper = choose(f, device);
  ++deeper.stages;
  if (sm90_forward_layout(deeper).bytes > device.shared_bytes_per_cta) return {};
  return {deeper};
}

bool Sm90ForwardQuantized::reads(const AttentionForward& args, const GrownCache* cache) {
  if (cache == nullptr) return Sm90Forward::reads(args, cache);
  const Operands tensors(args, cache);
  const bool stores = args.out.dtype() != Dtype::f32;
  return have_tensor_maps({&tensors.q}) && is_aligned(tensors.k) && is_aligned(tensors.v) &&
         (!stores || have_tensor_maps({&tensors.out}));
}

std::size_t Sm90ForwardQuantized::scratch_bytes(const Sm90ForwardSpec& spec,
                                                const ForwardProblem& f) {
  return notes_at(spec, f) + note_bytes(spec, f);
}

namespace {

/// All but what quantisers make; the kernel itself looks a key up in the cache only where it was not rounded.
Sm90Launch launch_over_cache(const ForwardProblem& f, const ForwardPlan& plan,
                             const AttentionForward& args, const GrownCache& cache, void* workspace,
                             const TensorMapEncoder& encode) {
  const auto& spec = plan.spec.as<Sm90ForwardSpec>();
  Sm90Launch launch = persistent_launch(spec, f, plan, args, &cache, workspace);
  if (launch.num_ctas == 0) return launch;
  const Operands tensors(args, &cache);
  const std::int32_t panel = sm90_panel_elements(spec);
  launch.params.q = tensor_map(encode, tensors.q, kRowsOfGroup, panel);
  if (f.problem.out.dtype != Dtype::f32)
    launch.params.out = tensor_map(encode, tensors.out, kRowsOfGroup, panel);
  launch.params.k_scale = scale_param(cache.cache.k_scale);
  launch.params.v_scale = scale_param(cache.cache.v_scale);
  return launch;
}

}  // namespace

Sm90Launch Sm90ForwardQuantized::prepare(const ForwardProblem& f, const ForwardPlan& plan,
                                         const AttentionForward& args, const GrownCache* cache,
                                         void* workspace, const TensorMapEncoder& encode) {
  const auto& spec = plan.spec.as<Sm90ForwardSpec>();
  Sm90Launch launch = cache == nullptr
                          ? Sm90Forward::prepare(f, plan, args, cache, workspace, encode)
                          : launch_over_cache(f, plan, args, *cache, workspace, encode);
  if (launch.num_ctas == 0) return launch;
  launch.quantize = quantize_kv_launch(quantize_kv_spec(spec), f, launch.common.params,
                                       static_cast<std::byte*>(workspace) + codes_at(spec, f));
  launch.params.k = map_of_key_codes(encode, launch.quantize);
  launch.params.quantized = launch.quantize.params.k.beside;
  if (cache != nullptr) launch.quantize.take_cache(launch.common.params, cache->cache);
  place_notes(spec, launch.common.params, static_cast<std::byte*>(workspace) + notes_at(spec, f),
              launch.quantize);
  launch.params.notes = launch.quantize.params.notes;
  launch.lost = lost_rows_launch(plan, launch.common.params, launch.quantize);
  if (cache != nullptr && !spec.sums_codes)
    launch.params.v =
        map_of_kept_values(encode, launch.quantize, spec.tile_kv, sm90_panel_elements(spec));
  if (!spec.sums_codes) return launch;
  launch.params.v = map_of_value_codes(encode, launch.quantize);
  launch.params.values = launch.quantize.params.v.beside;
  return launch;
}

}  // namespace fovea::cuda
