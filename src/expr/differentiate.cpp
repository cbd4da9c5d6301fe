// Forward mode: one walk from leaves to root gives every node its tangent, null where that is
// identically 0. The derivative by a leaf is the tangent of the root where that leaf alone moves,
// at speed 1.
//
// Reverse mode would share more between leaves, but its adjoints meet the factors of sides that
// were not chosen: 0 · ∞ would have to be kept out of sums. Programs capture a few tensors.
#include "expr/differentiate.hpp"

#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <numbers>
#include <unordered_map>
#include <unordered_set>

#include "core/check.hpp"
#include "expr/passes.hpp"

namespace fovea::expr {

namespace {

/// The tangent of a load, scalar or variable; null: it stands still.
using LeafTangent = std::function<NodePtr(const NodePtr&)>;

bool is_constant(const NodePtr& node, double value) {
  return node->op == Op::constant && node->type == ExprType::floating && node->float_value == value;
}

bool same(const NodePtr& a, const NodePtr& b) { return a->digest == b->digest; }

NodePtr or_zero(const NodePtr& tangent) { return tangent ? tangent : make_constant(0.0); }

NodePtr negated(const NodePtr& node) {
  return node->op == Op::neg ? node->operands[0] : make(Op::neg, {node});
}

// ---- sums and products of tangents ----

/// c ? x : 0 and c ? 0 : y.
bool are_sides_of_one_choice(const NodePtr& a, const NodePtr& b) {
  return a->op == Op::select && b->op == Op::select && same(a->operands[0], b->operands[0]) &&
         is_constant(a->operands[2], 0) && is_constant(b->operands[1], 0);
}

NodePtr sum(const NodePtr& a, const NodePtr& b) {
  if (!a) return b;
  if (!b) return a;
  if (are_sides_of_one_choice(a, b)) {
    return make(Op::select, {a->operands[0], a->operands[1], b->operands[2]});
  }
  if (b->op == Op::neg) return make(Op::sub, {a, b->operands[0]});
  if (a->op == Op::neg) return make(Op::sub, {b, a->operands[0]});
  return make(Op::add, {a, b});
}

bool is_reciprocal_of(const NodePtr& node, const NodePtr& value) {
  return node->op == Op::div && is_constant(node->operands[0], 1) && same(node->operands[1], value);
}

/// x of x · (1 / value): the softcap c · tanh(score / c) has such a pair, per score. Null: no pair.
NodePtr cancelled(const NodePtr& product, const NodePtr& value) {
  if (is_reciprocal_of(product, value)) return make_constant(1.0);
  if (product->op != Op::mul) return nullptr;
  for (const int side : {0, 1}) {
    const auto i = static_cast<std::size_t>(side);
    if (is_reciprocal_of(product->operands[i], value)) return product->operands[1 - i];
  }
  return nullptr;
}

/// A choice that has 0 (or ±1, which costs nothing) on one side.
bool is_guard(const NodePtr& node) {
  if (node->op != Op::select) return false;
  const auto is_unit = [](const NodePtr& side) {
    return is_constant(side, 0) || is_constant(side, 1) || is_constant(side, -1);
  };
  return is_unit(node->operands[1]) || is_unit(node->operands[2]);
}

/// Products go into that many nested choices. Unbounded, a long chain of choices would make a
/// derivative of quadratic size; deeper down, 0 · ∞ is possible.
constexpr int kMaxGuards = 8;

/// tangent · factor; null where the factor is 0 by rule.
NodePtr product(const NodePtr& tangent, const NodePtr& factor, int guards = kMaxGuards) {
  if (is_constant(tangent, 0) || is_constant(factor, 0)) return nullptr;
  if (is_constant(factor, 1)) return tangent;
  if (is_constant(tangent, 1)) return factor;
  if (is_constant(factor, -1)) return negated(tangent);
  if (is_constant(tangent, -1)) return negated(factor);
  for (const auto& [choice, other] : {std::pair(tangent, factor), std::pair(factor, tangent)}) {
    if (guards == 0 || !is_guard(choice)) continue;
    const NodePtr yes = product(choice->operands[1], other, guards - 1);
    const NodePtr no = product(choice->operands[2], other, guards - 1);
    return make(Op::select, {choice->operands[0], or_zero(yes), or_zero(no)});
  }
  if (factor->op == Op::neg) return negated(product(tangent, factor->operands[0], guards));
  if (tangent->op == Op::neg) return negated(product(tangent->operands[0], factor, guards));
  if (NodePtr rest = cancelled(tangent, factor)) return rest;
  return make(Op::mul, {tangent, factor});
}

// ---- the rule of each op ----

Expr chosen_if(const Expr& condition) { return select(condition, 1.0, 0.0); }

/// pow(a, b) by a. Common constant exponents get by without a power.
Expr power_by_base(const Expr& a, const Expr& b) {
  const Expr slope = b * pow(a, b - 1.0);
  if (b.node().op != Op::constant) return select(b == 0.0, 0.0, slope);
  if (is_constant(b.shared(), 0)) return 0.0;
  if (is_constant(b.shared(), 1)) return 1.0;
  return is_constant(b.shared(), 2) ? b * a : slope;
}

Expr power_by_exponent(const Expr& power, const Expr& a, const Expr& b) {
  return select(a == 0.0 && b >= 0.0, 0.0, power * log(a));
}

/// d node / d operand i, both floats. 0 and 1 are recognised where it is used.
Expr partial_derivative(const NodePtr& node, std::size_t i) {
  const Expr y(node);
  const Expr a(node->operands.front());
  const Expr b(node->operands.back());
  const bool is_by_a = i == 0;
  switch (node->op) {
    case Op::add:
      return 1.0;
    case Op::sub:
      return is_by_a ? 1.0 : -1.0;
    case Op::mul:
      return is_by_a ? b : a;
    case Op::div:
      return is_by_a ? 1.0 / b : -(y / b);
    case Op::floor_div:
    case Op::floor:
    case Op::ceil:
    case Op::trunc:
    case Op::round:
      return 0.0;
    case Op::fmod:
      return is_by_a ? Expr(1.0) : -trunc(a / b);
    case Op::mod:
      return is_by_a ? Expr(1.0) : -floor_div(a, b);
    case Op::neg:
      return -1.0;
    case Op::min:
      return is_by_a ? chosen_if(a <= b) : select(a <= b, 0.0, 1.0);
    case Op::max:
      return is_by_a ? chosen_if(a >= b) : select(a >= b, 0.0, 1.0);
    case Op::abs:
      return select(a > 0.0, 1.0, select(a < 0.0, -1.0, 0.0));
    case Op::exp:
      return Expr(node);
    case Op::exp2:
      return y * std::numbers::ln2;
    case Op::log:
      return 1.0 / a;
    case Op::log2:
      return std::numbers::log2e / a;
    case Op::tanh:
      return 1.0 - y * y;
    case Op::sqrt:
      return 0.5 / y;
    case Op::rsqrt:
      return -0.5 * (y * y * y);
    case Op::sigmoid:
      return y * (1.0 - y);
    case Op::sin:
      return cos(a);
    case Op::cos:
      return -sin(a);
    case Op::tan:
      return 1.0 + y * y;
    case Op::erf:
      return 2.0 * std::numbers::inv_sqrtpi * exp(-(a * a));
    case Op::log1p:
      return 1.0 / (1.0 + a);
    case Op::expm1:
      return y + 1.0;
    case Op::pow:
      return is_by_a ? power_by_base(a, b) : power_by_exponent(y, a, b);
    case Op::select:
      return i == 1 ? chosen_if(a) : select(a, 0.0, 1.0);
    case Op::to_float:  // of an int or bool, which have no tangent; so do all the others
    default:
      throw InternalError(fmt::format("internal: '{}' has no derivative", info(node->op).name));
  }
}

// ---- the walk ----

/// A formula's nodes, operands before users: found once, walked once for each derivative.
class Formula {
 public:
  explicit Formula(const NodePtr& root) {
    FOVEA_ASSERT(root->type == ExprType::floating);
    // Only a walk: nothing is rewritten.
    rewrite(root, [this](const NodePtr& node) -> NodePtr {
      add(node);
      return nullptr;
    });
  }

  const std::vector<NodePtr>& nodes() const { return nodes_; }

  /// Of the root, simplified; null where it is identically 0. Nodes before `first` stand still.
  NodePtr tangent(const LeafTangent& leaf_tangent, std::size_t first = 0) const {
    std::vector<NodePtr> tangents(nodes_.size());
    for (std::size_t i = first; i < nodes_.size(); ++i)
      tangents[i] = tangent(i, tangents, leaf_tangent);
    if (!tangents.back()) return nullptr;
    NodePtr result = simplify(tangents.back());
    return is_constant(result, 0) ? nullptr : result;
  }

  NodePtr derivative_by(std::size_t leaf) const {
    const auto speed = [&](const NodePtr& node) -> NodePtr {
      return node == nodes_[leaf] ? make_constant(1.0) : nullptr;
    };
    return tangent(speed, leaf);
  }

 private:
  void add(const NodePtr& node) {
    std::vector<std::size_t> operands;
    for (const NodePtr& operand : node->operands) operands.push_back(index_.at(operand->digest));
    index_.emplace(node->digest, nodes_.size());
    operands_.push_back(std::move(operands));
    nodes_.push_back(node);
  }

  NodePtr tangent(std::size_t i, const std::vector<NodePtr>& tangents,
                  const LeafTangent& leaf_tangent) const {
    const NodePtr& node = nodes_[i];
    if (node->type != ExprType::floating) return nullptr;
    if (node->op == Op::load || node->operands.empty()) return leaf_tangent(node);
    NodePtr total;
    for (std::size_t k = 0; k < operands_[i].size(); ++k) {
      const NodePtr& moved = tangents[operands_[i][k]];
      if (!moved) continue;
      const bool is_term = node->op == Op::add;  // long sums make no node for each term
      total = sum(total, is_term ? moved : product(moved, partial_derivative(node, k).shared()));
    }
    return total;
  }

  std::vector<NodePtr> nodes_;
  std::vector<std::vector<std::size_t>> operands_;  // as indices into nodes_
  std::unordered_map<Digest, std::size_t, DigestHash> index_;
};

bool is_captured_float(const Node& node) {
  return (node.op == Op::load || node.op == Op::scalar) && node.type == ExprType::floating;
}

/// `<slot>_tangent`, or the first of `<slot>_tangent_2`, ... that is free; takes it.
std::string tangent_name(const std::string& slot, std::unordered_set<std::string>& taken) {
  std::string name = slot + "_tangent";
  for (int suffix = 2; !taken.insert(name).second; ++suffix) {
    name = fmt::format("{}_tangent_{}", slot, suffix);
  }
  return name;
}

std::unordered_set<std::string> slot_names(const NodePtr& root) {
  std::unordered_set<std::string> names;
  for (const Node* node : topological(*root)) {
    if (node->op == Op::load || node->op == Op::scalar) names.insert(node->name);
  }
  return names;
}

}  // namespace

NodePtr derivative_by_score(const NodePtr& root) {
  return or_zero(Formula(root).tangent([](const NodePtr& node) -> NodePtr {
    const bool is_score = node->op == Op::variable && node->variable == Variable::score;
    return is_score ? make_constant(1.0) : nullptr;
  }));
}

std::vector<CapturedDerivative> captured_derivatives(const NodePtr& root) {
  const Formula formula(root);
  std::vector<CapturedDerivative> result;
  for (std::size_t i = 0; i < formula.nodes().size(); ++i) {
    const NodePtr& node = formula.nodes()[i];
    if (!is_captured_float(*node)) continue;
    if (NodePtr derivative = formula.derivative_by(i)) {
      result.push_back({.slot = node->name, .leaf = node, .derivative = std::move(derivative)});
    }
  }
  return result;
}

std::vector<std::string> tangent_slots(const NodePtr& root,
                                       const std::vector<CapturedTensor>& tangents) {
  std::unordered_set<std::string> taken = slot_names(root);
  std::vector<std::string> slots;
  for (const CapturedTensor& each : tangents) slots.push_back(tangent_name(each.name, taken));
  return slots;
}

NodePtr captured_tangent(const NodePtr& root, const std::vector<CapturedTensor>& tangents) {
  using Slot = std::shared_ptr<const CapturedTensor>;
  const std::vector<std::string> names = tangent_slots(root, tangents);
  std::unordered_map<std::string, Slot> slots;
  for (std::size_t i = 0; i < names.size(); ++i) {
    slots.emplace(tangents[i].name, std::make_shared<const CapturedTensor>(
                                        CapturedTensor{names[i], tangents[i].view}));
  }
  return Formula(root).tangent([&](const NodePtr& node) -> NodePtr {
    const auto found = slots.find(node->name);
    if (!is_captured_float(*node) || found == slots.end()) return nullptr;
    const Slot& slot = found->second;
    if (!node->operands.empty()) return make_load(slot, node->operands);
    const auto rank = static_cast<std::size_t>(slot->view.rank());
    return make_load(slot, std::vector<NodePtr>(rank, make_constant(std::int64_t{0})));
  });
}

}  // namespace fovea::expr
