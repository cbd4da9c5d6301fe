// A formula of a program as a tape, and where the program's captures stand that its slots name.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "cpu/operands.hpp"
#include "expr/tape.hpp"

namespace fovea::cpu {

struct BoundTape {
  expr::Tape tape;
  std::vector<int> tensors, scalars;  // slot of the tape -> index of the capture

  BoundTape() = default;
  BoundTape(const expr::NodePtr& formula, const Captures& captures) : tape(expr::lower(formula)) {
    tensors = slots(tape.tensors, captures.tensors);
    scalars = slots(tape.scalars, captures.scalars);
  }

  bool empty() const { return tape.empty(); }
  Bindings bindings(const Captures& captures) const { return {captures, tensors, scalars}; }
  Bindings bindings(const Program& program) const { return bindings(program.captures()); }

 private:
  template <typename Captured>
  static std::vector<int> slots(const std::vector<std::string>& names,
                                const std::vector<Captured>& captures) {
    std::vector<int> result;
    for (const std::string& slot : names) {
      const auto found = std::ranges::find(captures, slot, &Captured::name);
      FOVEA_ASSERT(found != captures.end());
      result.push_back(static_cast<int>(found - captures.begin()));
    }
    return result;
  }
};

}  // namespace fovea::cpu
