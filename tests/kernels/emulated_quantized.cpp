#include <algorithm>
#include <stdexcept>

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

consteval QuantizeKvSpec of_rounding(Rounding rounding, Element element, std::int32_t head_dim_qk,
                                     std::int32_t head_dim_v, bool is_packed = false) {
  return for_sm80({.element = element,
                   .head_dim_qk = head_dim_qk,
                   .head_dim_v = head_dim_v,
                   .is_packed = is_packed,
                   .rounding = rounding});
}

consteval QuantizeKvSpec of_codes(std::int32_t head_dim, bool is_packed = false) {
  QuantizeKvSpec spec = of_rounding(Rounding::given, Element::bf16, head_dim, head_dim, is_packed);
  spec.takes_codes = true;
  return spec;
}

/// Of recipes whose codes of P are exponentials: those that cases want.
template <class Run, QuantizeKvSpec... specs>
void with_one_of(const QuantizeKvSpec& spec, const Run& run) {
  const bool is_any = ((spec == specs && (run.template operator()<specs>(), true)) || ...);
  if (!is_any) throw std::out_of_range("no such rounding");
}
template <class Run>
void with_rounding(const QuantizeKvSpec& spec, const Run& run) {
  using enum Rounding;
  constexpr Element kBf16 = Element::bf16, kF16 = Element::f16;
  with_one_of<Run, of_rounding(lanes, kBf16, 64, 64), of_rounding(lanes, kBf16, 128, 128),
              of_rounding(lanes, kF16, 64, 64), of_rounding(lanes, kBf16, 64, 64, true),
              of_rounding(given, kBf16, 64, 64), of_rounding(given, kBf16, 128, 128),
              of_rounding(given, kF16, 64, 64), of_rounding(given, kBf16, 64, 64, true),
              of_rounding(given, kBf16, 128, 64), of_codes(64), of_codes(128), of_codes(64, true)>(
      spec, run);
}

/// run.operator()<spec>() of the spec, which is a constant there.
template <class Run>
void with_spec(const QuantizeKvSpec& spec, const Run& run) {
  if (spec.rounding != Rounding::rows) return with_rounding(spec, run);
  const auto of_element = [&]<Element element>() {
    const auto of_width = [&]<std::int32_t head_dim>() {
      const auto of_v = [&]<std::int32_t head_dim_v>() {
        constexpr QuantizeKvSpec kDense{
            .element = element, .head_dim_qk = head_dim, .head_dim_v = head_dim_v};
        constexpr QuantizeKvSpec kPacked{.element = element,
                                         .head_dim_qk = head_dim,
                                         .head_dim_v = head_dim_v,
                                         .is_packed = true};
        if (spec.rounds_q) {
          return spec.is_packed ? run.template operator()<for_sm80(kPacked)>()
                                : run.template operator()<for_sm80(kDense)>();
        }
        return spec.is_packed ? run.template operator()<kPacked>()
                              : run.template operator()<kDense>();
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
