#include "expr/softcap.hpp"

#include <algorithm>

#include "expr/passes.hpp"

namespace fovea::expr {
namespace {

bool is_score(const Node& node) {
  return node.op == Op::variable && node.variable == Variable::score;
}

bool is_one_for_all(const Node& cap) {
  return std::ranges::none_of(topological(cap), [](const Node* node) {
    const bool is_number = node->op == Op::load && node->operands.empty();
    return node->op == Op::variable || (node->op == Op::load && !is_number);
  });
}

/// cap * tanh(score / cap), for the cap that is given.
bool caps_by(const Node& factor, const Node& cap) {
  if (factor.op != Op::tanh || factor.operands[0]->op != Op::div) return false;
  const Node& quotient = *factor.operands[0];
  return is_score(*quotient.operands[0]) && quotient.operands[1]->digest == cap.digest;
}

}  // namespace

NodePtr cap_of(const NodePtr& score) {
  if (score->op != Op::mul) return nullptr;
  for (std::size_t i = 0; i < 2; ++i) {
    const NodePtr& cap = score->operands[i];
    if (caps_by(*score->operands[1 - i], *cap) && is_one_for_all(*cap)) return cap;
  }
  return nullptr;
}

}  // namespace fovea::expr
