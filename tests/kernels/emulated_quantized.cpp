#include <algorithm>
#include <stdexcept>

#include "common/quantize_qk.cuh"
#include "common/quantize_v.cuh"
#include "kernels/emulated_forward.hpp"
#include "ptx/generated/wgmma_bf16.cuh"
#include "ptx/generated/wgmma_e4m3.cuh"
#include "ptx/generated/wgmma_f16.cuh"
#include "ptx/generated/wgmma_s8.cuh"
#include "sm90/attention_forward.cuh"

// Written by print_forward_units from hopper_quantized_cases.cpp.
#include "quantized_units.inc"

namespace fovea::cuda {

const EmulatedHopper& quantized_named(std::string_view name) {
  const auto* const found = std::ranges::find(kQuantizeds, name, &EmulatedHopper::name);
  if (found == std::end(kQuantizeds)) throw std::out_of_range(std::string(name));
  return *found;
}

namespace {

/// run.operator()<spec>() of the spec of either kernel, which is a constant there.
template <class Spec, class Run>
void with_spec(const Spec& spec, const Run& run) {
  const auto of_element = [&]<Element element>() {
    const auto of_width = [&]<std::int32_t head_dim>() {
      constexpr Spec kDense{.element = element, .head_dim = head_dim};
      constexpr Spec kPacked{.element = element, .head_dim = head_dim, .is_packed = true};
      return spec.is_packed ? run.template operator()<kPacked>()
                            : run.template operator()<kDense>();
    };
    return spec.head_dim == 64 ? of_width.template operator()<64>()
                               : of_width.template operator()<128>();
  };
  return spec.element == Element::f16 ? of_element.template operator()<Element::f16>()
                                      : of_element.template operator()<Element::bf16>();
}

}  // namespace

void run_mean_of_keys(const QuantizeQkSpec& spec, const QuantizeQkParams& params) {
  with_spec(spec, [&]<QuantizeQkSpec of>() { mean_of_keys<of>(params); });
}

void run_quantize_qk(const QuantizeQkSpec& spec, const QuantizeQkParams& params) {
  with_spec(spec, [&]<QuantizeQkSpec of>() { quantize_qk<of>(params); });
}

void run_quantize_v(const QuantizeVSpec& spec, const QuantizeVParams& params) {
  with_spec(spec, [&]<QuantizeVSpec of>() { quantize_v<of>(params); });
}

}  // namespace fovea::cuda
