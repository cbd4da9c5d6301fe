#include "cuda/backward/launch.hpp"

#include <algorithm>
#include <cstddef>
#include <span>

#include "core/ceil_div.hpp"
#include "cuda/backward/candidates.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {
namespace {

/// Walked rows of heads that run side by side may fill so much of the L2 cache.
constexpr double kSectionOfL2 = 0.6;

/// Largest lse whose rounding to f32 moves P by less than the rounding of products: 2^-24 of it against 2^-9 of P in 16
/// bits, and against that of scores of its size in f32.
constexpr float kLargestLse16Bit = 1024, kLargestLseF32 = 256;

GradientParam gradient_param(const TensorView& view) {
  if (!view) return {};
  return {
      .tensor = bshd(view), .element = element_of(view.dtype()), .is_aligned = is_aligned(view)};
}

class Filler {
 public:
  Filler(const GradientProblem& problem, const BackwardPlan& plan, const AttentionBackward& args)
      : g_(problem), f_(problem.forward), plan_(plan), args_(args) {}

  BackwardLaunch fill(void* workspace) const {
    BackwardLaunch launch{};
    std::byte* const bytes = static_cast<std::byte*>(workspace);
    fill_past(launch.params.forward);
    fill_gradients(launch.params);
    fill_statistics(launch.params, static_cast<float*>(workspace));
    fill_sections(launch.params);
    fill_grids(launch);
    if (!plan_.range_tables.is_empty()) {
      launch.range_tables = plan_.range_tables.place(
          launch.params.forward.captures,
          std::span(bytes, plan_.workspace_bytes).subspan(plan_.memory.tables_at));
    }
    launch.captured =
        captured_launch(g_, plan_.captured, args_, launch.params, bytes + plan_.memory.captured_at);
    return launch;
  }

 private:
  /// out and lse are inputs here, of views that may be written or not.
  void fill_past(ForwardParams& p) const {
    p = call_params(f_, args_.forward, nullptr);
    p.lse = static_cast<float*>(const_cast<void*>(args_.forward.lse.data()));
    p.row_max = nullptr;
    p.captures = plan_.capture_slots.bind(args_.forward.score, args_.forward.mask);
  }

  void fill_gradients(BackwardParams& b) const {
    b.dout = bshd(args_.dout);
    b.is_dout_aligned = is_aligned(args_.dout);
    b.dlse = static_cast<const float*>(args_.dlse.data());
    const RowStrides dlse = row_strides(args_.dlse);
    b.dlse_batch_stride = dlse.batch;
    b.dlse_head_stride = dlse.head;
    b.dlse_row_stride = dlse.row;
    b.dq = gradient_param(args_.dq);
    b.dk = gradient_param(args_.dk);
    b.dv = gradient_param(args_.dv);
    b.dsinks = static_cast<float*>(args_.dsinks.mutable_data());
    b.dsinks_stride = args_.dsinks ? args_.dsinks.stride(0) : 0;
  }

  void fill_statistics(BackwardParams& b, float* rows) const {
    const std::int64_t of_head = num_statistics(g_);
    const std::size_t count = statistics_floats(g_);
    b.rows = {.log_sum = rows,
              .delta = rows + count,
              .origin = plan_.delta.has_origins ? rows + 2 * count : nullptr,
              .batch_stride = f_.is_varlen ? 0 : of_head * f_.num_heads_q,
              .head_stride = of_head};
    b.largest_lse = f_.problem.q.dtype == Dtype::f32 ? kLargestLseF32 : kLargestLse16Bit;
  }

  /// Pairs (batch, head) whose walked rows share the L2 cache.
  std::int32_t pairs_per_section(std::int64_t length, std::int64_t heads,
                                 std::int64_t pairs_of_head) const {
    const double bytes = static_cast<double>(length) *
                         static_cast<double>(f_.head_dim_qk + f_.head_dim_v) *
                         static_cast<double>(size_bytes(f_.problem.q.dtype));
    const double fitting = kSectionOfL2 * static_cast<double>(plan_.device.l2_bytes) /
                           std::max(1.0, bytes) * static_cast<double>(pairs_of_head);
    return static_cast<std::int32_t>(
        std::clamp<std::int64_t>(static_cast<std::int64_t>(std::min(fitting, 1e9)), 1,
                                 std::max<std::int64_t>(1, f_.num_sequences * heads)));
  }

  void fill_sections(BackwardParams& b) const {
    const ForwardParams& p = b.forward;
    // Queries of a kv head are those of its whole group.
    b.kv_pairs_per_section = pairs_per_section(p.seqlen_q * f_.group, f_.num_heads_kv, 1);
    b.q_pairs_per_section = pairs_per_section(p.seqlen_kv, f_.num_heads_q, f_.group);
  }

  void fill_grids(BackwardLaunch& launch) const {
    const TensorView& q = args_.forward.q;
    const std::int64_t length = q.size(q.rank() - 3);
    const std::int64_t tiles =
        f_.is_varlen ? (length == 0 ? 0 : length / kStatisticsRows + f_.num_sequences + 1)
                     : f_.num_sequences * ((length + kStatisticsRows - 1) / kStatisticsRows);
    launch.num_delta_ctas = static_cast<std::uint32_t>(tiles * f_.num_heads_q);
    launch.num_sink_ctas =
        static_cast<std::uint32_t>(g_.wants_dsinks ? f_.num_heads_q : std::int64_t{0});
    for (std::size_t i = 0; i < plan_.steps.size(); ++i) {
      const OwnerSpec* spec = plan_.steps[i].spec.owner();
      if (spec != nullptr)
        launch.num_ctas[i] = static_cast<std::uint32_t>(num_owned_tiles(*spec, g_, args_));
    }
  }

  const GradientProblem& g_;
  const ForwardProblem& f_;
  const BackwardPlan& plan_;
  const AttentionBackward& args_;
};

}  // namespace

std::int64_t num_statistics(const GradientProblem& g) {
  const ForwardProblem& f = g.forward;
  if (!f.is_varlen) return round_up(f.seqlen_q, kStatisticsRows);
  return round_up(f.total_q, kStatisticsRows) + (f.num_sequences + 2) * kStatisticsRows;
}

std::size_t statistics_floats(const GradientProblem& g) {
  const ForwardProblem& f = g.forward;
  return static_cast<std::size_t>(num_statistics(g) * f.num_heads_q *
                                  (f.is_varlen ? 1 : f.num_sequences));
}

std::size_t statistics_bytes(const GradientProblem& g, bool has_origins) {
  return statistics_floats(g) * (has_origins ? 3 : 2) * sizeof(float);
}

BackwardLaunch backward_launch(const GradientProblem& problem, const BackwardPlan& plan,
                               const AttentionBackward& args, void* workspace) {
  return Filler(problem, plan, args).fill(workspace);
}

void BackwardLaunch::add_before(KernelLaunches& all) const {
  if (!range_tables.is_empty()) all.add(range_tables_launch(range_tables));
  KernelLaunch delta = kernel_launch(KernelRole::delta, params);
  delta.grid.x = num_delta_ctas;
  delta.num_threads = kDeltaThreads;
  all.add(delta);
}

void BackwardLaunch::add_after(KernelLaunches& all) const {
  captured.add(all);
  if (params.dsinks == nullptr) return;
  KernelLaunch sinks = kernel_launch(KernelRole::sinks, params);
  sinks.grid.x = num_sink_ctas;
  sinks.num_threads = kSinkThreads;
  sinks.shared_bytes = kSinkThreads * sizeof(double);
  all.add(sinks);
}

KernelLaunches BackwardLaunch::launches(const BackwardPlan& plan) const {
  KernelLaunches all;
  add_before(all);
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    const BackwardStep& step = plan.steps[i];
    all.add(step_launch(step, params, num_ctas[i]));
  }
  add_after(all);
  return all;
}

}  // namespace fovea::cuda
