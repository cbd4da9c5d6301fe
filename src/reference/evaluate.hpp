// The oracle's own evaluator of formulas and of their derivatives: walks the nodes, one value each.
// It shares nothing with the vector tape, nor with the symbolic derivative.
//
// A double holds a value of any type exactly: fp64, a 32-bit int, or a bool as 0 and 1.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "fovea/expr.hpp"

#include "expr/node.hpp"
#include "reference/partials.hpp"

namespace fovea::reference {

/// Where a formula is evaluated: a value for every variable.
struct Position {
  double score = 0;
  std::int64_t batch = 0, q_head = 0, kv_head = 0;
  std::int64_t q_idx = 0, kv_idx = 0;
  std::int64_t seqlen_q = 0, seqlen_kv = 0;
};

/// f64 is the oracle. f32 rounds every float result to fp32: what the same formula loses in the
/// kernels' arithmetic.
enum class Precision : std::uint8_t { f64, f32 };

/// A captured float tensor, or a captured float scalar: what a formula can be differentiated by.
struct Slot {
  std::string name;
  std::size_t num_elements = 1;
};

/// A number for each element of each slot, row-major: gradients, or a direction.
using SlotValues = std::vector<std::vector<double>>;

/// How a value moves along a line: to first and to second order.
struct Motion {
  double first = 0, second = 0;
};

/// What a sum of a value and its tangent is differentiated with.
struct TangentSeeds {
  double value = 0, tangent = 0;
};

/// One program, prepared for many positions. Not thread safe: it keeps the values of its nodes
/// between calls, and the derivatives below are those where it was last evaluated.
///
/// What a derivative of 0 flows through adds exactly 0, infinite slopes included. A load passes it to
/// the element that it read, a select to the chosen side; kinks are listed in partials.hpp.
class Evaluator {
 public:
  explicit Evaluator(const Program& program, Precision precision = Precision::f64);

  double operator()(const Position& position);

  const std::vector<Slot>& slots() const { return slots_; }
  SlotValues zeros() const;

  /// Reverse mode: adds seed · d value / d x to the element of `gradients` of each x that was read;
  /// returns seed · d value / d score.
  double pull_back(double seed, SlotValues& gradients);
  /// Forward mode: how the value moves when score and captured floats do.
  double push_forward(double score_tangent, const SlotValues& tangents);
  /// Reverse mode over forward mode, of seeds.value · value + seeds.tangent · value', value' as push_forward has it:
  /// adds the derivatives by captured floats to `gradients`; returns those by the score (value) and by score_tangent
  /// (tangent).
  TangentSeeds pull_back_tangent(const TangentSeeds& seeds, double score_tangent,
                                 const SlotValues& tangents, SlotValues& gradients);
  /// d value / d score and d² value / d score².
  Motion derivatives_by_score();

 private:
  /// A node whose operands are earlier steps.
  struct Step {
    const expr::Node* node = nullptr;
    std::vector<std::size_t> operands;
    TensorView tensor;  // of a load
    double scalar = 0;  // of a scalar
    std::optional<std::size_t> slot;
    std::optional<std::size_t> element;  // of the slot, that was read last; none where it is empty
  };
  /// Operands of a step that are floats and move its value: none, one or two.
  struct Sources {
    int count = 0;
    std::size_t steps[2] = {};
    double slopes[2] = {};
  };

  std::size_t visit(const expr::NodePtr& node, const Captures& captures);
  std::optional<std::size_t> slot_of(const expr::Node& node, const TensorView& tensor);
  double compute(Step& step, const Position& position);
  double load(Step& step);
  double rounded(double value) const;
  bool is_arithmetic(const Step& step) const;
  Application application(std::size_t step) const;
  Sources sources(std::size_t step) const;

  expr::NodePtr root_;
  Precision precision_;
  std::vector<Slot> slots_;
  std::vector<Step> steps_;
  std::vector<double> values_;    // of each step, at the present position
  std::vector<double> adjoints_;  // of each step: d result / d step, or in forward mode its motion
  std::vector<double> second_;    // of each step: its motion to second order
  std::unordered_map<const expr::Node*, std::size_t> step_of_;
};

}  // namespace fovea::reference
