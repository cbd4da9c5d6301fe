// fovea bench --device cuda: the same jobs, their tensors on a GPU.
#include <algorithm>

#include "fovea/backward.hpp"
#include "fovea/kv_cache.hpp"

#include "bench_row.hpp"
#include "core/shape.hpp"
#include "cuda/driver/resources.hpp"
#include "gradient_call.hpp"
#include "paged_call.hpp"
#include "plan/plan.hpp"
#include "problem/decode.hpp"

namespace fovea::tools {
namespace {

using cuda::driver::DeviceMemory;

std::span<std::byte> bytes_of(const DeviceMemory& memory) {
  return {static_cast<std::byte*>(memory.data()), memory.bytes()};
}

Times time_flushed(const Gpu& gpu, const std::function<void()>& enqueue, std::int64_t runs) {
  FlushedClock clock(gpu);
  return time_runs([&] { return clock.seconds(enqueue); }, runs);
}

/// The kernel that a cache of these shapes gets.
Explanation explain_decode(const AttentionDecode& args, std::int64_t seqlen_kv) {
  constexpr std::string_view kWhere = "bench";
  const ForwardProblem problem = validate_decode_problem(decode_problem(args, seqlen_kv, 0, kWhere),
                                                         cache_layout(args), kWhere);
  return explain_forward(problem, cuda::plan_forward(problem, problem.device()), MaskData::lent);
}

void run_decode(const AttentionForward& forward, const Job& job, const Gpu& gpu, std::int64_t runs,
                Row& row) {
  PagedCall call(forward, job.page_size, &gpu);
  AttentionDecode& args = call.args;
  const std::int64_t seqlen_kv = forward.k.size(1);
  const DeviceMemory workspace(gpu.context(), decode_workspace_bytes(args, seqlen_kv));
  args.workspace = bytes_of(workspace);
  row.explanation = explain_decode(args, seqlen_kv);
  row.times = time_flushed(
      gpu, [&] { attention_decode(args); }, runs);
}

void run_forward(AttentionForward args, const Gpu& gpu, std::int64_t runs, Row& row) {
  const Plan plan = fovea::plan(problem_of(args));
  plan.wait();  // where FOVEA_COMPILE says staged
  const DeviceMemory workspace(gpu.context(), plan.workspace_bytes());
  args.workspace = bytes_of(workspace);
  row.explanation = plan.explain();
  row.times = time_flushed(
      gpu, [&] { plan.run(args); }, runs);
}

/// All gradients; of training forward too, with lse.
void run_gradients(const AttentionForward& forward, Timed timed, const Gpu& gpu, std::int64_t runs,
                   Row& row) {
  GradientCall call(forward, &gpu);
  AttentionBackward& args = call.args;
  const Plan plan = fovea::plan(problem_of(forward));
  plan.wait();
  const BackwardPlan backward = plan_backward(problem_of(args));
  const DeviceMemory workspace(gpu.context(), plan.workspace_bytes());
  const DeviceMemory backward_workspace(gpu.context(), backward.workspace_bytes());
  args.forward.workspace = bytes_of(workspace);
  args.workspace = bytes_of(backward_workspace);
  row.explanation = backward.explain();
  plan.run(args.forward);
  row.times = time_flushed(
      gpu,
      [&] {
        if (timed == Timed::training) plan.run(args.forward);
        backward.run(args);
      },
      runs);
}

}  // namespace

Row run_on_gpu(const Job& job, Timed timed, const Gpu& gpu, const GpuBounds& bounds,
               std::int64_t runs) {
  const Inputs host = job.make();
  const Inputs inputs = gpu.copy(host);
  const TensorSpec spec = out_spec(host, host.q.spec.dtype);
  const Array host_out = make_array(spec.dtype, shape_of(spec));
  const Array out = gpu.copy(host_out);
  AttentionForward args = make_call(job.options, inputs);
  args.out = as_bshd(out.mutable_view(), job.options.layout);
  args.stream = gpu.stream_handle();
  const Array lse = gpu.copy(make_array(Dtype::f32, shape_of(lse_spec(job.options, host))));
  if (timed != Timed::forward) args.lse = lse.mutable_view();
  Row row{.name = row_name(job, timed),
          .why = job.why,
          .device = to_string(gpu.device()),
          .threads = 0,
          .num_threads = 0,
          .explanation = {},
          .work = {},
          .times = {},
          .bounds = bounds.of(host.q.spec.dtype)};
  if (timed != Timed::forward) {
    run_gradients(args, timed, gpu, runs, row);
  } else if (job.page_size > 0) {
    run_decode(args, job, gpu, runs, row);
  } else {
    run_forward(args, gpu, runs, row);
  }
  AttentionForward on_host = make_call(job.options, host);
  on_host.out = as_bshd(host_out.mutable_view(), job.options.layout);
  if (timed != Timed::forward) on_host.lse = lse.mutable_view();  // for its bytes
  row.work = work_of(timed, visible_work(on_host, row.explanation.tile_q, row.explanation.tile_kv));
  return row;
}

}  // namespace fovea::tools
