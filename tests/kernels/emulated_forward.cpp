#include "kernels/emulated_forward.hpp"

#include <algorithm>
#include <stdexcept>

#include "common/clear_counter.cuh"
#include "sm80/attention_forward.cuh"
#include "sm80/attention_forward_f32.cuh"
#include "sm80/combine.cuh"
#include "sm80/combine_rows.cuh"
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

template <CombineSpec spec>
void run_combine(const CombineParams& p) {
  sm80::combine<spec>(p);
}
template <CombineSpec spec>
void run_combine_rows(const CombineParams& p) {
  sm80::combine_rows<spec>(p);
}

template <Element element, bool wants_row_max>
CombineFunction combine_rows_of_splits(int most_splits) {
  if (most_splits == 16)
    return run_combine_rows<{
        .out_element = element, .wants_row_max = wants_row_max, .most_splits = 16}>;
  if (most_splits == 32)
    return run_combine_rows<{
        .out_element = element, .wants_row_max = wants_row_max, .most_splits = 32}>;
  return run_combine_rows<{.out_element = element, .wants_row_max = wants_row_max}>;
}

template <Element element, bool wants_row_max>
CombineFunction combine_of_splits(int most_splits) {
  if (most_splits == 16)
    return run_combine<{.out_element = element, .wants_row_max = wants_row_max, .most_splits = 16}>;
  if (most_splits == 32)
    return run_combine<{.out_element = element, .wants_row_max = wants_row_max, .most_splits = 32}>;
  return run_combine<{.out_element = element, .wants_row_max = wants_row_max}>;
}

template <Element element>
CombineFunction combine_to(const ForwardSpec& spec, bool joins_by_warps) {
  if (joins_by_warps) {
    return spec.wants_row_max ? combine_rows_of_splits<element, true>(spec.most_splits)
                              : combine_rows_of_splits<element, false>(spec.most_splits);
  }
  return spec.wants_row_max ? combine_of_splits<element, true>(spec.most_splits)
                            : combine_of_splits<element, false>(spec.most_splits);
}

}  // namespace

CombineFunction combine_of(const ForwardSpec& spec, bool joins_by_warps) {
  if (spec.out_element == Element::f32) return combine_to<Element::f32>(spec, joins_by_warps);
  if (spec.out_element == Element::f16) return combine_to<Element::f16>(spec, joins_by_warps);
  return combine_to<Element::bf16>(spec, joins_by_warps);
}

}  // namespace fovea::cuda
