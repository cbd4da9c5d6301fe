// The functions of fovea.h around a forward call: gradients, tangents, partial states.
#include "ffi/gradients.hpp"

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "fovea/backward.hpp"
#include "fovea/fovea.h"
#include "fovea/jvp.hpp"
#include "fovea/state.hpp"

#include "core/check.hpp"
#include "ffi/arguments.hpp"
#include "ffi/error.hpp"
#include "ffi/explanation.hpp"
#include "ffi/plan.hpp"
#include "ffi/sized_struct.hpp"
#include "ffi/tensor.hpp"

namespace {

using fovea::TensorView;
using fovea::ffi::Access;
using fovea::ffi::BackwardCall;
using fovea::ffi::guarded;
using fovea::ffi::to_backward;

/// Reads the tensors of one struct and says whose they are when one is wrong.
class Tensors {
 public:
  explicit Tensors(std::string where) : where_(std::move(where)) {}
  TensorView input(const DLTensor* tensor, const char* name) const {
    return fovea::ffi::to_view(tensor, Access::read, where_ + ": " + name);
  }
  TensorView output(const DLTensor* tensor, const char* name) const {
    return fovea::ffi::to_view(tensor, Access::write, where_ + ": " + name);
  }
  TensorView required(const TensorView& view, const char* name) const {
    if (!view) fovea::invalid(where_ + ": " + name, "is NULL; expected a tensor");
    return view;
  }

 private:
  std::string where_;
};

std::span<std::byte> to_workspace(void* data, std::size_t bytes, const std::string& where) {
  if (data == nullptr && bytes > 0)
    fovea::invalid(where, "workspace is NULL; expected workspace_bytes bytes");
  return {static_cast<std::byte*>(data), bytes};
}

}  // namespace

fovea::ffi::BackwardCall fovea::ffi::to_backward(const fovea_attention_backward_args* source,
                                                 const std::string& where, ProgramCache* cache) {
  constexpr std::size_t kLeastSize = offsetof(fovea_attention_backward_args, dlse);
  const auto c = read_struct(source, kLeastSize, where);
  const Tensors read(where);
  BackwardCall call;
  call.forward = to_call(c.forward, where + ": forward", cache);
  AttentionBackward& args = call.args;
  args.forward = call.forward.args;
  args.dout = read.required(read.input(c.dout, "dout"), "dout");
  args.dlse = read.input(c.dlse, "dlse");
  args.dq = read.output(c.dq, "dq");
  args.dk = read.output(c.dk, "dk");
  args.dv = read.output(c.dv, "dv");
  args.dsinks = read.output(c.dsinks, "dsinks");
  args.dcaptured =
      to_captured(call.forward, c.dcaptured, c.num_dcaptured, Access::write, where + ": dcaptured");
  args.workspace = to_workspace(c.workspace, c.workspace_bytes, where);
  args.executor = call.forward.threads.executor;
  args.stream = call.forward.args.stream;
  return call;
}

namespace {

struct DoubleBackwardCall {
  fovea::ffi::Call forward;
  fovea::AttentionDoubleBackward args;
};

DoubleBackwardCall to_double_backward(const fovea_attention_double_backward_args* source,
                                      const std::string& where) {
  constexpr std::size_t kLeastSize = offsetof(fovea_attention_double_backward_args, dlse);
  const auto c = fovea::ffi::read_struct(source, kLeastSize, where);
  const Tensors read(where);
  DoubleBackwardCall call;
  call.forward = fovea::ffi::to_call(c.forward, where + ": forward");
  fovea::AttentionDoubleBackward& args = call.args;
  args.backward.forward = call.forward.args;
  args.backward.dout = read.required(read.input(c.dout, "dout"), "dout");
  args.backward.dlse = read.input(c.dlse, "dlse");
  args.ddq = read.input(c.ddq, "ddq");
  args.ddk = read.input(c.ddk, "ddk");
  args.ddv = read.input(c.ddv, "ddv");
  args.ddsinks = read.input(c.ddsinks, "ddsinks");
  args.ddcaptured = fovea::ffi::to_captured(call.forward, c.ddcaptured, c.num_ddcaptured,
                                            Access::read, where + ": ddcaptured");
  args.grad_dout = read.output(c.grad_dout, "grad_dout");
  args.grad_dlse = read.output(c.grad_dlse, "grad_dlse");
  args.grad_q = read.output(c.grad_q, "grad_q");
  args.grad_k = read.output(c.grad_k, "grad_k");
  args.grad_v = read.output(c.grad_v, "grad_v");
  args.grad_sinks = read.output(c.grad_sinks, "grad_sinks");
  args.grad_captured = fovea::ffi::to_captured(call.forward, c.grad_captured, c.num_grad_captured,
                                               Access::write, where + ": grad_captured");
  args.executor = call.forward.threads.executor;
  args.stream = call.forward.args.stream;
  return call;
}

struct JvpCall {
  fovea::ffi::Call forward;
  fovea::AttentionJvp args;
};

JvpCall to_jvp(const fovea_attention_jvp_args* source, const std::string& where,
               fovea::ffi::ProgramCache* cache = nullptr) {
  constexpr std::size_t kLeastSize = offsetof(fovea_attention_jvp_args, q_tangent);
  const auto c = fovea::ffi::read_struct(source, kLeastSize, where);
  const Tensors read(where);
  JvpCall call;
  call.forward = fovea::ffi::to_call(c.forward, where + ": forward", cache);
  call.args = {
      .forward = call.forward.args,
      .q_tangent = read.input(c.q_tangent, "q_tangent"),
      .k_tangent = read.input(c.k_tangent, "k_tangent"),
      .v_tangent = read.input(c.v_tangent, "v_tangent"),
      .sinks_tangent = read.input(c.sinks_tangent, "sinks_tangent"),
      .captured_tangents =
          fovea::ffi::to_captured(call.forward, c.captured_tangents, c.num_captured_tangents,
                                  Access::read, where + ": captured_tangents"),
      .out_tangent = read.required(read.output(c.out_tangent, "out_tangent"), "out_tangent"),
      .lse_tangent = read.output(c.lse_tangent, "lse_tangent"),
      .workspace = to_workspace(c.workspace, c.workspace_bytes, where)};
  return call;
}

fovea::JvpProblem problem_of(const JvpCall& call) {
  fovea::JvpProblem problem = fovea::problem_of(call.args);
  if (const fovea::Executor* executor = call.args.forward.executor; executor != nullptr)
    problem.forward.num_threads = executor->concurrency();
  return problem;
}

std::vector<TensorView> to_views(const DLTensor* const* tensors, std::size_t count,
                                 const std::string& where) {
  if (count > 0 && tensors == nullptr)
    fovea::invalid(where, "is NULL; expected num_states tensors");
  std::vector<TensorView> views;
  for (std::size_t i = 0; i < count; ++i) {
    const std::string name = where + "[" + std::to_string(i) + "]";
    views.push_back(fovea::ffi::to_view(tensors[i], Access::read, name));
    if (!views.back()) fovea::invalid(name, "is NULL; expected a tensor");
  }
  return views;
}

constexpr std::size_t kLeastMergeSize = offsetof(fovea_merge_states_args, lse);

struct MergeCall {
  fovea::ffi::Threads threads;
  fovea::MergeStates args;
};

MergeCall to_merge(const fovea_merge_states_args* source, const std::string& where) {
  const auto c = fovea::ffi::read_struct(source, kLeastMergeSize, where);
  const Tensors read(where);
  MergeCall call;
  call.threads = fovea::ffi::to_threads(c.runtime, c.executor, where);
  call.args = {.outs = to_views(c.outs, c.num_states, where + ": outs"),
               .lses = to_views(c.lses, c.num_states, where + ": lses"),
               .out = read.required(read.output(c.out, "out"), "out"),
               .lse = read.output(c.lse, "lse"),
               .workspace = to_workspace(c.workspace, c.workspace_bytes, where),
               .executor = call.threads.executor,
               .stream = c.stream};
  return call;
}

}  // namespace

extern "C" {

int fovea_attention_backward(const fovea_attention_backward_args* args, fovea_error** error) {
  return guarded(error, [&] {
    const BackwardCall call = to_backward(args, "fovea_attention_backward");
    fovea::attention_backward(call.args, fovea::ffi::runtime_of(call.forward.threads));
  });
}

int fovea_explain_backward(const fovea_attention_backward_args* args, int32_t format, char** text,
                           fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_explain_backward";
    fovea::ffi::require_text(text, kWhere);
    const BackwardCall call = to_backward(args, kWhere);
    fovea::BackwardProblem problem = fovea::problem_of(call.args);
    if (call.args.executor != nullptr)
      problem.forward.num_threads = call.args.executor->concurrency();
    *text = fovea::ffi::render(fovea::explain(problem), format, kWhere);
  });
}

int fovea_plan_create_backward(const fovea_attention_backward_args* args, fovea_plan** plan,
                               fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_plan_create_backward";
    fovea::ffi::create_plan(plan, kWhere, [&] {
      const BackwardCall call = to_backward(args, kWhere);
      fovea::BackwardProblem problem = fovea::problem_of(call.args);
      if (call.args.executor != nullptr)
        problem.forward.num_threads = call.args.executor->concurrency();
      return fovea::plan_backward(problem);
    });
  });
}

int fovea_plan_run_backward(const fovea_plan* plan, const fovea_attention_backward_args* args,
                            fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_plan_run_backward";
    const auto& of_backward = fovea::ffi::plan_of<fovea::BackwardPlan>(plan, kWhere);
    of_backward.run(to_backward(args, kWhere, &plan->programs).args);
  });
}

int fovea_attention_double_backward(const fovea_attention_double_backward_args* args,
                                    fovea_error** error) {
  return guarded(error, [&] {
    fovea::attention_double_backward(
        to_double_backward(args, "fovea_attention_double_backward").args);
  });
}

int fovea_explain_double_backward(const fovea_attention_double_backward_args* args, int32_t format,
                                  char** text, fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_explain_double_backward";
    fovea::ffi::require_text(text, kWhere);
    const DoubleBackwardCall call = to_double_backward(args, kWhere);
    *text = fovea::ffi::render(fovea::explain_double_backward(call.args), format, kWhere);
  });
}

int fovea_attention_jvp(const fovea_attention_jvp_args* args, fovea_error** error) {
  return guarded(error, [&] {
    const JvpCall call = to_jvp(args, "fovea_attention_jvp");
    fovea::attention_jvp(call.args, fovea::ffi::runtime_of(call.forward.threads));
  });
}

int fovea_explain_jvp(const fovea_attention_jvp_args* args, int32_t format, char** text,
                      fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_explain_jvp";
    fovea::ffi::require_text(text, kWhere);
    const JvpCall call = to_jvp(args, kWhere);
    *text = fovea::ffi::render(fovea::explain(problem_of(call)), format, kWhere);
  });
}

int fovea_plan_create_jvp(const fovea_attention_jvp_args* args, fovea_plan** plan,
                          fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_plan_create_jvp";
    fovea::ffi::create_plan(plan, kWhere,
                            [&] { return fovea::plan_jvp(problem_of(to_jvp(args, kWhere))); });
  });
}

int fovea_plan_run_jvp(const fovea_plan* plan, const fovea_attention_jvp_args* args,
                       fovea_error** error) {
  return guarded(error, [&] {
    constexpr auto kWhere = "fovea_plan_run_jvp";
    const auto& of_jvp = fovea::ffi::plan_of<fovea::JvpPlan>(plan, kWhere);
    of_jvp.run(to_jvp(args, kWhere, &plan->programs).args);
  });
}

int fovea_merge_states(const fovea_merge_states_args* args, fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_merge_states";
    const MergeCall call = to_merge(args, where);
    fovea::merge_states(call.args, fovea::ffi::runtime_of(call.threads));
  });
}

int fovea_explain_merge_states(const fovea_merge_states_args* args, int32_t format, char** text,
                               fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_explain_merge_states";
    fovea::ffi::require_text(text, where);
    const MergeCall call = to_merge(args, where);
    *text =
        fovea::ffi::render(fovea::plan_merge_states(call.args).explain(), format, where.c_str());
  });
}

int fovea_plan_create_merge_states(const fovea_merge_states_args* args, fovea_plan** plan,
                                   fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_plan_create_merge_states";
    fovea::ffi::create_plan(plan, where,
                            [&] { return fovea::plan_merge_states(to_merge(args, where).args); });
  });
}

int fovea_plan_run_merge_states(const fovea_plan* plan, const fovea_merge_states_args* args,
                                fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_plan_run_merge_states";
    const auto& of_merge = fovea::ffi::plan_of<fovea::MergeStatesPlan>(plan, where);
    of_merge.run(to_merge(args, where).args);
  });
}

}  // extern "C"
