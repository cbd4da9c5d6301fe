#include "expr/position_steps.hpp"

#include <limits>
#include <numeric>
#include <unordered_map>

namespace fovea::expr {
namespace {

/// Steps of what a node reads; 0: it does not read that position.
struct Reads {
  PositionSteps steps{.q = 0, .kv = 0};
  // A position, or one rounded down to its multiples and divided by a step
  bool is_quotient = false;
};

/// What is 1 from 2^31 on is no divisor of a position.
constexpr std::int64_t kMostSteps = std::numeric_limits<std::int32_t>::max();

/// n of `x // n` and `x >> log2(n)`; 0 where the node is no such quotient.
std::int64_t divisor(const Node& node) {
  if (node.op != Op::floor_div && node.op != Op::shr) return 0;
  const Node& by = *node.operands[1];
  if (node.type != ExprType::integer || by.op != Op::constant || by.int_value < 0) return 0;
  if (node.op == Op::floor_div) return by.int_value;
  return by.int_value < 31 ? std::int64_t{1} << by.int_value : 0;
}

Reads reads_of_variable(Variable variable) {
  if (variable == Variable::q_idx) return {.steps = {.q = 1, .kv = 0}, .is_quotient = true};
  if (variable == Variable::kv_idx) return {.steps = {.q = 0, .kv = 1}, .is_quotient = true};
  return {};
}

/// (x // m) // n is x // (m * n), for positions, which are never negative.
Reads divided(const Reads& position, std::int64_t by) {
  const PositionSteps steps{.q = position.steps.q * by, .kv = position.steps.kv * by};
  if (steps.q > kMostSteps || steps.kv > kMostSteps) return {.steps = position.steps};
  return {.steps = steps, .is_quotient = true};
}

PositionSteps common(const PositionSteps& a, const PositionSteps& b) {
  return {.q = std::gcd(a.q, b.q), .kv = std::gcd(a.kv, b.kv)};
}

/// visit(node, steps of all that it reads), operands before users.
template <typename Visit>
void for_each_node(const Node& root, const Visit& visit) {
  std::unordered_map<Digest, Reads, DigestHash> reads;
  for (const Node* node : topological(root)) {
    Reads mine = node->op == Op::variable ? reads_of_variable(node->variable) : Reads{};
    for (const NodePtr& operand : node->operands)
      mine.steps = common(mine.steps, reads.at(operand->digest).steps);
    if (const std::int64_t by = divisor(*node); by > 0) {
      const Reads& position = reads.at(node->operands[0]->digest);
      if (position.is_quotient) mine = divided(position, by);
    }
    visit(*node, mine.steps);
    reads.emplace(node->digest, mine);
  }
}

}  // namespace

PositionSteps position_steps(const Node& mask) {
  PositionSteps of_loads{.q = 0, .kv = 0};
  for_each_node(mask, [&](const Node& node, const PositionSteps& steps) {
    const bool reads_both = steps.q > 0 && steps.kv > 0;
    if (node.op == Op::load && reads_both) of_loads = common(of_loads, steps);
  });
  return of_loads.q > 0 ? of_loads : PositionSteps{};
}

PositionSteps mask_steps(const Node& mask) {
  PositionSteps last;
  for_each_node(mask, [&](const Node&, const PositionSteps& steps) { last = steps; });
  return last;
}

}  // namespace fovea::expr
