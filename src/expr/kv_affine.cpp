#include "expr/kv_affine.hpp"

#include <cstdlib>
#include <limits>
#include <optional>
#include <unordered_map>

#include "expr/passes.hpp"

namespace fovea::expr {
namespace {

constexpr std::int64_t kMostPositions = std::int64_t{1} << 28U;
constexpr std::int64_t kMostInts = std::numeric_limits<std::int32_t>::max();

/// An int along the keys: no line where it may wrap.
struct IntLine {
  std::int64_t slope = 0;
  std::int64_t largest = kMostInts + 1;  // what its absolute value may be
  bool wraps() const { return largest > kMostInts; }
};

/// A number of this size times log2 e may be no float.
constexpr double kHuge = 0x1p100;

/// A float along the keys: slope * kv_idx + height * abs(kv_idx - bend), and what a row has in common.
struct FloatLine {
  NodePtr slope;  // null: 0
  bool has_score = false;
  NodePtr height = nullptr;  // null: there is no bend
  NodePtr bend = nullptr;
};

/// Null is 0.
NodePtr sum(Op op, const NodePtr& a, const NodePtr& b) {
  if (b == nullptr) return a;
  if (a == nullptr) return op == Op::sub ? make(Op::neg, {b}) : b;
  return make(op, {a, b});
}

class Finder {
 public:
  std::optional<ScoreLine> line_of(const NodePtr& root) {
    for (const Node* node : topological(*root)) visit(*node);
    const std::optional<FloatLine>& line = facts_.at(root->digest).line;
    if (!line || !line->has_score) return std::nullopt;
    const auto slope_by = [&](Op op) {
      const NodePtr slope = sum(op, line->slope, line->height);
      return slope == nullptr ? make_constant(0.0) : simplify(slope);
    };
    if (line->bend == nullptr) return ScoreLine{.slope = slope_by(Op::add)};
    return ScoreLine{.slope = slope_by(Op::sub),
                     .bend = simplify(line->bend),
                     .slope_behind = slope_by(Op::add)};
  }

 private:
  struct Facts {
    bool is_free = true;  // of the score and of kv_idx
    /// The lowest float, which others add to hide keys: it is a score, and times log2 e it is no float.
    bool may_be_huge = false;
    IntLine integer;
    std::optional<FloatLine> line;
  };

  const Facts& operand(const Node& node, std::size_t i) const {
    return facts_.at(node.operands[i]->digest);
  }

  void visit(const Node& node) {
    Facts facts;
    if (node.op == Op::variable)
      facts.is_free = node.variable != Variable::score && node.variable != Variable::kv_idx;
    for (const NodePtr& operand : node.operands)
      facts.is_free &= facts_.at(operand->digest).is_free;
    if (node.type == ExprType::integer) facts.integer = integer_line(node);
    if (node.type == ExprType::floating) {
      facts.line = facts.is_free ? FloatLine{} : float_line(node);
      facts.may_be_huge = facts.is_free && may_be_huge(node);
    }
    facts_.emplace(node.digest, std::move(facts));
  }

  /// Of what tensors, scalars and literals give as they are, or scaled by one another; slopes times distances are taken
  /// to be scores of ordinary size.
  bool may_be_huge(const Node& node) const {
    const auto is_huge = [&](std::size_t i) { return operand(node, i).may_be_huge; };
    switch (node.op) {
      case Op::constant:
        return std::abs(node.float_value) > kHuge;
      case Op::scalar:
      case Op::load:
        return true;
      case Op::add:
      case Op::sub:
      case Op::min:
      case Op::max:
        return is_huge(0) || is_huge(1);
      case Op::neg:
      case Op::abs:
        return is_huge(0);
      case Op::select:
        return is_huge(1) || is_huge(2);
      case Op::mul:
      case Op::div:
        return (is_huge(0) && (is_huge(1) || node.operands[1]->op == Op::constant)) ||
               (is_huge(1) && node.operands[0]->op == Op::constant);
      default:
        return false;
    }
  }

  IntLine integer_line(const Node& node) const {
    switch (node.op) {
      case Op::constant:
        return {0, std::abs(node.int_value)};
      case Op::variable:
        return {node.variable == Variable::kv_idx ? 1 : 0, kMostPositions};
      case Op::add:
      case Op::sub: {
        const IntLine& a = operand(node, 0).integer;
        const IntLine& b = operand(node, 1).integer;
        if (a.wraps() || b.wraps()) return {};
        return {node.op == Op::add ? a.slope + b.slope : a.slope - b.slope, a.largest + b.largest};
      }
      case Op::neg: {
        const IntLine& a = operand(node, 0).integer;
        return {-a.slope, a.largest};
      }
      default:
        return {};
    }
  }

  std::optional<FloatLine> float_line(const Node& node) const {
    switch (node.op) {
      case Op::variable:
        return FloatLine{.slope = nullptr, .has_score = true};
      case Op::to_float: {
        const NodePtr& integer = node.operands[0];
        if (integer->type != ExprType::integer) return std::nullopt;
        if (integer->op == Op::abs) return distance(integer->operands[0]);
        const IntLine& line = operand(node, 0).integer;
        if (line.wraps()) return std::nullopt;
        return FloatLine{.slope = make_constant(static_cast<double>(line.slope))};
      }
      case Op::abs:
        if (node.operands[0]->op != Op::to_float) return std::nullopt;
        return distance(node.operands[0]->operands[0]);
      case Op::add:
      case Op::sub:
        return float_sum(node);
      case Op::neg:
        return scaled(operand(node, 0), [](const NodePtr& x) { return make(Op::neg, {x}); });
      case Op::mul:
        return product(node, 0) ? product(node, 0) : product(node, 1);
      case Op::div:
        if (!operand(node, 1).is_free) return std::nullopt;
        return scaled(operand(node, 0), [&](const NodePtr& x) {
          return make(Op::div, {x, node.operands[1]});
        });
      default:
        return std::nullopt;
    }
  }

  std::optional<FloatLine> float_sum(const Node& node) const {
    const std::optional<FloatLine>& a = operand(node, 0).line;
    const std::optional<FloatLine>& b = operand(node, 1).line;
    if (!a || !b || operand(node, 0).may_be_huge || operand(node, 1).may_be_huge)
      return std::nullopt;
    if (b->has_score && (a->has_score || node.op == Op::sub)) return std::nullopt;
    if (a->bend != nullptr && b->bend != nullptr && a->bend->digest != b->bend->digest)
      return std::nullopt;
    return FloatLine{.slope = sum(node.op, a->slope, b->slope),
                     .has_score = a->has_score || b->has_score,
                     .height = sum(node.op, a->height, b->height),
                     .bend = a->bend != nullptr ? a->bend : b->bend};
  }

  /// From the key where this int is 0.
  std::optional<FloatLine> distance(const NodePtr& of) const {
    if (of->type != ExprType::integer) return std::nullopt;
    const IntLine& line = facts_.at(of->digest).integer;
    if (std::abs(line.slope) != 1 || line.largest > kMostInts - kMostPositions) return std::nullopt;
    return FloatLine{
        .slope = nullptr,
        .height = make_constant(1.0),
        .bend = make(line.slope == 1 ? Op::sub : Op::add, {make_variable(Variable::kv_idx), of})};
  }

  /// Where operand `factor` does not depend on the key.
  std::optional<FloatLine> product(const Node& node, std::size_t factor) const {
    if (!operand(node, factor).is_free) return std::nullopt;
    return scaled(operand(node, 1 - factor), [&](const NodePtr& x) {
      return make(Op::mul, {node.operands[factor], x});
    });
  }

  /// The score itself comes once, as it is.
  template <typename Scale>
  static std::optional<FloatLine> scaled(const Facts& facts, Scale scale) {
    if (!facts.line || facts.line->has_score) return std::nullopt;
    const auto scaled = [&](const NodePtr& x) { return x == nullptr ? nullptr : scale(x); };
    return FloatLine{.slope = scaled(facts.line->slope),
                     .height = scaled(facts.line->height),
                     .bend = facts.line->bend};
  }

  std::unordered_map<Digest, Facts, DigestHash> facts_;
};

}  // namespace

std::optional<ScoreLine> score_line(const NodePtr& score) { return Finder().line_of(score); }

NodePtr score_slope(const NodePtr& score) {
  const std::optional<ScoreLine> line = score_line(score);
  return line && !line->is_bent() ? line->slope : nullptr;
}

}  // namespace fovea::expr
