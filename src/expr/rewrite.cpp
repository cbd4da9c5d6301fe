#include <unordered_map>

#include "expr/passes.hpp"

namespace fovea::expr {

NodePtr rewrite(const NodePtr& root, const std::function<NodePtr(const NodePtr&)>& replace) {
  return rewrite_beside(
      root, [&](const NodePtr& /*node*/, const NodePtr& rebuilt) { return replace(rebuilt); });
}

NodePtr rewrite_beside(const NodePtr& root,
                       const std::function<NodePtr(const NodePtr&, const NodePtr&)>& replace) {
  std::unordered_map<Digest, NodePtr, DigestHash> rewritten;
  const auto rebuilt = [&](const NodePtr& node) {
    bool is_changed = false;
    std::vector<NodePtr> operands;
    operands.reserve(node->operands.size());
    for (const NodePtr& operand : node->operands) {
      operands.push_back(rewritten.at(operand->digest));
      is_changed |= operands.back() != operand;  // or bound to something else, under one digest
    }
    return is_changed ? with_operands(*node, std::move(operands)) : node;
  };
  const auto finish = [&](const NodePtr& node) {
    NodePtr result = rebuilt(node);
    if (NodePtr replacement = replace(node, result)) result = std::move(replacement);
    rewritten.emplace(node->digest, std::move(result));
  };

  struct Visit {
    NodePtr node;
    std::size_t next_operand;
  };
  std::vector<Visit> stack{{root, 0}};
  while (!stack.empty()) {
    Visit& visit = stack.back();
    if (visit.next_operand < visit.node->operands.size()) {
      const NodePtr operand = visit.node->operands[visit.next_operand++];
      if (!rewritten.contains(operand->digest)) stack.push_back({operand, 0});
      continue;
    }
    finish(visit.node);
    stack.pop_back();
  }
  return rewritten.at(root->digest);
}

NodePtr substitute_score(const NodePtr& root, const NodePtr& score) {
  return rewrite(root, [&](const NodePtr& node) {
    const bool is_score = node->op == Op::variable && node->variable == Variable::score;
    return is_score ? score : nullptr;
  });
}

bool reads(const Node& root, Variable variable) {
  for (const Node* node : topological(root)) {
    if (node->op == Op::variable && node->variable == variable) return true;
  }
  return false;
}

}  // namespace fovea::expr
