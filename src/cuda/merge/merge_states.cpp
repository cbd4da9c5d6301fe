// Fill params, launch.
#include "cuda/merge/merge_states.hpp"

#include <fmt/format.h>

#include <limits>

#include "fovea/error.hpp"

#include "cuda/kernel_unit.hpp"
#include "cuda/params/rows_param.hpp"

namespace fovea::cuda {
namespace {

/// Rows of a CTA, a warp each: enough of them on an SM that loads of one wait beside those of others.
constexpr unsigned kRows = 4;

StateParam state_param(const TensorView& out, const TensorView& lse) {
  const RowStrides strides = row_strides(lse);
  return {.out = rows_param(out),
          .lse = const_cast<float*>(static_cast<const float*>(lse.data())),
          .lse_batch_stride = strides.batch,
          .lse_head_stride = strides.head,
          .lse_row_stride = strides.row};
}

std::int64_t num_rows_of(const MergeStates& args) {
  const int last = args.out.rank() - 1;
  return (last == 3 ? args.out.size(0) : 1) * args.out.size(last - 2) * args.out.size(last - 1);
}

}  // namespace

void refuse_merge(const MergeStates& args) {
  if (args.outs.size() > kMostMergedStates) {
    throw Unsupported(fmt::format(
        "merge_states: {} states; expected at most {} on a GPU: merge some of them first",
        args.outs.size(), kMostMergedStates));
  }
  if (num_rows_of(args) / kRows >= std::numeric_limits<std::int32_t>::max())
    throw Unsupported(fmt::format("merge_states: 2^31 groups of {} rows, or more", kRows));
}

jit::KernelText merge_text() { return common_kernel("merge_states", "MergeParams", kRows * 32); }

MergePlan plan_merge(Device device) { return {load_alone(merge_text(), device, "merge_states")}; }

MergeLaunch merge_launch(const MergeStates& args) {
  const int last = args.out.rank() - 1;
  MergeLaunch launch{};
  MergeParams& p = launch.params;
  refuse_merge(args);
  p.num_rows = num_rows_of(args);
  for (std::size_t i = 0; i < args.outs.size(); ++i)
    p.states[i] = state_param(args.outs[i], args.lses[i]);
  p.merged = state_param(args.out, args.lse);
  p.num_states = static_cast<std::int32_t>(args.outs.size());
  p.seqlen_q = static_cast<std::int32_t>(args.out.size(last - 2));
  p.num_heads = static_cast<std::int32_t>(args.out.size(last - 1));
  p.head_dim = static_cast<std::int32_t>(args.out.size(last));
  launch.grid.x = static_cast<unsigned>((p.num_rows + kRows - 1) / kRows);
  launch.num_threads = kRows * 32;
  return launch;
}

KernelLaunches MergeLaunch::launches() const { return launch_alone(params, grid, num_threads); }

void merge_states(const MergePlan& plan, const MergeStates& args) {
  const MergeLaunch launch = merge_launch(args);
  enqueue(*plan.kernels, launch.launches(), driver::Stream(args.stream));
}

}  // namespace fovea::cuda
