// What a Plan holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"
#include "fovea/jvp.hpp"

#include "core/device.hpp"
#include "core/verbose.hpp"
#include "cpu/attention_backward.hpp"
#include "cpu/attention_forward.hpp"
#include "cpu/attention_jvp.hpp"
#include "cuda/backward/attention_backward.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/jvp/attention_jvp.hpp"
#include "plan/recipe_choice.hpp"
#include "problem/backward.hpp"
#include "problem/forward.hpp"
#include "problem/jvp.hpp"

namespace fovea {

inline constexpr std::size_t kWorkspaceAlignment = 64;
inline constexpr std::size_t kDeviceWorkspaceAlignment = 256;

/// What a caller gives so that `needed` aligned bytes lie in it, wherever it starts.
constexpr std::size_t unaligned_workspace_bytes(std::size_t needed,
                                                std::size_t alignment = kWorkspaceAlignment) {
  return needed == 0 ? 0 : needed + alignment - 1;
}

struct Plan::Impl {
  ForwardProblem problem;
  RecipeChoice choice{};
  std::variant<cpu::ForwardPlan, cuda::ForwardPlan> backend;  // by problem.device()

  const cpu::ForwardPlan& cpu() const { return std::get<cpu::ForwardPlan>(backend); }
};

struct BackwardPlan::Impl {
  GradientProblem problem;
  std::variant<cpu::BackwardPlan, cuda::BackwardPlan> backend;  // by problem.forward.device()
};

struct JvpPlan::Impl {
  TangentProblem problem;
  std::variant<cpu::JvpPlan, cuda::JvpPlan> backend;  // by problem.forward.device()
};

/// A line of FOVEA_VERBOSE, where it is wanted, of a call that `kernel` ran.
void log_call(const CallLog& log, const Plan::Impl& plan, std::string_view kernel);

struct NamedSpec {
  std::string_view name;
  const TensorSpec& spec;
};

/// Why an operation of the cpu alone cannot take this problem and the tensors beside it: the device of the first that
/// lives elsewhere. Empty: it can.
std::string why_not_cpu(const Problem& problem, std::span<const NamedSpec> others);

/// With q, k, v and out on this device; captured tensors know their own.
Problem on_device(Problem problem, Device device);

/// Tensors that a mask reads are lent for a call. A plan outlives them: what it explains looks at none.
enum class MaskData : std::uint8_t { lent, gone };

/// What a candidate decided, in words and numbers; cpu.candidate is empty where nothing can run.
Explanation explain_forward(const ForwardProblem& problem, const cpu::ForwardPlan& cpu,
                            MaskData data);
Explanation explain_forward(const ForwardProblem& problem, const cuda::ForwardPlan& cuda,
                            MaskData data);
Explanation explain_backward(const GradientProblem& problem, const cpu::BackwardPlan& cpu,
                             MaskData data);
Explanation explain_backward(const GradientProblem& problem, const cuda::BackwardPlan& plan,
                             MaskData data);
/// What a typical GPU of an architecture would run, "sm_90a" or "gfx942", of a problem on Device::cuda() or rocm();
/// neither GPU nor compiler is needed. Throws InvalidArgument for others.
Explanation explain_for(const Problem& problem, std::string_view architecture);
Explanation explain_for(const BackwardProblem& problem, std::string_view architecture);
Explanation explain_jvp(const TangentProblem& problem, const cpu::JvpPlan& cpu, MaskData data);
Explanation explain_jvp(const TangentProblem& problem, const cuda::JvpPlan& plan, MaskData data);
/// `obstacle`: why it cannot run; empty: it can.
Explanation explain_double_backward(const ForwardProblem& problem, const std::string& obstacle);

/// What a run asks of the memory and the executor that it is given. `see` names where the number of bytes is had,
/// `whose` the workers that the workspace is sized for. Throws InvalidArgument.
void require_workspace(std::string_view where, std::span<const std::byte> workspace,
                       std::size_t bytes, std::string_view see);
void require_workers(std::string_view where, const Executor& executor, int num_workers,
                     std::string_view whose = "the num_threads of the plan's problem");

/// The part of a caller's workspace that starts aligned; it holds unaligned_workspace_bytes(bytes, alignment). Null for
/// 0 bytes.
std::byte* aligned_workspace(std::span<std::byte> workspace, std::size_t bytes,
                             std::size_t alignment = kWorkspaceAlignment);

}  // namespace fovea
