// The nodes of the expression DAG and the table of operators. Read print.hpp, parse.hpp,
// interval.hpp or tape.hpp next.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/expr.hpp"

namespace fovea::expr {

enum class Op : std::uint8_t {
  // leaves
  constant,
  variable,
  scalar,
  load,
  // arithmetic
  add,
  sub,
  mul,
  div,
  floor_div,
  mod,
  neg,
  min,
  max,
  abs,
  floor,
  exp,
  exp2,
  log,
  log2,
  tanh,
  sqrt,
  rsqrt,
  sigmoid,
  sin,
  cos,
  tan,
  erf,
  round,
  ceil,
  trunc,
  log1p,
  expm1,
  fmod,
  pow,
  // comparison: operands of one type, result bool
  lt,
  le,
  gt,
  ge,
  eq,
  ne,
  // logic on bools
  logical_and,
  logical_or,
  logical_not,
  // bits of ints
  bit_and,
  bit_or,
  bit_xor,
  bit_not,
  shl,
  shr,
  // select(bool, a, b)
  select,
  // conversions
  to_int,
  to_float,
};
inline constexpr int kNumOps = static_cast<int>(Op::to_float) + 1;

enum class Variable : std::uint8_t {
  score,
  batch,
  q_head,
  kv_head,
  q_idx,
  kv_idx,
  seqlen_q,
  seqlen_kv
};
inline constexpr int kNumVariables = 8;
std::string_view name(Variable variable);

struct Digest {
  std::uint64_t lo = 0, hi = 0;
  bool operator==(const Digest&) const = default;
};

struct DigestHash {
  std::size_t operator()(const Digest& d) const { return static_cast<std::size_t>(d.lo); }
};

/// Immutable. Operands have already been converted: binary arithmetic and comparisons have two
/// operands of one type, the type of arithmetic is that of its operands, indices of a load are
/// ints.
struct Node {
  Op op = Op::constant;
  ExprType type = ExprType::floating;
  std::vector<NodePtr> operands;        // load: its indices
  std::int64_t int_value = 0;           // constant of type integer (in 32 bits) or boolean (0, 1)
  double float_value = 0;               // constant of type floating: exactly an fp32 value
  Variable variable = Variable::score;  // variable
  std::string name;                     // scalar, load: the slot
  Dtype dtype = Dtype::f32;             // load: element type of the tensor (part of the digest)
  // load: what the slot is bound to (not part of the digest)
  std::shared_ptr<const CapturedTensor> tensor;
  std::shared_ptr<const CapturedScalar> scalar_binding;  // scalar: likewise
  Digest digest;                                         // of structure, names and constants

  Node() = default;
  Node(const Node&) = default;
  Node(Node&&) = default;
  Node& operator=(const Node&) = delete;
  ~Node();  // without recursion: formulas may be thousands of nodes deep
};

/// One row per op: spelling, arity and where it stands in the grammar.
struct OpInfo {
  std::string_view name;  // of the function, or the operator's token
  int arity = 0;          // -1: any
  int precedence = 0;     // of an infix or prefix operator, rising; 0 for function call syntax
};
const OpInfo& info(Op op);

/// Why these operands, as written, cannot be given to this op ("'&&' got float and bool; expected
/// bools ..."); empty: they can.
std::optional<std::string> refusal(Op op, std::span<const NodePtr> operands);

/// Likewise for a load from a tensor of this shape.
std::optional<std::string> load_refusal(const CapturedTensor& tensor,
                                        std::span<const NodePtr> indices);

/// Why this cannot be the name of a captured tensor or scalar; empty: it can.
std::optional<std::string> name_refusal(std::string_view name);

/// Why a scalar cannot have this value: an int is whole and has 32 bits; empty: it can.
std::optional<std::string> scalar_refusal(const CapturedScalar& scalar);

/// Type rules, conversions, literal folding of casts and negation, digest. Throws InvalidArgument
/// naming the op and types. `operands` as written; the result holds the converted ones.
NodePtr make(Op op, std::vector<NodePtr> operands);
NodePtr make_constant(bool value);
NodePtr make_constant(std::int64_t value);  // must fit in 32 bits
NodePtr make_constant(double value);        // rounded to fp32
[[noreturn]] void refuse_constant(const std::string& value);
NodePtr make_variable(Variable variable);
NodePtr make_scalar(std::shared_ptr<const CapturedScalar> binding);
NodePtr make_load(std::shared_ptr<const CapturedTensor> tensor, std::vector<NodePtr> indices);

/// A copy with other operands of the same types (same op, same leaf data): what rewriting passes
/// use. Refuses nothing.
NodePtr with_operands(const Node& node, std::vector<NodePtr> operands);

/// A copy of a load or scalar whose slot has another name.
NodePtr with_name(const Node& node, const std::string& slot);

/// A copy of a load or scalar whose slot is bound to something else of its dtype and rank, or type. Refuses nothing.
NodePtr with_binding(const Node& load, std::shared_ptr<const CapturedTensor> tensor);
NodePtr with_binding(const Node& scalar, std::shared_ptr<const CapturedScalar> binding);

/// "bool", "int", "float".
std::string_view name(ExprType type);

/// ExprType that an element of this dtype has in a program.
ExprType type_of(Dtype dtype);

/// Nodes of the DAG, operands before users, each digest once.
std::vector<const Node*> topological(const Node& root);

}  // namespace fovea::expr
