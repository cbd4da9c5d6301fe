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
#include "plan/decode_plan.hpp"
#include "plan/device_kernels.hpp"
#include "plan/plan.hpp"
#include "plan/runtime.hpp"
#include "plan/shared_prefix.hpp"

namespace fovea {
namespace {

constexpr std::string_view kDecode = "attention_decode";
constexpr std::string_view kAppend = "append_to_cache";
constexpr std::int64_t kMostKeys = std::numeric_limits<std::int32_t>::max();  // of a sequence

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

/// What plans of a call are: one, or those of a shared prefix.
struct CallPlan {
  std::variant<Plan, SharedPrefixPlanPtr> plans;

  const Plan* plain() const { return std::get_if<Plan>(&plans); }
  const SharedPrefixPlan& prefixed() const { return *std::get<SharedPrefixPlanPtr>(plans); }
  const ForwardProblem& problem() const {
    return plain() != nullptr ? plain()->impl().problem : prefixed().problem;
  }
};

/// Queries in workspace where they are turned, row-major; else the call's.
TensorView queries_of(const AttentionDecode& args, std::byte* turned) {
  if (!args.rotary) return args.q;
  const TensorSpec& q = args.q.spec();
  TensorSpec dense =
      make_spec(q.dtype, std::span(q.shape.data(), static_cast<std::size_t>(q.rank)));
  dense.device = q.device;
  return {static_cast<void*>(turned), dense};
}

/// The pieces of a call's workspace: the plans', turned queries, what a shared prefix keeps.
struct DecodeWorkspace {
  std::size_t alignment = 0, plan_bytes = 0, q_bytes = 0, prefix_bytes = 0;

  DecodeWorkspace(const CallPlan& plan, const AttentionDecode& args)
      : alignment(is_cpu(args.q.spec().device) ? kWorkspaceAlignment : kDeviceWorkspaceAlignment),
        q_bytes(rotated_bytes(args)) {
    if (plan.plain() != nullptr) {
      plan_bytes = round_up(aligned_bytes_of(*plan.plain()));
      return;
    }
    const SharedPrefixBytes bytes =
        shared_prefix_bytes(plan.prefixed(), args, queries_of(args, nullptr));
    plan_bytes = round_up(bytes.scratch);
    q_bytes = round_up(q_bytes);
    prefix_bytes = bytes.states;
  }

  std::size_t aligned_bytes() const { return plan_bytes + q_bytes + prefix_bytes; }
  std::size_t bytes() const { return unaligned_workspace_bytes(aligned_bytes(), alignment); }

 private:
  std::size_t round_up(std::size_t bytes) const {
    return (bytes + alignment - 1) / alignment * alignment;
  }
};

void append_and_turn(const NewTokens& tokens, const AttentionDecode& args, Runtime& runtime) {
  if (!args.append.k && tokens.rotary == nullptr) return;
  const Device device = args.q.spec().device;
  if (is_cpu(device)) {
    cpu::append_tokens(tokens, *args.executor);
  } else {
    cuda::append_tokens(find_append(device, runtime), tokens, args.stream);
  }
}

/// Appends and turns, then attends over what the cache holds. Returns the name of the kernel, of keys behind a shared
/// prefix where there is one.
std::string_view run(const CallPlan& plan, const AttentionDecode& args,
                     const DecodeWorkspace& sizes, Runtime& runtime) {
  std::byte* workspace = aligned_workspace(args.workspace, sizes.aligned_bytes(), sizes.alignment);
  std::byte* const turned = workspace + sizes.plan_bytes;
  const TensorView q = queries_of(args, turned);
  const NewTokens tokens{.cache = args.cache,
                         .append = args.append,
                         .batch = plan.problem().num_sequences,
                         .rotary = args.rotary ? &*args.rotary : nullptr,
                         .q = args.q,
                         .cu_seqlens_q = args.cu_seqlens_q,
                         .rotated_q = q};
  append_and_turn(tokens, args, runtime);
  if (plan.plain() == nullptr)
    return attend(plan.prefixed(), args, q, workspace, turned + sizes.q_bytes, runtime);
  AttentionForward forward = forward_of(args);
  forward.q = q;
  return attend(*plan.plain(), args, forward, workspace);
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

/// All that the cache and the owners of tokens ask of a call. Returns the keys of the longest sequence.
std::int64_t validate_tokens(const AttentionDecode& call) {
  const std::int64_t batch = decode_batch(call, kDecode);
  validate_query_offsets(call, kDecode);
  if (call.shared_prefix) check_shared_prefix(call, kDecode);
  const std::int64_t longest = validate_cache(call.cache, call.append, call.rotary, batch, kDecode);
  if (call.shared_prefix) check_prefix_lengths(call, kDecode);
  return longest;
}

CallPlan make_call_plan(const AttentionDecode& args, std::int64_t max_prefix,
                        std::int64_t max_seqlen_kv, Runtime& runtime, CallLog& log,
                        std::string_view where) {
  if (!args.shared_prefix) return {find_decode_plan(args, max_seqlen_kv, runtime, log, where)};
  return {find_shared_prefix_plan(args, max_prefix, max_seqlen_kv, runtime, log, where)};
}

/// Of a call, or of its workspace: for lengths up to those of a few plans.
CallPlan find_plan(const AttentionDecode& args, std::int64_t longest, Runtime& runtime,
                   CallLog& log, std::string_view where) {
  const std::int64_t max_prefix = planned_keys(args.shared_prefix.seqlen, kMostKeysWithPrefix);
  return make_call_plan(args, max_prefix, planned_keys(args, longest), runtime, log, where);
}

/// What a plan's kernel was chosen by, of which `key` is the key: dtypes, heads, the layout of the cache and the
/// programs. The executor may be smaller than the plan's.
void require_same_problem(const CallPlan& plan, const expr::Digest& key,
                          const AttentionDecode& call) {
  const ForwardProblem& f = plan.problem();
  const int workers = f.problem.num_threads;
  if (is_cpu(f.device())) require_workers(kDecode, *call.executor, workers, "those of the plan");
  const Problem problem = decode_problem(call, f.problem.seqlen_kv->value, workers, kDecode);
  const bool is_plain = plan.plain() != nullptr;
  const bool is_same =
      is_plain == !call.shared_prefix &&
      (is_plain ? decode_key(problem, cache_layout(call))
                : shared_prefix_key(problem, call, plan.prefixed().max_prefix)) == key;
  if (is_same) return;
  invalid(
      std::string(kDecode),
      fmt::format(
          "the call poses another problem than the plan's; expected equal dtypes, heads, head "
          "dims, layout of the cache, programs, sm_margin and wanted outputs{}",
          is_plain && !call.shared_prefix ? ""
                                          : ", a shared prefix where the plan has one, in as many "
                                            "groups, and of whole pages where the plan's is"));
}

void require_short_prefix(const CallPlan& plan, const AttentionDecode& call) {
  if (plan.plain() != nullptr || call.shared_prefix.seqlen <= plan.prefixed().max_prefix) return;
  invalid(std::string(kDecode),
          fmt::format("shared_prefix.seqlen is {}; expected at most {}, that of the plan",
                      call.shared_prefix.seqlen, plan.prefixed().max_prefix));
}

void log_decode(const CallLog& log, const CallPlan& plan, std::string_view kernel) {
  const Plan& logged = plan.plain() != nullptr ? *plan.plain() : plan.prefixed().suffix;
  log_call(log, logged.impl(), kernel);
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
  CallPlan plan;
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
  const CallPlan plan = find_plan(call, longest, runtime, log, kDecode);
  validate_decode(plan.problem(), call, kDecode);
  const DecodeWorkspace sizes(plan, call);
  const CallWorkspace workspace(call.workspace, sizes.bytes(), {call.q.spec().device, call.stream},
                                runtime.impl());
  call.workspace = workspace.bytes();
  require_workspace(kDecode, call.workspace, sizes.bytes(), "decode_workspace_bytes");
  const std::string_view kernel = run(plan, call, sizes, runtime);
  log_decode(log, plan, kernel);
}

DecodePlan plan_decode(const AttentionDecode& args, std::int64_t max_seqlen_kv) {
  const FloatEnvironment environment;
  constexpr std::string_view kWhere = "plan_decode";
  require_length(max_seqlen_kv, kWhere);
  CallLog log(kWhere);
  Runtime& runtime = Runtime::process_default();
  const AttentionDecode call = completed(args, runtime);
  decode_batch(call, kWhere);
  if (call.shared_prefix) check_shared_prefix(call, kWhere);
  const CallPlan plan =
      make_call_plan(call, call.shared_prefix.seqlen, max_seqlen_kv, runtime, log, kWhere);
  const ForwardProblem& f = plan.problem();
  auto impl = std::make_shared<DecodePlan::Impl>(DecodePlan::Impl{
      .plan = plan,
      .key = plan.plain() != nullptr ? decode_key(f.problem, f.cache) : plan.prefixed().key,
      .max_seqlen_kv = max_seqlen_kv,
      .workspace_bytes = 0});
  impl->workspace_bytes = DecodeWorkspace(impl->plan, call).bytes();
  if (!is_cpu(call.q.spec().device) && (call.append.k || call.rotary))
    find_append(call.q.spec().device, runtime);  // so that no run loads it
  return DecodePlan(std::move(impl));
}

std::size_t DecodePlan::workspace_bytes() const { return impl_->workspace_bytes; }

Explanation DecodePlan::explain() const {
  const CallPlan& plan = impl_->plan;
  Explanation explanation =
      plan.plain() != nullptr ? plan.plain()->explain() : explain_shared_prefix(plan.prefixed());
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
  require_short_prefix(impl_->plan, call);
  require_same_problem(impl_->plan, impl_->key, call);
  validate_decode(impl_->plan.problem(), call, kDecode);
  const DecodeWorkspace sizes(impl_->plan, call);
  require_workspace(kDecode, call.workspace, sizes.bytes(), "DecodePlan::workspace_bytes");
  const std::string_view kernel = fovea::run(impl_->plan, call, sizes, runtime);
  log_decode(log, impl_->plan, kernel);
}

Explanation explain(const AttentionDecode& args, std::int64_t max_seqlen_kv) {
  const FloatEnvironment environment;
  constexpr std::string_view kWhere = "explain";
  require_length(max_seqlen_kv, kWhere);
  const AttentionDecode call = completed(args, Runtime::process_default());
  if (!call.shared_prefix) return explain_decode(call, max_seqlen_kv, kWhere);
  check_shared_prefix(call, kWhere);
  return explain_shared_prefix(call, max_seqlen_kv, kWhere);
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
  if (call.shared_prefix) check_shared_prefix(call, kWhere);
  const auto bytes_for = [&](std::int64_t length) {
    return DecodeWorkspace(find_plan(call, length, runtime, log, kWhere), call).bytes();
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
