#include "expr/visible_score.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "expr/kv_limits.hpp"
#include "expr/passes.hpp"

namespace fovea::expr {
namespace {

/// Ints that no key which is seen lies behind, and those that none lies before.
struct Bounds {
  std::vector<NodePtr> last, first;

  void add(const NodePtr& mask) {
    if (mask->op == Op::logical_and) {
      for (const NodePtr& operand : mask->operands) add(operand);
    } else if (const std::optional<KvLimits> limits = kv_limits(mask)) {
      if (limits->last != nullptr) last.push_back(limits->last);
      if (limits->first != nullptr) first.push_back(limits->first);
    }
  }
};

bool is_kv_idx(const Node& node) {
  return node.op == Op::variable && node.variable == Variable::kv_idx;
}

bool has(const std::vector<NodePtr>& bounds, const Node& node) {
  return std::ranges::any_of(bounds,
                             [&](const NodePtr& bound) { return bound->digest == node.digest; });
}

/// Of a difference of a key and a bound, which does not wrap: the key is an index. 0: either.
int sign_of(const Node& difference, const Bounds& bounds) {
  if (difference.op != Op::sub || difference.type != ExprType::integer) return 0;
  const Node& from = *difference.operands[0];
  const Node& taken = *difference.operands[1];
  if (is_kv_idx(taken)) return has(bounds.last, from) ? 1 : has(bounds.first, from) ? -1 : 0;
  if (is_kv_idx(from)) return has(bounds.first, taken) ? 1 : has(bounds.last, taken) ? -1 : 0;
  return 0;
}

}  // namespace

NodePtr score_where_visible(const NodePtr& score, const NodePtr& mask) {
  Bounds bounds;
  bounds.add(mask);
  if (bounds.last.empty() && bounds.first.empty()) return score;
  return simplify(rewrite(score, [&](const NodePtr& node) -> NodePtr {
    if (node->op != Op::abs) return nullptr;
    const NodePtr& of = node->operands[0];
    const int sign = sign_of(of->op == Op::to_float ? *of->operands[0] : *of, bounds);
    if (sign == 0) return nullptr;
    return sign > 0 ? of : make(Op::neg, {of});
  }));
}

}  // namespace fovea::expr
