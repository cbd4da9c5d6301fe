// The choice of a kernel and what it needs: asked once per problem.
#include <fmt/format.h>

#include <algorithm>

#include "fovea/error.hpp"

#include "core/check.hpp"
#include "cuda/attention_forward.hpp"
#include "cuda/availability.hpp"
#include "cuda/forward_kernels.hpp"
#include "cuda/forward_launch.hpp"
#include "cuda/print_spec.hpp"
#include "expr/print_cuda.hpp"

namespace fovea::cuda {
namespace {

template <typename Captured>
std::size_t index_of(const std::vector<Captured>& captures, const std::string& name) {
  const auto found = std::ranges::find(captures, name, &Captured::name);
  FOVEA_ASSERT(found != captures.end());
  return static_cast<std::size_t>(found - captures.begin());
}

void bind_slots(const ForwardProblem& f, const expr::CudaProgram& program, ForwardPlan& plan) {
  const auto captures_of = [&](expr::ProgramRole role) -> const fovea::Captures& {
    if (role == expr::ProgramRole::mask) return f.problem.mask.captures();
    return f.problem.score.captures();
  };
  for (const expr::CudaTensorSlot& slot : program.tensors) {
    plan.tensor_slots.push_back({slot.role == expr::ProgramRole::mask,
                                 index_of(captures_of(slot.role).tensors, slot.name)});
  }
  for (const expr::CudaScalarSlot& slot : program.scalars) {
    plan.scalar_slots.push_back({slot.role == expr::ProgramRole::mask,
                                 index_of(captures_of(slot.role).scalars, slot.name)});
  }
}

const Candidate& candidate_named(const std::string& name) {
  const auto candidates = forward_candidates();
  return *std::ranges::find(candidates, name, &Candidate::name);
}

DeviceTraits traits_of(const driver::DeviceInfo& info) {
  return {.major = info.compute_capability_major,
          .minor = info.compute_capability_minor,
          .num_sms = info.num_sms,
          .shared_bytes_per_cta = info.shared_bytes_per_cta,
          .shared_bytes_per_sm = info.shared_bytes_per_sm,
          .l2_bytes = info.l2_bytes};
}

ForwardPlan refused_by_all(const std::string& reason) {
  ForwardPlan plan;
  for (const Candidate& candidate : forward_candidates())
    plan.refused.push_back({std::string(candidate.name), reason});
  return plan;
}

void load(const ForwardProblem& problem, int device_index, ForwardPlan& plan) {
  auto kernels = std::make_shared<ForwardPlan::Kernels>();
  const driver::DeviceContext& context = driver::process_context(device_index);
  const std::vector<jit::KernelText> texts = kernel_texts(problem, plan);
  kernels->forward = jit::process_loader().load(texts[0], context);
  if (plan.spec.is_split) kernels->combine = jit::process_loader().load(texts[1], context);
  plan.kernels = std::move(kernels);
}

}  // namespace

std::vector<jit::KernelText> kernel_texts(const ForwardProblem& problem, const ForwardPlan& plan) {
  const Candidate& candidate = candidate_named(plan.candidate);
  const ForwardSpec& spec = plan.spec;
  std::vector<jit::KernelText> texts;
  texts.push_back({fmt::format("#include \"{}\"\n"
                               "namespace fovea::cuda {{\n{}\ninline constexpr {} spec = {};\n}}\n"
                               "extern \"C\" __global__ void __launch_bounds__({}, {}) {}("
                               "const __grid_constant__ fovea::cuda::ForwardParams p) {{\n"
                               "  fovea::cuda::{}<fovea::cuda::spec, fovea::cuda::Mods>(p);\n}}\n",
                               candidate.header,
                               expr::print_cuda(problem.problem.score, problem.problem.mask).mods,
                               "ForwardSpec", print_spec(spec), spec.num_warps * 32,
                               std::max(1, spec.ctas_per_sm), jit::kEntryName, candidate.entry),
                   fmt::format("{} {}", candidate.name.substr(candidate.name.find('/') + 1),
                               describe_spec(spec))});
  if (!spec.is_split) return texts;
  const CombineSpec combine{.out_element = spec.out_element, .wants_row_max = spec.wants_row_max};
  texts.push_back(
      {fmt::format("#include \"sm80/combine.cuh\"\n"
                   "namespace fovea::cuda {{\ninline constexpr {} spec = {};\n}}\n"
                   "extern \"C\" __global__ void __launch_bounds__({}) {}("
                   "const __grid_constant__ fovea::cuda::CombineParams p) {{\n"
                   "  fovea::cuda::sm80::combine<fovea::cuda::spec>(p);\n}}\n",
                   "CombineSpec", print_spec(combine), kCombineThreads, jit::kEntryName),
       "sm80/combine"});
  return texts;
}

ForwardPlan choose_forward(const ForwardProblem& problem, const DeviceTraits& device) {
  ForwardPlan plan;
  plan.device = device;
  for (const Candidate& candidate : forward_candidates()) {
    if (const auto refusal = candidate.refuses(problem, device)) {
      plan.refused.push_back({std::string(candidate.name), refusal->reason});
      continue;
    }
    plan.candidate = candidate.name;
    plan.spec = candidate.choose(problem, device);
    plan.shared_bytes = candidate.shared_bytes(plan.spec);
    plan.workspace_bytes = partial_bytes(plan.spec, problem);
    bind_slots(problem, expr::print_cuda(problem.problem.score, problem.problem.mask), plan);
    break;
  }
  return plan;
}

ForwardPlan try_plan_forward(const ForwardProblem& problem, Device device) {
  if (const std::string reason = why_unavailable(device.index); !reason.empty())
    return refused_by_all(reason);
  const driver::DeviceInfo& info = driver::process_driver().device(device.index);
  ForwardPlan plan = choose_forward(problem, traits_of(info));
  if (!plan.candidate.empty()) load(problem, device.index, plan);
  return plan;
}

ForwardPlan plan_forward(const ForwardProblem& problem, Device device) {
  ForwardPlan plan = try_plan_forward(problem, device);
  if (!plan.candidate.empty()) return plan;
  std::string message = fmt::format("plan: no kernel for this problem on cuda:{}:", device.index);
  for (const auto& refused : plan.refused)
    message += fmt::format("\n  {}  {}", refused.candidate, refused.reason);
  throw Unsupported(message);
}

}  // namespace fovea::cuda
