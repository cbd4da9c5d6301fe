#include "cpu/quantized/attention_quantized.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "cpu/features.hpp"
#include "cpu/quantized/walk.hpp"
#include "cpu/tasks.hpp"
#include "problem/head_dim.hpp"

namespace fovea::cpu {
namespace {

std::optional<std::string> refusal_of(const ForwardProblem& f, CpuTarget wanted) {
  if (f.problem.compute_dtype == ComputeDtype::bf16)
    return "compute_dtype is bf16; codes are multiplied in f32";
  if (wanted == CpuTarget::avx512_bf16 || wanted == CpuTarget::amx_bf16)
    return fmt::format(
        "target {} was asked for; codes are multiplied in f32, by avx512, avx2, neon or "
        "scalar",
        name(wanted));
  if (panel_kernels(wanted) == nullptr)
    return fmt::format("this build has no kernels for target {}", name(wanted));
  if (const std::string_view missing = missing_for(wanted); !missing.empty())
    return std::string(missing);
  if (std::max(f.head_dim_qk, f.head_dim_v) > kMaxHeadDim)
    return fmt::format("a head_dim is {}, above {}", std::max(f.head_dim_qk, f.head_dim_v),
                       kMaxHeadDim);
  return std::nullopt;
}

struct QuantizedMemory {
  QuantizedOperands operands;
  std::vector<QuantizedScratch> workers;

  static QuantizedMemory carve(Carver& carver, const ForwardSpec& spec, const ForwardProblem& f,
                               std::size_t program_bytes, int num_workers) {
    QuantizedMemory memory{QuantizedOperands::carve(carver, f), {}};
    for (int worker = 0; worker < num_workers; ++worker)
      memory.workers.push_back(QuantizedScratch::carve(carver, spec, f, program_bytes));
    return memory;
  }
};

class QuantizedRun {
 public:
  QuantizedRun(const ForwardProblem& problem, const ForwardPlan& plan, const AttentionForward& args,
               std::byte* workspace, Executor& executor)
      : call_(problem, plan, args, nullptr),
        carver_(workspace),
        memory_(QuantizedMemory::carve(carver_, plan.spec, problem, plan.program_bytes,
                                       plan.num_workers)),
        results_(call_),
        executor_(executor) {}

  void run() const {
    results_.clear_padding_rows();
    round_operands();
    const std::int64_t heads = call_.problem.num_heads_kv;
    const std::int64_t panels =
        ceil_div(call_.problem.group * call_.problem.seqlen_q, call_.spec.lanes);
    run_tasks(executor_, call_.problem.num_sequences * heads * panels,
              [&](int worker, std::int64_t task) {
                attend(call_.sequence(task / panels / heads), task / panels % heads, task % panels,
                       worker);
              });
  }

 private:
  /// Queries need the mean of their keys.
  void round_operands() const {
    const ForwardProblem& f = call_.problem;
    run_tasks(executor_, f.num_sequences * f.num_heads_kv, [&](int /*worker*/, std::int64_t task) {
      const Sequence s = call_.sequence(task / f.num_heads_kv);
      quantize_keys(f, call_.args, s, task % f.num_heads_kv, memory_.operands);
      quantize_values(f, call_.args, s, task % f.num_heads_kv, memory_.operands);
    });
    run_tasks(executor_, f.num_sequences * f.num_heads_q, [&](int /*worker*/, std::int64_t task) {
      quantize_queries(f, call_.args, call_.sequence(task / f.num_heads_q), task % f.num_heads_q,
                       memory_.operands);
    });
  }

  void attend(const Sequence& sequence, std::int64_t kv_head, std::int64_t panel,
              int worker) const {
    ForwardItem item{.sequence = sequence, .kv_head = kv_head};
    item.row_begin = panel * call_.spec.lanes;
    item.row_end =
        std::min(item.row_begin + call_.spec.lanes, call_.problem.group * sequence.seqlen_q);
    if (item.num_rows() <= 0) return;
    QuantizedWalk(call_, memory_.operands, item, memory_.workers[static_cast<std::size_t>(worker)])
        .run(results_);
  }

  const ForwardCall call_;
  Carver carver_;
  const QuantizedMemory memory_;
  const ForwardResults results_;
  Executor& executor_;
};

}  // namespace

ForwardPlan try_plan_quantized(const ForwardProblem& f, int num_threads) {
  ForwardPlan plan;
  const CpuTarget asked = wanted_target(f);
  const CpuTarget target = asked == CpuTarget::automatic ? best_f32_target() : asked;
  if (const auto reason = refusal_of(f, target)) {
    plan.refused.push_back({std::string(kQuantizedCandidate), *reason});
    return plan;
  }
  plan.candidate = fmt::format("{} {}", kQuantizedCandidate, name(target));
  plan.num_workers = num_threads;
  plan.spec = {
      .target = target, .lanes = panel_kernels(target)->lanes, .tile_kv = f.problem.quant.block_kv};
  prepare_programs(f, plan);
  Carver carver(nullptr);
  QuantizedMemory::carve(carver, plan.spec, f, plan.program_bytes, num_threads);
  plan.workspace_bytes = carver.used();
  return plan;
}

void attention_quantized(const ForwardProblem& problem, const ForwardPlan& plan,
                         const AttentionForward& args, std::byte* workspace, Executor& executor) {
  QuantizedRun(problem, plan, args, workspace, executor).run();
}

}  // namespace fovea::cpu
