#include "cpu/quantized/attention_quantized.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "cpu/features.hpp"
#include "cpu/quantized/walk.hpp"
#include "cpu/tasks.hpp"
#include "problem/head_dim.hpp"

namespace fovea::cpu {
namespace {

// ---- what can run ----

/// A target, best first, the f32 target of its panels, and its products of codes (null: none).
struct QuantizedTarget {
  CpuTarget target, f32;
  const CodeProducts* (*products)();
};

constexpr std::array kTargets = {
    QuantizedTarget{CpuTarget::amx_bf16, CpuTarget::avx512, code_products_amx},
    QuantizedTarget{CpuTarget::avx512_bf16, CpuTarget::avx512, code_products_avx512},
    QuantizedTarget{CpuTarget::avx512_vnni, CpuTarget::avx512, code_products_avx512},
    QuantizedTarget{CpuTarget::avx512, CpuTarget::avx512, nullptr},
    QuantizedTarget{CpuTarget::avx_vnni, CpuTarget::avx2, code_products_avx2},
    QuantizedTarget{CpuTarget::avx2, CpuTarget::avx2, nullptr},
    QuantizedTarget{CpuTarget::neon, CpuTarget::neon, nullptr},
    QuantizedTarget{CpuTarget::scalar, CpuTarget::scalar, nullptr},
};

ByteProducts int8_products(const Quantization& quant) {
  return {.qk = quant.qk == QuantFormat::int8, .pv = quant.pv == QuantFormat::int8};
}

/// What keeps products beside those of codes from bf16: e4m3 is exact in it, other numbers must be bf16 already.
std::string obstacle_of_bf16(const ForwardProblem& f) {
  const Quantization& quant = f.problem.quant;
  if (quant.smooth_q != Smoothing::none) return "means of q are multiplied in f32";
  if (quant.pv == QuantFormat::f16) return "codes are f16, which bf16 would round";
  const auto obstacle_of = [&](QuantFormat format,
                               std::initializer_list<const TensorSpec*> inputs) {
    for (const TensorSpec* input : inputs) {
      if (format != QuantFormat::none) continue;
      if (f.problem.compute_dtype == ComputeDtype::f32) return std::string("compute_dtype is f32");
      if (input->dtype != Dtype::bf16)
        return fmt::format("inputs are {}, which bf16 products would round", name(input->dtype));
    }
    return std::string();
  };
  std::string reason = obstacle_of(quant.qk, {&f.problem.q, &f.problem.k});
  return reason.empty() ? obstacle_of(quant.pv, {&f.problem.v}) : reason;
}

/// Empty, or what the problem has that this target does not do.
std::string obstacle_of(const ForwardProblem& f, const QuantizedTarget& row, CpuTarget wanted) {
  const ByteProducts int8 = int8_products(f.problem.quant);
  if (row.target == CpuTarget::avx512_bf16 || row.target == CpuTarget::amx_bf16) {
    if (std::string reason = obstacle_of_bf16(f); !reason.empty()) return reason;
    if (wanted == row.target || row.target == CpuTarget::amx_bf16) return "";
    if (int8.qk && int8.pv) return "all products are those of int8 codes";
    return best_bf16_target() == row.target ? "" : "f32 products are faster on this processor";
  }
  if (row.products != nullptr && !int8.qk && !int8.pv)
    return "the recipe has no products of int8 codes";
  if (f.problem.compute_dtype == ComputeDtype::bf16)
    return "compute_dtype is bf16 and this target multiplies other than codes in f32";
  const std::int64_t head_dim = std::max(f.head_dim_qk, f.head_dim_v);
  return head_dim > kMaxHeadDim ? fmt::format("a head_dim is {}, above {}", head_dim, kMaxHeadDim)
                                : "";
}

/// Empty, or the first reason why this target cannot.
std::string refusal_of(const ForwardProblem& f, const QuantizedTarget& row, CpuTarget wanted) {
  if (wanted != CpuTarget::automatic && wanted != row.target)
    return fmt::format("target {} was asked for", name(wanted));
  if (f.is_cached) return "keys lie in a cache; expected tensors";
  if (std::string reason = obstacle_of(f, row, wanted); !reason.empty()) return reason;
  if (panel_kernels(row.target) == nullptr) return "this build has no kernels for it";
  const ByteProducts int8 = int8_products(f.problem.quant);
  return std::string(int8.qk || int8.pv ? missing_for_codes(row.target) : missing_for(row.target));
}

QuantizedKernels kernels_of(const ForwardSpec& spec, const Quantization& quant) {
  const QuantizedTarget& row = *std::ranges::find(kTargets, spec.target, &QuantizedTarget::target);
  QuantizedKernels kernels{.steps = &rounding_steps(row.f32)};
  if (row.products == nullptr) return kernels;
  kernels.products = row.products();
  kernels.bytes = int8_products(quant);
  return kernels;
}

// ---- a call ----

struct QuantizedMemory {
  QuantizedOperands operands;
  std::vector<QuantizedScratch> workers;

  static QuantizedMemory carve(Carver& carver, const ForwardSpec& spec, const ForwardProblem& f,
                               std::size_t program_bytes, int num_workers) {
    const QuantizedKernels how = kernels_of(spec, f.problem.quant);
    QuantizedMemory memory{QuantizedOperands::carve(carver, f, how.bytes), {}};
    for (int worker = 0; worker < num_workers; ++worker)
      memory.workers.push_back(QuantizedScratch::carve(carver, spec, f, how, program_bytes));
    return memory;
  }
};

class QuantizedRun {
 public:
  QuantizedRun(const ForwardProblem& problem, const ForwardPlan& plan, const AttentionForward& args,
               std::byte* workspace, Executor& executor)
      : call_(problem, plan, args, nullptr),
        kernels_(kernels_of(plan.spec, problem.problem.quant)),
        carver_(workspace),
        memory_(QuantizedMemory::carve(carver_, plan.spec, problem, plan.program_bytes,
                                       plan.num_workers)),
        rounding_(call_.problem, call_.args, *kernels_.steps, memory_.operands),
        results_(call_),
        executor_(executor) {}

  void run() const {
    results_.clear_padding_rows();
    round_operands();
    const std::int64_t heads = call_.problem.num_heads_kv;
    const std::int64_t rows_of_item = call_.spec.panels * call_.spec.lanes;
    const std::int64_t items = ceil_div(call_.problem.group * call_.problem.seqlen_q, rows_of_item);
    const std::int64_t pairs = call_.problem.num_sequences * heads;
    // Causal masks: the longest first. But items of one panel are short: one head after the other, so that its codes
    // stay in the caches.
    const bool goes_by_heads = call_.spec.panels == 1;
    run_tasks(executor_, pairs * items, [&](int worker, std::int64_t task) {
      const std::int64_t pair = goes_by_heads ? task / items : task % pairs;
      const std::int64_t item = goes_by_heads ? task % items : task / pairs;
      attend(call_.sequence(pair / heads), pair % heads, (items - 1 - item) * rows_of_item, worker);
    });
  }

 private:
  /// Each pass reads what the one before it wrote: rows their means, queries the mean of their keys.
  void round_operands() const {
    const ForwardProblem& f = call_.problem;
    const bool rounds_qk = f.problem.quant.qk != QuantFormat::none;
    for_each_head(f.num_heads_kv, 1, [&](const Sequence& s, std::int64_t head, std::int64_t) {
      if (rounds_qk) rounding_.measure_keys(s, head);
      rounding_.measure_values(s, head);
    });
    for_each_head(f.num_heads_kv, rounding_.num_key_pieces(),
                  [&](const Sequence& s, std::int64_t head, std::int64_t piece) {
                    if (rounds_qk) rounding_.round_keys(s, head, piece);
                    rounding_.round_values(s, head, piece);
                  });
    if (!rounds_qk) return;
    for_each_head(f.num_heads_q, rounding_.num_query_pieces(),
                  [&](const Sequence& s, std::int64_t head, std::int64_t piece) {
                    rounding_.round_queries(s, head, piece);
                  });
  }

  /// A piece of all heads, then the next piece: rows of all heads lie in the same pages.
  template <typename F>
  void for_each_head(std::int64_t heads, std::int64_t pieces, const F& f) const {
    run_tasks(executor_, call_.problem.num_sequences * heads * pieces,
              [&](int /*worker*/, std::int64_t task) {
                const std::int64_t of_sequence = task % (heads * pieces);
                f(call_.sequence(task / (heads * pieces)), of_sequence % heads,
                  of_sequence / heads);
              });
  }

  void attend(const Sequence& sequence, std::int64_t kv_head, std::int64_t row_begin,
              int worker) const {
    ForwardItem item{.sequence = sequence, .kv_head = kv_head, .row_begin = row_begin};
    item.row_end = std::min(row_begin + call_.spec.panels * call_.spec.lanes,
                            call_.problem.group * sequence.seqlen_q);
    if (item.num_rows() <= 0) return;
    QuantizedWalk(call_, kernels_, memory_.operands, item,
                  memory_.workers[static_cast<std::size_t>(worker)])
        .run(results_);
  }

  const ForwardCall call_;
  const QuantizedKernels kernels_;
  Carver carver_;
  const QuantizedMemory memory_;
  const OperandRounding rounding_;
  const ForwardResults results_;
  Executor& executor_;
};

ForwardSpec choose(const ForwardProblem& f, CpuTarget target, int num_threads) {
  const Quantization& quant = f.problem.quant;
  ForwardSpec spec{
      .target = target, .lanes = panel_kernels(target)->lanes, .tile_kv = quant.block_kv};
  const ByteProducts bytes = kernels_of(spec, quant).bytes;
  // Codes lie ready for every panel: only what is converted for each tile wants to be shared.
  if (!bytes.qk || !bytes.pv) spec.panels = panels_that_share(f, spec, num_threads);
  return spec;
}

}  // namespace

ForwardPlan try_plan_quantized(const ForwardProblem& f, int num_threads) {
  ForwardPlan plan;
  const CpuTarget wanted = wanted_target(f);
  for (const QuantizedTarget& row : kTargets) {
    std::string candidate = fmt::format("{} {}", kQuantizedCandidate, name(row.target));
    if (std::string reason = refusal_of(f, row, wanted); !reason.empty()) {
      plan.refused.push_back({std::move(candidate), std::move(reason)});
      continue;
    }
    plan.candidate = std::move(candidate);
    plan.num_workers = num_threads;
    plan.spec = choose(f, row.target, num_threads);
    prepare_programs(f, plan);
    Carver carver(nullptr);
    QuantizedMemory::carve(carver, plan.spec, f, plan.program_bytes, num_threads);
    plan.workspace_bytes = carver.used();
    break;
  }
  return plan;
}

CpuTarget f32_target(CpuTarget target) {
  const auto row = std::ranges::find(kTargets, target, &QuantizedTarget::target);
  return row == kTargets.end() ? target : row->f32;
}

bool has_fastest_products(const ForwardPlan& plan, const Quantization& quant) {
  const ByteProducts bytes = kernels_of(plan.spec, quant).bytes;
  return bytes.qk && bytes.pv && plan.spec.target != CpuTarget::amx_bf16;
}

std::string quantized_products(const ForwardPlan& plan, const Quantization& quant) {
  const ByteProducts bytes = kernels_of(plan.spec, quant).bytes;
  const auto panels = std::string(name(forward_kernels(plan.spec).product));
  if (bytes.qk && bytes.pv) return "int8";
  return bytes.qk || bytes.pv ? "int8 and " + panels : panels;
}

void attention_quantized(const ForwardProblem& problem, const ForwardPlan& plan,
                         const AttentionForward& args, std::byte* workspace, Executor& executor) {
  QuantizedRun(problem, plan, args, workspace, executor).run();
}

}  // namespace fovea::cpu
