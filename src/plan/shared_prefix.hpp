// Attention over a cache whose sequences share a prefix: the plans of its two calls, and a run of both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "fovea/kv_cache.hpp"
#include "fovea/runtime.hpp"

#include "core/verbose.hpp"
#include "plan/plan.hpp"
#include "problem/shared_prefix.hpp"

namespace fovea {

/// For prefixes of up to max_prefix keys and sequences of up to max_seqlen_kv.
struct SharedPrefixPlan {
  ForwardProblem problem;  // of the call as it is posed
  expr::Digest key;
  PrefixPrograms programs;
  Plan prefix, suffix;
  std::int64_t max_prefix = 0;
};
using SharedPrefixPlanPtr = std::shared_ptr<const SharedPrefixPlan>;

/// All that such a plan depends on; `problem` is that of the whole call.
expr::Digest shared_prefix_key(const Problem& problem, const AttentionDecode& args,
                               std::int64_t max_prefix);

/// Found or made. Throws as plan_decode does.
SharedPrefixPlanPtr find_shared_prefix_plan(const AttentionDecode& args, std::int64_t max_prefix,
                                            std::int64_t max_seqlen_kv, Runtime& runtime,
                                            CallLog& log, std::string_view where);

/// Aligned bytes of a call's workspace, beside turned queries: what both calls work in, then states and places.
struct SharedPrefixBytes {
  std::size_t scratch = 0, states = 0;
};
SharedPrefixBytes shared_prefix_bytes(const SharedPrefixPlan& plan, const AttentionDecode& args,
                                      const TensorView& q);

/// After the append. q: the queries, turned where there is a rotary. Returns the name of the kernel of keys behind the
/// prefix.
std::string_view attend(const SharedPrefixPlan& plan, const AttentionDecode& args,
                        const TensorView& q, std::byte* scratch, std::byte* states,
                        Runtime& runtime);

Explanation explain_shared_prefix(const SharedPrefixPlan& plan);
/// As explain(args, max_seqlen_kv), for args with a shared prefix.
Explanation explain_shared_prefix(const AttentionDecode& args, std::int64_t max_seqlen_kv,
                                  std::string_view where);

}  // namespace fovea
