// Programs: a formula with its captures, and how programs are joined.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

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

/// The given capture of this name; mostly it stands at the same place.
template <typename Captured>
Captured* find(std::vector<Captured>& given, std::size_t place, const std::string& name) {
  if (place < given.size() && given[place].name == name) return &given[place];
  const auto found = std::ranges::find(given, name, &Captured::name);
  return found == given.end() ? nullptr : &*found;
}

std::string described(Dtype dtype, int rank) {
  return fmt::format("{} of rank {}", name(dtype), rank);
}

void check_tensor(std::string_view where, const CapturedTensor& slot, const CapturedTensor* given) {
  const TensorSpec& wanted = slot.view.spec();
  if (given == nullptr) {
    invalid(std::string(where), fmt::format("captured '{}' is missing; expected {}", slot.name,
                                            described(wanted.dtype, wanted.rank)));
  }
  const TensorSpec& got = given->view.spec();
  if (got.dtype == wanted.dtype && got.rank == wanted.rank) return;
  invalid(std::string(where),
          fmt::format("captured '{}' is {}; expected {}", slot.name, described(got.dtype, got.rank),
                      described(wanted.dtype, wanted.rank)));
}

void check_scalar(std::string_view where, const CapturedScalar& slot, const CapturedScalar* given) {
  if (given == nullptr) {
    invalid(std::string(where),
            fmt::format("captured '{}' is missing; expected {}", slot.name, expr::name(slot.type)));
  }
  if (given->type != slot.type) {
    invalid(std::string(where), fmt::format("captured '{}' is {}; expected {}", slot.name,
                                            expr::name(given->type), expr::name(slot.type)));
  }
  if (const auto reason = expr::scalar_refusal(*given)) invalid(std::string(where), *reason);
}

}  // namespace

/// Nodes are immutable and know what they are bound to: others are made where somebody asks for them, once for all
/// copies of a program.
struct Program::Rebound {
  std::once_flag once;
  std::optional<Expr> expr;
};

const Expr& Program::expr() const {
  if (rebound_ == nullptr) return formula_;
  std::call_once(rebound_->once,
                 [this] { rebound_->expr = Expr(expr::bind(formula_.shared(), captures_)); });
  return *rebound_->expr;
}

void Program::capture(Captures captures, std::string_view where) {
  for (std::size_t i = 0; i < captures_.tensors.size(); ++i) {
    CapturedTensor& slot = captures_.tensors[i];
    const CapturedTensor* given = find(captures.tensors, i, slot.name);
    check_tensor(where, slot, given);
    slot.view = given->view;
  }
  for (std::size_t i = 0; i < captures_.scalars.size(); ++i) {
    CapturedScalar& slot = captures_.scalars[i];
    const CapturedScalar* given = find(captures.scalars, i, slot.name);
    check_scalar(where, slot, given);
    slot.value = given->value;
  }
  rebound_ = std::make_shared<Rebound>();
}

ScoreMod ScoreMod::with_captures(Captures captures) const {
  ScoreMod result = *this;
  result.capture(std::move(captures), "score");
  return result;
}

MaskMod MaskMod::with_captures(Captures captures) const {
  MaskMod result = *this;
  result.capture(std::move(captures), "mask");
  return result;
}

CapturedTensor tensor_slot(std::string name, Dtype dtype, int rank) {
  TensorSpec spec{.dtype = dtype, .rank = rank};
  // No index is known to be out of range.
  std::fill_n(spec.shape.begin(), std::clamp(rank, 0, kMaxRank),
              std::numeric_limits<std::int32_t>::max());
  return {std::move(name), TensorView(static_cast<const void*>(nullptr), spec)};
}

ScoreMod::ScoreMod() : Program(arguments().score, {}) {}

ScoreMod::ScoreMod(const Expr& expr)
    : Program(score_formula(expr), expr::collect_captures(expr.node())) {}

bool ScoreMod::is_identity() const {
  return formula().node().op == Op::variable && formula().node().variable == expr::Variable::score;
}

MaskMod::MaskMod() : Program(Expr(true), {}) {}

MaskMod::MaskMod(const Expr& expr)
    : Program(mask_formula(expr), expr::collect_captures(expr.node())) {}

bool MaskMod::is_all_visible() const {
  return formula().node().op == Op::constant && formula().node().int_value == 1;
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

bool operator==(const ScoreMod& a, const ScoreMod& b) {
  return identical(a.formula(), b.formula());
}
bool operator==(const MaskMod& a, const MaskMod& b) { return identical(a.formula(), b.formula()); }

}  // namespace fovea
