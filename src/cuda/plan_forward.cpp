// The choice of a kernel and what it needs: asked once per problem.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>

#include "fovea/error.hpp"

#include "core/check.hpp"
#include "cuda/attention_forward.hpp"
#include "cuda/availability.hpp"
#include "cuda/choices.hpp"
#include "cuda/forward_kernels.hpp"
#include "cuda/forward_launch.hpp"
#include "cuda/print_spec.hpp"
#include "cuda/tuning.hpp"
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
  bind_programs(problem, candidate.scratch_bytes(plan.spec, problem), plan);
}

/// The best of the table for tensors that start anywhere, beside what `plan` has taken; empty where each refuses.
std::optional<Choice> choose_unaligned(const ForwardProblem& problem, const ForwardPlan& plan) {
  for (const Candidate& candidate : forward_candidates()) {
    if (candidate.reads != nullptr || candidate.refuses(problem, plan.device)) continue;
    Choice choice{&candidate, candidate.choose(problem, plan.device)};
    choice.spec.most_splits = plan.spec.most_splits;  // no more workspace than the plan has
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

/// The bodies of wgmma for one element: a unit reads those that it uses.
std::string include_of_products(const Candidate& candidate, const ForwardSpec& spec) {
  if (!candidate.multiplies_by_wgmma) return "";
  return fmt::format("#include \"ptx/generated/wgmma_{}.cuh\"\n",
                     spec.element == Element::f16 ? "f16" : "bf16");
}

jit::KernelText forward_text(const ForwardPlan& plan) {
  const Candidate& candidate = candidate_named(plan.candidate);
  const ForwardSpec& spec = plan.spec;
  return {fmt::format("{}#include \"{}\"\n#include \"{}\"\n"
                      "namespace fovea::cuda {{\n{}\ninline constexpr ForwardSpec spec = {};\n}}\n"
                      "extern \"C\" __global__ void __launch_bounds__({}, {}) {}("
                      "const __grid_constant__ fovea::cuda::{} p) {{\n"
                      "  fovea::cuda::{}<fovea::cuda::spec, fovea::cuda::Mods>(p);\n}}\n",
                      include_of_products(candidate, spec), candidate.header, plan.program->include,
                      plan.program->mods, print_spec(spec), spec.num_warps * 32,
                      std::max(1, spec.ctas_per_sm), jit::kEntryName, candidate.params,
                      candidate.entry),
          fmt::format("{} {}", candidate.name.substr(candidate.name.find('/') + 1),
                      describe_spec(spec))};
}

/// What joins splits.
jit::KernelText combine_text(const ForwardSpec& spec, const CombineForm& form) {
  const CombineSpec combine{.out_element = spec.out_element,
                            .wants_row_max = spec.wants_row_max,
                            .is_chained = spec.is_chained,
                            .most_splits = spec.most_splits};
  return {fmt::format("#include \"common/combine.cuh\"\n"
                      "namespace fovea::cuda {{\ninline constexpr CombineSpec spec = {};\n}}\n"
                      "extern \"C\" __global__ void __launch_bounds__({}, {}) {}("
                      "const __grid_constant__ fovea::cuda::CombineParams p) {{\n"
                      "  fovea::cuda::combine<fovea::cuda::spec, {}>(p);\n}}\n",
                      print_spec(combine), form.num_warps * 32, form.ctas_per_sm, jit::kEntryName,
                      form.splits_at_once),
          fmt::format("common/combine {} at once{}", form.splits_at_once,
                      spec.is_chained ? " chained" : "")};
}

jit::KernelText clear_counter_text() {
  return {fmt::format("#include \"common/clear_counter.cuh\"\n"
                      "extern \"C\" __global__ void __launch_bounds__(1) {}("
                      "const __grid_constant__ fovea::cuda::ClearCounterParams p) {{\n"
                      "  fovea::cuda::clear_counter(p);\n}}\n",
                      jit::kEntryName),
          "common/clear_counter"};
}

}  // namespace

std::vector<jit::KernelText> kernel_texts(const ForwardPlan& plan) {
  std::vector<jit::KernelText> texts = {forward_text(plan)};
  if (plan.spec.is_split) {
    for (const CombineForm& form : {kDeepCombine, kWideCombine})
      texts.push_back(combine_text(plan.spec, form));
  }
  if (plan.spec.is_dynamic) texts.push_back(clear_counter_text());
  if (!plan.range_tables.is_empty()) texts.push_back(range_tables_text());
  return texts;
}

std::vector<jit::KernelText> unaligned_kernel_texts(const ForwardPlan& plan) {
  if (plan.unaligned == nullptr) return {};
  return kernel_texts(plan.unaligned->plan());
}

void load_kernels(jit::Loader& loader, const driver::DeviceContext& context, ForwardPlan& plan) {
  auto kernels = std::make_shared<ForwardPlan::Kernels>();
  kernels->loader = &loader;
  kernels->forward = loader.load(forward_text(plan), context);
  if (plan.spec.is_split) {
    kernels->deep_combine = loader.load(combine_text(plan.spec, kDeepCombine), context);
    kernels->wide_combine = loader.load(combine_text(plan.spec, kWideCombine), context);
  }
  if (plan.spec.is_dynamic) kernels->clear_counter = loader.load(clear_counter_text(), context);
  if (!plan.range_tables.is_empty())
    kernels->range_tables = loader.load(range_tables_text(), context);
  plan.kernels = std::move(kernels);
}

const ForwardPlan& ForwardPlan::Unaligned::loaded(const Kernels& kernels) {
  std::call_once(once_,
                 [&] { load_kernels(*kernels.loader, *kernels.forward->function.context, plan_); });
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

namespace {

double memory_bytes_per_clock(const driver::DeviceInfo& info) {
  if (info.clock_khz == 0) return 0;
  constexpr double kTransfersPerClock = 2;  // double data rate
  return kTransfersPerClock * info.memory_clock_khz / info.clock_khz * info.memory_bus_bits / 8;
}

}  // namespace

DeviceTraits traits_of(const driver::DeviceInfo& info) {
  return {.major = info.compute_capability_major,
          .minor = info.compute_capability_minor,
          .num_sms = info.num_sms,
          .shared_bytes_per_cta = info.shared_bytes_per_cta,
          .shared_bytes_per_sm = info.shared_bytes_per_sm,
          .l2_bytes = info.l2_bytes,
          .memory_bytes_per_clock = memory_bytes_per_clock(info)};
}

namespace {

/// The table's choice in the place of a measured one that cannot be had.
void give_way(const ForwardProblem& problem, std::string_view why, ForwardPlan& plan) {
  std::string tuning = fmt::format("{}; not taken: {}", plan.tuning, why.substr(0, why.find('\n')));
  plan = choose_forward(problem, plan.device);
  plan.tuning = std::move(tuning);
}

}  // namespace

void load_or_fall_back(jit::Loader& loader, const driver::DeviceContext& context,
                       const ForwardProblem& problem, ForwardPlan& plan) {
  if (plan.is_tuned) {
    try {
      return load_kernels(loader, context, plan);
    } catch (const Unsupported& error) {
      give_way(problem, error.what(), plan);
    } catch (const CompileError& error) {
      give_way(problem, error.what(), plan);
    } catch (const driver::ImageRefused& error) {
      give_way(problem, error.what(), plan);
    }
  }
  load_kernels(loader, context, plan);
}

namespace {

std::string why_missing(jit::Loader& loader, jit::Architecture architecture,
                        const ForwardPlan& plan) {
  for (const jit::KernelText& text : kernel_texts(plan)) {
    if (std::string why = loader.why_missing(text, architecture); !why.empty()) return why;
  }
  return "";
}

}  // namespace

void check_kernels(jit::Loader& loader, jit::Architecture architecture,
                   const ForwardProblem& problem, ForwardPlan& plan) {
  std::string why = why_missing(loader, architecture, plan);
  if (!why.empty() && plan.is_tuned) {
    give_way(problem, why, plan);
    why = why_missing(loader, architecture, plan);
  }
  if (why.empty()) return;
  plan.refused.push_back({plan.candidate, std::move(why)});
  plan.candidate.clear();
}

namespace {

/// The choice for a device of this process; nothing where no kernel can run there.
ForwardPlan choose_here(const ForwardProblem& problem, Device device) {
  if (const std::string reason = why_unavailable(device.index); !reason.empty())
    return refused_by_all(reason);
  const driver::DeviceInfo& info = driver::process_driver().device(device.index);
  return choose_forward(problem, traits_of(info), process_tuning());
}

}  // namespace

ForwardPlan try_plan_forward(const ForwardProblem& problem, Device device) {
  ForwardPlan plan = choose_here(problem, device);
  if (!plan.candidate.empty()) {
    const driver::DeviceInfo& info = driver::process_driver().device(device.index);
    check_kernels(jit::process_loader(), jit::architecture_of(info), problem, plan);
  }
  return plan;
}

ForwardPlan plan_forward(const ForwardProblem& problem, Device device) {
  ForwardPlan plan = choose_here(problem, device);
  if (!plan.candidate.empty()) {
    load_or_fall_back(jit::process_loader(), driver::process_context(device.index), problem, plan);
    return plan;
  }
  std::string message = fmt::format("plan: no kernel for this problem on cuda:{}:", device.index);
  for (const auto& refused : plan.refused)
    message += fmt::format("\n  {}  {}", refused.candidate, refused.reason);
  throw Unsupported(message);
}

}  // namespace fovea::cuda
