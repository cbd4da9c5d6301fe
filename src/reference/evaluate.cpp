#include "reference/evaluate.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/check.hpp"
#include "reference/element.hpp"

namespace fovea::reference {

namespace {

using expr::Op;

std::int64_t as_int(double value) { return static_cast<std::int64_t>(value); }

double wrapped(std::int64_t value) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(value));
}

/// Operands are 32-bit ints, so that everything but a product of extremes fits easily into 64.
double integer_op(Op op, std::int64_t a, std::int64_t b) {
  const int shift = static_cast<int>(b & 31);
  switch (op) {
    case Op::add:
      return wrapped(a + b);
    case Op::sub:
      return wrapped(a - b);
    case Op::mul:
      return wrapped(a * b);
    case Op::floor_div:
      if (b == 0) return 0;
      return wrapped(a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0));
    case Op::mod:
      if (b == 0) return 0;
      return wrapped(a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0));
    case Op::neg:
      return wrapped(-a);
    case Op::abs:
      return wrapped(a < 0 ? -a : a);
    case Op::min:
      return static_cast<double>(std::min(a, b));
    case Op::max:
      return static_cast<double>(std::max(a, b));
    case Op::bit_and:
      return wrapped(a & b);
    case Op::bit_or:
      return wrapped(a | b);
    case Op::bit_xor:
      return wrapped(a ^ b);
    case Op::bit_not:
      return wrapped(~a);
    case Op::shl:
      return wrapped(static_cast<std::int64_t>(static_cast<std::uint64_t>(a) << shift));
    case Op::shr:
      return wrapped(a >> shift);
    case Op::floor:
      return static_cast<double>(a);
    default:
      throw InternalError("reference: no such operation on ints");
  }
}

/// A NaN operand gives NaN, on either side: std::min would depend on the order.
double nan_or(double a, double b, double otherwise) {
  return std::isnan(a) || std::isnan(b) ? std::numeric_limits<double>::quiet_NaN() : otherwise;
}

double float_mod(double a, double b) {
  const double remainder = std::fmod(a, b);
  return remainder != 0 && (remainder < 0) != (b < 0) ? remainder + b : remainder;
}

double float_op(Op op, double a, double b) {
  switch (op) {
    case Op::add:
      return a + b;
    case Op::sub:
      return a - b;
    case Op::mul:
      return a * b;
    case Op::div:
      return a / b;
    case Op::floor_div:
      return std::floor(a / b);
    case Op::mod:
      return float_mod(a, b);
    case Op::neg:
      return -a;
    case Op::abs:
      return std::fabs(a);
    case Op::floor:
      return std::floor(a);
    case Op::min:
      return nan_or(a, b, std::min(a, b));
    case Op::max:
      return nan_or(a, b, std::max(a, b));
    case Op::exp:
      return std::exp(a);
    case Op::exp2:
      return std::exp2(a);
    case Op::log:
      return std::log(a);
    case Op::log2:
      return std::log2(a);
    case Op::tanh:
      return std::tanh(a);
    case Op::sqrt:
      return std::sqrt(a);
    case Op::rsqrt:
      return 1 / std::sqrt(a);
    case Op::sigmoid:
      return 1 / (1 + std::exp(-a));
    case Op::sin:
      return std::sin(a);
    case Op::cos:
      return std::cos(a);
    case Op::tan:
      return std::tan(a);
    case Op::erf:
      return std::erf(a);
    case Op::round:
      return std::nearbyint(a);
    case Op::ceil:
      return std::ceil(a);
    case Op::trunc:
      return std::trunc(a);
    case Op::log1p:
      return std::log1p(a);
    case Op::expm1:
      return std::expm1(a);
    case Op::fmod:
      return std::fmod(a, b);
    case Op::pow:
      return std::pow(a, b);
    default:
      throw InternalError("reference: no such operation on floats");
  }
}

bool bool_op(Op op, bool a, bool b) {
  switch (op) {
    case Op::logical_and:
    case Op::bit_and:
      return a && b;
    case Op::logical_or:
    case Op::bit_or:
      return a || b;
    case Op::bit_xor:
      return a != b;
    case Op::logical_not:
    case Op::bit_not:
      return !a;
    default:
      throw InternalError("reference: no such operation on bools");
  }
}

/// C++ compares as IEEE does: with a NaN all are false but ne.
bool compare(Op op, double a, double b) {
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

double truncated_to_int(double value) {
  using Int32 = std::numeric_limits<std::int32_t>;
  if (std::isnan(value)) return 0;
  return std::clamp<double>(std::trunc(value), Int32::min(), Int32::max());
}

double variable_value(expr::Variable variable, const Position& at) {
  switch (variable) {
    case expr::Variable::score:
      return at.score;
    case expr::Variable::batch:
      return static_cast<double>(at.batch);
    case expr::Variable::q_head:
      return static_cast<double>(at.q_head);
    case expr::Variable::kv_head:
      return static_cast<double>(at.kv_head);
    case expr::Variable::q_idx:
      return static_cast<double>(at.q_idx);
    case expr::Variable::kv_idx:
      return static_cast<double>(at.kv_idx);
    case expr::Variable::seqlen_q:
      return static_cast<double>(at.seqlen_q);
    case expr::Variable::seqlen_kv:
      return static_cast<double>(at.seqlen_kv);
  }
  return 0;
}

template <typename Captured>
const Captured& find(const std::vector<Captured>& captured, const std::string& name) {
  const auto found = std::find_if(captured.begin(), captured.end(),
                                  [&](const Captured& each) { return each.name == name; });
  FOVEA_ASSERT(found != captured.end());
  return *found;
}

}  // namespace

Evaluator::Evaluator(const Program& program, Precision precision)
    : root_(program.expr().shared()), precision_(precision) {
  visit(root_, program.captures());
  values_.resize(steps_.size());
}

/// Appends the node's operands and then the node, unless it is there already; returns its step.
std::size_t Evaluator::visit(const expr::NodePtr& node, const Captures& captures) {
  if (const auto known = step_of_.find(node.get()); known != step_of_.end()) return known->second;
  Step step{
      .node = node.get(), .operands = {}, .tensor = {}, .scalar = 0, .slot = {}, .element = {}};
  for (const expr::NodePtr& operand : node->operands)
    step.operands.push_back(visit(operand, captures));
  if (node->op == Op::load) step.tensor = find(captures.tensors, node->name).view;
  if (node->op == Op::scalar) step.scalar = find(captures.scalars, node->name).value;
  step.slot = slot_of(*node, step.tensor);
  if (node->op == Op::scalar) step.element = 0;
  steps_.push_back(std::move(step));
  step_of_[node.get()] = steps_.size() - 1;
  return steps_.size() - 1;
}

/// Two loads of one tensor share its slot.
std::optional<std::size_t> Evaluator::slot_of(const expr::Node& node, const TensorView& tensor) {
  const bool is_captured = node.op == Op::load || node.op == Op::scalar;
  if (!is_captured || node.type != ExprType::floating) return std::nullopt;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].name == node.name) return slot;
  }
  const std::int64_t count = node.op == Op::load ? tensor.spec().num_elements() : 1;
  slots_.push_back({.name = node.name, .num_elements = static_cast<std::size_t>(count)});
  return slots_.size() - 1;
}

SlotValues Evaluator::zeros() const {
  SlotValues values;
  for (const Slot& slot : slots_) values.emplace_back(slot.num_elements, 0.0);
  return values;
}

double Evaluator::rounded(double value) const {
  return precision_ == Precision::f32 ? static_cast<float>(value) : value;
}

double Evaluator::operator()(const Position& position) {
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const double value = compute(steps_[i], position);
    values_[i] = steps_[i].node->type == ExprType::floating ? rounded(value) : value;
  }
  return values_.back();
}

double Evaluator::compute(Step& step, const Position& position) {
  const expr::Node& node = *step.node;
  const auto operand = [&](std::size_t i) { return values_[step.operands[i]]; };
  switch (node.op) {
    case Op::constant:
      return node.type == ExprType::floating ? node.float_value
                                             : static_cast<double>(node.int_value);
    case Op::variable:
      return variable_value(node.variable, position);
    case Op::scalar:
      return step.scalar;
    case Op::load:
      return load(step);
    case Op::select:
      return operand(0) != 0 ? operand(1) : operand(2);
    case Op::to_int:
      return truncated_to_int(operand(0));
    case Op::to_float:
      return operand(0);
    case Op::lt:
    case Op::le:
    case Op::gt:
    case Op::ge:
    case Op::eq:
    case Op::ne:
      return compare(node.op, operand(0), operand(1)) ? 1 : 0;
    default:
      break;
  }
  const double a = operand(0);
  const double b = step.operands.size() > 1 ? operand(1) : 0;
  if (node.type == ExprType::boolean) return bool_op(node.op, a != 0, b != 0) ? 1 : 0;
  if (node.type == ExprType::integer) return integer_op(node.op, as_int(a), as_int(b));
  return float_op(node.op, a, b);
}

/// Indices out of range are clamped; a tensor without elements reads as 0.
double Evaluator::load(Step& step) {
  std::int64_t offset = 0;
  std::int64_t row_major = 0;
  step.element = std::nullopt;
  for (int dim = 0; dim < step.tensor.rank(); ++dim) {
    const std::int64_t extent = step.tensor.size(dim);
    if (extent == 0) return 0;
    const std::int64_t index = std::clamp<std::int64_t>(
        as_int(values_[step.operands[static_cast<std::size_t>(dim)]]), 0, extent - 1);
    offset += index * step.tensor.stride(dim);
    row_major = row_major * extent + index;
  }
  step.element = static_cast<std::size_t>(row_major);
  return element(step.tensor, offset);
}

/// Is it a float made from floats? Leaves, comparisons and what is converted from an int are not.
bool Evaluator::is_arithmetic(const Step& step) const {
  if (step.node->type != ExprType::floating || step.node->op == Op::load) return false;
  return !step.operands.empty() && steps_[step.operands.back()].node->type == ExprType::floating;
}

Application Evaluator::application(std::size_t step) const {
  const std::vector<std::size_t>& operands = steps_[step].operands;
  return {.op = steps_[step].node->op,
          .a = values_[operands[0]],
          .b = operands.size() > 1 ? values_[operands[1]] : 0,
          .value = values_[step]};
}

Evaluator::Sources Evaluator::sources(std::size_t step) const {
  const Step& at = steps_[step];
  if (!is_arithmetic(at)) return {};
  if (at.node->op == Op::to_float) return {.count = 1, .steps = {at.operands[0]}, .slopes = {1}};
  if (at.node->op == Op::select) {
    const std::size_t chosen = at.operands[values_[at.operands[0]] != 0 ? 1 : 2];
    return {.count = 1, .steps = {chosen}, .slopes = {1}};
  }
  const Partials slopes = partials(application(step));
  if (at.operands.size() == 1) return {.count = 1, .steps = {at.operands[0]}, .slopes = {slopes.a}};
  return {.count = 2, .steps = {at.operands[0], at.operands[1]}, .slopes = {slopes.a, slopes.b}};
}

double Evaluator::pull_back(double seed, SlotValues& gradients) {
  double by_score = 0;
  adjoints_.assign(steps_.size(), 0);
  adjoints_.back() = seed;
  for (std::size_t i = steps_.size(); i-- > 0;) {
    const double adjoint = adjoints_[i];
    if (adjoint == 0) continue;
    const Step& step = steps_[i];
    if (step.slot && step.element) {
      double& sum = gradients[*step.slot][*step.element];
      sum = rounded(sum + adjoint);
    }
    if (step.node->op == Op::variable && step.node->variable == expr::Variable::score)
      by_score += adjoint;  // a formula may hold several nodes of it
    const Sources from = sources(i);
    for (int j = 0; j < from.count; ++j) {
      double& sum = adjoints_[from.steps[j]];
      sum = rounded(sum + rounded(adjoint * rounded(from.slopes[j])));
    }
  }
  return by_score;
}

double Evaluator::push_forward(double score_tangent, const SlotValues& tangents) {
  std::vector<double>& motion = adjoints_;
  motion.assign(steps_.size(), 0);
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    if (step.node->op == Op::variable && step.node->variable == expr::Variable::score)
      motion[i] = score_tangent;
    if (step.slot && step.element) motion[i] = tangents[*step.slot][*step.element];
    const Sources from = sources(i);
    for (int j = 0; j < from.count; ++j) {
      const double moved = motion[from.steps[j]];
      if (moved != 0) motion[i] = rounded(motion[i] + rounded(moved * rounded(from.slopes[j])));
    }
  }
  return motion.back();
}

namespace {

/// What a derivative of 0 flows through adds exactly 0.
double flow(double adjoint, double slope) {
  return adjoint == 0 || slope == 0 ? 0 : adjoint * slope;
}

}  // namespace

// y' = f_a a' + f_b b', so what y' passes on goes to a' by f_a, and to a by f_aa a' + f_ab b'.
TangentSeeds Evaluator::pull_back_tangent(const TangentSeeds& seeds, double score_tangent,
                                          const SlotValues& tangents, SlotValues& gradients) {
  push_forward(score_tangent, tangents);
  const std::vector<double> motion = adjoints_;
  std::vector<double>& by_value = adjoints_;
  std::vector<double>& by_tangent = second_;
  by_value.assign(steps_.size(), 0);
  by_tangent.assign(steps_.size(), 0);
  by_value.back() = seeds.value;
  by_tangent.back() = seeds.tangent;
  TangentSeeds by_score;
  for (std::size_t i = steps_.size(); i-- > 0;) {
    const Step& step = steps_[i];
    if (step.slot && step.element) gradients[*step.slot][*step.element] += by_value[i];
    if (step.node->op == Op::variable && step.node->variable == expr::Variable::score) {
      by_score.value += by_value[i];
      by_score.tangent += by_tangent[i];
    }
    const Sources from = sources(i);
    for (int j = 0; j < from.count; ++j) {
      by_value[from.steps[j]] += flow(by_value[i], from.slopes[j]);
      by_tangent[from.steps[j]] += flow(by_tangent[i], from.slopes[j]);
    }
    const Op op = step.node->op;
    if (from.count == 0 || op == Op::select || op == Op::to_float || by_tangent[i] == 0) continue;
    const SecondPartials f = second_partials(application(i));
    const double a = motion[from.steps[0]];
    const double b = from.count > 1 ? motion[from.steps[1]] : 0;
    by_value[from.steps[0]] += by_tangent[i] * (flow(a, f.aa) + flow(b, f.ab));
    if (from.count > 1) by_value[from.steps[1]] += by_tangent[i] * (flow(a, f.ab) + flow(b, f.bb));
  }
  return by_score;
}

/// Faà di Bruno's formula to second order: f(a, b)'' = f_a a'' + f_b b'' + f_aa a'² + 2 f_ab a' b' +
/// f_bb b'².
Motion Evaluator::derivatives_by_score() {
  const Motion result{.first = push_forward(1, zeros()), .second = 0};
  const std::vector<double>& first = adjoints_;
  second_.assign(steps_.size(), 0);
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const Sources from = sources(i);
    for (int j = 0; j < from.count; ++j) {
      if (second_[from.steps[j]] != 0) second_[i] += from.slopes[j] * second_[from.steps[j]];
    }
    const Op op = steps_[i].node->op;
    if (from.count == 0 || op == Op::select || op == Op::to_float) continue;
    const SecondPartials f = second_partials(application(i));
    const double a = first[from.steps[0]];
    const double b = from.count > 1 ? first[from.steps[1]] : 0;
    if (a != 0) second_[i] += f.aa * a * a;
    if (a != 0 && b != 0) second_[i] += 2 * f.ab * a * b;
    if (b != 0) second_[i] += f.bb * b * b;
  }
  return {result.first, second_.back()};
}

}  // namespace fovea::reference
