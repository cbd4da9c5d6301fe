// Exact rewrites: small rules on one node whose operands are simple already. A rule returns null
// where it does not apply.
//
// Floats keep their NaN and signed zeros: x + 0.0 stays (-0.0 + 0.0 is 0.0), x - 0.0 goes; x * 0.0
// stays. Only operations that IEEE rounds once are folded, in fp32; exp and its kin are left to the
// backend that would have computed them.
#include <algorithm>
#include <bit>
#include <cmath>

#include "expr/passes.hpp"

namespace fovea::expr {

namespace {

bool is_constant(const Node& node) { return node.op == Op::constant; }

bool is_int(const Node& node, std::int64_t value) {
  return is_constant(node) && node.type == ExprType::integer && node.int_value == value;
}

bool is_bool(const Node& node, bool value) {
  return is_constant(node) && node.type == ExprType::boolean && (node.int_value != 0) == value;
}

// By bits: -0.0 is not 0.0.
bool is_float(const Node& node, float value) {
  return is_constant(node) && node.type == ExprType::floating &&
         std::bit_cast<std::uint32_t>(static_cast<float>(node.float_value)) ==
             std::bit_cast<std::uint32_t>(value);
}

bool is_comparison(Op op) { return Op::lt <= op && op <= Op::ne; }

bool same(const NodePtr& a, const NodePtr& b) { return a->digest == b->digest; }

NodePtr make_int(std::int64_t value) {
  return make_constant(std::int64_t{static_cast<std::int32_t>(static_cast<std::uint32_t>(value))});
}

std::int64_t floor_quotient(std::int64_t a, std::int64_t b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

template <typename T>
bool compare(Op op, T a, T b) {
  switch (op) {
    case Op::lt:
      return a < b;
    case Op::le:
      return a <= b;
    case Op::gt:
      return a > b;
    case Op::ge:
      return a >= b;
    case Op::eq:
      return a == b;
    default:
      return a != b;
  }
}

// ---- constants ----

NodePtr fold_ints(Op op, std::int64_t a, std::int64_t b) {
  switch (op) {
    case Op::add:
      return make_int(a + b);
    case Op::sub:
      return make_int(a - b);
    case Op::mul:
      return make_int(a * b);
    case Op::floor_div:
      return make_int(b == 0 ? 0 : floor_quotient(a, b));
    case Op::mod:
      return make_int(b == 0 ? 0 : a - b * floor_quotient(a, b));
    case Op::neg:
      return make_int(-a);
    case Op::abs:
      return make_int(a < 0 ? -a : a);
    case Op::min:
      return make_int(std::min(a, b));
    case Op::max:
      return make_int(std::max(a, b));
    case Op::bit_and:
      return make_int(a & b);
    case Op::bit_or:
      return make_int(a | b);
    case Op::bit_xor:
      return make_int(a ^ b);
    case Op::bit_not:
      return make_int(~a);
    case Op::shl:
      return make_int(static_cast<std::int64_t>(static_cast<std::uint64_t>(a) << (b & 31)));
    case Op::shr:
      return make_int(a >> (b & 31));
    default:
      return nullptr;
  }
}

NodePtr fold_floats(Op op, float a, float b) {
  const auto made = [](float value) { return make_constant(static_cast<double>(value)); };
  const bool is_ordered = !std::isnan(a) && !std::isnan(b) && !(a == 0 && b == 0);
  switch (op) {
    case Op::add:
      return made(a + b);
    case Op::sub:
      return made(a - b);
    case Op::mul:
      return made(a * b);
    case Op::div:
      return b == 0 ? nullptr : made(a / b);
    case Op::neg:
      return made(-a);
    case Op::abs:
      return made(std::fabs(a));
    case Op::floor:
      return made(std::floor(a));
    case Op::ceil:
      return made(std::ceil(a));
    case Op::trunc:
      return made(std::trunc(a));
    case Op::round:
      return made(std::nearbyint(a));
    case Op::min:
      return is_ordered ? made(std::min(a, b)) : nullptr;
    case Op::max:
      return is_ordered ? made(std::max(a, b)) : nullptr;
    default:
      return nullptr;
  }
}

NodePtr fold(const Node& node) {
  const bool all_constant =
      std::all_of(node.operands.begin(), node.operands.end(),
                  [](const NodePtr& operand) { return is_constant(*operand); });
  if (node.operands.empty() || !all_constant || node.op == Op::load || node.op == Op::select) {
    return nullptr;
  }
  if (node.op == Op::to_int || node.op == Op::to_float) return make(node.op, node.operands);
  const Node& a = *node.operands.front();
  const Node& b = *node.operands.back();
  if (a.type == ExprType::floating) {
    const auto x = static_cast<float>(a.float_value);
    const auto y = static_cast<float>(b.float_value);
    return is_comparison(node.op) ? make_constant(compare(node.op, x, y))
                                  : fold_floats(node.op, x, y);
  }
  if (is_comparison(node.op)) return make_constant(compare(node.op, a.int_value, b.int_value));
  return a.type == ExprType::integer ? fold_ints(node.op, a.int_value, b.int_value) : nullptr;
}

// ---- arithmetic ----

// (x + c) + d and (x - c) + d on ints, which wrap: one constant is enough.
NodePtr join_int_constants(const Node& node) {
  const Node& inner = *node.operands[0];
  const Node& outer = *node.operands[1];
  const bool fits = (inner.op == Op::add || inner.op == Op::sub) && is_constant(outer) &&
                    is_constant(*inner.operands[1]);
  if (!fits) return nullptr;
  const std::int64_t first =
      inner.op == Op::add ? inner.operands[1]->int_value : -inner.operands[1]->int_value;
  const std::int64_t second = node.op == Op::add ? outer.int_value : -outer.int_value;
  const NodePtr total = make_int(first + second);
  const bool is_subtraction = total->int_value < 0 && total->int_value != INT32_MIN;
  if (is_subtraction) return make(Op::sub, {inner.operands[0], make_int(-total->int_value)});
  return make(Op::add, {inner.operands[0], total});
}

NodePtr int_arithmetic(const Node& node) {
  const NodePtr& a = node.operands.front();
  const NodePtr& b = node.operands.back();
  switch (node.op) {
    case Op::add:
      if (is_int(*a, 0)) return b;
      if (is_int(*b, 0)) return a;
      return join_int_constants(node);
    case Op::sub:
      if (is_int(*b, 0)) return a;
      if (same(a, b)) return make_int(0);
      return join_int_constants(node);
    case Op::mul:
      if (is_int(*a, 1) || is_int(*b, 0)) return b;
      if (is_int(*b, 1) || is_int(*a, 0)) return a;
      return nullptr;
    case Op::floor_div:
      if (is_int(*b, 1) || is_int(*a, 0)) return a;
      return is_int(*b, 0) ? b : nullptr;
    case Op::mod:
      if (is_int(*a, 0) || is_int(*b, 0) || is_int(*b, 1) || same(a, b)) return make_int(0);
      return nullptr;
    case Op::bit_and:
      if (same(a, b) || is_int(*a, 0) || is_int(*b, -1)) return a;
      return is_int(*b, 0) || is_int(*a, -1) ? b : nullptr;
    case Op::bit_or:
      if (same(a, b) || is_int(*a, -1) || is_int(*b, 0)) return a;
      return is_int(*b, -1) || is_int(*a, 0) ? b : nullptr;
    case Op::bit_xor:
      if (is_int(*a, 0)) return b;
      if (is_int(*b, 0)) return a;
      return same(a, b) ? make_int(0) : nullptr;
    case Op::shl:
    case Op::shr:
      if (is_int(*a, 0)) return a;
      return is_constant(*b) && (b->int_value & 31) == 0 ? a : nullptr;
    case Op::bit_not:
      return a->op == Op::bit_not ? a->operands[0] : nullptr;
    default:
      return nullptr;
  }
}

bool rounds_to_whole(Op op) {
  return op == Op::floor || op == Op::ceil || op == Op::trunc || op == Op::round;
}

NodePtr float_arithmetic(const Node& node) {
  const NodePtr& a = node.operands.front();
  const NodePtr& b = node.operands.back();
  switch (node.op) {
    case Op::add:
      if (is_float(*a, -0.0F)) return b;
      return is_float(*b, -0.0F) ? a : nullptr;
    case Op::sub:
      return is_float(*b, 0.0F) ? a : nullptr;
    case Op::mul:
      if (is_float(*a, 1.0F)) return b;
      return is_float(*b, 1.0F) ? a : nullptr;
    case Op::div:
      return is_float(*b, 1.0F) ? a : nullptr;
    case Op::floor:
    case Op::ceil:
    case Op::trunc:
    case Op::round:
      return rounds_to_whole(a->op) || a->op == Op::to_float ? a : nullptr;
    default:
      return nullptr;
  }
}

NodePtr arithmetic(const Node& node) {
  const NodePtr& a = node.operands.front();
  const bool is_int_op = node.operands.front()->type == ExprType::integer;
  switch (node.op) {
    case Op::neg:
      return a->op == Op::neg ? a->operands[0] : nullptr;
    case Op::abs:
      if (a->op == Op::neg) return make(Op::abs, {a->operands[0]});
      return a->op == Op::abs ? a : nullptr;
    case Op::min:
    case Op::max:
      return same(a, node.operands[1]) ? a : nullptr;
    default:
      return is_int_op ? int_arithmetic(node) : float_arithmetic(node);
  }
}

// ---- bools ----

Op opposite(Op comparison) {
  switch (comparison) {
    case Op::lt:
      return Op::ge;
    case Op::le:
      return Op::gt;
    case Op::gt:
      return Op::le;
    case Op::ge:
      return Op::lt;
    case Op::eq:
      return Op::ne;
    default:
      return Op::eq;
  }
}

bool is_negation_of(const NodePtr& a, const NodePtr& b) {
  return (a->op == Op::logical_not && same(a->operands[0], b)) ||
         (b->op == Op::logical_not && same(b->operands[0], a));
}

NodePtr negation(const Node& node) {
  const NodePtr& a = node.operands[0];
  if (is_constant(*a)) return make_constant(a->int_value == 0);
  if (a->op == Op::logical_not) return a->operands[0];
  if (!is_comparison(a->op)) return nullptr;
  // With a NaN, x < y and x >= y are both false: orderings of floats have no opposite.
  const bool is_ordering = a->op != Op::eq && a->op != Op::ne;
  if (is_ordering && a->operands[0]->type == ExprType::floating) return nullptr;
  return make(opposite(a->op), a->operands);
}

NodePtr conjunction(const Node& node) {
  const NodePtr& a = node.operands[0];
  const NodePtr& b = node.operands[1];
  if (is_bool(*a, false) || is_bool(*b, true) || same(a, b)) return a;
  if (is_bool(*b, false) || is_bool(*a, true)) return b;
  return is_negation_of(a, b) ? make_constant(false) : nullptr;
}

NodePtr disjunction(const Node& node) {
  const NodePtr& a = node.operands[0];
  const NodePtr& b = node.operands[1];
  if (is_bool(*a, true) || is_bool(*b, false) || same(a, b)) return a;
  if (is_bool(*b, true) || is_bool(*a, false)) return b;
  return is_negation_of(a, b) ? make_constant(true) : nullptr;
}

// flag == true and the like.
NodePtr bool_equality(const Node& node) {
  const NodePtr& a = node.operands[0];
  const NodePtr& b = node.operands[1];
  if (!is_constant(*a) && !is_constant(*b)) return nullptr;
  const NodePtr& flag = is_constant(*a) ? b : a;
  const NodePtr& constant = is_constant(*a) ? a : b;
  const bool is_flag_itself = (node.op == Op::eq) == (constant->int_value != 0);
  return is_flag_itself ? flag : make(Op::logical_not, {flag});
}

NodePtr comparison(const Node& node) {
  const ExprType type = node.operands[0]->type;
  if (same(node.operands[0], node.operands[1])) {
    const bool is_strict = node.op == Op::lt || node.op == Op::gt;
    if (is_strict) return make_constant(false);
    if (type != ExprType::floating) return make_constant(node.op != Op::ne);
  }
  return type == ExprType::boolean ? bool_equality(node) : nullptr;
}

NodePtr selection(const Node& node) {
  const NodePtr& condition = node.operands[0];
  const NodePtr& a = node.operands[1];
  const NodePtr& b = node.operands[2];
  if (is_constant(*condition)) return condition->int_value != 0 ? a : b;
  if (same(a, b)) return a;
  if (is_bool(*a, true) && is_bool(*b, false)) return condition;
  if (is_bool(*a, false) && is_bool(*b, true)) return make(Op::logical_not, {condition});
  if (condition->op == Op::logical_not) return make(Op::select, {condition->operands[0], b, a});
  return nullptr;
}

// A bool is 0 or 1 in every type: the step between can go.
NodePtr conversion(const Node& node) {
  const Node& inner = *node.operands[0];
  const bool is_conversion = inner.op == Op::to_int || inner.op == Op::to_float;
  if (!is_conversion || inner.operands[0]->type != ExprType::boolean) return nullptr;
  return make(node.op, inner.operands);
}

NodePtr simpler(const Node& node) {
  if (node.operands.empty() || node.op == Op::load) return nullptr;
  if (NodePtr constant = fold(node)) return constant;
  if (is_comparison(node.op)) return comparison(node);
  switch (node.op) {
    case Op::logical_and:
      return conjunction(node);
    case Op::logical_or:
      return disjunction(node);
    case Op::logical_not:
      return negation(node);
    case Op::select:
      return selection(node);
    case Op::to_int:
    case Op::to_float:
      return conversion(node);
    default:
      return arithmetic(node);
  }
}

}  // namespace

NodePtr simplify(const NodePtr& root) {
  NodePtr result = rewrite(root, [](const NodePtr& node) -> NodePtr {
    // Each rule removes nodes or brings a node nearer to its one form, so this ends.
    NodePtr simplest = node;
    while (NodePtr next = simpler(*simplest)) simplest = std::move(next);
    return simplest;
  });
  verify(*result, "simplify");
  return result;
}

}  // namespace fovea::expr
