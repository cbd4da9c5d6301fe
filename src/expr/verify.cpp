#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/check.hpp"
#include "expr/passes.hpp"

namespace fovea::expr {

namespace {

bool is_int(ExprType type) { return type == ExprType::integer; }
bool is_float(ExprType type) { return type == ExprType::floating; }
bool is_bool(ExprType type) { return type == ExprType::boolean; }

bool all_operands(const Node& node, ExprType type) {
  return std::all_of(node.operands.begin(), node.operands.end(),
                     [&](const NodePtr& operand) { return operand->type == type; });
}

const char* constant_fault(const Node& node) {
  if (is_float(node.type)) {
    const bool is_fp32 =
        std::isnan(node.float_value) ||
        static_cast<double>(static_cast<float>(node.float_value)) == node.float_value;
    return is_fp32 ? nullptr : "its value is not fp32";
  }
  if (is_bool(node.type) && node.int_value != 0 && node.int_value != 1)
    return "its value is not a bool";
  const bool is_in_range = node.int_value == static_cast<std::int32_t>(node.int_value);
  return is_in_range ? nullptr : "its value is beyond 32 bits";
}

const char* load_fault(const Node& node) {
  if (!node.tensor || node.tensor->name != node.name) return "its slot has no binding of that name";
  if (node.tensor->view.dtype() != node.dtype) return "its dtype is not that of the tensor";
  if (node.type != type_of(node.dtype)) return "its type is not that of its dtype";
  if (static_cast<int>(node.operands.size()) != node.tensor->view.rank())
    return "it has another rank";
  return all_operands(node, ExprType::integer) ? nullptr : "an index is not int";
}

const char* scalar_fault(const Node& node) {
  if (!node.scalar_binding || node.scalar_binding->name != node.name) {
    return "its slot has no binding of that name";
  }
  return node.scalar_binding->type == node.type ? nullptr : "its type is not that of the binding";
}

const char* number_fault(const Node& node, bool may_be_int) {
  if (!is_float(node.type) && !(may_be_int && is_int(node.type))) return "its type is wrong";
  return all_operands(node, node.type) ? nullptr : "an operand has another type";
}

const char* comparison_fault(const Node& node) {
  if (!is_bool(node.type)) return "its type is not bool";
  if (node.operands[0]->type != node.operands[1]->type) return "its operands have two types";
  const bool is_ordering = node.op != Op::eq && node.op != Op::ne;
  return is_ordering && is_bool(node.operands[0]->type) ? "it orders bools" : nullptr;
}

const char* select_fault(const Node& node) {
  if (!is_bool(node.operands[0]->type)) return "its condition is not bool";
  const bool is_unified =
      node.operands[1]->type == node.type && node.operands[2]->type == node.type;
  return is_unified ? nullptr : "its choices have another type";
}

const char* fault(const Node& node) {
  const int arity = info(node.op).arity;
  if (arity >= 0 && static_cast<int>(node.operands.size()) != arity) return "it has another arity";
  switch (node.op) {
    case Op::constant:
      return constant_fault(node);
    case Op::variable:
      return is_float(node.type) == (node.variable == Variable::score) ? nullptr
                                                                       : "its type is wrong";
    case Op::scalar:
      return scalar_fault(node);
    case Op::load:
      return load_fault(node);
    case Op::add:
    case Op::sub:
    case Op::mul:
    case Op::floor_div:
    case Op::mod:
    case Op::neg:
    case Op::min:
    case Op::max:
    case Op::abs:
      return number_fault(node, true);
    case Op::div:
    case Op::floor:
    case Op::exp:
    case Op::exp2:
    case Op::log:
    case Op::log2:
    case Op::tanh:
    case Op::sqrt:
    case Op::rsqrt:
    case Op::sigmoid:
    case Op::sin:
    case Op::cos:
    case Op::tan:
    case Op::erf:
    case Op::round:
    case Op::ceil:
    case Op::trunc:
    case Op::log1p:
    case Op::expm1:
    case Op::fmod:
    case Op::pow:
      return number_fault(node, false);
    case Op::lt:
    case Op::le:
    case Op::gt:
    case Op::ge:
    case Op::eq:
    case Op::ne:
      return comparison_fault(node);
    case Op::logical_and:
    case Op::logical_or:
    case Op::logical_not:
      return is_bool(node.type) && all_operands(node, ExprType::boolean) ? nullptr
                                                                         : "it is not bool";
    case Op::bit_and:
    case Op::bit_or:
    case Op::bit_xor:
    case Op::bit_not:
    case Op::shl:
    case Op::shr:
      return is_int(node.type) && all_operands(node, ExprType::integer) ? nullptr : "it is not int";
    case Op::select:
      return select_fault(node);
    case Op::to_int:
      return is_int(node.type) && !is_int(node.operands[0]->type) ? nullptr : "it converts nothing";
    case Op::to_float:
      return is_float(node.type) && !is_float(node.operands[0]->type) ? nullptr
                                                                      : "it converts nothing";
  }
  return "its op is unknown";
}

}  // namespace

void verify(const Node& root, std::string_view after_pass) {
  for (const Node* node : topological(root)) {
    if (const char* reason = fault(*node)) {
      throw InternalError(fmt::format("internal: after {}, node '{}' is broken: {}", after_pass,
                                      info(node->op).name, reason));
    }
  }
}

}  // namespace fovea::expr
