// Derivatives of formulas: by the score, by what a program captures, and along a direction (forward
// mode). The rule of each op is a row of partial_derivative in differentiate.cpp.
//
// Every derivative is an ordinary formula, so it prints, lowers to a tape and can be differentiated
// again. It reads the same `score` that the formula itself read: the score before the program.
//
// Conventions, here and in docs/design/contract.md:
//   abs                         0 at 0
//   min, max                    of equal operands, the first gets the gradient
//   select                      the chosen side alone; the condition gets none
//   floor, ceil, trunc, round,  0
//   //, comparisons, int(x)
//   fmod(a, b)                  1 by a, -trunc(a / b) by b
//   a % b                       1 by a, -(a // b) by b
//   pow(a, b)                   b pow(a, b - 1) by a, 0 where b is 0;
//                               pow(a, b) log(a) by b, 0 where a is 0 and b >= 0
//   ints and bools              none, so indices of loads and conditions have none
// A side that select, min, max or abs do not choose contributes exactly 0, whatever its derivative
// is there: derivatives select, they never multiply by a 0 that stands for "not chosen". Nothing
// else is guarded: the derivative of sqrt at 0 is inf.
#pragma once

#include <string>
#include <vector>

#include "expr/node.hpp"

namespace fovea::expr {

/// d root / d score of a float formula, simplified; the constant 0.0 where it does not depend on
/// the score. Of the score itself: the constant 1.0.
NodePtr derivative_by_score(const NodePtr& root);

/// How a float formula depends on one place where it reads captured data.
struct CapturedDerivative {
  std::string slot;
  /// The load or scalar. A load adds its gradient to the element that its indices (its operands)
  /// name, limited to the tensor as the load itself is; one slot may be loaded in several places.
  NodePtr leaf;
  NodePtr derivative;  // d root / d leaf, simplified; never the constant 0.0
};

/// One for each distinct load from a float tensor and each float scalar that the formula depends
/// on, in order of first use.
std::vector<CapturedDerivative> captured_derivatives(const NodePtr& root);

/// The part of root's tangent that captured data cause: root' = derivative_by_score · score' + this.
/// Null where it is identically 0.
///
/// `tangents` has slots of root by name: for a float tensor its tangent, of the same shape; for a
/// float scalar, or a tensor of rank 0, any tensor of one element. Slots of ints and bools, and names
/// that root does not read, are passed over. The result reads the tangents from slots of their own, named
/// `<slot>_tangent` (with a number behind where root has that name): collect_captures finds them.
NodePtr captured_tangent(const NodePtr& root, const std::vector<CapturedTensor>& tangents);

/// The names of those slots, one for each of `tangents`.
std::vector<std::string> tangent_slots(const NodePtr& root,
                                       const std::vector<CapturedTensor>& tangents);

}  // namespace fovea::expr
