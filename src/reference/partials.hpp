// First and second partial derivatives of the float operators, for the oracle's evaluator.
#pragma once

#include "expr/node.hpp"

namespace fovea::reference {

/// A float operator where it was evaluated; b is 0 where there is one operand.
struct Application {
  expr::Op op = expr::Op::add;
  double a = 0, b = 0;
  double value = 0;  // op(a, b)
};

struct Partials {
  double a = 0, b = 0;
};

/// At kinks: abs has derivative 0 at 0; min and max of equal operands pass it to the first; floor is
/// flat; so is the quotient inside `a % b = a - b floor(a / b)`. pow(0, b) does not move with b.
Partials partials(const Application& f);

struct SecondPartials {
  double aa = 0, ab = 0, bb = 0;
};
SecondPartials second_partials(const Application& f);

}  // namespace fovea::reference
