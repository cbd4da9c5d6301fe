#include "kernels/emulated_forward.hpp"

#include <algorithm>
#include <stdexcept>

#include "common/clear_counter.cuh"
#include "common/clear_rows.cuh"
#include "common/range_table.cuh"
#include "ptx/generated/wgmma_bf16.cuh"
#include "ptx/generated/wgmma_f16.cuh"
#include "sm80/attention_forward.cuh"
#include "sm80/attention_forward_f32.cuh"
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
void run_clear_rows(const ClearRowsParams& params) { clear_rows(params); }
void run_range_tables(const RangeTableParams& params) { build_range_tables(params); }

}  // namespace fovea::cuda
