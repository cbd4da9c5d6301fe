#include "cuda/params/range_tables.hpp"

#include <algorithm>
#include <limits>

#include "core/ceil_div.hpp"

namespace fovea::cuda {
namespace {

// Tables start where a line of the L2 cache does.
constexpr std::size_t kAlignment = 256;

constexpr int kThreads = 32 * kRunsPerGroup;
constexpr unsigned kSharedBytes = kRunsPerGroup * sizeof(RangeEntry);

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

CapturedElement element_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::boolean:
      return CapturedElement::boolean;
    case Dtype::u8:
      return CapturedElement::u8;
    case Dtype::i8:
      return CapturedElement::i8;
    case Dtype::i32:
      return CapturedElement::i32;
    case Dtype::i64:
      return CapturedElement::i64;
    case Dtype::f32:
      return CapturedElement::f32;
    case Dtype::f16:
      return CapturedElement::f16;
    case Dtype::bf16:
      return CapturedElement::bf16;
    case Dtype::e4m3:  // refused where it is captured
      break;
  }
  return CapturedElement::i32;
}

std::int64_t num_runs(const RangeTableParam& table) {
  return ceil_div(table.tensor.shape[table.dim], kPositionsPerRun);
}

std::size_t table_bytes(const RangeTableParam& table) {
  const std::int64_t entries = table.num_lines * (num_runs(table) + table.num_groups);
  return aligned(static_cast<std::size_t>(entries) * sizeof(RangeEntry));
}

bool fits_a_grid(const RangeTableParam& table) {
  return table.num_lines * table.num_groups <= std::numeric_limits<std::int32_t>::max();
}

}  // namespace

RangeTables::RangeTables(const expr::CudaProgram& program) {
  for (std::size_t slot = 0; slot < program.tensors.size(); ++slot) {
    const expr::CudaTensorSlot& tensor = program.tensors[slot];
    if (tensor.range_dim == expr::kNoRangeTable) continue;
    wanted_.push_back({.slot = static_cast<int>(slot),
                       .rank = tensor.rank,
                       .dim = tensor.range_dim,
                       .element = element_of(tensor.dtype)});
  }
}

RangeTableParam RangeTables::table_of(const Wanted& wanted, const Captures& captures) {
  RangeTableParam table{};
  table.tensor = captures.tensors[wanted.slot];
  table.rank = wanted.rank;
  table.dim = wanted.dim;
  table.element = wanted.element;
  table.num_lines = 1;
  for (int dim = 0; dim < wanted.rank; ++dim) {
    if (dim != wanted.dim && table.tensor.strides[dim] != 0)
      table.num_lines *= table.tensor.shape[dim];
  }
  table.num_groups = static_cast<std::int32_t>(ceil_div(num_runs(table), kRunsPerGroup));
  return table;
}

std::size_t RangeTables::workspace_bytes(const Captures& captures) const {
  std::size_t bytes = 0;
  for (const Wanted& wanted : wanted_) bytes += table_bytes(table_of(wanted, captures));
  return bytes;
}

RangeTableLaunch RangeTables::place(Captures& captures, std::span<std::byte> workspace) const {
  RangeTableLaunch launch{};
  for (const Wanted& wanted : wanted_) {
    RangeTableParam table = table_of(wanted, captures);
    const std::size_t bytes = table_bytes(table);
    if (bytes == 0 || bytes > workspace.size() || !fits_a_grid(table)) continue;
    table.entries = reinterpret_cast<RangeEntry*>(workspace.data());
    workspace = workspace.subspan(bytes);
    captures.tensors[wanted.slot].ranges = table.entries;
    launch.params.tables[launch.num_tables++] = table;
    const auto num_groups = static_cast<std::uint32_t>(table.num_lines * table.num_groups);
    launch.num_groups = std::max(launch.num_groups, num_groups);
  }
  return launch;
}

jit::KernelText range_tables_text() {
  return {.unit =
              "#include \"common/range_table.cuh\"\n"
              "extern \"C\" __global__ void __launch_bounds__(1024)\n"
              "fovea_kernel(const __grid_constant__ fovea::cuda::RangeTableParams p) {\n"
              "  fovea::cuda::build_range_tables(p);\n"
              "}\n",
          .label = "common/range_table"};
}

KernelLaunch range_tables_launch(const RangeTableLaunch& launch) {
  KernelLaunch result = kernel_launch(KernelRole::range_tables, launch.params);
  result.grid = {.x = launch.num_groups, .y = launch.num_tables};
  result.num_threads = kThreads;
  result.shared_bytes = kSharedBytes;
  return result;
}

}  // namespace fovea::cuda
