#include "kernels/run.hpp"

#include <gtest/gtest.h>

#include "problem/decode.hpp"
#include "support/kernel_compare.hpp"

namespace fovea::testing {

void run_args(Runner run, const std::string& label, const AttentionForward& args,
              const cuda::DeviceTraits& device, Emulation& emulation) {
  run({.label = label,
       .problem = validate(problem_of(args), "test"),
       .args = args,
       .device = device},
      emulation);
}

namespace {

/// With offsets of packed tokens, which are those of the queries where none are given.
Append appended_by(const AttentionDecode& decode) {
  Append append = decode.append;
  if (append.k.rank() == 3 && !append.cu_seqlens) append.cu_seqlens = decode.cu_seqlens_q;
  return append;
}

}  // namespace

CacheCall::CacheCall(const AttentionDecode& decode, std::int64_t most_keys)
    : args(forward_of(decode)),
      problem(validate_decode_problem(decode_problem(decode, most_keys, 1, "test"),
                                      cache_layout(decode), "test")),
      append(appended_by(decode)),
      cache(grown_cache(decode.cache, append)) {}

void expect_cache_equals_oracle(const NamedCacheCase& each, Runner run,
                                const cuda::DeviceTraits& device, Emulation& emulation,
                                double lse_error) {
  const CacheCase& problem = each.problem;
  CacheMemory memory(problem);
  const AttentionDecode decode = memory.args();
  const CacheCall call(problem, decode);
  if (problem.appends()) append_to_cache({.cache = decode.cache, .append = call.append});
  run(call.on(each.label, device), emulation);
  EXPECT_EQ(emulation.findings, "");
  expect_sequences_equal_oracle(problem, memory, decode, lse_error);
}

}  // namespace fovea::testing
