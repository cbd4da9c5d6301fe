// Formulas from C++: the operators of the public header, one line each.
#include <limits>
#include <string>

#include "fovea/expr.hpp"

#include "core/check.hpp"
#include "expr/node.hpp"

namespace fovea {

namespace {

using expr::Op;

Expr unary(Op op, const Expr& a) { return Expr(expr::make(op, {a.shared()})); }

Expr binary(Op op, const Expr& a, const Expr& b) {
  return Expr(expr::make(op, {a.shared(), b.shared()}));
}

Expr variable(expr::Variable v) { return Expr(expr::make_variable(v)); }

}  // namespace

ExprType Expr::type() const { return node_->type; }
Expr Expr::from_literal(bool value) { return Expr(expr::make_constant(value)); }
Expr Expr::from_literal(double value) { return Expr(expr::make_constant(value)); }
Expr Expr::from_literal(std::int64_t value) { return Expr(expr::make_constant(value)); }
Expr Expr::from_literal(std::uint64_t value) {
  if (value > std::numeric_limits<std::int32_t>::max())
    expr::refuse_constant(std::to_string(value));
  return from_literal(static_cast<std::int64_t>(value));
}

bool identical(const Expr& a, const Expr& b) { return a.node().digest == b.node().digest; }

Expr operator+(const Expr& a, const Expr& b) { return binary(Op::add, a, b); }
Expr operator-(const Expr& a, const Expr& b) { return binary(Op::sub, a, b); }
Expr operator*(const Expr& a, const Expr& b) { return binary(Op::mul, a, b); }
Expr operator/(const Expr& a, const Expr& b) { return binary(Op::div, a, b); }
Expr operator%(const Expr& a, const Expr& b) { return binary(Op::mod, a, b); }
Expr floor_div(const Expr& a, const Expr& b) { return binary(Op::floor_div, a, b); }
Expr operator-(const Expr& a) { return unary(Op::neg, a); }
Expr min(const Expr& a, const Expr& b) { return binary(Op::min, a, b); }
Expr max(const Expr& a, const Expr& b) { return binary(Op::max, a, b); }
Expr abs(const Expr& a) { return unary(Op::abs, a); }
Expr floor(const Expr& a) { return unary(Op::floor, a); }
Expr exp(const Expr& a) { return unary(Op::exp, a); }
Expr exp2(const Expr& a) { return unary(Op::exp2, a); }
Expr log(const Expr& a) { return unary(Op::log, a); }
Expr log2(const Expr& a) { return unary(Op::log2, a); }
Expr tanh(const Expr& a) { return unary(Op::tanh, a); }
Expr sqrt(const Expr& a) { return unary(Op::sqrt, a); }
Expr rsqrt(const Expr& a) { return unary(Op::rsqrt, a); }
Expr sigmoid(const Expr& a) { return unary(Op::sigmoid, a); }
Expr sin(const Expr& a) { return unary(Op::sin, a); }
Expr cos(const Expr& a) { return unary(Op::cos, a); }
Expr tan(const Expr& a) { return unary(Op::tan, a); }
Expr erf(const Expr& a) { return unary(Op::erf, a); }
Expr round(const Expr& a) { return unary(Op::round, a); }
Expr ceil(const Expr& a) { return unary(Op::ceil, a); }
Expr trunc(const Expr& a) { return unary(Op::trunc, a); }
Expr log1p(const Expr& a) { return unary(Op::log1p, a); }
Expr expm1(const Expr& a) { return unary(Op::expm1, a); }
Expr fmod(const Expr& a, const Expr& b) { return binary(Op::fmod, a, b); }
Expr pow(const Expr& a, const Expr& b) { return binary(Op::pow, a, b); }
Expr to_int(const Expr& a) { return unary(Op::to_int, a); }
Expr to_float(const Expr& a) { return unary(Op::to_float, a); }

Expr select(const Expr& condition, const Expr& a, const Expr& b) {
  return Expr(expr::make(Op::select, {condition.shared(), a.shared(), b.shared()}));
}

Expr operator<(const Expr& a, const Expr& b) { return binary(Op::lt, a, b); }
Expr operator<=(const Expr& a, const Expr& b) { return binary(Op::le, a, b); }
Expr operator>(const Expr& a, const Expr& b) { return binary(Op::gt, a, b); }
Expr operator>=(const Expr& a, const Expr& b) { return binary(Op::ge, a, b); }
Expr operator==(const Expr& a, const Expr& b) { return binary(Op::eq, a, b); }
Expr operator!=(const Expr& a, const Expr& b) { return binary(Op::ne, a, b); }
Expr operator&&(const Expr& a, const Expr& b) { return binary(Op::logical_and, a, b); }
Expr operator||(const Expr& a, const Expr& b) { return binary(Op::logical_or, a, b); }
Expr operator!(const Expr& a) { return unary(Op::logical_not, a); }
Expr operator&(const Expr& a, const Expr& b) { return binary(Op::bit_and, a, b); }
Expr operator|(const Expr& a, const Expr& b) { return binary(Op::bit_or, a, b); }
Expr operator^(const Expr& a, const Expr& b) { return binary(Op::bit_xor, a, b); }
Expr operator~(const Expr& a) { return unary(Op::bit_not, a); }
Expr operator<<(const Expr& a, const Expr& b) { return binary(Op::shl, a, b); }
Expr operator>>(const Expr& a, const Expr& b) { return binary(Op::shr, a, b); }

Captured::Captured(std::string name, const TensorView& view)
    : Captured(CapturedTensor{std::move(name), view}) {}

Captured::Captured(CapturedTensor captured)
    : captured_(std::make_shared<const CapturedTensor>(std::move(captured))) {
  if (const auto reason = expr::name_refusal(captured_->name)) invalid("capture", *reason);
}

// The public signature takes a list in braces by value.
Expr Captured::load(
    std::vector<Expr> indices) const {  // NOLINT(performance-unnecessary-value-param)
  std::vector<expr::NodePtr> nodes;
  nodes.reserve(indices.size());
  for (const Expr& index : indices) nodes.push_back(index.shared());
  return Expr(expr::make_load(captured_, std::move(nodes)));
}

Expr scalar(const CapturedScalar& scalar) {
  return Expr(expr::make_scalar(std::make_shared<const CapturedScalar>(scalar)));
}

// Immutable, and part of every formula and of every call that poses none: made once.
Arguments arguments() {
  using expr::Variable;
  static const Arguments arguments{.score = variable(Variable::score),
                                   .batch = variable(Variable::batch),
                                   .q_head = variable(Variable::q_head),
                                   .kv_head = variable(Variable::kv_head),
                                   .q_idx = variable(Variable::q_idx),
                                   .kv_idx = variable(Variable::kv_idx),
                                   .seqlen_q = variable(Variable::seqlen_q),
                                   .seqlen_kv = variable(Variable::seqlen_kv)};
  return arguments;
}

}  // namespace fovea
