// What kernels need to find the tiles of a mask that captured tensors decide: a table of least and greatest values for
// each tensor that positions index, built on the device before the attention kernel. Masks of positions and scalars
// need none. The tiles themselves are found by the kernel on its way (device/common/tile_walk.cuh): no list of them
// exists.
//
//   const RangeTables tables(program);                              // once
//   bytes = tables.workspace_bytes(captures);                       // for shapes up to these
//   const RangeTableLaunch launch = tables.place(captures, {workspace, bytes});   // each call: no allocation, no wait
//   launches.add(range_tables_launch(launch));
//
// Contents, shapes and addresses may change from call to call, and between replays of a captured graph contents may.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cuda/device/shared/range_table.h"
#include "cuda/jit/cubin.hpp"
#include "cuda/kernel_set.hpp"
#include "expr/print_cuda.hpp"

namespace fovea::cuda {

/// One launch builds all tables of a call.
struct RangeTableLaunch {
  RangeTableParams params;
  std::uint32_t num_tables = 0;
  std::uint32_t num_groups = 0;  // of the table with most
  bool is_empty() const { return num_tables == 0; }
};

class RangeTables {
 public:
  RangeTables() = default;
  explicit RangeTables(const expr::CudaProgram& program);

  bool is_empty() const { return wanted_.empty(); }

  /// Bytes of the tables of tensors of these shapes, a multiple of 256: 8 bytes for 62 elements along a position.
  std::size_t workspace_bytes(const Captures& captures) const;

  /// Lays the tables out in the workspace and points the captures at them. A table that does not fit, where a tensor
  /// has outgrown the plan, is left out: its tiles then count as partial, which costs time and changes nothing.
  RangeTableLaunch place(Captures& captures, std::span<std::byte> workspace) const;

 private:
  struct Wanted {
    int slot = 0;
    int rank = 1;
    int dim = 0;
    CapturedElement element = CapturedElement::i32;
  };
  static RangeTableParam table_of(const Wanted& wanted, const Captures& captures);

  std::vector<Wanted> wanted_;
};

/// The kernel that builds tables of any dtype and shape: one for every program.
jit::KernelText range_tables_text();

/// Of tables that there are.
KernelLaunch range_tables_launch(const RangeTableLaunch& launch);

}  // namespace fovea::cuda
