// Random well-typed formulas over captured data, and a plain scalar evaluator for them. For the
// expr_*_test.cpp here.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fovea/expr.hpp"

#include "expr/node.hpp"
#include "expr/passes.hpp"

namespace fovea::testing {

using expr::NodePtr;
using expr::Op;

/// Tensors of every kind that a formula reads differently, small so that indices often leave them; of rank 0, too.
class FormulaData {
 public:
  static constexpr std::int64_t kLong = 16;
  static constexpr std::int64_t kShort = 3;

  /// Floats are halves plus `offset`: without one they often equal constants and positions.
  explicit FormulaData(float offset = 0) {
    for (std::size_t i = 0; i < slopes_.size(); ++i) {
      slopes_[i] = 0.5F * static_cast<float>(i) - 3 + offset;
    }
    slopes_[3] = -0.0F - offset;
    for (std::size_t i = 0; i < ids_.size(); ++i)
      ids_[i] = static_cast<std::int32_t>(i * 7 % 5) - 1;
    for (std::size_t i = 0; i < flags_.size(); ++i) flags_[i] = i % 3 == 0;
    wide_ = {std::int64_t{1} << 40, -(std::int64_t{1} << 40), 5};
  }
  FormulaData(const FormulaData&) = delete;
  FormulaData& operator=(const FormulaData&) = delete;

  Captures captures() const {
    return {.tensors = {{"slopes", matrix(slopes_.data(), Dtype::f32, {kLong})},
                        {"ids", matrix(ids_.data(), Dtype::i32, {kShort, kLong})},
                        {"flags", matrix(flags_.data(), Dtype::boolean, {kLong})},
                        {"wide", matrix(wide_.data(), Dtype::i64, {kShort})},
                        {"gain", matrix(slopes_.data() + 11, Dtype::f32, {})},
                        {"reach", matrix(ids_.data() + 4, Dtype::i32, {})}},
            .scalars = {CapturedScalar::of("n", 3), CapturedScalar::of("t", 0.75)}};
  }

 private:
  static TensorView matrix(const void* data, Dtype dtype, std::vector<std::int64_t> shape) {
    TensorSpec spec;
    spec.dtype = dtype;
    spec.rank = static_cast<int>(shape.size());
    std::int64_t stride = 1;
    for (int dim = spec.rank - 1; dim >= 0; --dim) {
      const auto d = static_cast<std::size_t>(dim);
      spec.shape[d] = shape[d];
      spec.strides[d] = stride;
      stride *= shape[d];
    }
    return {data, spec};
  }

  std::array<float, kLong> slopes_{};
  std::array<std::int32_t, kShort * kLong> ids_{};
  std::array<bool, kLong> flags_{};
  std::array<std::int64_t, kShort> wide_{};
};

inline double element(const TensorView& view, std::int64_t offset) {
  switch (view.dtype()) {
    case Dtype::f32:
      return static_cast<const float*>(view.data())[offset];
    case Dtype::i32:
      return static_cast<const std::int32_t*>(view.data())[offset];
    case Dtype::boolean:
      return static_cast<const bool*>(view.data())[offset] ? 1 : 0;
    case Dtype::i64: {
      const std::int64_t value = static_cast<const std::int64_t*>(view.data())[offset];
      return static_cast<double>(std::clamp<std::int64_t>(value, INT32_MIN, INT32_MAX));
    }
    default:
      return 0;
  }
}

/// What formulas are made of: everything, or floats of modest size that mostly have derivatives.
enum class Taste { anything, differentiable };

/// Grows a formula of `num_steps` operations from leaves; parts are shared at random.
class FormulaGenerator {
 public:
  FormulaGenerator(const Captures& captures, std::uint32_t seed, Taste taste = Taste::anything)
      : random_(seed), taste_(taste) {
    const auto is_wanted = [&](ExprType type) {
      return taste_ == Taste::anything || type == ExprType::floating;
    };
    for (const CapturedTensor& tensor : captures.tensors) {
      if (!is_wanted(expr::type_of(tensor.view.dtype()))) continue;
      tensors_.push_back(std::make_shared<const CapturedTensor>(tensor));
    }
    for (int i = 0; i < expr::kNumVariables; ++i) {
      add(expr::make_variable(static_cast<expr::Variable>(i)));
    }
    for (const CapturedScalar& scalar : captures.scalars) {
      if (!is_wanted(scalar.type)) continue;
      add(expr::make_scalar(std::make_shared<const CapturedScalar>(scalar)));
    }
    for (const bool flag : {false, true}) add(expr::make_constant(flag));
    if (taste_ == Taste::differentiable) take_float_leaves();
  }

  NodePtr formula(int num_steps) {
    NodePtr last = pool_.front();
    for (int made = 0, tried = 0; made < num_steps && tried < 50 * num_steps; ++tried) {
      NodePtr node = step();
      if (node == nullptr) continue;
      last = node;
      add(std::move(node));
      ++made;
    }
    return last;
  }

  int below(int bound) { return std::uniform_int_distribution<int>(0, bound - 1)(random_); }

 private:
  // The text repeats what the DAG shares: keeps it readable.
  static constexpr int kMaxWrittenSize = 200;

  void add(NodePtr node) { pool_.push_back(std::move(node)); }

  // Beside the score: loads at positions, which would rarely come about by chance.
  void take_float_leaves() {
    std::vector<NodePtr> indices;
    for (const NodePtr& leaf : std::exchange(pool_, {})) {
      (leaf->type == ExprType::floating ? pool_ : indices).push_back(leaf);
    }
    for (const auto& tensor : tensors_) {
      for (int i = 0; i < 2; ++i) {
        std::vector<NodePtr> at(static_cast<std::size_t>(tensor->view.rank()));
        for (NodePtr& index : at)
          index = indices[static_cast<std::size_t>(below(static_cast<int>(indices.size())))];
        add(expr::make_load(tensor, std::move(at)));
      }
    }
    for (const double value : {0.5, -1.5, 2.0, 3.0}) add(expr::make_constant(value));
  }

  // Of floats, and what chooses between them. Sums and products twice: they keep values modest.
  Op differentiable_op() {
    constexpr std::array<Op, 34> kOps = {
        Op::sin,  Op::cos,   Op::tan,  Op::erf,   Op::log1p,  Op::expm1,  Op::round,
        Op::ceil, Op::trunc, Op::fmod, Op::add,   Op::sub,    Op::mul,    Op::add,
        Op::sub,  Op::mul,   Op::div,  Op::mod,   Op::neg,    Op::min,    Op::max,
        Op::abs,  Op::exp,   Op::exp2, Op::log,   Op::log2,   Op::floor,  Op::tanh,
        Op::sqrt, Op::pow,   Op::lt,   Op::rsqrt, Op::select, Op::sigmoid};
    return kOps[static_cast<std::size_t>(below(static_cast<int>(kOps.size())))];
  }

  // Half of the time a late one, so that formulas grow deep.
  NodePtr any() {
    const int count = static_cast<int>(pool_.size());
    const int recent = std::min(count, 6);
    return pool_[static_cast<std::size_t>(below(2) == 0 ? count - 1 - below(recent)
                                                        : below(count))];
  }

  NodePtr constant() {
    constexpr std::array<std::int64_t, 12> kInts = {0, 1,  -1, 2,  3,         7,
                                                    8, 31, 32, 64, INT32_MIN, INT32_MAX};
    constexpr float kInf = std::numeric_limits<float>::infinity();
    constexpr std::array<float, 12> kFloats = {0.0F,   -0.0F, 1.0F,        -1.0F,    0.1F, 2.5F,
                                               1e-40F, 3e38F, 16777216.0F, 1.5e-45F, kInf, -kInf};
    if (below(12) == 0) return expr::make_constant(std::nan(""));
    if (below(2) == 0) return expr::make_constant(kInts[static_cast<std::size_t>(below(12))]);
    return expr::make_constant(double{kFloats[static_cast<std::size_t>(below(12))]});
  }

  NodePtr load() {
    const auto& tensor =
        tensors_[static_cast<std::size_t>(below(static_cast<int>(tensors_.size())))];
    std::vector<NodePtr> indices;
    for (int dim = 0; dim < tensor->view.rank(); ++dim) indices.push_back(any());
    for (const NodePtr& index : indices) {
      if (index->type == ExprType::floating) return nullptr;
    }
    std::vector<NodePtr> simple;
    for (const NodePtr& index : indices) simple.push_back(expr::simplify(index));
    if (expr::load_refusal(*tensor, simple)) return nullptr;
    return expr::make_load(tensor, indices);
  }

  NodePtr step() {
    if (taste_ == Taste::differentiable) return applied(differentiable_op());
    const int kind = below(10);
    if (kind == 0) return constant();
    if (kind == 1) return bounded(load());
    const auto first = static_cast<int>(Op::add);
    return applied(static_cast<Op>(first + below(expr::kNumOps - first)));
  }

  NodePtr applied(Op op) {
    std::vector<NodePtr> operands;
    for (int i = 0; i < expr::info(op).arity; ++i) operands.push_back(any());
    // A divisor that simplifies to zero is refused by the parser, though not by make.
    const bool is_division = Op::div <= op && op <= Op::mod;
    std::vector<NodePtr> checked = operands;
    if (is_division) checked[1] = expr::simplify(operands[1]);
    if (expr::refusal(op, operands) || expr::refusal(op, checked)) return nullptr;
    return bounded(expr::make(op, operands));
  }

  NodePtr bounded(NodePtr node) {
    if (node == nullptr) return nullptr;
    int size = 1;
    for (const NodePtr& operand : node->operands) size += written_size(*operand);
    if (size > kMaxWrittenSize) return nullptr;
    sizes_[node->digest] = size;
    return node;
  }

  // Conversions are not in the pool, only what they convert.
  int written_size(const expr::Node& node) const {
    const auto found = sizes_.find(node.digest);
    if (found != sizes_.end()) return found->second;
    return node.operands.empty() ? 1 : 1 + written_size(*node.operands[0]);
  }

  std::mt19937 random_;
  Taste taste_;
  std::vector<std::shared_ptr<const CapturedTensor>> tensors_;
  std::vector<NodePtr> pool_;
  std::unordered_map<expr::Digest, int, expr::DigestHash> sizes_;
};

/// Calls `property` with many generators for each case that RapidCheck draws: formulas are cheap.
template <typename Property>
void for_random_formulas(const Captures& captures, std::uint32_t seed, Property property,
                         Taste taste = Taste::anything) {
  constexpr std::uint32_t kFormulasPerCase = 30;
  for (std::uint32_t i = 0; i < kFormulasPerCase; ++i) {
    FormulaGenerator generator(captures, seed * kFormulasPerCase + i, taste);
    property(generator);
  }
}

/// Every node's value at one position. Real is the precision of floats: float, or double as the
/// oracle has it.
template <typename Real>
class Evaluation {
 public:
  using Values = std::unordered_map<expr::Digest, double, expr::DigestHash>;

  Evaluation(const expr::Node& root, const std::array<double, expr::kNumVariables>& variables)
      : variables_(variables) {
    for (const expr::Node* node : expr::topological(root)) {
      values_.emplace(node->digest, value_of(*node));
    }
  }

  double at(const expr::Node& node) const { return values_.at(node.digest); }

 private:
  static double wrap(std::int64_t value) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(value));
  }

  double operand(const expr::Node& node, std::size_t i) const { return at(*node.operands[i]); }

  double value_of(const expr::Node& node) const {
    switch (node.op) {
      case Op::constant:
        return node.type == ExprType::floating ? node.float_value
                                               : static_cast<double>(node.int_value);
      case Op::variable:
        return variables_[static_cast<std::size_t>(node.variable)];
      case Op::scalar:
        return node.scalar_binding->value;
      case Op::load:
        return load(node);
      case Op::select:
        return operand(node, 0) != 0 ? operand(node, 1) : operand(node, 2);
      case Op::to_int: {
        const double value = operand(node, 0);
        if (std::isnan(value)) return 0;
        return static_cast<std::int32_t>(std::clamp(value, -2147483648.0, 2147483647.0));
      }
      case Op::to_float:
        return static_cast<double>(static_cast<Real>(operand(node, 0)));
      default:
        break;
    }
    const double a = operand(node, 0);
    const double b = node.operands.size() > 1 ? operand(node, 1) : 0;
    switch (node.op) {
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
      case Op::ne:
        return a != b;
      case Op::logical_and:
        return a != 0 && b != 0;
      case Op::logical_or:
        return a != 0 || b != 0;
      case Op::logical_not:
        return a == 0;
      default:
        break;
    }
    if (node.type == ExprType::integer) {
      return integer(node.op, static_cast<std::int64_t>(a), static_cast<std::int64_t>(b));
    }
    return static_cast<double>(floating(node.op, static_cast<Real>(a), static_cast<Real>(b)));
  }

  double load(const expr::Node& node) const {
    const TensorView& view = node.tensor->view;
    std::int64_t offset = 0;
    for (int dim = 0; dim < view.rank(); ++dim) {
      const auto index = static_cast<std::int64_t>(operand(node, static_cast<std::size_t>(dim)));
      offset += std::clamp<std::int64_t>(index, 0, view.size(dim) - 1) * view.stride(dim);
    }
    return element(view, offset);
  }

  static double integer(Op op, std::int64_t a, std::int64_t b) {
    const std::int64_t quotient = b == 0 ? 0
                                         : static_cast<std::int64_t>(std::floor(
                                               static_cast<double>(a) / static_cast<double>(b)));
    switch (op) {
      case Op::add:
        return wrap(a + b);
      case Op::sub:
        return wrap(a - b);
      case Op::mul:
        return wrap(a * b);
      case Op::floor_div:
        return wrap(quotient);
      case Op::mod:
        return b == 0 ? 0 : wrap(a - b * quotient);
      case Op::neg:
        return wrap(-a);
      case Op::min:
        return static_cast<double>(std::min(a, b));
      case Op::max:
        return static_cast<double>(std::max(a, b));
      case Op::abs:
        return wrap(std::abs(a));
      case Op::bit_and:
        return wrap(a & b);
      case Op::bit_or:
        return wrap(a | b);
      case Op::bit_xor:
        return wrap(a ^ b);
      case Op::bit_not:
        return wrap(~a);
      case Op::shl:
        return wrap(a * (std::int64_t{1} << (b & 31)));
      case Op::shr:
        return wrap(a >> (b & 31));
      default:
        throw std::logic_error("not an op on ints");
    }
  }

  static Real floating(Op op, Real a, Real b) {
    const bool nan = std::isnan(a) || std::isnan(b);
    constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();
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
      case Op::mod: {
        const Real product = b * std::floor(a / b);
        return a - product;
      }
      case Op::neg:
        return -a;
      case Op::min:
        return nan ? kNan : std::min(a, b);
      case Op::max:
        return nan ? kNan : std::max(a, b);
      case Op::abs:
        return std::abs(a);
      case Op::floor:
        return std::floor(a);
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
        throw std::logic_error("not an op on floats");
    }
  }

  std::array<double, expr::kNumVariables> variables_;
  Values values_;
};

}  // namespace fovea::testing
