// Programs: a formula with its captures, and how programs are joined.
#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "fovea/expr.hpp"

#include "core/check.hpp"
#include "expr/node.hpp"
#include "expr/passes.hpp"

namespace fovea {

namespace {

using expr::Op;

Expr score_formula(const Expr& formula) {
  if (formula.type() == ExprType::boolean) {
    invalid("score_mod", "the formula is bool; expected a number, e.g. condition ? score : -inf");
  }
  return to_float(formula);
}

Expr mask_formula(const Expr& formula) {
  if (formula.type() != ExprType::boolean) {
    invalid("mask_mod",
            fmt::format("the formula is {}; expected bool (true: visible), compare a number first",
                        expr::name(formula.type())));
  }
  if (expr::reads(formula.node(), expr::Variable::score)) {
    invalid("mask_mod",
            "the formula reads 'score'; expected positions and captures only, use a score_mod");
  }
  return formula;
}

// Do the two sets bind `name` to different things?
bool clashes(const Captures& a, const Captures& b, const std::string& name) {
  const auto find = [&name](const auto& slots) {
    const auto it =
        std::find_if(slots.begin(), slots.end(), [&](const auto& s) { return s.name == name; });
    return it == slots.end() ? nullptr : &*it;
  };
  const CapturedTensor* tensor_a = find(a.tensors);
  const CapturedTensor* tensor_b = find(b.tensors);
  const CapturedScalar* scalar_a = find(a.scalars);
  const CapturedScalar* scalar_b = find(b.scalars);
  if (tensor_a != nullptr && tensor_b != nullptr) return !expr::same_binding(*tensor_a, *tensor_b);
  if (scalar_a != nullptr && scalar_b != nullptr) return !expr::same_binding(*scalar_a, *scalar_b);
  return (tensor_a != nullptr && scalar_b != nullptr) ||
         (scalar_a != nullptr && tensor_b != nullptr);
}

void add_names(const Captures& captures, std::unordered_set<std::string>& names) {
  for (const CapturedTensor& tensor : captures.tensors) names.insert(tensor.name);
  for (const CapturedScalar& scalar : captures.scalars) names.insert(scalar.name);
}

// The formula of `second` with slots renamed where their names mean something else in `first`.
Expr beside(const Program& first, const Program& second) {
  std::unordered_set<std::string> taken;
  add_names(first.captures(), taken);
  add_names(second.captures(), taken);
  std::unordered_map<std::string, std::string> new_names;
  const auto renamed = [&](const std::string& name) {
    if (!clashes(first.captures(), second.captures(), name)) return name;
    const auto [entry, is_new] = new_names.emplace(name, std::string());
    for (int suffix = 2; is_new && entry->second.empty(); ++suffix) {
      std::string candidate = fmt::format("{}_{}", name, suffix);
      if (taken.insert(candidate).second) entry->second = std::move(candidate);
    }
    return entry->second;
  };
  return Expr(expr::rename_slots(second.expr().shared(), renamed));
}

}  // namespace

ScoreMod::ScoreMod() : Program(arguments().score, {}) {}

ScoreMod::ScoreMod(const Expr& expr)
    : Program(score_formula(expr), expr::collect_captures(expr.node())) {}

bool ScoreMod::is_identity() const {
  return expr_.node().op == Op::variable && expr_.node().variable == expr::Variable::score;
}

MaskMod::MaskMod() : Program(Expr(true), {}) {}

MaskMod::MaskMod(const Expr& expr)
    : Program(mask_formula(expr), expr::collect_captures(expr.node())) {}

bool MaskMod::is_all_visible() const {
  return expr_.node().op == Op::constant && expr_.node().int_value == 1;
}

ScoreMod operator|(const ScoreMod& first, const ScoreMod& second) {
  const Expr renamed = beside(first, second);
  return ScoreMod(Expr(expr::substitute_score(renamed.shared(), first.expr().shared())));
}

MaskMod operator&&(const MaskMod& a, const MaskMod& b) {
  if (a.is_all_visible()) return b;
  if (b.is_all_visible()) return a;
  return MaskMod(a.expr() && beside(a, b));
}

MaskMod operator||(const MaskMod& a, const MaskMod& b) {
  if (a.is_all_visible() || b.is_all_visible()) return {};
  return MaskMod(a.expr() || beside(a, b));
}

MaskMod operator!(const MaskMod& a) { return MaskMod(!a.expr()); }

bool operator==(const ScoreMod& a, const ScoreMod& b) { return identical(a.expr(), b.expr()); }
bool operator==(const MaskMod& a, const MaskMod& b) { return identical(a.expr(), b.expr()); }

}  // namespace fovea
