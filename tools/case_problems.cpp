#include "case_problems.hpp"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "paged_call.hpp"
#include "problem/decode.hpp"
#include "problem/shared_prefix.hpp"

namespace fovea::tools {
namespace {

constexpr std::string_view kWhere = "pack";

TensorView shaped(const TensorSpec& spec) { return {static_cast<void*>(nullptr), spec}; }

AttentionForward call_of_case(const Case& named, const Inputs& inputs) {
  AttentionForward call = make_call(named.options, inputs);
  call.out = as_bshd(shaped(out_spec(inputs, inputs.q.spec.dtype)), named.options.layout);
  return call;
}

AttentionDecode decode_call(const Case& named, const AttentionForward& call,
                            const PagedCall& paged) {
  AttentionDecode args = paged.args;
  if (named.page_size == 0) {
    args.cache.k = call.k;
    args.cache.v = call.v;
    args.cache.page_table = {};
  }
  args.shared_prefix.seqlen = named.shared_prefix;
  return args;
}

ForwardProblem decode_problem_of(const AttentionDecode& args, std::int64_t most_keys) {
  return validate_decode_problem(decode_problem(args, most_keys, 0, kWhere), cache_layout(args),
                                 kWhere);
}

/// The two calls over a cache whose sequences begin with the same keys.
std::vector<ForwardProblem> prefixed_problems(const Case& named, const AttentionForward& call) {
  const PagedCall paged(call, std::max<std::int64_t>(1, named.page_size), nullptr);
  const AttentionDecode args = decode_call(named, call, paged);
  const PrefixPrograms programs = prefix_programs(args.score, args.mask, /*has_groups=*/false);
  const PrefixCalls calls = split_at_prefix(args, args.q, programs, nullptr);
  return {decode_problem_of(calls.prefix, named.shared_prefix),
          decode_problem_of(calls.suffix, call.k.size(1))};
}

}  // namespace

BackwardProblem gradients_of(const Problem& problem) {
  BackwardProblem gradients{.forward = problem,
                            .dout = problem.out,
                            .dq = problem.q,
                            .dk = problem.k,
                            .dv = problem.v,
                            .wants_dsinks = problem.has_sinks};
  gradients.forward.wants_lse = true;
  return gradients;
}

CaseProblems problems_of_case(const Case& named, const Inputs& inputs, bool wants_lse) {
  const AttentionForward call = call_of_case(named, inputs);
  if (named.shared_prefix > 0) return {prefixed_problems(named, call), {}};
  Problem problem = fovea::problem_of(call);
  problem.wants_lse = wants_lse;
  if (named.page_size > 0 || named.is_cached) {
    if (named.codes) problem.k.dtype = problem.v.dtype = *named.codes;
    return {{validate_decode_problem(problem,
                                     {.page_size = named.page_size,
                                      .has_aligned_rows = true,
                                      .has_latent_values = named.options.has_latent_values},
                                     kWhere)},
            {}};
  }
  if (!named.is_backward) return {{validate(problem, kWhere)}, {}};
  if (!wants_lse) return {};
  return {{validate(problem, kWhere)}, {validate(gradients_of(problem), kWhere)}};
}

}  // namespace fovea::tools
