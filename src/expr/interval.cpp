#include "expr/interval.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_map>

#include "core/check.hpp"
#include "expr/interval_rules.hpp"

namespace fovea::expr {

namespace {

// Evaluation of a formula of up to this many nodes needs no memory but the stack: 3 KiB.
constexpr std::size_t kNodesOnStack = 128;

// Affine forms stay within these bounds so that their sums are exact in fp64: 4 * 2^19 * 2^31 +
// 2^32 < 2^53.
constexpr std::size_t kMaxTerms = 4;
constexpr double kMaxFactor = 1 << 19;
constexpr double kMaxConstant = 4294967296.0;

Interval range_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::boolean:
      return kAnyBool;
    case Dtype::u8:
      return {0, 255, false};
    case Dtype::i8:
      return {-128, 127, false};
    case Dtype::i32:
    case Dtype::i64:
      return kAnyInt;
    case Dtype::f32:
    case Dtype::f16:
    case Dtype::bf16:
    case Dtype::e4m3:
      return Interval::whole();
  }
  return Interval::whole();
}

Interval range_of(ExprType type) {
  if (type == ExprType::boolean) return kAnyBool;
  return type == ExprType::integer ? kAnyInt : Interval::whole();
}

Interval leaf_of(const Node& node) {
  if (node.op == Op::load) return range_of(node.dtype);
  if (node.op == Op::scalar) return range_of(node.type);
  if (node.op != Op::constant) return {};
  if (node.type != ExprType::floating) return Interval::point(static_cast<double>(node.int_value));
  return std::isnan(node.float_value) ? Interval::whole() : Interval::point(node.float_value);
}

// A position is an int, also where the box does not bound it.
Interval int_range(const Box& box, Variable variable) {
  const Interval& range = box.variables[static_cast<std::size_t>(variable)];
  return {std::max(range.lo, kAnyInt.lo), std::min(range.hi, kAnyInt.hi), false};
}

Interval scalar_interval(const Node& node, double value) {
  if (std::isnan(value)) return Interval::whole();
  if (node.type == ExprType::floating) return rounded(value, value, false);
  return Interval::point(std::clamp(std::trunc(value), kAnyInt.lo, kAnyInt.hi));
}

// What equals itself: anything but a NaN.
Interval compare_with_itself(Op op, const Interval& a) {
  const bool is_true_if_equal = op == Op::eq || op == Op::le || op == Op::ge;
  if (a.may_be_nan && (is_true_if_equal || op == Op::ne)) return kAnyBool;
  return Interval::point(is_true_if_equal ? 1 : 0);
}

Interval chosen(const Interval& condition, const Interval& a, const Interval& b) {
  if (condition.always_true()) return a;
  if (condition.always_false()) return b;
  return hull(a, b);
}

bool is_comparison(Op op) { return Op::lt <= op && op <= Op::ne; }

}  // namespace

// Finds operand indices and the affine forms that are worth having.
class IntervalProgram::Preparation {
 public:
  explicit Preparation(IntervalProgram& program) : program_(program) {}

  void run() {
    const std::size_t count = program_.nodes_.size();
    for (std::size_t i = 0; i < count; ++i) index_.emplace(program_.nodes_[i]->digest, i);
    forms_.resize(count);
    reads_.resize(count);
    for (std::size_t i = 0; i < count; ++i) program_.steps_.push_back(step(static_cast<int>(i)));
  }

 private:
  using Form = std::map<int, double>;  // factor by node; kConstant for the constant
  static constexpr int kConstant = -1;

  Step step(int i) {
    const Node& node = *program_.nodes_[static_cast<std::size_t>(i)];
    Step result;
    result.node = &node;
    result.leaf = leaf_of(node);
    for (const NodePtr& operand : node.operands) {
      result.operands.push_back(static_cast<int>(index_.at(operand->digest)));
    }
    std::copy_n(result.operands.begin(), std::min<std::size_t>(3, result.operands.size()),
                result.first.begin());
    result.operand_type = node.operands.empty() ? node.type : node.operands.back()->type;
    result.same_operands = node.operands.size() == 2 && result.first[0] == result.first[1];
    note_variables(i, result);
    find_affine(i, result);
    return result;
  }

  void note_variables(int i, const Step& step) {
    unsigned& mask = reads_[static_cast<std::size_t>(i)];
    if (step.node->op == Op::variable) mask = 1U << static_cast<unsigned>(step.node->variable);
    for (const int operand : step.operands) mask |= reads_[static_cast<std::size_t>(operand)];
    for (unsigned v = 0; v < kNumVariables; ++v) {
      if ((mask >> v & 1U) != 0) program_.dependents_[v].push_back(i);
    }
  }

  void find_affine(int i, Step& step) {
    Form& form = forms_[static_cast<std::size_t>(i)];
    form = {{i, 1.0}};
    const Op op = step.node->op;
    if (step.operand_type != ExprType::integer) return;
    if (op == Op::constant) {
      form = {{kConstant, static_cast<double>(step.node->int_value)}};
      return;
    }
    Form combined;
    if (op == Op::add || op == Op::sub || is_comparison(op)) {
      const Form& a = forms_[static_cast<std::size_t>(step.first[0])];
      const Form& b = forms_[static_cast<std::size_t>(step.first[1])];
      combined = sum(a, b, op == Op::add ? 1 : -1);
      if (is_small(combined) && share_a_term(a, b)) step.affine = keep(combined);
      if (is_comparison(op)) return;
    } else if (op == Op::neg) {
      combined = sum({}, forms_[static_cast<std::size_t>(step.first[0])], -1);
    } else if (op == Op::mul) {
      combined = product(forms_[static_cast<std::size_t>(step.first[0])],
                         forms_[static_cast<std::size_t>(step.first[1])]);
    }
    if (!combined.empty() && is_small(combined)) form = std::move(combined);
  }

  static Form sum(const Form& a, const Form& b, double factor_b) {
    Form result = a;
    result[kConstant] += 0;
    for (const auto& [node, factor] : b) result[node] += factor * factor_b;
    std::erase_if(result,
                  [](const auto& term) { return term.first != kConstant && term.second == 0; });
    return result;
  }

  // Empty unless one side is a constant.
  static Form product(const Form& a, const Form& b) {
    const auto is_constant = [](const Form& f) {
      return f.size() == 1 && f.begin()->first == kConstant;
    };
    if (!is_constant(a) && !is_constant(b)) return {};
    return is_constant(b) ? sum({}, a, b.at(kConstant)) : sum({}, b, a.at(kConstant));
  }

  static bool share_a_term(const Form& a, const Form& b) {
    return std::any_of(a.begin(), a.end(), [&](const auto& term) {
      return term.first != kConstant && b.contains(term.first);
    });
  }

  static bool is_small(const Form& form) {
    return form.size() <= kMaxTerms + 1 &&
           std::all_of(form.begin(), form.end(), [](const auto& term) {
             return std::abs(term.second) <= (term.first == kConstant ? kMaxConstant : kMaxFactor);
           });
  }

  int keep(const Form& form) {
    Affine affine;
    for (const auto& [node, factor] : form) {
      if (node == kConstant) {
        affine.constant = factor;
      } else {
        affine.terms.push_back({node, factor});
      }
    }
    program_.affines_.push_back(std::move(affine));
    return static_cast<int>(program_.affines_.size()) - 1;
  }

  IntervalProgram& program_;
  std::unordered_map<Digest, std::size_t, DigestHash> index_;
  std::vector<Form> forms_;
  std::vector<unsigned> reads_;  // variables under a node, as bits
};

IntervalProgram::IntervalProgram(const NodePtr& root) : root_(root), nodes_(topological(*root)) {
  Preparation(*this).run();
}

Interval IntervalProgram::evaluate(const Box& box) const {
  if (steps_.size() > kNodesOnStack) {
    std::vector<Interval> values;
    evaluate_all(box, values);
    return values.back();
  }
  // Every step writes its value before another one reads it: no need to initialise.
  alignas(Interval) std::byte storage[kNodesOnStack * sizeof(Interval)];
  auto* values = reinterpret_cast<Interval*>(storage);
  for (std::size_t i = 0; i < steps_.size(); ++i) values[i] = run(steps_[i], box, values);
  return values[steps_.size() - 1];
}

void IntervalProgram::evaluate_all(const Box& box, std::vector<Interval>& values) const {
  values.resize(steps_.size());
  for (std::size_t i = 0; i < steps_.size(); ++i) values[i] = run(steps_[i], box, values.data());
}

Interval IntervalProgram::evaluate_again(const Box& box, Variable changed,
                                         std::vector<Interval>& values) const {
  FOVEA_ASSERT(values.size() == steps_.size());
  for (const int i : dependents_[static_cast<std::size_t>(changed)]) {
    const auto at = static_cast<std::size_t>(i);
    values[at] = run(steps_[at], box, values.data());
  }
  return values.back();
}

Interval IntervalProgram::run(const Step& step, const Box& box, const Interval* values) const {
  const Node& node = *step.node;
  switch (node.op) {
    case Op::constant:
      return step.leaf;
    case Op::variable:
      return node.type == ExprType::integer
                 ? int_range(box, node.variable)
                 : box.variables[static_cast<std::size_t>(node.variable)];
    case Op::scalar:
      if (!box.are_scalars_known) return step.leaf;
      return scalar_interval(
          node, box.scalar_value ? box.scalar_value(node) : node.scalar_binding->value);
    case Op::load:
      return box.load_bounds ? load(step, box, values) : step.leaf;
    case Op::select:
      return chosen(values[step.first[0]], values[step.first[1]], values[step.first[2]]);
    case Op::to_int:
      return int_of(values[step.first[0]]);
    case Op::to_float:
      return float_of(values[step.first[0]]);
    default:
      break;
  }
  const Interval& a = values[step.first[0]];
  const Interval& b = values[step.first[1]];
  if (is_comparison(node.op)) {
    if (step.same_operands) return compare_with_itself(node.op, a);
    // A full range may have wrapped; then the operands are not equal to their affine forms.
    if (step.affine >= 0 && a != kAnyInt && b != kAnyInt) {
      return apply_rule(node.op, step.operand_type, difference(step, values), Interval::point(0));
    }
  } else if (step.affine >= 0) {
    const Interval exact = difference(step, values);
    return wrapped(exact.lo, exact.hi);
  }
  return apply_rule(node.op, step.operand_type, a, b);
}

Interval IntervalProgram::difference(const Step& step, const Interval* values) const {
  const Affine& affine = affines_[static_cast<std::size_t>(step.affine)];
  Interval result = Interval::point(affine.constant);
  for (const Term& term : affine.terms) {
    const Interval& value = values[term.node];
    result.lo += term.factor * (term.factor > 0 ? value.lo : value.hi);
    result.hi += term.factor * (term.factor > 0 ? value.hi : value.lo);
  }
  return result;
}

Interval IntervalProgram::load(const Step& step, const Box& box, const Interval* values) const {
  const Node& node = *step.node;
  const TensorView& view = box.tensor ? box.tensor(node) : node.tensor->view;
  std::array<Interval, kMaxRank> indices;
  for (std::size_t dim = 0; dim < step.operands.size(); ++dim) {
    const std::int64_t extent = view.size(static_cast<int>(dim));
    if (extent == 0) return step.leaf;
    const Interval& index = values[step.operands[dim]];
    const auto last = static_cast<double>(extent - 1);
    indices[dim] = {std::clamp(index.lo, 0.0, last), std::clamp(index.hi, 0.0, last), false};
  }
  return box.load_bounds(node, indices.data());
}

}  // namespace fovea::expr
