// Interval analysis: what a formula can yield when its variables range over boxes.
//
// Sound: the interval contains every value that evaluation on the box can give, in fp32 or fp64,
// and with any faithful exp or tanh. Ints are bounded before wrapping: one that may leave 32 bits
// becomes the full range. Formulas that are affine in positions are bounded as a whole, so q_idx +
// 3 > q_idx and (q_idx - kv_idx) + kv_idx lose nothing.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "expr/node.hpp"

namespace fovea::expr {

/// [lo, hi] of an int, a float (may_be_nan beside it) or a bool (0, 1). Empty never occurs.
struct Interval {
  double lo = -std::numeric_limits<double>::infinity();
  double hi = std::numeric_limits<double>::infinity();
  bool may_be_nan = false;

  static constexpr Interval point(double value) { return {value, value, false}; }
  static constexpr Interval whole() { return {.may_be_nan = true}; }
  bool is_point() const { return lo == hi && !may_be_nan; }
  bool contains(double value) const { return lo <= value && value <= hi; }
  bool always_true() const { return lo >= 1; }
  bool always_false() const { return hi <= 0; }
  bool operator==(const Interval&) const = default;
};

/// Bounds of a load's value given the intervals of its indices, already clamped into the tensor.
using LoadBounds = std::function<Interval(const Node& load, const Interval* indices)>;

struct Box {
  std::array<Interval, kNumVariables> variables{};  // by Variable
  /// False: a scalar may be anything that its type can hold.
  bool are_scalars_known = true;
  /// Value of a scalar slot; when empty the binding in the node is used.
  std::function<double(const Node& scalar)> scalar_value;
  /// When empty, a load may yield anything its dtype can hold.
  LoadBounds load_bounds;
  /// The tensor of a load's slot; when empty the binding in the node is used.
  std::function<const TensorView&(const Node& load)> tensor;
};

/// A formula prepared for many evaluations: order, operands and affine forms are found once. Keep
/// one Box and change its variables between calls; evaluate allocates nothing for formulas of up to
/// 128 nodes.
class IntervalProgram {
 public:
  explicit IntervalProgram(const NodePtr& root);
  Interval evaluate(const Box& box) const;
  /// As evaluate, but the interval of every node, in topological order (for the out-of-range
  /// check).
  void evaluate_all(const Box& box, std::vector<Interval>& values) const;
  /// As evaluate after an evaluate_all into `values` of which only `changed` has changed since:
  /// cheaper along a row of tiles.
  Interval evaluate_again(const Box& box, Variable changed, std::vector<Interval>& values) const;
  const std::vector<const Node*>& nodes() const { return nodes_; }
  /// The operands of node i, as indices into nodes().
  const std::vector<int>& operands(std::size_t i) const { return steps_[i].operands; }

  struct Term {
    int node = 0;
    double factor = 1;
  };
  /// Sum or difference of two operands that share positions, as constant + sum of factor * node.
  struct Affine {
    double constant = 0;
    std::vector<Term> terms;
  };
  /// How node i, a sum, or the difference of a comparison's operands, is bounded as a whole; null: operand by operand.
  const Affine* affine(std::size_t i) const {
    const int affine = steps_[i].affine;
    return affine < 0 ? nullptr : &affines_[static_cast<std::size_t>(affine)];
  }

 private:
  struct Step {
    const Node* node = nullptr;
    std::array<int, 3> first{};  // the first three operands, at hand
    int affine = -1;             // into affines_; -1: operand by operand is just as tight
    ExprType operand_type = ExprType::floating;
    bool same_operands = false;
    Interval leaf;  // constants; loads and scalars: what their type can hold
    std::vector<int> operands;
  };
  class Preparation;

  Interval run(const Step& step, const Box& box, const Interval* values) const;
  Interval difference(const Step& step, const Interval* values) const;
  Interval load(const Step& step, const Box& box, const Interval* values) const;

  NodePtr root_;
  std::vector<const Node*> nodes_;
  std::vector<Step> steps_;
  std::vector<Affine> affines_;
  // steps to run again when a variable changes
  std::array<std::vector<int>, kNumVariables> dependents_;
};

}  // namespace fovea::expr
