// The choice of a kernel and what it needs: asked once per problem.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>

#include "fovea/error.hpp"

#include "core/check.hpp"
#include "cuda/combine/combine.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/choices.hpp"
#include "cuda/forward/kernels.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/forward/lost_rows.hpp"
#include "cuda/forward/numbers_of_codes.hpp"
#include "cuda/forward/quantize_kv.hpp"
#include "cuda/forward/sm100.hpp"
#include "cuda/forward/sm100_fp4.hpp"
#include "cuda/forward/sm120_fp4.hpp"
#include "cuda/forward/staged.hpp"
#include "cuda/forward/tuning.hpp"
#include "cuda/kernel_unit.hpp"
#include "expr/print_cuda.hpp"

namespace fovea::cuda {
namespace {

constexpr std::size_t kTablesAlignment = 256;

/// Captures, their tables of ranges, and with them the workspace: what the kernel needs, then tables.
void bind_programs(const ForwardProblem& f, std::size_t scratch_bytes, ForwardPlan& plan) {
  const ScoreMod& score = f.problem.score;
  const MaskMod& mask = f.problem.mask;
  plan.capture_slots = CaptureSlots(*plan.program, score, mask);
  plan.range_tables = RangeTables(*plan.program);
  plan.tables_at = (scratch_bytes + kTablesAlignment - 1) / kTablesAlignment * kTablesAlignment;
  plan.workspace_bytes =
      plan.tables_at + plan.range_tables.workspace_bytes(plan.capture_slots.bind(score, mask));
}

ForwardPlan refused_by_all(const std::string& reason) {
  ForwardPlan plan;
  for (const Candidate& candidate : forward_candidates())
    plan.refused.push_back({std::string(candidate.name), reason});
  return plan;
}

/// All of a plan that no kernel decides; program is null where its captures are refused.
ForwardPlan plan_programs(const ForwardProblem& problem, const DeviceTraits& device) {
  const Problem& p = problem.problem;
  auto program = std::make_shared<const expr::CudaProgram>(expr::print_cuda(p.score, p.mask));
  if (const auto reason = captures_refusal(*program)) return refused_by_all(*reason);
  ForwardPlan plan;
  plan.device = device;
  plan.program = std::move(program);
  return plan;
}

void take_kernel(const Choice& choice, const ForwardProblem& problem, ForwardPlan& plan) {
  const Candidate& candidate = *choice.candidate;
  plan.candidate = candidate.name;
  plan.spec = choice.spec;
  plan.shared_bytes = candidate.shared_bytes(plan.spec);
  plan.clears_rows = clears_rows(*plan.spec, problem);
  plan.quant = problem.problem.quant;
  plan.numbers = std::nullopt;  // of the kernel that was taken before
  if (candidate.reads_numbers_of_codes) plan.numbers = numbers_of_codes_spec(problem);
  bind_programs(problem, candidate.scratch_bytes(plan.spec, problem), plan);
}

/// The best of the table for tensors that start anywhere, beside what `plan` has taken; empty where each refuses.
std::optional<Choice> choose_unaligned(const ForwardProblem& problem, const ForwardPlan& plan) {
  for (const Candidate& candidate : forward_candidates()) {
    if (candidate.reads != nullptr || candidate.refuses(problem, plan.device)) continue;
    Choice choice{&candidate, candidate.choose(problem, plan.device)};
    choice.spec->most_splits = plan.spec->most_splits;  // no more workspace than the plan has
    return choice;
  }
  return std::nullopt;
}

void take(const Choice& choice, const ForwardProblem& problem, ForwardPlan& plan) {
  take_kernel(choice, problem, plan);
  if (choice.candidate->reads == nullptr) return;
  const std::optional<Choice> other = choose_unaligned(problem, plan);
  if (!other) return;
  ForwardPlan unaligned = plan;
  take_kernel(*other, problem, unaligned);
  plan.workspace_bytes = std::max(plan.workspace_bytes, unaligned.workspace_bytes);
  plan.unaligned = std::make_shared<ForwardPlan::Unaligned>(std::move(unaligned));
}

/// The bodies of wgmma for the types that are multiplied: a unit reads those that it uses.
std::string include_of_products(const Candidate& candidate, const AnyForwardSpec& spec) {
  const auto* const decode = spec.get_if<Sm90DecodeSpec>();
  if (!candidate.multiplies_by_wgmma && !(decode != nullptr && multiplies_by_wgmma(*decode)))
    return "";
  constexpr std::string_view kInclude = "#include \"ptx/generated/wgmma_{}.cuh\"\n";
  const auto* const sm90 = spec.get_if<Sm90ForwardSpec>();
  std::string includes;
  if (sm90 != nullptr && sm90->multiplies_codes) includes = fmt::format(kInclude, "s8");
  if (sm90 != nullptr && sm90->sums_codes) return includes + fmt::format(kInclude, "e4m3");
  return includes + fmt::format(kInclude, spec->element == Element::f16 ? "f16" : "bf16");
}

/// A launch need not say it then.
std::string cluster_of(const AnyForwardSpec& spec) {
  const auto* const decode = spec.get_if<Sm90DecodeSpec>();
  if (decode == nullptr || !is_clustered(*decode)) return "";
  return fmt::format("__cluster_dims__({}, 1, 1) ", decode->ctas_of_cluster);
}

jit::KernelText forward_text(const ForwardPlan& plan) {
  const Candidate& candidate = candidate_named(plan.candidate);
  const ForwardSpec& spec = *plan.spec;
  return {fmt::format("{}#include \"{}\"\n#include \"{}\"\n"
                      "namespace fovea::cuda {{\n{}\n{}}}\n"
                      "extern \"C\" __global__ void __launch_bounds__({}) {}{}("
                      "const __grid_constant__ fovea::cuda::{} p) {{\n"
                      "  fovea::cuda::{}<fovea::cuda::spec, fovea::cuda::Mods>(p);\n}}\n",
                      include_of_products(candidate, plan.spec), candidate.header,
                      plan.program->include, plan.program->mods, plan.spec.print(),
                      launch_bounds(spec.num_warps, std::max(1, spec.ctas_per_sm), plan.device),
                      cluster_of(plan.spec), jit::kEntryName, candidate.params, candidate.entry),
          fmt::format("{} {}", candidate.name.substr(candidate.name.find('/') + 1),
                      plan.spec.describe())};
}

jit::KernelText clear_counter_text() {
  return {fmt::format("#include \"common/clear_counter.cuh\"\n"
                      "extern \"C\" __global__ void __launch_bounds__(1) {}("
                      "const __grid_constant__ fovea::cuda::ClearCounterParams p) {{\n"
                      "  fovea::cuda::clear_counter(p);\n}}\n",
                      jit::kEntryName),
          "common/clear_counter"};
}

jit::KernelText clear_rows_text() {
  return {fmt::format("#include \"common/clear_rows.cuh\"\n"
                      "extern \"C\" __global__ void __launch_bounds__({}) {}("
                      "const __grid_constant__ fovea::cuda::ClearRowsParams p) {{\n"
                      "  fovea::cuda::clear_rows(p);\n}}\n",
                      kClearingThreads, jit::kEntryName),
          "common/clear_rows"};
}

}  // namespace

bool has_combine(const ForwardPlan& plan) {
  const auto* const decode = plan.spec.get_if<Sm90DecodeSpec>();
  return plan.spec->is_split && (decode == nullptr || !is_clustered(*decode));
}

CombineSpec combine_spec(const ForwardPlan& plan) {
  const auto* const decode = plan.spec.get_if<Sm90DecodeSpec>();
  return {.out_element = plan.spec->out_element,
          .wants_row_max = plan.spec->wants_row_max,
          .is_chained = candidate_named(plan.candidate).is_chained,
          .has_packed_q = plan.spec->has_packed_q,
          .most_splits = plan.spec->most_splits,
          .has_groups = decode != nullptr && decode->has_groups,
          .takes_groups = decode != nullptr && decode->takes_groups};
}

PlannedKernels planned_kernels(const ForwardPlan& plan) {
  PlannedKernels kernels = {{KernelRole::main, forward_text(plan)}};
  if (has_combine(plan)) {
    const CombineSpec spec = combine_spec(plan);
    for (const CombineForm& form : {kDeepCombine, wide_form(spec.takes_groups)})
      kernels.push_back({form.role, combine_text(spec, form, plan.device)});
  }
  const auto* sm90 = persistent_spec(plan.spec);
  if (sm90 != nullptr && sm90->is_dynamic)
    kernels.push_back({KernelRole::clear_counter, clear_counter_text()});
  if (sm90 != nullptr && sm90->multiplies_codes)
    std::ranges::move(quantize_kv_kernels(quantize_kv_spec(*sm90)), std::back_inserter(kernels));
  const auto* team = plan.spec.get_if<TeamSpec>();
  if (team != nullptr && team->multiplies_codes)
    std::ranges::move(quantize_kv_kernels(quantize_kv_spec(*team, plan.quant)),
                      std::back_inserter(kernels));
  if (const auto lost = lost_rows_spec(plan))
    kernels.push_back({KernelRole::lost_rows, lost_rows_text(plan, *lost)});
  if (const auto* fp4 = plan.spec.get_if<Fp4ForwardSpec>())
    std::ranges::move(fp4_rounding_kernels(Sm120ForwardFp4::rounding_spec(*fp4)),
                      std::back_inserter(kernels));
  if (const auto* fp4 = plan.spec.get_if<Sm100Fp4Spec>())
    std::ranges::move(fp4_rounding_kernels(Sm100ForwardFp4::rounding_spec(*fp4)),
                      std::back_inserter(kernels));
  if (plan.numbers) kernels.push_back({KernelRole::numbers, numbers_of_codes_text(*plan.numbers)});
  if (plan.clears_rows) kernels.push_back({KernelRole::clear_rows, clear_rows_text()});
  if (!plan.range_tables.is_empty())
    kernels.push_back({KernelRole::range_tables, range_tables_text()});
  return kernels;
}

PlannedKernels planned_unaligned_kernels(const ForwardPlan& plan) {
  if (plan.unaligned == nullptr) return {};
  return planned_kernels(plan.unaligned->plan());
}

const ForwardPlan& ForwardPlan::Unaligned::loaded(const KernelSet& kernels) {
  std::call_once(once_, [&] { ForwardLadder::load(kernels.loader(), kernels.context(), plan_); });
  return plan_;
}

ForwardPlan choose_forward(const ForwardProblem& problem, const DeviceTraits& device) {
  return choose_forward(problem, device, TuningFile{});
}

ForwardPlan choose_forward(const ForwardProblem& problem, const DeviceTraits& device,
                           const TuningFile& tuning) {
  ForwardPlan plan = plan_programs(problem, device);
  if (plan.program == nullptr) return plan;
  TunedChoice tuned = tuned_choice(problem, device, tuning);
  plan.is_tuned = tuned.choice.has_value();
  plan.tuning = std::move(tuned.words);
  for (const Candidate& candidate : forward_candidates()) {
    if (const auto refusal = candidate.refuses(problem, device)) {
      plan.refused.push_back({std::string(candidate.name), refusal->reason});
    } else if (!tuned.choice || tuned.choice->candidate == &candidate) {
      take({&candidate, tuned.choice ? tuned.choice->spec : candidate.choose(problem, device)},
           problem, plan);
      break;
    } else {
      plan.refused.push_back({std::string(candidate.name), "another was measured as faster"});
    }
  }
  return plan;
}

ForwardPlan plan_choice(const ForwardProblem& problem, const DeviceTraits& device,
                        const Choice& choice) {
  ForwardPlan plan = plan_programs(problem, device);
  FOVEA_ASSERT(plan.program != nullptr);
  take(choice, problem, plan);
  return plan;
}

ForwardPlan ForwardOperation::choose(const ForwardProblem& problem, const DeviceTraits& device) {
  return choose_forward(problem, device);
}

ForwardPlan ForwardOperation::choose_measured(const ForwardProblem& problem,
                                              const DeviceTraits& device) {
  return choose_forward(problem, device, process_tuning());
}

PlannedKernels ForwardOperation::planned_kernels(const ForwardPlan& plan) {
  return cuda::planned_kernels(plan);
}

ForwardPlan ForwardOperation::refused_by_all(const std::string& reason) {
  return cuda::refused_by_all(reason);
}

namespace {

/// Of sequences of few queries, as many as the kernel for decoding takes.
constexpr std::int64_t kRowsOfFewQueries = 16;

/// Do keys of sequences of few queries want to be split, beside others of many?
bool has_two_parts(const ForwardProblem& f) {
  return f.is_cached && has_packed_tiles(f) && f.group <= kFewRows &&
         f.seqlen_kv > kFewestKeysPerSplit && f.problem.quant.is_none();
}

template <typename MakePlan>
ForwardPlan plan_in_parts(const ForwardProblem& problem, const MakePlan& make) {
  if (!has_two_parts(problem)) return make(problem);
  const std::int64_t most = std::max<std::int64_t>(1, kRowsOfFewQueries / problem.group);
  auto few = std::make_shared<ForwardPlan::FewQueries>(
      ForwardPlan::FewQueries{.problem = problem, .rest = problem});
  few->problem.seqlen_q = most;
  few->problem.is_beside_longer = true;
  few->rest.fewest_queries = most + 1;
  ForwardPlan plan = make(few->rest);
  if (plan.candidate.empty()) return plan;
  few->plan = make(few->problem);
  if (few->plan.candidate.empty()) return make(problem);
  few->workspace_at =
      (plan.workspace_bytes + kTablesAlignment - 1) / kTablesAlignment * kTablesAlignment;
  plan.workspace_bytes = few->workspace_at + few->plan.workspace_bytes;
  plan.few = std::move(few);
  return plan;
}

}  // namespace

ForwardPlan try_plan_forward(const ForwardProblem& problem, Device device) {
  return plan_in_parts(problem, [&](const ForwardProblem& part) {
    ForwardPlan plan = ForwardLadder::try_plan_on(part, device);
    if (has_stages(part)) tell_stages(part, plan);
    return plan;
  });
}

ForwardPlan plan_forward(const ForwardProblem& problem, Device device) {
  return plan_in_parts(problem, [&](const ForwardProblem& part) {
    if (!has_stages(part)) return ForwardLadder::plan_on(part, device);
    return load_in_stages(jit::process_loader(), driver::process_context(device), part,
                          ForwardLadder::choose_on(part, device));
  });
}

ForwardPlan choose_in_parts(const ForwardProblem& problem, const DeviceTraits& device) {
  return plan_in_parts(problem,
                       [&](const ForwardProblem& part) { return choose_forward(part, device); });
}

}  // namespace fovea::cuda
