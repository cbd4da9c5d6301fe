// A formula ready to run in one call: its tape, and the data that it captures.
#pragma once

#include "cpu/bound_tape.hpp"
#include "cpu/operands.hpp"
#include "expr/passes.hpp"

namespace fovea::cpu {

struct BoundProgram {
  BoundTape tape;  // empty: nothing to run
  Bindings bindings;

  /// `root` may be null.
  explicit BoundProgram(const expr::NodePtr& root)
      : BoundProgram(root, root != nullptr ? expr::collect_captures(*root) : Captures()) {}

  bool empty() const { return tape.empty(); }

 private:
  BoundProgram(const expr::NodePtr& root, const Captures& captures)
      : tape(root != nullptr ? BoundTape(root, captures) : BoundTape()),
        bindings(tape.bindings(captures)) {}
};

}  // namespace fovea::cpu
