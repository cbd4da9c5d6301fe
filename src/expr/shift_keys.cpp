// Keys of a sequence counted from another one: what a formula says of the keys behind a prefix that is attended to
// apart.
#include <cstdlib>
#include <unordered_map>

#include "expr/interval.hpp"
#include "expr/passes.hpp"

namespace fovea::expr {

namespace {

// No sum of so many numbers up to 2^28 and a constant leaves 32 bits.
constexpr std::int64_t kMostFactors = 6;
constexpr std::int64_t kMostConstant = std::int64_t{1} << 28;
constexpr double kMostOfSequence = 1 << 28;

/// A sum of positions, scalars and a constant.
struct Sum {
  bool is_one = false;
  std::int64_t keys = 0;      // factors of kv_idx and seqlen_kv together
  std::int64_t factors = 0;   // magnitudes of all factors together
  std::int64_t constant = 0;  // its magnitude at most

  bool is_small() const { return is_one && factors <= kMostFactors && constant <= kMostConstant; }
  /// Stays what it is when keys are counted from another one.
  bool is_unmoved() const { return is_small() && keys == 0; }
};

bool counts_keys(const Node& node) {
  return node.op == Op::variable &&
         (node.variable == Variable::kv_idx || node.variable == Variable::seqlen_kv);
}

bool is_comparison(Op op) { return Op::lt <= op && op <= Op::ne; }

Sum plus(const Sum& a, const Sum& b, std::int64_t sign) {
  if (!a.is_small() || !b.is_small()) return {};
  return {.is_one = true,
          .keys = a.keys + sign * b.keys,
          .factors = a.factors + b.factors,
          .constant = a.constant + b.constant};
}

class Shift {
 public:
  explicit Shift(NodePtr by) : by_(std::move(by)) {}

  NodePtr operator()(const NodePtr& node, const NodePtr& rebuilt) {
    const Sum sum = sum_of(*node);
    sums_.emplace(node->digest, sum);
    if (counts_keys(*node)) return make(Op::add, {rebuilt, by_});
    return !node->operands.empty() && sum.is_unmoved() ? node : nullptr;
  }

 private:
  Sum sum_of(const Node& node) const {
    const bool is_int = node.operands.empty() ? node.type == ExprType::integer
                                              : node.operands[0]->type == ExprType::integer;
    if (!is_int) return {};
    const auto operand = [&](std::size_t i) { return sums_.at(node.operands[i]->digest); };
    if (node.op == Op::variable)
      return {.is_one = true, .keys = counts_keys(node) ? 1 : 0, .factors = 1};
    if (node.op == Op::scalar) return {.is_one = true, .factors = 1};
    if (node.op == Op::constant) return {.is_one = true, .constant = std::abs(node.int_value)};
    if (node.op == Op::neg) return plus({.is_one = true}, operand(0), -1);
    if (node.op == Op::add) return plus(operand(0), operand(1), 1);
    // The difference of what is compared.
    if (node.op == Op::sub || is_comparison(node.op)) return plus(operand(0), operand(1), -1);
    return {};
  }

  const NodePtr by_;
  std::unordered_map<Digest, Sum, DigestHash> sums_;
};

/// Any keys may have gone before: the formula is the same.
bool is_unmoved(const NodePtr& root) {
  return shift_keys(root, make_constant(std::int64_t{1}))->digest == root->digest;
}

}  // namespace

NodePtr shift_keys(const NodePtr& root, const NodePtr& by) {
  Shift shift(by);
  return rewrite_beside(
      root, [&](const NodePtr& node, const NodePtr& rebuilt) { return shift(node, rebuilt); });
}

bool sees_all_keys_before(const NodePtr& mask) {
  if (!is_unmoved(mask)) return false;
  // Of a sequence that has its queries' keys: seqlen_kv stands for seqlen_kv - seqlen_q.
  const NodePtr formula = rewrite(mask, [](const NodePtr& node) -> NodePtr {
    const bool is_length = node->op == Op::variable && node->variable == Variable::seqlen_kv;
    return is_length ? make(Op::add, {make_variable(Variable::seqlen_q), node}) : nullptr;
  });
  Box box;
  box.are_scalars_known = false;
  for (Interval& range : box.variables) range = {0, kMostOfSequence, false};
  box.variables[static_cast<std::size_t>(Variable::kv_idx)] = {-kMostOfSequence, -1, false};
  return IntervalProgram(formula).evaluate(box).always_true();
}

}  // namespace fovea::expr
