#include "expr/kv_limits.hpp"

#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

#include "expr/passes.hpp"

namespace fovea::expr {
namespace {

constexpr std::int64_t kMostPositions = std::int64_t{1} << 28U;

bool is_variable(const Node& node, Variable variable) {
  return node.op == Op::variable && node.variable == variable;
}

bool is_free_of_keys(const Node& node) { return !reads(node, Variable::kv_idx); }

NodePtr integer(std::int64_t value) { return make_constant(value); }

/// The next int up or down; the last one of all stays.
NodePtr above(const NodePtr& x) {
  const NodePtr most = integer(std::numeric_limits<std::int32_t>::max());
  return make(Op::select, {make(Op::eq, {x, most}), most, make(Op::add, {x, integer(1)})});
}
NodePtr below(const NodePtr& x) {
  const NodePtr least = integer(std::numeric_limits<std::int32_t>::min());
  return make(Op::select, {make(Op::eq, {x, least}), least, make(Op::sub, {x, integer(1)})});
}

Op mirrored(Op op) {
  switch (op) {
    case Op::lt:
      return Op::gt;
    case Op::le:
      return Op::ge;
    case Op::gt:
      return Op::lt;
    case Op::ge:
      return Op::le;
    default:
      return op;
  }
}

class Finder {
 public:
  bool add(const NodePtr& node) {
    if (node->op == Op::logical_and) return add(node->operands[0]) && add(node->operands[1]);
    if (node->operands.size() != 2) return false;
    return add(node->op, node->operands[0], node->operands[1]) ||
           add(mirrored(node->op), node->operands[1], node->operands[0]);
  }
  KvLimits limits() const { return limits_; }

 private:
  /// a op b, where a is kv_idx, or its distance from q_idx and b a constant: no difference of positions wraps.
  bool add(Op op, const NodePtr& a, const NodePtr& b) {
    if (op != Op::lt && op != Op::le && op != Op::gt && op != Op::ge && op != Op::eq) return false;
    if (a->type != ExprType::integer || !is_free_of_keys(*b) || reads(*b, Variable::score))
      return false;
    if (is_variable(*a, Variable::kv_idx)) return compare(op, b);
    const bool is_small = b->op == Op::constant && std::abs(b->int_value) < kMostPositions;
    if (a->op != Op::sub || !is_small) return false;
    const NodePtr& from = a->operands[0];
    const NodePtr& taken = a->operands[1];
    if (is_variable(*from, Variable::q_idx) && is_variable(*taken, Variable::kv_idx))
      return compare(mirrored(op), make(Op::sub, {from, b}));
    if (is_variable(*from, Variable::kv_idx) && is_variable(*taken, Variable::q_idx))
      return compare(op, make(Op::add, {taken, b}));
    return false;
  }

  /// kv_idx op limit.
  bool compare(Op op, const NodePtr& limit) {
    if (op == Op::ge || op == Op::eq) combine(limits_.first, Op::max, limit);
    if (op == Op::gt) combine(limits_.first, Op::max, above(limit));
    if (op == Op::le || op == Op::eq) combine(limits_.last, Op::min, limit);
    if (op == Op::lt) combine(limits_.last, Op::min, below(limit));
    return true;
  }

  static void combine(NodePtr& side, Op op, const NodePtr& limit) {
    side = side == nullptr ? limit : make(op, {side, limit});
  }

  KvLimits limits_;
};

}  // namespace

std::optional<KvLimits> kv_limits(const NodePtr& mask) {
  Finder finder;
  if (!finder.add(mask)) return std::nullopt;
  KvLimits limits = finder.limits();
  for (NodePtr* side : {&limits.first, &limits.last}) {
    if (*side != nullptr) *side = simplify(*side);
  }
  return limits;
}

}  // namespace fovea::expr
