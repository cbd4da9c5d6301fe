#include "expr/node.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <unordered_set>

#include "core/check.hpp"

namespace fovea::expr {

namespace {

constexpr std::array<std::string_view, kNumVariables> kVariableNames = {
    "score", "batch", "q_head", "kv_head", "q_idx", "kv_idx", "seqlen_q", "seqlen_kv"};

// In the order of Op.
constexpr std::array<OpInfo, kNumOps> kOps = {{
    {"constant", 0, 0}, {"variable", 0, 0}, {"scalar", 0, 0},  {"load", -1, 0}, {"+", 2, 10},
    {"-", 2, 10},       {"*", 2, 11},       {"/", 2, 11},      {"//", 2, 11},   {"%", 2, 11},
    {"-", 1, 12},       {"min", 2, 0},      {"max", 2, 0},     {"abs", 1, 0},   {"floor", 1, 0},
    {"exp", 1, 0},      {"exp2", 1, 0},     {"log", 1, 0},     {"log2", 1, 0},  {"tanh", 1, 0},
    {"sqrt", 1, 0},     {"rsqrt", 1, 0},    {"sigmoid", 1, 0}, {"sin", 1, 0},   {"cos", 1, 0},
    {"tan", 1, 0},      {"erf", 1, 0},      {"round", 1, 0},   {"ceil", 1, 0},  {"trunc", 1, 0},
    {"log1p", 1, 0},    {"expm1", 1, 0},    {"fmod", 2, 0},    {"pow", 2, 0},   {"<", 2, 5},
    {"<=", 2, 5},       {">", 2, 5},        {">=", 2, 5},      {"==", 2, 5},    {"!=", 2, 5},
    {"&&", 2, 3},       {"||", 2, 2},       {"!", 1, 4},       {"&", 2, 8},     {"|", 2, 6},
    {"^", 2, 7},        {"~", 1, 12},       {"<<", 2, 9},      {">>", 2, 9},    {"select", 3, 1},
    {"int", 1, 0},      {"float", 1, 0},
}};

constexpr double kMinInt = std::numeric_limits<std::int32_t>::min();
constexpr double kMaxInt = std::numeric_limits<std::int32_t>::max();

constexpr std::array<std::string_view, 8> kKeywords = {"and",   "or",  "not", "true",
                                                       "false", "inf", "nan", "let"};

// Two independent mixers (the finalisers of SplitMix64 and of MurmurHash3) make 128 bits that are
// equal on every machine.
class Hasher {
 public:
  void add(std::uint64_t word) {
    lo_ = mix_lo(lo_ + 0x9e3779b97f4a7c15U + word);
    hi_ = mix_hi((hi_ ^ word) * 0x2545f4914f6cdd1dU + 0x632be59bd9b4e019U);
  }
  void add(std::string_view text) {
    add(text.size());
    for (const char c : text) add(static_cast<std::uint64_t>(static_cast<unsigned char>(c)));
  }
  Digest digest() const { return {lo_, hi_}; }

 private:
  static std::uint64_t mix_lo(std::uint64_t x) {
    x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31U);
  }
  static std::uint64_t mix_hi(std::uint64_t x) {
    x = (x ^ (x >> 33U)) * 0xff51afd7ed558ccdU;
    x = (x ^ (x >> 33U)) * 0xc4ceb9fe1a85ec53U;
    return x ^ (x >> 33U);
  }

  std::uint64_t lo_ = 0x243f6a8885a308d3U;
  std::uint64_t hi_ = 0x13198a2e03707344U;
};

Digest digest_of(const Node& node) {
  Hasher hasher;
  hasher.add((static_cast<std::uint64_t>(node.op) << 8U) | static_cast<std::uint64_t>(node.type));
  switch (node.op) {
    case Op::constant:
      hasher.add(std::bit_cast<std::uint64_t>(node.int_value));
      hasher.add(std::bit_cast<std::uint64_t>(node.float_value));
      break;
    case Op::variable:
      hasher.add(static_cast<std::uint64_t>(node.variable));
      break;
    case Op::scalar:
      hasher.add(node.name);
      break;
    case Op::load:
      hasher.add(node.name);
      hasher.add((static_cast<std::uint64_t>(node.dtype) << 8U) | node.operands.size());
      break;
    default:
      break;
  }
  for (const NodePtr& operand : node.operands) {
    hasher.add(operand->digest.lo);
    hasher.add(operand->digest.hi);
  }
  return hasher.digest();
}

NodePtr finish(Node&& node) {
  node.digest = digest_of(node);
  return std::make_shared<const Node>(std::move(node));
}

NodePtr apply(Op op, ExprType type, std::vector<NodePtr> operands) {
  Node node;
  node.op = op;
  node.type = type;
  node.operands = std::move(operands);
  return finish(std::move(node));
}

std::int64_t saturated_int(double value) {
  if (std::isnan(value)) return 0;
  return static_cast<std::int64_t>(std::trunc(std::clamp(value, kMinInt, kMaxInt)));
}

NodePtr convert(const NodePtr& node, ExprType type) {
  if (node->type == type) return node;
  FOVEA_ASSERT(type != ExprType::boolean);
  const bool to_int = type == ExprType::integer;
  if (node->op != Op::constant) return apply(to_int ? Op::to_int : Op::to_float, type, {node});
  if (!to_int) return make_constant(static_cast<double>(node->int_value));
  return make_constant(node->type == ExprType::floating ? saturated_int(node->float_value)
                                                        : node->int_value);
}

NodePtr negate(const NodePtr& operand) {
  if (operand->op != Op::constant) return apply(Op::neg, operand->type, {operand});
  if (operand->type == ExprType::floating) return make_constant(-operand->float_value);
  const auto wrapped =
      static_cast<std::int32_t>(0U - static_cast<std::uint32_t>(operand->int_value));
  return make_constant(std::int64_t{wrapped});
}

ExprType number(ExprType type) { return type == ExprType::boolean ? ExprType::integer : type; }

ExprType unified(ExprType a, ExprType b) { return std::max(a, b); }

// The bool counterpart of an op on bits.
Op logic_of(Op op) {
  switch (op) {
    case Op::bit_and:
      return Op::logical_and;
    case Op::bit_or:
      return Op::logical_or;
    case Op::bit_xor:
      return Op::ne;
    case Op::bit_not:
      return Op::logical_not;
    default:
      return op;
  }
}

bool is_bitwise(Op op) { return Op::bit_and <= op && op <= Op::shr; }
bool is_logic(Op op) { return Op::logical_and <= op && op <= Op::logical_not; }
bool is_division(Op op) { return Op::div <= op && op <= Op::mod; }

bool is_zero(const Node& node) {
  return node.op == Op::constant && node.int_value == 0 && node.float_value == 0;
}

std::string types_of(std::span<const NodePtr> operands) {
  std::string text;
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const char* separator = i == 0 ? "" : i + 1 == operands.size() ? " and " : ", ";
    text += fmt::format("{}{}", separator, name(operands[i]->type));
  }
  return text;
}

template <typename Predicate>
bool any_type(std::span<const NodePtr> operands, Predicate predicate) {
  for (const NodePtr& operand : operands) {
    if (predicate(operand->type)) return true;
  }
  return false;
}

std::vector<NodePtr> converted(const std::vector<NodePtr>& operands, ExprType type) {
  std::vector<NodePtr> result;
  result.reserve(operands.size());
  for (const NodePtr& operand : operands) result.push_back(convert(operand, type));
  return result;
}

}  // namespace

Node::~Node() {
  // A node is released only while its operands are held here, so its own destructor ends at once.
  std::vector<NodePtr> pending = std::move(operands);
  while (!pending.empty()) {
    const NodePtr node = std::move(pending.back());
    pending.pop_back();
    if (node.use_count() == 1) {
      pending.insert(pending.end(), node->operands.begin(), node->operands.end());
    }
  }
}

std::string_view name(Variable variable) {
  return kVariableNames[static_cast<std::size_t>(variable)];
}

std::string_view name(ExprType type) {
  constexpr std::array<std::string_view, 3> kNames = {"bool", "int", "float"};
  return kNames[static_cast<std::size_t>(type)];
}

const OpInfo& info(Op op) { return kOps[static_cast<std::size_t>(op)]; }

ExprType type_of(Dtype dtype) {
  if (dtype == Dtype::boolean) return ExprType::boolean;
  return is_float(dtype) ? ExprType::floating : ExprType::integer;
}

std::optional<std::string> refusal(Op op, std::span<const NodePtr> operands) {
  const OpInfo& row = info(op);
  if (static_cast<int>(operands.size()) != row.arity) {
    return fmt::format("'{}' got {} operands; expected {}", row.name, operands.size(), row.arity);
  }
  const auto is_float = [](ExprType type) { return type == ExprType::floating; };
  const auto is_number = [](ExprType type) { return type != ExprType::boolean; };
  if (is_logic(op) && any_type(operands, is_number)) {
    return fmt::format("'{}' got {}; expected bool, compare a number first (x != 0)", row.name,
                       types_of(operands));
  }
  if (is_bitwise(op) && any_type(operands, is_float)) {
    return fmt::format("'{}' got {}; expected ints, convert with int(x)", row.name,
                       types_of(operands));
  }
  if (op == Op::select && is_number(operands[0]->type)) {
    return fmt::format(
        "the condition of select is {}; expected bool, compare a number first (x != 0)",
        name(operands[0]->type));
  }
  if (is_division(op) && is_zero(*operands[1])) {
    return fmt::format("'{}' divides by the constant zero; expected another divisor", row.name);
  }
  return std::nullopt;
}

std::optional<std::string> name_refusal(std::string_view name) {
  const auto is_letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  };
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  bool is_identifier = !name.empty() && is_letter(name.front());
  for (const char c : name) is_identifier = is_identifier && (is_letter(c) || is_digit(c));
  if (!is_identifier) {
    return fmt::format("captured name is '{}'; expected letters, digits and '_', no digit first",
                       name);
  }
  bool is_reserved = false;
  for (const std::string_view word : kVariableNames) is_reserved |= word == name;
  for (const std::string_view word : kKeywords) is_reserved |= word == name;
  for (const OpInfo& row : kOps) is_reserved |= row.name == name && row.arity > 0;
  if (is_reserved) {
    return fmt::format("captured name is '{}'; expected one that is not a word of the language",
                       name);
  }
  return std::nullopt;
}

std::optional<std::string> load_refusal(const CapturedTensor& tensor,
                                        std::span<const NodePtr> indices) {
  const int rank = tensor.view.rank();
  if (tensor.view.dtype() == Dtype::e4m3)
    return fmt::format("'{}' is e4m3; expected numbers that programs read: convert it",
                       tensor.name);
  if (static_cast<int>(indices.size()) != rank) {
    return fmt::format("'{}' got {} {}; expected {}, its rank", tensor.name, indices.size(),
                       indices.size() == 1 ? "index" : "indices", rank);
  }
  for (int dim = 0; dim < rank; ++dim) {
    const Node& index = *indices[static_cast<std::size_t>(dim)];
    if (index.type == ExprType::floating) {
      return fmt::format("index {} of '{}' is float; expected int, convert with int(x)", dim,
                         tensor.name);
    }
    const std::int64_t extent = tensor.view.size(dim);
    if (index.op == Op::constant && (index.int_value < 0 || index.int_value >= extent)) {
      return fmt::format("index {} of '{}' is {}; expected 0 <= index < {}, its extent", dim,
                         tensor.name, index.int_value, extent);
    }
  }
  return std::nullopt;
}

NodePtr make(Op op, std::vector<NodePtr> operands) {
  if (const auto reason = refusal(op, operands)) invalid("formula", *reason);
  switch (op) {
    case Op::add:
    case Op::sub:
    case Op::mul:
    case Op::floor_div:
    case Op::mod:
    case Op::min:
    case Op::max: {
      const ExprType type = number(unified(operands[0]->type, operands[1]->type));
      return apply(op, type, converted(operands, type));
    }
    case Op::neg:
      return negate(convert(operands[0], number(operands[0]->type)));
    case Op::abs: {
      const ExprType type = number(operands[0]->type);
      return apply(op, type, converted(operands, type));
    }
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
      return apply(op, ExprType::floating, converted(operands, ExprType::floating));
    case Op::eq:
    case Op::ne:
      return apply(op, ExprType::boolean,
                   converted(operands, unified(operands[0]->type, operands[1]->type)));
    case Op::lt:
    case Op::le:
    case Op::gt:
    case Op::ge:
      return apply(op, ExprType::boolean,
                   converted(operands, number(unified(operands[0]->type, operands[1]->type))));
    case Op::logical_and:
    case Op::logical_or:
    case Op::logical_not:
      return apply(op, ExprType::boolean, std::move(operands));
    case Op::bit_and:
    case Op::bit_or:
    case Op::bit_xor:
    case Op::bit_not:
    case Op::shl:
    case Op::shr: {
      const bool all_bool = !any_type(operands, [](ExprType t) { return t != ExprType::boolean; });
      if (all_bool && logic_of(op) != op) {
        return apply(logic_of(op), ExprType::boolean, std::move(operands));
      }
      return apply(op, ExprType::integer, converted(operands, ExprType::integer));
    }
    case Op::select: {
      const ExprType type = unified(operands[1]->type, operands[2]->type);
      return apply(op, type, {operands[0], convert(operands[1], type), convert(operands[2], type)});
    }
    case Op::to_int:
      return convert(operands[0], ExprType::integer);
    case Op::to_float:
      return convert(operands[0], ExprType::floating);
    case Op::constant:
    case Op::variable:
    case Op::scalar:
    case Op::load:
      break;
  }
  throw InternalError(fmt::format("internal: make cannot build a {}", info(op).name));
}

NodePtr make_constant(bool value) {
  Node node;
  node.type = ExprType::boolean;
  node.int_value = value ? 1 : 0;
  return finish(std::move(node));
}

void refuse_constant(const std::string& value) {
  invalid("formula", fmt::format("the constant {} is beyond 32 bits; expected -2147483648 to "
                                 "2147483647",
                                 value));
}

NodePtr make_constant(std::int64_t value) {
  if (value != static_cast<std::int32_t>(value)) refuse_constant(std::to_string(value));
  Node node;
  node.type = ExprType::integer;
  node.int_value = value;
  return finish(std::move(node));
}

NodePtr make_constant(double value) {
  Node node;
  node.type = ExprType::floating;
  // One NaN, so that equal formulas have equal digests.
  node.float_value = std::isnan(value) ? std::numeric_limits<double>::quiet_NaN()
                                       : static_cast<double>(static_cast<float>(value));
  return finish(std::move(node));
}

NodePtr make_variable(Variable variable) {
  Node node;
  node.op = Op::variable;
  node.type = variable == Variable::score ? ExprType::floating : ExprType::integer;
  node.variable = variable;
  return finish(std::move(node));
}

std::optional<std::string> scalar_refusal(const CapturedScalar& scalar) {
  const double value = scalar.value;
  const bool is_exact = scalar.type == ExprType::floating ||
                        (value == std::floor(value) && kMinInt <= value && value <= kMaxInt);
  if (is_exact) return std::nullopt;
  return fmt::format("'{}' is {}; expected a whole number of 32 bits for an int", scalar.name,
                     value);
}

NodePtr make_scalar(std::shared_ptr<const CapturedScalar> binding) {
  if (const auto reason = name_refusal(binding->name)) invalid("scalar", *reason);
  if (const auto reason = scalar_refusal(*binding)) invalid("scalar", *reason);
  Node node;
  node.op = Op::scalar;
  node.type = binding->type;
  node.name = binding->name;
  node.scalar_binding = std::move(binding);
  return finish(std::move(node));
}

NodePtr make_load(std::shared_ptr<const CapturedTensor> tensor, std::vector<NodePtr> indices) {
  if (const auto reason = name_refusal(tensor->name)) invalid("capture", *reason);
  if (const auto reason = load_refusal(*tensor, indices)) invalid("formula", *reason);
  Node node;
  node.op = Op::load;
  node.dtype = tensor->view.dtype();
  node.type = type_of(node.dtype);
  node.operands = converted(indices, ExprType::integer);
  node.name = tensor->name;
  node.tensor = std::move(tensor);
  return finish(std::move(node));
}

NodePtr with_operands(const Node& node, std::vector<NodePtr> operands) {
  FOVEA_ASSERT(operands.size() == node.operands.size());
  const bool folds = node.op == Op::neg || node.op == Op::to_int || node.op == Op::to_float;
  if (folds && operands[0]->op == Op::constant) return make(node.op, std::move(operands));
  Node copy = node;
  copy.operands = std::move(operands);
  return finish(std::move(copy));
}

NodePtr with_name(const Node& node, const std::string& slot) {
  Node copy = node;
  copy.name = slot;
  if (node.op == Op::load) {
    CapturedTensor renamed = *node.tensor;
    renamed.name = slot;
    copy.tensor = std::make_shared<const CapturedTensor>(std::move(renamed));
  } else {
    const CapturedScalar& bound = *node.scalar_binding;
    copy.scalar_binding =
        std::make_shared<const CapturedScalar>(CapturedScalar{slot, bound.type, bound.value});
  }
  return finish(std::move(copy));
}

NodePtr with_binding(const Node& load, std::shared_ptr<const CapturedTensor> tensor) {
  Node copy = load;
  copy.tensor = std::move(tensor);
  return std::make_shared<const Node>(std::move(copy));
}

NodePtr with_binding(const Node& scalar, std::shared_ptr<const CapturedScalar> binding) {
  Node copy = scalar;
  copy.scalar_binding = std::move(binding);
  return std::make_shared<const Node>(std::move(copy));
}

std::vector<const Node*> topological(const Node& root) {
  std::vector<const Node*> order;
  std::unordered_set<Digest, DigestHash> seen{root.digest};
  struct Visit {
    const Node* node;
    std::size_t next_operand;
  };
  std::vector<Visit> stack{{&root, 0}};
  while (!stack.empty()) {
    Visit& visit = stack.back();
    if (visit.next_operand == visit.node->operands.size()) {
      order.push_back(visit.node);
      stack.pop_back();
      continue;
    }
    const Node* operand = visit.node->operands[visit.next_operand++].get();
    if (seen.insert(operand->digest).second) stack.push_back({operand, 0});
  }
  return order;
}

}  // namespace fovea::expr
