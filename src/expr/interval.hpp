// Interval analysis: what a formula can yield when its variables range over boxes. Sound: the interval contains every value
// that evaluation on the box can give (ints as int64 before wrapping: an int that may leave 32 bits becomes the full range).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>

#include "expr/node.hpp"

namespace fovea::expr {

/// [lo, hi] of an int, a float (may_be_nan beside it) or a bool (0, 1). Empty never occurs.
struct Interval {
  double lo = -std::numeric_limits<double>::infinity();
  double hi = std::numeric_limits<double>::infinity();
  bool may_be_nan = false;

  static Interval point(double value) { return {value, value, false}; }
  static Interval whole() { return {.may_be_nan = true}; }
  bool is_point() const { return lo == hi && !may_be_nan; }
  bool contains(double value) const { return lo <= value && value <= hi; }
  bool always_true() const { return lo >= 1; }
  bool always_false() const { return hi <= 0; }
};

/// Bounds of a load's value given the intervals of its indices (already clamped into the tensor).
using LoadBounds = std::function<Interval(const Node& load, const Interval* indices)>;

struct Box {
  std::array<Interval, kNumVariables> variables{};  // by Variable
  /// Value of a scalar slot; when empty the binding in the node is used.
  std::function<double(const Node& scalar)> scalar_value;
  /// When empty, a load may yield anything its dtype can hold.
  LoadBounds load_bounds;
};

/// A formula prepared for many evaluations: topological order is found once.
class IntervalProgram {
 public:
  explicit IntervalProgram(const NodePtr& root);
  Interval evaluate(const Box& box) const;
  /// As evaluate, but the interval of every node, in topological order (for the out-of-range check).
  void evaluate_all(const Box& box, std::vector<Interval>& values) const;
  const std::vector<const Node*>& nodes() const { return nodes_; }

 private:
  NodePtr root_;
  std::vector<const Node*> nodes_;
  std::vector<std::array<int, 3>> operands_;       // indices into nodes_, for arity <= 3
  std::vector<std::vector<int>> load_operands_;    // for loads of any rank
};

}  // namespace fovea::expr
