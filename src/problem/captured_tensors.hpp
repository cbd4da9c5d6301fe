// What a call asks of the tensors that its programs capture, which may be others than the plan was made with.
#pragma once

#include "problem/forward.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {

/// Memory; an element to read wherever there is a position; and, where the host can read them, i64 that fit in the 32
/// bits of a program's integers. The latter reads every i64 tensor once, at the speed of memory: i32 ones are not read.
void check_captured_tensor(const ForwardProblem& problem, const CapturedTensor& tensor,
                           const TensorChecks& checks);
void check_captured_tensors(const ForwardProblem& problem, const ScoreMod& score,
                            const MaskMod& mask, const TensorChecks& checks);

}  // namespace fovea
