// The entry point of probabilities: one plain path, so there is nothing to plan.
#include "fovea/probabilities.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/float_environment.hpp"
#include "cpu/attention_probabilities.hpp"
#include "cpu/features.hpp"
#include "plan/plan.hpp"
#include "problem/backward.hpp"
#include "problem/quant.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

constexpr std::string_view kWhere = "attention_probabilities";

/// The call with k in place of v and q in place of out, which have shapes that fit: nothing here depends on either.
AttentionForward scores_of(AttentionForward call) {
  call.v = call.k;
  call.out = call.q;
  call.lse = call.row_max = {};
  return call;
}

/// The longest sequence of packed offsets.
std::int64_t longest(const TensorView& cu_seqlens) {
  std::int64_t most = 0;
  for (std::int64_t i = 0; i + 1 < cu_seqlens.size(0); ++i)
    most = std::max(most, cu_seqlen(cu_seqlens, i + 1) - cu_seqlen(cu_seqlens, i));
  return most;
}

/// [num_sequences, num_heads_q, rows, columns], packed: of at least these rows and columns.
void check_probabilities(const ForwardProblem& problem, const AttentionForward& call,
                         const TensorView& view, const TensorChecks& checks) {
  const bool is_packed = problem.is_varlen;
  const std::int64_t rows = is_packed ? longest(call.cu_seqlens_q) : problem.seqlen_q;
  const std::int64_t columns = is_packed ? longest(call.cu_seqlens_kv) : problem.seqlen_kv;
  const auto fits = [is_packed](std::int64_t got, std::int64_t expected) {
    return is_packed ? got >= expected : got == expected;
  };
  if (view.rank() != 4 || !is_float(view.dtype()) || view.size(0) != problem.num_sequences ||
      view.size(1) != problem.num_heads_q || !fits(view.size(2), rows) ||
      !fits(view.size(3), columns)) {
    checks.refuse(fmt::format("probabilities is {}; expected f32, f16 or bf16 [{}, {}, {}, {}]{}",
                              view ? to_string(view.spec()) : "missing", problem.num_sequences,
                              problem.num_heads_q, rows, columns,
                              is_packed ? ", or more rows and columns" : ""));
  }
  checks.check_memory({"probabilities", view, true});
}

void check_overlap(const AttentionProbabilities& args, const TensorChecks& checks) {
  OverlapCheck overlap;
  overlap.add_inputs(args.forward);
  overlap.add_output("probabilities", args.probabilities);
  overlap.refuse_overlap(checks);
}

}  // namespace

void attention_probabilities(const AttentionProbabilities& args, Runtime& runtime) {
  const FloatEnvironment environment;
  const CallLog log(kWhere);
  const AttentionProbabilities call{scores_of(args.forward), args.probabilities};
  const Problem posed = problem_of(call.forward);
  const TensorChecks checks(kWhere);
  refuse_quantization(checks, posed, "probabilities");
  const NamedSpec written[] = {{"probabilities", call.probabilities.spec()}};
  if (const std::string obstacle = why_not_cpu(posed, written); !obstacle.empty())
    throw Unsupported(fmt::format("{}: {}", kWhere, obstacle));
  const ForwardProblem problem = validate(posed, kWhere);
  validate_past_arguments(problem, call.forward, kWhere);
  check_probabilities(problem, call.forward, call.probabilities, checks);
  check_overlap(call, checks);
  Executor* const executor = call.forward.executor;
  cpu::attention_probabilities(problem, call, executor != nullptr ? *executor : runtime.executor());
  if (log.is_on()) [[unlikely]] {
    log.write(describe(problem), "cpu/attention_probabilities, the plain path",
              name(cpu::best_f32_target()));
  }
}

void attention_probabilities(const AttentionProbabilities& args) {
  attention_probabilities(args, Runtime::process_default());
}

}  // namespace fovea
