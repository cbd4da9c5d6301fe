// Kernels with warps of 64 lanes: of a program of their own, where all device text is compiled so.
#include <algorithm>
#include <stdexcept>

#include "cdna/attention_forward.cuh"
#include "common/clear_rows.cuh"
#include "common/range_table.cuh"
#include "kernels/emulated_forward.hpp"
#include "sm80/attention_forward_f32.cuh"

// Written by print_forward_units from forward_cases.hpp.
#include "amd_units.inc"

namespace fovea::cuda {

ForwardFunction forward_named(std::string_view name) {
  const auto* const found = std::ranges::find(kForwards, name, &EmulatedForward::name);
  if (found == std::end(kForwards)) throw std::out_of_range(std::string(name));
  return found->run;
}

void run_clear_rows(const ClearRowsParams& params) { clear_rows(params); }
void run_range_tables(const RangeTableParams& params) { build_range_tables(params); }

}  // namespace fovea::cuda
