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

constexpr std::string_view kDecode = "attention_decode";
constexpr std::string_view kAppend = "append_to_cache";
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

Plan find_plan(const AttentionDecode& args, std::int64_t bound, Runtime& runtime, CallLog& log,
               std::string_view where) {
  const int num_threads = args.executor != nullptr ? args.executor->concurrency() : 0;
  const Problem problem = decode_problem(args, bound, num_threads, where);
  const CacheLayout cache = cache_layout(args);
  return runtime.impl().find_or_make(decode_key(problem, cache), [&] {
    return log.timed_plan([&] { return make_plan(problem, cache, where); });
  });
}

/// With an executor where there must be one, and offsets of packed new tokens.
AttentionDecode completed(AttentionDecode call, Runtime& runtime) {
  if (call.append.k.rank() == 3 && !call.append.cu_seqlens)
    call.append.cu_seqlens = call.cu_seqlens_q;
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
  const GrownCache grown = grown_cache(call.args.cache, call.args.append);
  cpu::attention_forward(call.problem, plan, call.forward, call.workspace, *call.args.executor,
                         &grown);
}

/// Appending is planned once for each device.
cuda::AppendPlan find_append(Device device, Runtime& runtime) {
  const expr::Digest key{static_cast<std::uint64_t>(device.index), 0};
  return runtime.impl().find_or_make(key, [&] { return cuda::plan_append(device); });
}

void run_on(const cuda::ForwardPlan& plan, const DecodeSteps& call) {
  const GrownCache grown = grown_cache(call.args.cache, call.args.append);
  if (call.args.append.k || call.tokens.rotary != nullptr) {
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
                         .batch = plan.impl().problem.num_sequences,
                         .rotary = args.rotary ? &*args.rotary : nullptr,
                         .q = args.q,
                         .cu_seqlens_q = args.cu_seqlens_q,
                         .rotated_q = forward.q};
  const DecodeSteps call{args, tokens, plan.impl().problem, forward, workspace, runtime};
  std::visit([&](const auto& backend) { run_on(backend, call); }, plan.impl().backend);
}

void require_out(const AttentionDecode& call, std::string_view where) {
  if (call.out) return;
  invalid(std::string(where),
          "out is missing; expected a view of writable memory shaped like q with head_dim_v");
}

void require_length(std::int64_t max_seqlen_kv, std::string_view where) {
  if (max_seqlen_kv >= 0 && max_seqlen_kv <= kMostKeys) return;
  invalid(std::string(where),
          fmt::format("max_seqlen_kv is {}; expected 0 to {}", max_seqlen_kv, kMostKeys));
}

/// All that is told by the cache and by which tokens belong to whom. Returns the keys of the longest sequence.
std::int64_t validate_tokens(const AttentionDecode& call) {
  const std::int64_t batch = decode_batch(call, kDecode);
  validate_query_offsets(call, kDecode);
  return validate_cache(call.cache, call.append, call.rotary, batch, kDecode);
}

/// What a plan's kernel was chosen by, of which `key` is the key: dtypes, heads, the layout of the cache and the
/// programs. The executor may be smaller than the plan's.
void require_same_problem(const Plan& plan, const expr::Digest& key, const AttentionDecode& call) {
  const ForwardProblem& f = plan.impl().problem;
  const int workers = f.problem.num_threads;
  if (is_cpu(f.device())) require_workers(kDecode, *call.executor, workers, "those of the plan");
  const Problem problem = decode_problem(call, f.problem.seqlen_kv->value, workers, kDecode);
  if (decode_key(problem, cache_layout(call)) == key) return;
  invalid(
      std::string(kDecode),
      "the call poses another problem than the plan's; expected equal dtypes, heads, head dims, "
      "layout of the cache, programs, sm_margin and wanted outputs");
}

std::string_view append_kernel(Device device) {
  return is_cpu(device) ? "cpu/append_to_cache" : "cuda/common/append_to_cache";
}

void log_append(const CallLog& log, const AppendToCache& args) {
  if (!log.is_on()) [[likely]]
    return;
  const Device device = args.cache.k.spec().device;
  log.write(to_string(args.append.k.spec()), append_kernel(device), to_string(device));
}

std::int64_t append_batch(const Append& append, std::string_view where) {
  if (!append.cu_seqlens) return append.k.size(0);
  if (append.cu_seqlens.rank() == 1 && append.cu_seqlens.size(0) > 0)
    return append.cu_seqlens.size(0) - 1;
  invalid(std::string(where),
          fmt::format("append.cu_seqlens is {}; expected i32 or i64 [batch + 1]",
                      to_string(append.cu_seqlens.spec())));
}

NewTokens validated_tokens(const AppendToCache& args) {
  const KvCache& cache = args.cache;
  const Append& append = args.append;
  const bool is_packed = static_cast<bool>(append.cu_seqlens);
  const bool is_k_right = append.k.rank() == (is_packed ? 3 : 4);
  if (!is_k_right || !append.v) {
    const TensorView& wrong = is_k_right ? append.v : append.k;
    invalid(std::string(kAppend),
            fmt::format("append.{} is {}; expected {}", is_k_right ? "v" : "k",
                        wrong ? to_string(wrong.spec()) : "missing",
                        is_packed ? "[total_new, num_heads_kv, head_dim]"
                                  : "[batch, seqlen_new, num_heads_kv, head_dim], or packed with "
                                    "append.cu_seqlens"));
  }
  const std::int64_t batch = append_batch(append, kAppend);
  validate_cache(cache, append, args.rotary, batch, kAppend);
  validate_append(cache, append, args.rotary, kAppend);
  return {.cache = cache,
          .append = append,
          .batch = batch,
          .rotary = args.rotary ? &*args.rotary : nullptr};
}

}  // namespace

struct DecodePlan::Impl {
  Plan plan;
  expr::Digest key;  // of its problem
  std::int64_t max_seqlen_kv = 0;
  std::size_t workspace_bytes = 0;
};

void attention_decode(const AttentionDecode& args, Runtime& runtime) {
  const FloatEnvironment environment;
  CallLog log(kDecode);
  AttentionDecode call = completed(args, runtime);
  require_out(call, kDecode);
  const std::int64_t longest = validate_tokens(call);
  const Plan plan = find_plan(call, bound_of(call, longest), runtime, log, kDecode);
  validate_decode(plan.impl().problem, call, kDecode);
  const DecodeWorkspace sizes(plan, call);
  const CallWorkspace workspace(call.workspace, sizes.bytes(), {call.q.spec().device, call.stream},
                                runtime.impl());
  call.workspace = workspace.bytes();
  require_workspace(kDecode, call.workspace, sizes.bytes(), "decode_workspace_bytes");
  run(plan, call, sizes, runtime);
  log_call(log, plan.impl());
}

DecodePlan plan_decode(const AttentionDecode& args, std::int64_t max_seqlen_kv) {
  const FloatEnvironment environment;
  constexpr std::string_view kWhere = "plan_decode";
  require_length(max_seqlen_kv, kWhere);
  CallLog log(kWhere);
  Runtime& runtime = Runtime::process_default();
  const AttentionDecode call = completed(args, runtime);
  decode_batch(call, kWhere);
  const Plan plan = find_plan(call, max_seqlen_kv, runtime, log, kWhere);
  const ForwardProblem& f = plan.impl().problem;
  auto impl =
      std::make_shared<DecodePlan::Impl>(DecodePlan::Impl{.plan = plan,
                                                          .key = decode_key(f.problem, f.cache),
                                                          .max_seqlen_kv = max_seqlen_kv,
                                                          .workspace_bytes = 0});
  impl->workspace_bytes = DecodeWorkspace(impl->plan, call).bytes();
  if (!is_cpu(call.q.spec().device) && (call.append.k || call.rotary))
    find_append(call.q.spec().device, runtime);  // so that no run loads it
  return DecodePlan(std::move(impl));
}

std::size_t DecodePlan::workspace_bytes() const { return impl_->workspace_bytes; }

Explanation DecodePlan::explain() const {
  Explanation explanation = impl_->plan.explain();
  explanation.workspace_bytes = impl_->workspace_bytes;
  return explanation;
}

void DecodePlan::run(const AttentionDecode& args) const {
  const FloatEnvironment environment;
  const CallLog log(kDecode);
  Runtime& runtime = Runtime::process_default();
  const AttentionDecode call = completed(args, runtime);
  require_out(call, kDecode);
  const std::int64_t longest = validate_tokens(call);
  if (is_cpu(call.q.spec().device) && longest > impl_->max_seqlen_kv) {
    invalid(
        std::string(kDecode),
        fmt::format("a sequence has {} keys; expected at most {}, the max_seqlen_kv of the plan",
                    longest, impl_->max_seqlen_kv));
  }
  require_same_problem(impl_->plan, impl_->key, call);
  validate_decode(impl_->plan.impl().problem, call, kDecode);
  const DecodeWorkspace sizes(impl_->plan, call);
  require_workspace(kDecode, call.workspace, sizes.bytes(), "DecodePlan::workspace_bytes");
  fovea::run(impl_->plan, call, sizes, runtime);
  log_call(log, impl_->plan.impl());
}

Explanation explain(const AttentionDecode& args, std::int64_t max_seqlen_kv) {
  const FloatEnvironment environment;
  constexpr std::string_view kWhere = "explain";
  require_length(max_seqlen_kv, kWhere);
  const AttentionDecode call = completed(args, Runtime::process_default());
  const int num_threads = call.executor != nullptr ? call.executor->concurrency() : 0;
  const CacheLayout cache = cache_layout(call);
  const ForwardProblem f = validate_decode_problem(
      decode_problem(call, max_seqlen_kv, num_threads, kWhere), cache, kWhere);
  if (!is_cpu(f.device()))
    return explain_forward(f, cuda::try_plan_forward(f, f.device()), MaskData::gone);
  return explain_forward(f, cpu::try_plan_forward(f, num_threads), MaskData::gone);
}

void attention_decode(const AttentionDecode& args) {
  attention_decode(args, Runtime::process_default());
}

void append_to_cache(const AppendToCache& args, Runtime& runtime) {
  const FloatEnvironment environment;
  const CallLog log(kAppend);
  const NewTokens tokens = validated_tokens(args);
  const Device device = args.cache.k.spec().device;
  if (is_cpu(device)) {
    cpu::append_tokens(tokens, args.executor != nullptr ? *args.executor : runtime.executor());
  } else {
    cuda::append_tokens(find_append(device, runtime), tokens, args.stream);
  }
  log_append(log, args);
}

struct AppendPlan::Impl {
  TensorSpec k{}, v{};  // of the cache
  bool is_paged = false;
  cuda::AppendPlan cuda{};
};

AppendPlan plan_append(const AppendToCache& args) {
  const KvCache& cache = args.cache;
  if (!cache.k || !cache.v)
    invalid("plan_append", "cache.k or cache.v is missing; expected views of the cache");
  auto impl = std::make_shared<AppendPlan::Impl>(
      AppendPlan::Impl{.k = cache.k.spec(), .v = cache.v.spec(), .is_paged = is_paged(cache)});
  if (!is_cpu(impl->k.device)) impl->cuda = find_append(impl->k.device, Runtime::process_default());
  return AppendPlan(std::move(impl));
}

Explanation AppendPlan::explain() const {
  const bool is_host = is_cpu(impl_->k.device);
  Explanation e;
  e.problem =
      fmt::format("append to a {} cache of k {} and v {}", impl_->is_paged ? "paged" : "contiguous",
                  to_string(impl_->k), to_string(impl_->v));
  e.kernel = append_kernel(impl_->k.device);
  e.target = is_host ? "scalar" : to_string(impl_->k.device);
  e.compute_dtype = "f32";
  e.bound = "memory";
  return e;
}

void AppendPlan::run(const AppendToCache& args) const {
  const FloatEnvironment environment;
  const CallLog log(kAppend);
  if (args.cache.k.spec() != impl_->k || args.cache.v.spec() != impl_->v) {
    invalid(std::string(kAppend),
            "cache.k or cache.v has another shape, dtype, stride or device than the plan's");
  }
  const NewTokens tokens = validated_tokens(args);
  if (is_cpu(impl_->k.device)) {
    cpu::append_tokens(
        tokens, args.executor != nullptr ? *args.executor : Runtime::process_default().executor());
  } else {
    cuda::append_tokens(impl_->cuda, tokens, args.stream);
  }
  log_append(log, args);
}

void append_to_cache(const AppendToCache& args) {
  append_to_cache(args, Runtime::process_default());
}

std::size_t decode_workspace_bytes(const AttentionDecode& args, std::int64_t max_seqlen_kv) {
  const FloatEnvironment environment;
  constexpr std::string_view kWhere = "decode_workspace_bytes";
  require_length(max_seqlen_kv, kWhere);
  Runtime& runtime = Runtime::process_default();
  const AttentionDecode call = completed(args, runtime);
  CallLog log(kWhere);
  decode_batch(call, kWhere);
  const auto bytes_for = [&](std::int64_t length) {
    return DecodeWorkspace(find_plan(call, bound_of(call, length), runtime, log, kWhere), call)
        .bytes();
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
