// States that merge, between guards: what tests of every implementation of merge_states are given.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fovea/state.hpp"

#include "support/guarded_tensor.hpp"

namespace fovea::testing {

struct MergeCase {
  std::string name;
  int num_states = 3;
  std::int64_t batch = 2, rows = 5, heads = 3, width = 64;
  std::vector<Dtype> dtypes = {Dtype::f32};  // of the states in turn
  Dtype out_dtype = Dtype::f32;
  bool is_packed = false;
  bool has_drawn_strides = false;
  bool is_in_place = false;
  bool has_lse = true;
};

/// Sizes with reasons, dtypes, strides, and states merged in place.
std::vector<MergeCase> merge_cases();

/// Every fifth lse is -inf, where out holds NaN; others spread over some tens, so that weights underflow too.
struct MergeMemory {
  std::vector<GuardedTensor> outs, lses;
  GuardedTensor out, lse;
  MergeStates args;

  explicit MergeMemory(const MergeCase& c);
};

/// EXPECTs that out and lse are the oracle's, which was asked before the merge, and that nothing else was written.
void expect_merged(const MergeCase& c, const MergeMemory& memory,
                   const std::vector<double>& expected_out,
                   const std::vector<double>& expected_lse);

}  // namespace fovea::testing
