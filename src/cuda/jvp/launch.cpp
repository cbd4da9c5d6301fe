#include "cuda/jvp/launch.hpp"

#include <algorithm>
#include <cstddef>
#include <span>

#include "core/check.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {
namespace {

BshdParam given(const TensorView& tangent) { return tangent ? bshd(tangent) : BshdParam{}; }

bool is_aligned_or_absent(const TensorView& tangent) { return !tangent || is_aligned(tangent); }

/// The call with tangents in the places of tensors.
ForwardParams tangents_of(ForwardParams p, const AttentionJvp& args) {
  p.q = given(args.q_tangent);
  p.k = given(args.k_tangent);
  p.v = given(args.v_tangent);
  p.out = bshd(args.out_tangent);
  p.is_q_aligned = is_aligned_or_absent(args.q_tangent);
  p.is_kv_aligned = is_aligned_or_absent(args.k_tangent) && is_aligned_or_absent(args.v_tangent);
  p.is_out_aligned = is_aligned(args.out_tangent);
  p.lse = static_cast<float*>(args.lse_tangent.mutable_data());
  const RowStrides lse = row_strides(args.lse_tangent);
  p.lse_batch_stride = lse.batch;
  p.lse_head_stride = lse.head;
  p.lse_row_stride = lse.row;
  p.sinks = static_cast<const float*>(args.sinks_tangent.data());
  p.sinks_stride = args.sinks_tangent ? args.sinks_tangent.stride(0) : 0;
  return p;
}

struct Bytes {
  std::int32_t of_v, of_out;  // of an element
};

/// The columns from `begin` on, so many; lse is written with the first.
void take_columns(ForwardParams& p, std::int32_t begin, std::int32_t columns, const Bytes& bytes) {
  const auto ahead = [begin](BshdParam& t, std::int32_t element_bytes) {
    if (t.data != nullptr)
      t.data = static_cast<const std::byte*>(t.data) + begin * t.col_stride * element_bytes;
  };
  ahead(p.v, bytes.of_v);
  ahead(p.out, bytes.of_out);
  p.head_dim_v = std::min(p.head_dim_v - begin, columns);
  if (begin > 0) p.lse = nullptr;
}

}  // namespace

JvpLaunch jvp_launch(const TangentProblem& problem, const JvpPlan& plan, const AttentionJvp& args,
                     void* workspace) {
  const ForwardProblem& f = problem.forward;
  const JvpSpec& spec = plan.spec;
  FOVEA_ASSERT(plan.num_launches <= kMostJvpLaunches);
  JvpLaunch launch{};
  launch.num_launches = plan.num_launches;
  JvpParams& first = launch.params[0];
  first.forward = call_params(f, args.forward, nullptr);
  const fovea::Captures score =
      captures_with_tangents(args.forward.score, plan.tangent_slots, args.captured_tangents);
  first.forward.captures = plan.capture_slots.bind({score, args.forward.mask.captures()});
  launch.num_ctas = fill_row_tiles(spec, f, plan.device, first.forward);
  if (!plan.range_tables.is_empty()) {
    launch.range_tables = plan.range_tables.place(
        first.forward.captures, {static_cast<std::byte*>(workspace), plan.workspace_bytes});
  }
  first.tangent = tangents_of(first.forward, args);
  for (int i = plan.num_launches - 1; i >= 0; --i) {
    JvpParams& part = launch.params[i];
    part = first;
    take_columns(part.forward, i * spec.head_dim_v, spec.head_dim_v,
                 {element_bytes(spec.element), element_bytes(spec.out_element)});
    take_columns(part.tangent, i * spec.head_dim_v, spec.head_dim_v,
                 {element_bytes(spec.v_tangent_element), element_bytes(spec.out_tangent_element)});
  }
  return launch;
}

KernelLaunches JvpLaunch::launches(const JvpPlan& plan) const {
  KernelLaunches all;
  if (!range_tables.is_empty()) all.add(range_tables_launch(range_tables));
  for (const JvpParams& part : std::span(params).first(static_cast<std::size_t>(num_launches))) {
    KernelLaunch launch = kernel_launch(KernelRole::main, part);
    launch.grid.x = num_ctas;
    launch.num_threads = static_cast<unsigned>(plan.spec.num_warps) * 32;
    launch.shared_bytes = static_cast<unsigned>(plan.shared_bytes);
    all.add(launch);
  }
  return all;
}

}  // namespace fovea::cuda
