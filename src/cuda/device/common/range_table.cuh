// The kernel that builds the tables of least and greatest values, before a mask is asked about tiles. Read
// captured_range.cuh for who reads them.
//
// Reads every element once and is bound by that: grid (lines x groups, tables), 1024 threads, a warp for a run of 64
// positions, or for two where warps have 64 lanes, 256 bytes of shared memory. A table has 1/62 as many entries of 8
// bytes as the tensor has elements. It takes the contents of the moment, also when a captured graph is replayed:
// nothing here asks the host.
// Source: the pyramid of src/mask/range_table.hpp, with two levels.
#pragma once

#include "common/captured_range.cuh"
#include "ptx/barrier.cuh"
#include "ptx/warp.cuh"
#include "shared/range_table.h"

namespace fovea::cuda::program {

FOVEA_DEVICE std::int32_t element_order(const RangeTableParam& table, std::int64_t offset) {
  const CapturedTensorParam& tensor = table.tensor;
  switch (table.element) {
    case CapturedElement::boolean:
      return order_of(element_at<Bool>(tensor, offset));
    case CapturedElement::u8:
      return order_of(element_at<std::uint8_t>(tensor, offset));
    case CapturedElement::i8:
      return order_of(element_at<std::int8_t>(tensor, offset));
    case CapturedElement::i32:
      return order_of(element_at<std::int32_t>(tensor, offset));
    case CapturedElement::i64:
      return order_of(element_at<std::int64_t>(tensor, offset));
    case CapturedElement::f32:
      return order_of(element_at<float>(tensor, offset));
    case CapturedElement::f16:
      return order_of(element_at<F16>(tensor, offset));
    case CapturedElement::bf16:
      return order_of(element_at<Bf16>(tensor, offset));
  }
  return 0;
}

FOVEA_DEVICE RangeEntry hull(RangeEntry a, RangeEntry b) {
  return {least(a.lo, b.lo), greatest(a.hi, b.hi)};
}

FOVEA_DEVICE RangeEntry over_warp(RangeEntry mine) {
#pragma unroll
  for (std::int32_t distance = ptx::kWarpLanes / 2; distance > 0; distance /= 2) {
    mine = hull(mine, {ptx::shfl_bfly(mine.lo, distance), ptx::shfl_bfly(mine.hi, distance)});
  }
  return mine;
}

/// Offset of the first element of a line.
FOVEA_DEVICE std::int64_t line_offset(const RangeTableParam& table, std::int64_t line) {
  std::int64_t offset = 0;
#pragma unroll 1
  for (std::int32_t dim = table.rank - 1; dim >= 0; --dim) {
    if (dim == table.dim || table.tensor.strides[dim] == 0) continue;
    offset += line % table.tensor.shape[dim] * table.tensor.strides[dim];
    line /= table.tensor.shape[dim];
  }
  return offset;
}

/// A warp's run; nothing, that is [greatest, least], behind the end.
FOVEA_DEVICE RangeEntry range_of_run(const RangeTableParam& table, std::int64_t line,
                                     std::int64_t run) {
  const std::int64_t extent = table.tensor.shape[table.dim];
  const std::int64_t stride = table.tensor.strides[table.dim];
  const std::int64_t offset = line_offset(table, line);
  RangeEntry mine{kGreatestInt, kLeastInt};
#pragma unroll 1
  for (std::int32_t i = ptx::lane_idx(); i < kPositionsPerRun; i += ptx::kWarpLanes) {
    const std::int64_t position = run * kPositionsPerRun + i;
    if (position >= extent) break;
    const std::int32_t order = element_order(table, offset + position * stride);
    mine = hull(mine, {order, order});
  }
  ptx::sync_warp();
  return over_warp(mine);
}

/// Where the entry of the i-th run of the group stands in shared memory.
FOVEA_DEVICE ptx::SharedAddress shared_entry(std::int32_t i) {
  return ptx::dynamic_shared() + static_cast<std::uint32_t>(i * sizeof(RangeEntry));
}

/// Of the threads that 32 runs have a warp of 32 lanes each for.
inline constexpr std::int32_t kRunsPerWarp = ptx::kWarpLanes / 32;
static_assert(kRunsPerGroup <= ptx::kWarpLanes, "one warp joins the runs of a group");

/// The runs of the group; the first warp then joins them.
FOVEA_DEVICE void build_group(const RangeTableParam& table, std::int64_t line, std::int32_t group) {
  const std::int32_t num_runs = (table.tensor.shape[table.dim] - 1) / kPositionsPerRun + 1;
  const std::int32_t warp = ptx::warp_idx();
#pragma unroll
  for (std::int32_t of_warp = 0; of_warp < kRunsPerWarp; ++of_warp) {
    const std::int32_t i = warp * kRunsPerWarp + of_warp;
    const std::int32_t run = group * kRunsPerGroup + i;
    const RangeEntry mine = range_of_run(table, line, run);
    if (ptx::lane_idx() == 0) {
      if (run < num_runs) ptx::st_global(table.entries + line * num_runs + run, mine);
      ptx::st_shared(shared_entry(i), mine);
    }
  }
  ptx::sync_threads();
  if (warp != 0) return;
  RangeEntry mine{kGreatestInt, kLeastInt};
  if (kRunsPerGroup == ptx::kWarpLanes || ptx::lane_idx() < kRunsPerGroup)
    mine = ptx::ld_shared<RangeEntry>(shared_entry(ptx::lane_idx()));
  const RangeEntry all = over_warp(mine);
  RangeEntry* const groups = table.entries + table.num_lines * num_runs;
  if (ptx::lane_idx() == 0) ptx::st_global(groups + line * table.num_groups + group, all);
}

}  // namespace fovea::cuda::program

namespace fovea::cuda {

/// The grid's x is that of the table with most groups.
FOVEA_DEVICE void build_range_tables(const RangeTableParams& params) {
  const RangeTableParam& table = params.tables[ptx::block_idx().y];
  const std::int64_t line = ptx::block_idx().x / table.num_groups;
  if (line >= table.num_lines) return;
  program::build_group(table, line, ptx::block_idx().x % table.num_groups);
}

}  // namespace fovea::cuda
