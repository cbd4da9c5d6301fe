// What a Plan holds.
#pragma once

#include "fovea/attention.hpp"

#include "cpu/attention_forward.hpp"
#include "problem/forward.hpp"

namespace fovea {

struct Plan::Impl {
  ForwardProblem problem;
  cpu::ForwardPlan cpu;
};

/// What a candidate decided, in words and numbers; cpu.candidate is empty where nothing can run.
Explanation explain_forward(const ForwardProblem& problem, const cpu::ForwardPlan& cpu);

}  // namespace fovea
