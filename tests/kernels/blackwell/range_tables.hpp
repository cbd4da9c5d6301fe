// Range tables before a kernel of Blackwell under the emulator. Of device text: for files that are compiled as such.
#pragma once

#include <cstddef>

#include "common/range_table.cuh"
#include "cuda/forward/attention_forward.hpp"
#include "kernels/emulated_device.hpp"

namespace fovea::testing {

/// In memory of their own, so that no access to them strays into the rest of the workspace; and built.
inline void build_tables(const cuda::ForwardPlan& plan, cuda::Captures& captures,
                         cuda::RangeTableLaunch& launch, Emulation& emulation) {
  for (cuda::CapturedTensorParam& tensor : captures.tensors) tensor.ranges = nullptr;
  if (plan.range_tables.is_empty()) return;
  const std::size_t bytes = plan.workspace_bytes - plan.tables_at;
  const auto tables = emulation.device.buffer<std::byte>("range tables", bytes);
  launch = plan.range_tables.place(captures, {tables, bytes});
  emulation.launch({.x = launch.num_groups, .y = launch.num_tables}, 32 * cuda::kRunsPerGroup,
                   cuda::kRunsPerGroup * sizeof(cuda::RangeEntry),
                   [&] { cuda::build_range_tables(launch.params); });
}

}  // namespace fovea::testing
