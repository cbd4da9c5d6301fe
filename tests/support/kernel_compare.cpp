#include "support/kernel_compare.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <exception>
#include <string>

#include "reference/attention_forward.hpp"
#include "support/compare.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {

namespace {

/// Of kernels whose products of f32 are f32's, and bf16's of all else.
Tolerances allowed_by(const AttentionForward& args, const reference::ForwardResult& expected,
                      double lse_error) {
  Tolerances allowed = tolerances(
      args, expected, args.q.dtype() == Dtype::f32 ? ComputeDtype::f32 : ComputeDtype::bf16);
  allowed.lse.absolute += lse_error;
  allowed.lse.norm += lse_error * std::sqrt(static_cast<double>(expected.lse.size()));
  return allowed;
}

}  // namespace

void expect_kernel_equals_oracle(const Case& problem,
                                 const std::function<void(const AttentionForward&)>& run,
                                 double lse_error) {
  CaseMemory memory(problem);
  memory.poison_outputs();
  const AttentionForward args = memory.args();
  const reference::ForwardResult expected = reference::attention_forward(args);
  const Tolerances allowed = allowed_by(args, expected, lse_error);
  std::string found;
  try {
    run(args);
    found = difference({"out", args.out, expected.out, allowed.out}) +
            difference({"lse", args.lse, expected.lse, allowed.lse}) +
            difference({"row_max", args.row_max, expected.row_max, allowed.row_max}) +
            memory.damage();
  } catch (const std::exception& error) {
    found = error.what();
  }
  if (!found.empty()) ADD_FAILURE() << found << "  in " << problem.describe();
}

void expect_sequences_equal_oracle(const CacheCase& problem, CacheMemory& memory,
                                   const AttentionDecode& decode, double lse_error) {
  EXPECT_EQ(memory.damage() + memory.damage_of_nobody(), "");
  for (std::int64_t i = 0; i < problem.batch(); ++i) {
    const AttentionForward dense = memory.dense(i);
    const reference::ForwardResult expected = reference::attention_forward(dense);
    const Tolerances allowed = allowed_by(dense, expected, lse_error);
    EXPECT_EQ(difference({"out", memory.rows_of(decode.out, i), expected.out, allowed.out}), "")
        << i;
    EXPECT_EQ(difference({"lse", memory.lse_of(decode.lse, i), expected.lse, allowed.lse}), "")
        << i;
  }
}

}  // namespace fovea::testing
