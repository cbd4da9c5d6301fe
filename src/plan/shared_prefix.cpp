#include "plan/shared_prefix.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "cpu/merge_states.hpp"
#include "cpu/prefix_places.hpp"
#include "plan/decode_plan.hpp"
#include "plan/device_kernels.hpp"
#include "plan/runtime.hpp"

namespace fovea {
namespace {

/// The queries as both calls will see them, where only shapes matter.
TensorView planned_queries(const AttentionDecode& args) {
  if (!args.rotary) return args.q;
  const TensorSpec& q = args.q.spec();
  TensorSpec dense =
      make_spec(q.dtype, std::span(q.shape.data(), static_cast<std::size_t>(q.rank)));
  dense.device = q.device;
  return {static_cast<const void*>(nullptr), dense};
}

PrefixPrograms programs_of(const AttentionDecode& args) {
  return prefix_programs(args.score, args.mask, static_cast<bool>(args.shared_prefix.cu_sequences));
}

/// Whether keys behind the prefix begin inside a page.
bool ends_inside_page(const AttentionDecode& args) {
  return is_paged(args.cache) && args.shared_prefix.seqlen % args.cache.k.size(1) != 0;
}

Problem posed_problem(const AttentionDecode& args, std::int64_t max_seqlen_kv,
                      std::string_view where) {
  return decode_problem(args, max_seqlen_kv, num_threads_of(args), where);
}

/// Reasons of the part that has them.
void add_refused(const Explanation& part, std::string_view name, Explanation& e) {
  for (const Explanation::Refused& refused : part.refused)
    e.refused.push_back({fmt::format("{}: {}", name, refused.candidate), refused.reason});
}

Explanation joined(const Explanation& prefix, const Explanation& suffix,
                   const ForwardProblem& problem, std::int64_t num_keys, std::int64_t num_groups) {
  Explanation e = suffix;
  e.problem = fmt::format("{}, {} keys shared by all sequences{}: those by {}, others by {}",
                          describe(problem), num_keys,
                          num_groups > 1 ? fmt::format(" of each of {} groups", num_groups) : "",
                          prefix.problem, suffix.problem);
  const bool can_run = !prefix.kernel.empty() && !suffix.kernel.empty();
  const std::string_view merge =
      is_cpu(problem.device()) ? "cpu/merge_states" : "cuda/common/merge_states";
  e.kernel =
      can_run ? fmt::format("{}, {}, {}", prefix.kernel, suffix.kernel, merge) : std::string();
  e.score = fmt::format("{}; behind the prefix {}", prefix.score, suffix.score);
  e.mask = fmt::format("{}; behind the prefix {}", prefix.mask, suffix.mask);
  e.refused.clear();
  add_refused(prefix, "prefix", e);
  add_refused(suffix, "others", e);
  // What both parts count as out is a state of f32, written and read.
  const double state_bytes = static_cast<double>(problem.total_q * problem.num_heads_q) *
                             static_cast<double>(problem.head_dim_v + 1) * sizeof(float);
  e.flops = prefix.flops + suffix.flops;
  e.bytes = prefix.bytes + suffix.bytes + 2 * state_bytes;
  return e;
}

std::int64_t num_groups_of(const AttentionDecode& args) {
  const TensorView& groups = args.shared_prefix.cu_sequences;
  return groups ? groups.size(0) - 1 : 1;
}

void write_places(const PrefixCalls& calls, const AttentionDecode& args, Runtime& runtime) {
  const Device device = args.q.spec().device;
  if (is_cpu(device)) {
    cpu::write_prefix_places(calls.source, calls.places);
  } else {
    cuda::write_prefix_places(find_prefix(device, runtime), calls.source, calls.places,
                              args.stream);
  }
}

std::string_view attend_part(const Plan& plan, const AttentionDecode& part, std::byte* scratch) {
  return attend(plan, part, forward_of(part), scratch);
}

void merge(const PrefixCalls& calls, std::byte* scratch, Runtime& runtime) {
  const Device device = calls.merge.out.spec().device;
  if (is_cpu(device)) {
    cpu::merge_states(calls.merge, scratch, *calls.merge.executor);
  } else {
    cuda::merge_states(find_merge(device, runtime), calls.merge);
  }
}

}  // namespace

expr::Digest shared_prefix_key(const Problem& problem, const AttentionDecode& args,
                               std::int64_t max_prefix) {
  const expr::Digest key = decode_key(problem, cache_layout(args));
  const std::uint64_t flags = static_cast<std::uint64_t>(num_groups_of(args)) << 3U |
                              std::uint64_t{ends_inside_page(args)} << 2U |
                              std::uint64_t{args.rotary.has_value()} << 1U |
                              std::uint64_t{static_cast<bool>(args.shared_prefix.cu_sequences)};
  constexpr std::uint64_t kPrefixed = 0x7072656669786564U;  // apart from any plain call's
  return {key.lo ^ kPrefixed ^ flags << 32U, key.hi + static_cast<std::uint64_t>(max_prefix)};
}

SharedPrefixPlanPtr find_shared_prefix_plan(const AttentionDecode& args, std::int64_t max_prefix,
                                            std::int64_t max_seqlen_kv, Runtime& runtime,
                                            CallLog& log, std::string_view where) {
  const Problem posed = posed_problem(args, max_seqlen_kv, where);
  const expr::Digest key = shared_prefix_key(posed, args, max_prefix);
  const auto make = [&]() -> SharedPrefixPlanPtr {
    const PrefixPrograms programs = programs_of(args);
    const PrefixCalls calls = split_at_prefix(args, planned_queries(args), programs, nullptr);
    return std::make_shared<const SharedPrefixPlan>(SharedPrefixPlan{
        .problem = validate_decode_problem(posed, cache_layout(args), where),
        .key = key,
        .programs = programs,
        .prefix = find_decode_plan(calls.prefix, max_prefix, runtime, log, where),
        .suffix = find_decode_plan(calls.suffix, max_seqlen_kv, runtime, log, where),
        .max_prefix = max_prefix});
  };
  const Device device = args.q.spec().device;
  if (!is_cpu(device)) {  // so that no run loads them
    find_prefix(device, runtime);
    find_merge(device, runtime);
  }
  return runtime.impl().find_or_make(key, make);
}

SharedPrefixBytes shared_prefix_bytes(const SharedPrefixPlan& plan, const AttentionDecode& args,
                                      const TensorView& q) {
  const PrefixCalls calls = measure_prefix(args, q, plan.programs);
  SharedPrefixBytes bytes{
      .scratch = std::max(aligned_bytes_of(plan.prefix), aligned_bytes_of(plan.suffix)),
      .states = calls.bytes};
  if (is_cpu(q.spec().device)) {
    bytes.scratch = std::max(bytes.scratch,
                             cpu::merge_workspace_bytes(calls.merge, args.executor->concurrency()));
  }
  return bytes;
}

std::string_view attend(const SharedPrefixPlan& plan, const AttentionDecode& args,
                        const TensorView& q, std::byte* scratch, std::byte* states,
                        Runtime& runtime) {
  const PrefixCalls calls = split_at_prefix(args, q, plan.programs, states);
  write_places(calls, args, runtime);
  attend_part(plan.prefix, calls.prefix, scratch);
  const std::string_view kernel = attend_part(plan.suffix, calls.suffix, scratch);
  merge(calls, scratch, runtime);
  return kernel;
}

Explanation explain_shared_prefix(const SharedPrefixPlan& plan) {
  const std::int64_t groups = plan.prefix.impl().problem.num_sequences;
  return joined(plan.prefix.explain(), plan.suffix.explain(), plan.problem, plan.max_prefix,
                groups);
}

Explanation explain_shared_prefix(const AttentionDecode& args, std::int64_t max_seqlen_kv,
                                  std::string_view where) {
  const std::int64_t num_keys = args.shared_prefix.seqlen;
  const PrefixCalls calls =
      split_at_prefix(args, planned_queries(args), programs_of(args), nullptr);
  const ForwardProblem problem =
      validate_decode_problem(posed_problem(args, max_seqlen_kv, where), cache_layout(args), where);
  return joined(explain_decode(calls.prefix, num_keys, where),
                explain_decode(calls.suffix, max_seqlen_kv, where), problem, num_keys,
                num_groups_of(args));
}

}  // namespace fovea
