// The door of attention over a cache: validate, find the plan, append, attend.
#include "problem/decode.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>

#include "fovea/kv_cache.hpp"

#include "core/check.hpp"
#include "cpu/append.hpp"
#include "plan/plan.hpp"
#include "plan/runtime.hpp"

namespace fovea {
namespace {

constexpr std::int64_t kSmallestBound = 2048;

/// Plans are made for lengths up to a power of two, so that a growing cache meets a new one rarely; the bits do not know it.
std::int64_t bound_of(std::int64_t seqlen_kv, std::int64_t capacity) {
  std::int64_t bound = kSmallestBound;
  while (bound < seqlen_kv) bound *= 2;
  return std::max(seqlen_kv, std::min(bound, capacity));
}

Plan make_plan(const Problem& problem, bool is_paged, std::string_view where) {
  if (const std::string obstacle = why_not_cpu(problem); !obstacle.empty())
    throw Unsupported(fmt::format("{}: {}", where, obstacle));
  auto impl = std::make_shared<Plan::Impl>();
  impl->problem = validate_decode_problem(problem, is_paged, where);
  impl->backend = cpu::plan_forward(impl->problem, problem.num_threads);
  return Plan(std::move(impl));
}

Plan find_plan(const AttentionDecode& args, std::int64_t bound, int num_threads, Runtime& runtime,
               std::string_view where) {
  const Problem problem = decode_problem(args, bound, num_threads, where);
  const bool is_paged = static_cast<bool>(args.cache.page_table);
  return runtime.impl().find_or_make(decode_key(problem, is_paged),
                                     [&] { return make_plan(problem, is_paged, where); });
}

/// A copy of q where it is turned.
std::size_t rotated_bytes(const AttentionDecode& args) {
  if (!args.rotary) return 0;
  return static_cast<std::size_t>(args.q.spec().num_elements()) * size_bytes(args.q.dtype());
}

/// The pieces of a call's workspace: the plan's, then turned queries.
struct DecodeWorkspace {
  std::size_t plan_bytes = 0, q_bytes = 0;

  DecodeWorkspace(const Plan& plan, const AttentionDecode& args)
      : plan_bytes(round_up(plan.impl().cpu().workspace_bytes)), q_bytes(rotated_bytes(args)) {}

  std::size_t aligned_bytes() const { return plan_bytes + q_bytes; }
  std::size_t bytes() const { return unaligned_workspace_bytes(aligned_bytes()); }

 private:
  static std::size_t round_up(std::size_t bytes) {
    return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  }
};

void run(const Plan& plan, const AttentionDecode& args, const DecodeWorkspace& sizes) {
  void* start = args.workspace.data();
  std::size_t space = args.workspace.size();
  auto* workspace =
      static_cast<std::byte*>(std::align(kWorkspaceAlignment, sizes.aligned_bytes(), start, space));
  AttentionForward forward{.q = args.q,
                           .out = args.out,
                           .lse = args.lse,
                           .score = args.score,
                           .mask = args.mask,
                           .sinks = args.sinks};
  if (args.rotary) {
    const TensorSpec& q = args.q.spec();
    forward.q =
        TensorView(static_cast<void*>(workspace + sizes.plan_bytes),
                   make_spec(q.dtype, std::span(q.shape.data(), static_cast<std::size_t>(q.rank))));
  }
  cpu::append_tokens({.cache = args.cache,
                      .append = args.append,
                      .rotary = args.rotary ? &*args.rotary : nullptr,
                      .q = args.q,
                      .rotated_q = forward.q},
                     *args.executor);
  const GrownCache grown{args.cache, num_new(args.append)};
  cpu::attention_forward(plan.impl().problem, plan.impl().cpu(), forward, workspace, *args.executor,
                         &grown);
}

}  // namespace

void attention_decode(const AttentionDecode& args, Runtime& runtime) {
  constexpr std::string_view kWhere = "attention_decode";
  AttentionDecode call = args;
  if (call.executor == nullptr) call.executor = &runtime.executor();
  if (!call.out)
    invalid(std::string(kWhere),
            "out is missing; expected a view of writable memory shaped like q with head_dim_v");
  const std::int64_t longest =
      validate_cache(call.cache, call.append, call.rotary, decode_batch(call, kWhere), kWhere);
  const std::int64_t bound = bound_of(longest, cache_capacity(call.cache));
  const Plan plan = find_plan(call, bound, call.executor->concurrency(), runtime, kWhere);
  validate_decode(plan.impl().problem, call, kWhere);
  const DecodeWorkspace sizes(plan, call);
  std::unique_ptr<std::byte[]> own_workspace;
  if (call.workspace.empty()) {
    own_workspace = std::make_unique_for_overwrite<std::byte[]>(sizes.bytes());
    call.workspace = {own_workspace.get(), sizes.bytes()};
  }
  if (call.workspace.size() < sizes.bytes()) {
    invalid(std::string(kWhere),
            fmt::format("workspace has {} bytes; expected {}, see decode_workspace_bytes",
                        call.workspace.size(), sizes.bytes()));
  }
  run(plan, call, sizes);
}

void attention_decode(const AttentionDecode& args) {
  attention_decode(args, Runtime::process_default());
}

void append_to_cache(const KvCache& cache, const Append& append,
                     const std::optional<Rotary>& rotary) {
  constexpr std::string_view kWhere = "append_to_cache";
  if (append.k.rank() != 4 || !append.v) {
    invalid(std::string(kWhere),
            fmt::format("append.{} is {}; expected [batch, seqlen_new, num_heads_kv, head_dim]",
                        append.k.rank() != 4 ? "k" : "v",
                        append.k ? to_string(append.k.spec()) : "missing"));
  }
  validate_cache(cache, append, rotary, append.k.size(0), kWhere);
  validate_append(cache, append, rotary, kWhere);
  cpu::append_tokens({.cache = cache, .append = append, .rotary = rotary ? &*rotary : nullptr},
                     Runtime::process_default().executor());
}

std::size_t decode_workspace_bytes(const AttentionDecode& args, std::int64_t max_seqlen_kv) {
  constexpr std::string_view kWhere = "decode_workspace_bytes";
  if (max_seqlen_kv < 0) {
    invalid(std::string(kWhere), fmt::format("max_seqlen_kv is {}; expected >= 0", max_seqlen_kv));
  }
  Runtime& runtime = Runtime::process_default();
  const Executor& executor = args.executor != nullptr ? *args.executor : runtime.executor();
  // Shorter caches may want more: splits run side by side only while their states fit.
  std::size_t bytes = 0;
  for (std::int64_t length = 1; length > 0;
       length = length < max_seqlen_kv ? std::min(length * 2, max_seqlen_kv) : 0) {
    const std::int64_t bound = bound_of(length, cache_capacity(args.cache));
    const Plan plan = find_plan(args, bound, executor.concurrency(), runtime, kWhere);
    bytes = std::max(bytes, DecodeWorkspace(plan, args).bytes());
  }
  return bytes;
}

}  // namespace fovea
