#include "kernels/emulated_forward.hpp"

#include <algorithm>
#include <stdexcept>

#include "common/clear_counter.cuh"
#include "sm80/attention_forward.cuh"
#include "sm80/attention_forward_f32.cuh"
#include "sm80/combine.cuh"
#include "sm90/decode.cuh"

// Written by print_forward_units from forward_cases.hpp.
#include "forward_units.inc"

namespace fovea::cuda {

ForwardFunction forward_named(std::string_view name) {
  const auto* const found = std::ranges::find(kForwards, name, &EmulatedForward::name);
  if (found == std::end(kForwards)) throw std::out_of_range(std::string(name));
  return found->run;
}

DecodeFunction decode_named(std::string_view name) {
  const auto* const found = std::ranges::find(kDecodes, name, &EmulatedDecode::name);
  if (found == std::end(kDecodes)) throw std::out_of_range(std::string(name));
  return found->run;
}

void run_clear_counter(const ClearCounterParams& params) { clear_counter(params); }

namespace {

template <CombineSpec spec, int kAtOnce>
void run_combine(const CombineParams& p) {
  sm80::combine<spec, kAtOnce>(p);
}

template <Element element, bool wants_row_max, int kAtOnce>
CombineFunction combine_of_splits(int most_splits) {
  if (most_splits == 16) {
    return run_combine<{.out_element = element, .wants_row_max = wants_row_max, .most_splits = 16},
                       kAtOnce>;
  }
  if (most_splits == 32) {
    return run_combine<{.out_element = element, .wants_row_max = wants_row_max, .most_splits = 32},
                       kAtOnce>;
  }
  return run_combine<{.out_element = element, .wants_row_max = wants_row_max}, kAtOnce>;
}

template <Element element, int kAtOnce>
CombineFunction combine_to(const ForwardSpec& spec) {
  return spec.wants_row_max ? combine_of_splits<element, true, kAtOnce>(spec.most_splits)
                            : combine_of_splits<element, false, kAtOnce>(spec.most_splits);
}

template <int kAtOnce>
CombineFunction combine_at_once(const ForwardSpec& spec) {
  if (spec.out_element == Element::f32) return combine_to<Element::f32, kAtOnce>(spec);
  if (spec.out_element == Element::f16) return combine_to<Element::f16, kAtOnce>(spec);
  return combine_to<Element::bf16, kAtOnce>(spec);
}

}  // namespace

CombineFunction combine_of(const ForwardSpec& spec, int splits_at_once) {
  if (splits_at_once == 8) return combine_at_once<8>(spec);
  if (splits_at_once == 16) return combine_at_once<16>(spec);
  throw std::out_of_range("splits_at_once");
}

}  // namespace fovea::cuda
