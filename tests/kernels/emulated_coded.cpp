#include <algorithm>
#include <stdexcept>

#include "common/captured_range.cuh"
#include "common/numbers_of_codes.cuh"
#include "common/range.cuh"
#include "kernels/emulated_forward.hpp"
#include "ptx/generated/wgmma_bf16.cuh"
#include "ptx/generated/wgmma_f16.cuh"
#include "sm80/attention_coded.cuh"
#include "sm80/decode_coded.cuh"
#include "sm90/attention_forward.cuh"
#include "sm90/decode.cuh"

// Written by print_forward_units from coded_cases.cpp.
#include "coded_units.inc"

namespace fovea::cuda {

CodedFunction coded_named(std::string_view name) {
  const auto* const found = std::ranges::find(kCodeds, name, &EmulatedCoded::name);
  if (found == std::end(kCodeds)) throw std::out_of_range(std::string(name));
  return found->run;
}

DecodeFunction decode_coded_named(std::string_view name) {
  const auto* const found = std::ranges::find(kDecodesOfCodes, name, &EmulatedDecode::name);
  if (found == std::end(kDecodesOfCodes)) throw std::out_of_range(std::string(name));
  return found->run;
}

const EmulatedHopper& chunk_over_codes_named(std::string_view name) {
  const auto* const found = std::ranges::find(kChunksOverCodes, name, &EmulatedHopper::name);
  if (found == std::end(kChunksOverCodes)) throw std::out_of_range(std::string(name));
  return *found;
}

NumbersFunction numbers_of_codes_named(std::string_view name) {
  const auto* const found = std::ranges::find(kNumbersOfCodes, name, &EmulatedNumbers::name);
  if (found == std::end(kNumbersOfCodes)) throw std::out_of_range(std::string(name));
  return found->run;
}

}  // namespace fovea::cuda
