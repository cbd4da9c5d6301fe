#include <algorithm>
#include <stdexcept>

#include "common/lost_rows.cuh"
#include "common/quantize_kv.cuh"
#include "kernels/emulated_forward.hpp"
#include "ptx/generated/wgmma_bf16.cuh"
#include "ptx/generated/wgmma_e4m3.cuh"
#include "ptx/generated/wgmma_f16.cuh"
#include "ptx/generated/wgmma_s8.cuh"
#include "sm80/attention_quantized.cuh"
#include "sm90/attention_forward.cuh"

// Written by print_forward_units from hopper_quantized_cases.cpp and sm80_quantized_cases.cpp.
#include "quantized_units.inc"

namespace fovea::cuda {

const EmulatedHopper& quantized_named(std::string_view name) {
  const auto* const found = std::ranges::find(kQuantizeds, name, &EmulatedHopper::name);
  if (found == std::end(kQuantizeds)) throw std::out_of_range(std::string(name));
  return *found;
}

const EmulatedCacheRounding& cache_rounding_named(std::string_view name) {
  const auto* const found = std::ranges::find(kCacheRoundings, name, &EmulatedCacheRounding::name);
  if (found == std::end(kCacheRoundings)) throw std::out_of_range(std::string(name));
  return *found;
}

const EmulatedLostRows& lost_rows_named(std::string_view name) {
  const auto* const found = std::ranges::find(kLostRows, name, &EmulatedLostRows::name);
  if (found == std::end(kLostRows)) throw std::out_of_range(std::string(name));
  return *found;
}

Sm80QuantizedFunction sm80_quantized_named(std::string_view name) {
  const auto* const found = std::ranges::find(kSm80Quantizeds, name, &EmulatedSm80Quantized::name);
  if (found == std::end(kSm80Quantizeds)) throw std::out_of_range(std::string(name));
  return found->run;
}

namespace {

consteval QuantizeKvSpec for_sm80(QuantizeKvSpec spec) {
  spec.rounds_q = spec.reads_elements = true;
  return spec;
}

/// Whose greatest scale of keys attention reads.
consteval QuantizeKvSpec greatest(QuantizeKvSpec spec) {
  spec.keeps_greatest_scale = true;
  return spec;
}

/// Of `sage2` and `fp8_static`.
consteval QuantizeKvSpec of_rounding(Rounding rounding, Element element, std::int32_t head_dim_qk,
                                     std::int32_t head_dim_v, bool is_packed = false) {
  QuantizeKvSpec spec = for_sm80({.element = element,
                                  .head_dim_qk = head_dim_qk,
                                  .head_dim_v = head_dim_v,
                                  .is_packed = is_packed,
                                  .rounding = rounding});
  if (rounding == Rounding::lanes) spec.q_span = 16, spec.q_step = 8;
  spec.key_mean = rounding == Rounding::lanes ? KeyMean::all : KeyMean::none;
  return spec;
}
consteval QuantizeKvSpec of_codes(std::int32_t head_dim, bool is_packed = false) {
  QuantizeKvSpec spec = of_rounding(Rounding::given, Element::bf16, head_dim, head_dim, is_packed);
  spec.takes_codes = true;
  return spec;
}

/// What shares scales: rows, keys of which tile, lanes or all of them.
struct Groups {
  std::int32_t q_span, q_step, k_tile;
  bool has_k_lanes;
  KeyMean key_mean;
};
consteval QuantizeKvSpec with_groups(QuantizeKvSpec spec, const Groups& groups) {
  spec.q_span = groups.q_span;
  spec.q_step = groups.q_step;
  spec.k_tile = groups.k_tile;
  spec.has_k_lanes = groups.has_k_lanes;
  spec.key_mean = groups.key_mean;
  return spec;
}

/// Whose V comes without its mean: as codes, or as elements where `head_dim_v` is of P and V in 16 bits.
consteval QuantizeKvSpec smooth(QuantizeKvSpec spec) {
  spec.smooths_v = true;
  return spec;
}
consteval QuantizeKvSpec centered(QuantizeKvSpec spec, std::int32_t head_dim_v) {
  spec.head_dim_v = head_dim_v;
  spec.smooths_v = spec.centers_v = true;
  return spec;
}

/// Whose rows of Q and K are rotated.
consteval QuantizeKvSpec rotated(QuantizeKvSpec spec) {
  spec.rotates = true;
  return spec;
}

/// Of recipes that have other groups than `accurate` and `fast`, or other codes: those that cases want.
template <class Run, QuantizeKvSpec... specs>
bool is_one_of(const QuantizeKvSpec& spec, const Run& run) {
  return ((spec == specs && (run.template operator()<specs>(), true)) || ...);
}
/// Of `sage1`.
constexpr Groups kBlocks{128, 1, 64, false, KeyMean::all};

template <class Run>
bool has_named_rounding(const QuantizeKvSpec& spec, const Run& run) {
  using enum Rounding;
  using enum KeyMean;
  constexpr Element kBf16 = Element::bf16, kF16 = Element::f16;
  return is_one_of<
      Run, of_rounding(lanes, kBf16, 64, 64), of_rounding(lanes, kBf16, 128, 128),
      of_rounding(lanes, kF16, 64, 64), of_rounding(lanes, kBf16, 64, 64, true),
      of_rounding(given, kBf16, 64, 64), of_rounding(given, kBf16, 128, 128),
      of_rounding(given, kF16, 64, 64), of_rounding(given, kBf16, 64, 64, true),
      of_rounding(given, kBf16, 128, 64), of_codes(64), of_codes(128), of_codes(64, true),
      with_groups(of_rounding(lanes, kBf16, 128, 128), {32, 8, 64, true, all}),
      with_groups(of_rounding(lanes, kBf16, 64, 64, true), {32, 1, 64, false, none}),
      with_groups(of_rounding(lanes, kBf16, 64, 64), {16, 1, 128, false, all}),
      with_groups(of_rounding(rows, kF16, 64, 0), {64, 1, 64, false, all}),
      greatest(with_groups(of_rounding(rows, kF16, 128, 0), {32, 8, 64, true, none})),
      greatest(with_groups(of_rounding(rows, kBf16, 64, 0), {128, 1, 64, false, all})),
      smooth(of_rounding(lanes, kBf16, 128, 128)), smooth(of_rounding(lanes, kBf16, 64, 64, true)),
      greatest(smooth(for_sm80({.element = kBf16, .head_dim_qk = 128, .head_dim_v = 64}))),
      greatest(smooth(for_sm80({.element = kBf16, .head_dim_qk = 128, .head_dim_v = 128}))),
      greatest(smooth(for_sm80({.element = kF16, .head_dim_qk = 64, .head_dim_v = 64}))),
      greatest(smooth({.element = kBf16, .head_dim_qk = 128, .head_dim_v = 128})),
      greatest(smooth({.element = kBf16, .head_dim_qk = 128, .head_dim_v = 64})),
      greatest(smooth({.element = kBf16, .head_dim_qk = 64, .head_dim_v = 64, .is_packed = true})),
      greatest(centered(with_groups(of_rounding(rows, kF16, 64, 0, true), kBlocks), 64)),
      greatest(centered(with_groups(of_rounding(rows, kF16, 64, 0), kBlocks), 64)),
      greatest(rotated(for_sm80({.element = kBf16, .head_dim_qk = 128}))),
      greatest(rotated(for_sm80({.element = kBf16, .head_dim_qk = 64}))),
      greatest(rotated(for_sm80({.element = kBf16, .head_dim_qk = 64, .is_packed = true}))),
      rotated(of_rounding(lanes, kF16, 64, 64)), rotated(of_rounding(given, kBf16, 128, 128)),
      rotated(with_groups(of_rounding(lanes, kBf16, 128, 128), {32, 8, 64, true, all})),
      greatest(rotated(smooth(for_sm80({.element = kF16, .head_dim_qk = 64, .head_dim_v = 64})))),
      greatest(rotated({.element = kBf16, .head_dim_qk = 128})),
      greatest(rotated(smooth(
          {.element = kBf16, .head_dim_qk = 64, .head_dim_v = 64, .is_packed = true})))>(spec, run);
}

/// run.operator()<spec>() of the spec, which is a constant there.
template <class Run>
void with_spec(const QuantizeKvSpec& spec, const Run& run) {
  if (has_named_rounding(spec, run)) return;
  if (spec.rounding != Rounding::rows || spec.q_span > 1 || spec.k_tile != kQuantizedTile ||
      spec.smooths_v || spec.rotates)
    throw std::out_of_range("no such rounding");
  const auto of_element = [&]<Element element>() {
    const auto of_width = [&]<std::int32_t head_dim>() {
      const auto of_v = [&]<std::int32_t head_dim_v>() {
        constexpr QuantizeKvSpec kDense{
            .element = element, .head_dim_qk = head_dim, .head_dim_v = head_dim_v};
        constexpr QuantizeKvSpec kPacked{.element = element,
                                         .head_dim_qk = head_dim,
                                         .head_dim_v = head_dim_v,
                                         .is_packed = true};
        if (!spec.keeps_greatest_scale) {  // beside programs: of dense bf16
          if (spec.is_packed || element != Element::bf16)
            throw std::out_of_range("no such rounding");
          if constexpr (element == Element::bf16) {
            return spec.rounds_q ? run.template operator()<for_sm80(kDense)>()
                                 : run.template operator()<kDense>();
          }
        }
        if (spec.rounds_q) {
          return spec.is_packed ? run.template operator()<greatest(for_sm80(kPacked))>()
                                : run.template operator()<greatest(for_sm80(kDense))>();
        }
        return spec.is_packed ? run.template operator()<greatest(kPacked)>()
                              : run.template operator()<greatest(kDense)>();
      };
      return spec.head_dim_v == 0    ? of_v.template operator()<0>()
             : spec.head_dim_v == 64 ? of_v.template operator()<64>()
                                     : of_v.template operator()<128>();
    };
    return spec.head_dim_qk == 64 ? of_width.template operator()<64>()
                                  : of_width.template operator()<128>();
  };
  return spec.element == Element::f16 ? of_element.template operator()<Element::f16>()
                                      : of_element.template operator()<Element::bf16>();
}

}  // namespace

void run_mean_of_keys(const QuantizeKvSpec& spec, const QuantizeKvParams& params) {
  with_spec(spec, [&]<QuantizeKvSpec of>() { mean_of_keys<of>(params); });
}

void run_quantize_kv(const QuantizeKvSpec& spec, const QuantizeKvParams& params) {
  with_spec(spec, [&]<QuantizeKvSpec of>() { quantize_kv<of>(params); });
}

}  // namespace fovea::cuda
