// The oracle's own evaluator of formulas: walks the nodes, one value each. It shares nothing with
// the vector tape.
//
// A double holds a value of any type exactly: fp64, a 32-bit int, or a bool as 0 and 1.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "fovea/expr.hpp"

#include "expr/node.hpp"

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

/// One program, prepared for many positions. Not thread safe: it keeps the values of its nodes
/// between calls.
class Evaluator {
 public:
  explicit Evaluator(const Program& program, Precision precision = Precision::f64);

  double operator()(const Position& position);

 private:
  /// A node whose operands are earlier steps.
  struct Step {
    const expr::Node* node = nullptr;
    std::vector<std::size_t> operands;
    TensorView tensor;  // of a load
    double scalar = 0;  // of a scalar
  };

  std::size_t visit(const expr::NodePtr& node, const Captures& captures);
  double compute(const Step& step, const Position& position) const;
  double load(const Step& step) const;

  expr::NodePtr root_;
  Precision precision_;
  std::vector<Step> steps_;
  std::vector<double> values_;  // of each step, at the present position
  std::unordered_map<const expr::Node*, std::size_t> step_of_;
};

}  // namespace fovea::reference
