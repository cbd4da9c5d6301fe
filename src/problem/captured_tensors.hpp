// What a call asks of the tensors that its programs capture, which may be others than the plan was made with.
#pragma once

#include <cstdint>
#include <optional>

#include "problem/forward.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {

/// How many indices of a call go along the dimensions of what words read; those that it does not say are in memory that
/// is not looked at here.
struct IndexCounts {
  std::int64_t batch = 0, num_heads_q = 0;
  std::optional<std::int64_t> seqlen_q{}, seqlen_kv{};
  std::optional<std::int64_t> total_q{}, total_kv{};
};
/// Of every call that this problem stands for.
IndexCounts index_counts(const ForwardProblem& problem);

/// A word's tensor has an element for each index: beyond its end, the last one would be read again.
void check_extents(const CapturedTensor& tensor, const IndexCounts& counts,
                   const TensorChecks& checks);
void check_extents(const ScoreMod& score, const MaskMod& mask, const IndexCounts& counts,
                   const TensorChecks& checks);

/// Extents; memory; an element to read wherever there is a position; and, where the host can read them, i64 that fit in
/// the 32 bits of a program's integers. The latter reads every i64 tensor once, at the speed of memory: i32 ones are
/// not read.
void check_captured_tensor(const ForwardProblem& problem, const CapturedTensor& tensor,
                           const TensorChecks& checks);
void check_captured_tensors(const ForwardProblem& problem, const ScoreMod& score,
                            const MaskMod& mask, const IndexCounts& counts,
                            const TensorChecks& checks);

}  // namespace fovea
