// Fill params, launch.
#include "cuda/rotary/rotary.hpp"

#include "cuda/kernel_unit.hpp"
#include "cuda/params/tensor_params.hpp"
#include "problem/rotary.hpp"

namespace fovea::cuda {
namespace {

/// Two heads of 128 elements are turned in one step.
constexpr unsigned kThreads = 128;

BshdParam angles(const TensorView& table) {
  return {.data = table.data(),
          .batch_stride = 0,
          .row_stride = table.stride(0),
          .head_stride = 0,
          .col_stride = table.stride(1)};
}

}  // namespace

jit::KernelText rotary_text() { return common_kernel("rotary", "RotaryParams", kThreads); }

RotaryPlan plan_rotary(Device device) { return {load_alone(rotary_text(), device, "rotary")}; }

RotaryLaunch rotary_launch(const ApplyRotary& args) {
  const int last = args.x.rank() - 1;
  const bool is_packed = static_cast<bool>(args.cu_seqlens);
  RotaryLaunch launch{};
  RotaryParams& p = launch.params;
  p.x = bshd(args.x);
  p.out = bshd(args.out);
  p.x_element = element_of(args.x.dtype());
  p.out_element = element_of(args.out.dtype());
  p.cos = angles(args.cos);
  p.sin = angles(args.sin);
  p.cos_element = element_of(args.cos.dtype());
  p.sin_element = element_of(args.sin.dtype());
  p.cu_seqlens = index_param(args.cu_seqlens);
  p.positions = index_param(args.positions);
  p.positions_row_stride = args.positions.rank() > 1 ? args.positions.stride(0) : 0;
  p.offsets = index_param(args.offsets);
  p.batch = static_cast<std::int32_t>(rotary_batch(args));
  p.seqlen = is_packed ? 0 : static_cast<std::int32_t>(args.x.size(1));
  p.num_rows = is_packed ? static_cast<std::int32_t>(args.x.size(0)) : p.batch * p.seqlen;
  p.num_heads = static_cast<std::int32_t>(args.x.size(last - 1));
  p.head_dim = static_cast<std::int32_t>(args.x.size(last));
  p.max_positions = count_param(args.cos.size(0));
  p.num_pairs = static_cast<std::int32_t>(args.cos.size(1));
  p.is_interleaved = args.is_interleaved;
  p.is_conjugate = args.is_conjugate;
  p.is_in_place = args.x.data() == args.out.data();
  launch.grid.x = static_cast<unsigned>(p.num_rows);
  launch.num_threads = kThreads;
  return launch;
}

KernelLaunches RotaryLaunch::launches() const { return launch_alone(params, grid, num_threads); }

void rotary(const RotaryPlan& plan, const ApplyRotary& args) {
  const RotaryLaunch launch = rotary_launch(args);
  enqueue(*plan.kernels, launch.launches(), driver::Stream(args.stream));
}

}  // namespace fovea::cuda
