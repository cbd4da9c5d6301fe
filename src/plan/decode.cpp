// The entry point of attention over a cache: validate, find the plan, append, attend.
#include "problem/decode.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <variant>

#include "fovea/kv_cache.hpp"

#include "core/check.hpp"
#include "core/float_environment.hpp"
#include "cpu/append.hpp"
#include "cuda/append/append_to_cache.hpp"
#include "plan/call_workspace.hpp"
#include "plan/plan.hpp"
#include "plan/runtime.hpp"

namespace fovea {
namespace {

constexpr std::int64_t kMostKeys = std::numeric_limits<std::int32_t>::max();  // of a sequence

/// Plans are made for lengths up to a power of two, so that a growing cache meets a new one rarely; the bits do not
/// know it.
std::int64_t bound_of(std::int64_t seqlen_kv, std::int64_t capacity) {
  std::int64_t bound = kLeastPlannedKeys;
  while (bound < seqlen_kv) bound *= 2;
  return std::max(seqlen_kv, std::min(bound, capacity));
}

/// What the host cannot read is planned for as if every sequence filled its room.
std::int64_t bound_of(const AttentionDecode& args, std::int64_t longest) {
  const bool is_known = is_cpu(args.q.spec().device);
  return bound_of(longest, is_known ? cache_capacity(args.cache) : cuda::kMostOfSequence);
}

Plan make_plan(const Problem& problem, const CacheLayout& cache, std::string_view where) {
  auto impl = std::make_shared<Plan::Impl>();
  impl->problem = validate_decode_problem(problem, cache, where);
  if (is_cpu(impl->problem.device())) {
    impl->backend = cpu::plan_forward(impl->problem, problem.num_threads);
  } else {
    impl->backend = cuda::plan_forward(impl->problem, impl->problem.device());
  }
  return Plan(std::move(impl));
}

Plan find_plan(const AttentionDecode& args, std::int64_t bound, Runtime& runtime,
               std::string_view where) {
  const int num_threads = args.executor != nullptr ? args.executor->concurrency() : 0;
  const Problem problem = decode_problem(args, bound, num_threads, where);
  const CacheLayout cache = cache_layout(args);
  return runtime.impl().find_or_make(decode_key(problem, cache),
                                     [&] { return make_plan(problem, cache, where); });
}

/// With an executor where there must be one.
AttentionDecode completed(AttentionDecode call, Runtime& runtime) {
  if (call.executor == nullptr && is_cpu(call.q.spec().device)) call.executor = &runtime.executor();
  return call;
}

/// A copy of q where it is turned.
std::size_t rotated_bytes(const AttentionDecode& args) {
  if (!args.rotary) return 0;
  return static_cast<std::size_t>(args.q.spec().num_elements()) * size_bytes(args.q.dtype());
}

/// The pieces of a call's workspace: the plan's, then turned queries.
struct DecodeWorkspace {
  std::size_t alignment = 0, plan_bytes = 0, q_bytes = 0;

  DecodeWorkspace(const Plan& plan, const AttentionDecode& args)
      : alignment(is_cpu(args.q.spec().device) ? kWorkspaceAlignment : kDeviceWorkspaceAlignment),
        plan_bytes(round_up(std::visit([](const auto& backend) { return backend.workspace_bytes; },
                                       plan.impl().backend))),
        q_bytes(rotated_bytes(args)) {}

  std::size_t aligned_bytes() const { return plan_bytes + q_bytes; }
  std::size_t bytes() const { return unaligned_workspace_bytes(aligned_bytes(), alignment); }

 private:
  std::size_t round_up(std::size_t bytes) const {
    return (bytes + alignment - 1) / alignment * alignment;
  }
};

/// Appends and turns, then attends over what the cache holds.
struct DecodeSteps {
  const AttentionDecode& args;
  const NewTokens& tokens;
  const ForwardProblem& problem;
  const AttentionForward& forward;
  std::byte* workspace;
  Runtime& runtime;
};

void run_on(const cpu::ForwardPlan& plan, const DecodeSteps& call) {
  cpu::append_tokens(call.tokens, *call.args.executor);
  const GrownCache grown{call.args.cache, num_new(call.args.append)};
  cpu::attention_forward(call.problem, plan, call.forward, call.workspace, *call.args.executor,
                         &grown);
}

/// Appending is planned once for each device.
cuda::AppendPlan find_append(Device device, Runtime& runtime) {
  const expr::Digest key{static_cast<std::uint64_t>(device.index), 0};
  return runtime.impl().find_or_make(key, [&] { return cuda::plan_append(device); });
}

void run_on(const cuda::ForwardPlan& plan, const DecodeSteps& call) {
  const GrownCache grown{call.args.cache, num_new(call.args.append)};
  if (grown.num_new > 0 || call.tokens.rotary != nullptr) {
    cuda::append_tokens(find_append(call.problem.device(), call.runtime), call.tokens,
                        call.args.stream);
  }
  cuda::attention_forward(call.problem, plan, call.forward, call.workspace, call.args.stream,
                          &grown);
}

void run(const Plan& plan, const AttentionDecode& args, const DecodeWorkspace& sizes,
         Runtime& runtime) {
  std::byte* workspace = aligned_workspace(args.workspace, sizes.aligned_bytes(), sizes.alignment);
  AttentionForward forward = forward_of(args);
  if (args.rotary) {
    const TensorSpec& q = args.q.spec();
    TensorSpec dense =
        make_spec(q.dtype, std::span(q.shape.data(), static_cast<std::size_t>(q.rank)));
    dense.device = q.device;
    forward.q = TensorView(static_cast<void*>(workspace + sizes.plan_bytes), dense);
  }
  const NewTokens tokens{.cache = args.cache,
                         .append = args.append,
                         .rotary = args.rotary ? &*args.rotary : nullptr,
                         .q = args.q,
                         .rotated_q = forward.q};
  const DecodeSteps call{args, tokens, plan.impl().problem, forward, workspace, runtime};
  std::visit([&](const auto& backend) { run_on(backend, call); }, plan.impl().backend);
}

}  // namespace

void attention_decode(const AttentionDecode& args, Runtime& runtime) {
  const FloatEnvironment environment;
  constexpr std::string_view kWhere = "attention_decode";
  AttentionDecode call = completed(args, runtime);
  if (!call.out)
    invalid(std::string(kWhere),
            "out is missing; expected a view of writable memory shaped like q with head_dim_v");
  const std::int64_t longest =
      validate_cache(call.cache, call.append, call.rotary, decode_batch(call, kWhere), kWhere);
  const Plan plan = find_plan(call, bound_of(call, longest), runtime, kWhere);
  validate_decode(plan.impl().problem, call, kWhere);
  const DecodeWorkspace sizes(plan, call);
  const CallWorkspace workspace(call.workspace, sizes.bytes(), {call.q.spec().device, call.stream});
  call.workspace = workspace.bytes();
  if (call.workspace.size() < sizes.bytes()) {
    invalid(std::string(kWhere),
            fmt::format("workspace has {} bytes; expected {}, see decode_workspace_bytes",
                        call.workspace.size(), sizes.bytes()));
  }
  run(plan, call, sizes, runtime);
}

void attention_decode(const AttentionDecode& args) {
  attention_decode(args, Runtime::process_default());
}

void append_to_cache(const AppendToCache& args, Runtime& runtime) {
  const FloatEnvironment environment;
  constexpr std::string_view kWhere = "append_to_cache";
  const auto& [cache, append, rotary, executor, stream] = args;
  const bool is_k_right = append.k.rank() == 4;
  if (!is_k_right || !append.v) {
    const TensorView& wrong = is_k_right ? append.v : append.k;
    invalid(std::string(kWhere),
            fmt::format("append.{} is {}; expected [batch, seqlen_new, num_heads_kv, head_dim]",
                        is_k_right ? "v" : "k", wrong ? to_string(wrong.spec()) : "missing"));
  }
  validate_cache(cache, append, rotary, append.k.size(0), kWhere);
  validate_append(cache, append, rotary, kWhere);
  const NewTokens tokens{.cache = cache, .append = append, .rotary = rotary ? &*rotary : nullptr};
  const Device device = cache.k.spec().device;
  if (is_cpu(device))
    return cpu::append_tokens(tokens, executor != nullptr ? *executor : runtime.executor());
  cuda::append_tokens(find_append(device, runtime), tokens, stream);
}

void append_to_cache(const AppendToCache& args) {
  append_to_cache(args, Runtime::process_default());
}

std::size_t decode_workspace_bytes(const AttentionDecode& args, std::int64_t max_seqlen_kv) {
  const FloatEnvironment environment;
  constexpr std::string_view kWhere = "decode_workspace_bytes";
  if (max_seqlen_kv < 0 || max_seqlen_kv > kMostKeys) {
    invalid(std::string(kWhere),
            fmt::format("max_seqlen_kv is {}; expected 0 to {}", max_seqlen_kv, kMostKeys));
  }
  Runtime& runtime = Runtime::process_default();
  const AttentionDecode call = completed(args, runtime);
  decode_batch(call, kWhere);
  const auto bytes_for = [&](std::int64_t length) {
    return DecodeWorkspace(find_plan(call, bound_of(call, length), runtime, kWhere), call).bytes();
  };
  if (!is_cpu(call.q.spec().device)) return bytes_for(cache_capacity(call.cache));
  // Shorter caches may want more: splits run side by side only while their states fit.
  std::size_t bytes = 0;
  for (std::int64_t length = 1; length > 0;
       length = length < max_seqlen_kv ? std::min(length * 2, max_seqlen_kv) : 0) {
    bytes = std::max(bytes, bytes_for(length));
  }
  return bytes;
}

}  // namespace fovea
