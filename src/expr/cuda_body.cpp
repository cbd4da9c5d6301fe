#include "expr/cuda_body.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "expr/cuda_facts.hpp"
#include "expr/split_loads.hpp"

namespace fovea::expr {

namespace {

// Longer parts get a name of their own: lines stay readable, and text stays linear in the formula.
constexpr std::size_t kMaxPart = 48;

// How tightly C++ binds, rising. Comparisons and bits are not mixed without parentheses, whatever C++ allows.
enum Level : std::uint8_t {
  kConditional,
  kOr,
  kAnd,
  kBits,
  kComparison,
  kSum,
  kProduct,
  kPrefix,
  kPrimary
};

/// How an op is spelled, on values and on ranges: a token at a level, or a function.
struct Spelling {
  std::string_view token;
  Level level = kPrimary;  // kPrimary: a function of program.cuh and range.cuh
};

// In the order of Op.
constexpr std::array<Spelling, kNumOps> kSpellings = {{
    {"constant"},
    {"variable"},
    {"scalar"},
    {"load"},
    {"+", kSum},
    {"-", kSum},
    {"*", kProduct},
    {"div"},
    {"floor_div"},
    {"mod"},
    {"-", kPrefix},
    {"min"},
    {"max"},
    {"abs"},
    {"floor"},
    {"exp"},
    {"exp2"},
    {"log"},
    {"log2"},
    {"tanh"},
    {"sqrt"},
    {"rsqrt"},
    {"sigmoid"},
    {"sin"},
    {"cos"},
    {"tan"},
    {"erf"},
    {"round"},
    {"ceil"},
    {"trunc"},
    {"log1p"},
    {"expm1"},
    {"fmod"},
    {"pow"},
    {"<", kComparison},
    {"<=", kComparison},
    {">", kComparison},
    {">=", kComparison},
    {"==", kComparison},
    {"!=", kComparison},
    {"&&", kAnd},
    {"||", kOr},
    {"!", kPrefix},
    {"&", kBits},
    {"|", kBits},
    {"^", kBits},
    {"~", kPrefix},
    {"<<", kBits},
    {">>", kBits},
    {"select", kConditional},
    {"to_int"},
    {"to_float"},
}};

const Spelling& spelling(Op op) { return kSpellings[static_cast<std::size_t>(op)]; }

bool is_comparison(Op op) { return Op::lt <= op && op <= Op::ne; }
bool is_constant(const Node& node) { return node.op == Op::constant; }
std::string_view element_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::boolean:
      return "Bool";
    case Dtype::u8:
      return "std::uint8_t";
    case Dtype::i8:
      return "std::int8_t";
    case Dtype::i32:
      return "std::int32_t";
    case Dtype::i64:
      return "std::int64_t";
    case Dtype::f32:
      return "float";
    case Dtype::f16:
      return "F16";
    case Dtype::bf16:
      return "Bf16";
    case Dtype::e4m3:  // refused where it is captured
      break;
  }
  return "";
}

std::string float_text(double value) {
  if (std::isnan(value)) return "nan()";
  if (std::isinf(value)) return value < 0 ? "-infinity()" : "infinity()";
  return fmt::format("{:a}F", value);
}

std::string constant_text(const Node& node) {
  if (node.type == ExprType::floating) return float_text(node.float_value);
  if (node.type == ExprType::boolean) return node.int_value != 0 ? "true" : "false";
  if (node.int_value == std::numeric_limits<std::int32_t>::min()) return "kLeastInt";
  return fmt::format("{}", node.int_value);
}

bool is_negative(const Node& constant) {
  return constant.int_value < 0 ||
         (!std::isnan(constant.float_value) && std::signbit(constant.float_value));
}

/// k where the node is the constant 2^k, k >= 1; else 0.
int log2_of_constant(const Node& node) {
  if (!is_constant(node) || node.type != ExprType::integer || node.int_value < 2) return 0;
  int power = 0;
  while ((std::int64_t{1} << power) < node.int_value) ++power;
  return (std::int64_t{1} << power) == node.int_value ? power : 0;
}

class Printer {
 public:
  Printer(const CudaFunction& function, CudaSlots& slots)
      : function_(function),
        slots_(slots),
        reads_(find_reads(function.program)),
        is_smooth_(find_smooth(function.program)),
        uses_(count_uses(function.program)) {
    if (function.domain == Domain::range) name_compared_sums();
    declare_leaves();
    for (std::size_t i = 0; i < reads_.size(); ++i) write(i);
  }

  CudaBody take() {
    return {std::move(lines_), parts_.back().text, reads_captures_, reads_variables_};
  }

 private:
  struct Part {
    std::string text;
    Level level = kPrimary;
    Domain domain = Domain::value;
  };

  const Node& node(std::size_t i) const { return *function_.program.nodes()[i]; }
  const Part& operand(std::size_t i, std::size_t k) const {
    return parts_[static_cast<std::size_t>(function_.program.operands(i)[k])];
  }
  const Node& operand_node(std::size_t i, std::size_t k) const { return *node(i).operands[k]; }

  /// have_not_wrapped(a, b) names both operands of a comparison twice.
  void name_compared_sums() {
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      if (!is_comparison(node(i).op) || function_.program.affine(i) == nullptr) continue;
      for (const int k : function_.program.operands(i)) uses_[static_cast<std::size_t>(k)] += 2;
    }
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      const IntervalProgram::Affine* affine = function_.program.affine(i);
      if (affine == nullptr) continue;
      for (const auto& term : affine->terms) uses_[static_cast<std::size_t>(term.node)] += 2;
    }
  }

  void write(std::size_t i) {
    Part part = part_of(i);
    const bool is_load = node(i).op == Op::load;
    const bool is_leaf = node(i).operands.empty() && !is_load;
    const bool is_root = i + 1 == reads_.size();
    const bool is_shared = uses_[i] > 1 || is_load;
    const bool is_named = !is_leaf && !is_root && (is_shared || part.text.size() > kMaxPart);
    if (is_named) {
      const std::string name = fmt::format("t{}", num_names_++);
      line(fmt::format("const {} {} = {};", type_name(node(i).type, part.domain), name, part.text),
           is_load ? node(i).name : "");
      part.text = name;
      part.level = kPrimary;
    }
    parts_.push_back(std::move(part));
  }

  void line(const std::string& text, const std::string& slot = "") {
    const bool has_comment = !slot.empty() && function_.names == SlotNames::written;
    lines_ +=
        has_comment ? fmt::format("    {}  // {}\n", text, slot) : fmt::format("    {}\n", text);
  }

  static std::string_view type_name(ExprType type, Domain domain) {
    constexpr std::array<std::string_view, 3> kValues = {"bool", "Int", "float"};
    constexpr std::array<std::string_view, 3> kRanges = {"Truth", "IntRange", "FloatRange"};
    return (domain == Domain::value ? kValues : kRanges)[static_cast<std::size_t>(type)];
  }

  Domain domain_of(std::size_t i) const {
    const Reads& reads = reads_[i];
    const bool is_exact = !reads.position && !reads.q_head && !reads.rounds;
    return function_.domain == Domain::value || is_exact ? Domain::value : Domain::range;
  }

  Part part_of(std::size_t i) {
    const Domain domain = domain_of(i);
    switch (node(i).op) {
      case Op::constant:
        return {constant_text(node(i)), is_negative(node(i)) ? kPrefix : kPrimary, domain};
      case Op::variable:
        return {std::string(name(node(i).variable)), kPrimary, domain};
      case Op::scalar:
        return {scalar_name(node(i))};
      case Op::load:
        return load(i, domain);
      default:
        return domain == Domain::value ? applied_to_values(i) : applied_to_ranges(i);
    }
  }

  // ---- leaves and loads

  /// Positions in the order of Variable, then scalars.
  void declare_leaves() {
    std::array<bool, kNumVariables> is_read{};
    for (const Node* node : function_.program.nodes()) {
      if (node->op == Op::variable) is_read[static_cast<std::size_t>(node->variable)] = true;
    }
    for (std::size_t v = 0; v < is_read.size(); ++v) {
      if (is_read[v]) declare(static_cast<Variable>(v));
    }
    for (const Node* node : function_.program.nodes()) {
      if (node->op == Op::scalar && !is_part_name(node->name)) declare_scalar(*node);
    }
  }

  void declare(Variable variable) {
    if (variable == Variable::score) return;  // the parameter
    reads_variables_ = true;
    const std::string name(expr::name(variable));
    const bool is_position = variable == Variable::q_idx || variable == Variable::kv_idx;
    const bool varies = is_position || variable == Variable::q_head;
    if (function_.domain == Domain::value) {
      line(fmt::format("const Int {0} = at.{0};", name));
    } else if (varies) {
      const std::string stem = is_position ? name.substr(0, name.find('_')) : name;
      line(fmt::format("const IntRange {0}(tile.{1}_begin, tile.{1}_end - 1);", name, stem));
    } else {
      line(fmt::format("const Int {0} = tile.{0};", name));
    }
  }

  std::string scalar_name(const Node& node) const {
    if (is_part_name(node.name)) return node.name;
    return fmt::format("scalar_{}", slots_.of(node, function_.role));
  }

  void declare_scalar(const Node& node) {
    reads_captures_ = true;
    line(fmt::format("const {} {} = {}_scalar<{}>(captures);", type_name(node.type, Domain::value),
                     scalar_name(node), name(node.type), slots_.of(node, function_.role)),
         node.name);
  }

  Part load(std::size_t i, Domain domain) {
    reads_captures_ = true;
    const int slot = slots_.of(node(i), function_.role);
    const std::string_view element = element_name(node(i).dtype);
    std::string text = domain == Domain::value
                           ? fmt::format("load<{}, {}>(captures", slot, element)
                           : fmt::format("load_range<{}, {}, {}>(captures", slot, element,
                                         table_name(slots_.range_dim(slot, position_dim(i))));
    for (std::size_t k = 0; k < node(i).operands.size(); ++k) text += ", " + operand(i, k).text;
    return {text + ")", kPrimary, domain};
  }

  static std::string table_name(int dim) {
    return dim == kNoRangeTable ? "kNoTable" : fmt::format("{}", dim);
  }

  /// The only dimension whose index depends on positions; kNoRangeTable where there is none, or more than one.
  int position_dim(std::size_t i) const {
    int found = kNoRangeTable;
    const std::vector<int>& indices = function_.program.operands(i);
    for (std::size_t dim = 0; dim < indices.size(); ++dim) {
      if (!reads_[static_cast<std::size_t>(indices[dim])].position) continue;
      if (found != kNoRangeTable) return kNoRangeTable;
      found = static_cast<int>(dim);
    }
    return found;
  }

  // ---- operations

  Part applied_to_values(std::size_t i) const {
    const Node& node = this->node(i);
    if (node.op == Op::select) return conditional(i);
    const bool is_int = node.type == ExprType::integer;
    const int log2_divisor =
        is_int && node.operands.size() == 2 ? log2_of_constant(*node.operands[1]) : 0;
    if (log2_divisor > 0 && node.op == Op::floor_div) {
      return {fmt::format("{} >> {}", at_least(operand(i, 0), kPrefix), log2_divisor), kBits};
    }
    if (log2_divisor > 0 && node.op == Op::mod) {
      const std::int64_t mask = node.operands[1]->int_value - 1;
      return {fmt::format("{} & {}", at_least(operand(i, 0), kPrefix), mask), kBits};
    }
    if (node.op == Op::div && is_smooth_[i]) return call("approx_div", i, operand(i, 0).text);
    return spelled(i, first_operand(i));
  }

  /// Two literals would be computed in C++'s own ints.
  std::string first_operand(std::size_t i) const {
    const Node& node = this->node(i);
    const bool is_literal = std::ranges::all_of(node.operands, [](const NodePtr& operand) {
      return is_constant(*operand) && operand->type == ExprType::integer;
    });
    return is_literal ? fmt::format("Int({})", operand(i, 0).text) : "";
  }

  Part conditional(std::size_t i) const {
    const std::string& a = operand(i, 1).text;
    const bool are_literals = is_constant(operand_node(i, 1)) && is_constant(operand_node(i, 2)) &&
                              node(i).type == ExprType::integer;
    return {fmt::format("{} ? {} : {}", at_least(operand(i, 0), kOr),
                        are_literals ? fmt::format("Int({})", a) : at_least(operand(i, 1), kOr),
                        at_least(operand(i, 2), kOr)),
            kConditional};
  }

  Part applied_to_ranges(std::size_t i) const {
    Part part = range_part(i);
    part.domain = Domain::range;
    return part;
  }

  Part range_part(std::size_t i) const {
    const Node& node = this->node(i);
    if (node.op == Op::select) return range_select(i);
    const bool is_comparison = expr::is_comparison(node.op);
    if (is_comparison && function_.program.operands(i)[0] == function_.program.operands(i)[1]) {
      return compared_with_itself(i);
    }
    if (const IntervalProgram::Affine* affine = function_.program.affine(i)) {
      return is_comparison ? compared_by_difference(i, *affine)
                           : Part{fmt::format("wrapped({})", affine_text(*affine))};
    }
    return spelled(i, first_range(i, 0));
  }

  /// Where every operand is a value, one has to say that ranges are meant.
  std::string first_range(std::size_t i, std::size_t first) const {
    for (std::size_t k = first; k < node(i).operands.size(); ++k) {
      if (operand(i, k).domain == Domain::range) return "";
    }
    return as_range(i, first);
  }

  std::string as_range(std::size_t i, std::size_t k) const {
    return fmt::format("{}({})", type_name(operand_node(i, k).type, Domain::range),
                       operand(i, k).text);
  }

  Part range_select(std::size_t i) const {
    const std::string a = first_range(i, 1);
    return {fmt::format("select({}, {}, {})", operand(i, 0).text,
                        a.empty() ? operand(i, 1).text : a, operand(i, 2).text)};
  }

  Part compared_with_itself(std::size_t i) const {
    const Op op = node(i).op;
    if (op == Op::lt || op == Op::gt) return {"Truth(false)"};
    const std::string text = fmt::format("equals_itself({})", as_range(i, 0));
    return op == Op::ne ? Part{"!" + text, kPrefix} : Part{text};
  }

  Part compared_by_difference(std::size_t i, const IntervalProgram::Affine& affine) const {
    const std::string_view token = spelling(node(i).op).token;
    const std::string& a = operand(i, 0).text;
    const std::string& b = operand(i, 1).text;
    return {fmt::format("have_not_wrapped({}, {}) ? {} {} 0 : {} {} {}", a, b, affine_text(affine),
                        token, as_range(i, 0), token, at_least(operand(i, 1), kSum)),
            kConditional};
  }

  std::string affine_text(const IntervalProgram::Affine& affine) const {
    std::string text = fmt::format("affine({:.0f}", affine.constant);
    for (const auto& term : affine.terms) {
      text += fmt::format(", {:.0f}, IntRange({})", term.factor,
                          parts_[static_cast<std::size_t>(term.node)].text);
    }
    return text + ")";
  }

  /// The op by its row of the table; `first` replaces the first operand unless empty.
  Part spelled(std::size_t i, const std::string& first) const {
    const Spelling& row = spelling(node(i).op);
    const auto [left, right] = operand_levels(i);
    const std::string a = first.empty() ? at_least(operand(i, 0), left) : first;
    if (row.level == kPrimary)
      return call(row.token, i, first.empty() ? operand(i, 0).text : first);
    if (row.level == kPrefix) return {fmt::format("{}{}", row.token, a), kPrefix};
    return {fmt::format("{} {} {}", a, row.token, at_least(operand(i, 1), right)), row.level};
  }

  Part call(std::string_view function, std::size_t i, const std::string& first) const {
    std::string text = fmt::format("{}({}", function, first);
    for (std::size_t k = 1; k < node(i).operands.size(); ++k) text += ", " + operand(i, k).text;
    return {text + ")"};
  }

  /// What operands need to stand beside the op without parentheses: more than C++ does where readers stumble.
  std::pair<Level, Level> operand_levels(std::size_t i) const {
    const Op op = node(i).op;
    switch (spelling(op).level) {
      case kOr:
      case kAnd: {
        const bool is_chain = operand(i, 0).level == spelling(op).level;
        return {is_chain ? spelling(op).level : kComparison, kComparison};
      }
      case kBits:
        return {kPrefix, kPrefix};
      case kComparison:
        return {kSum, kSum};
      case kSum:
        return {kSum, kProduct};
      case kProduct:
        return {kProduct, kPrefix};
      default:
        return {kPrimary, kPrimary};
    }
  }

  static std::string at_least(const Part& part, Level level) {
    return part.level < level ? fmt::format("({})", part.text) : part.text;
  }

  const CudaFunction function_;
  CudaSlots& slots_;
  std::vector<Reads> reads_;
  std::vector<bool> is_smooth_;
  std::vector<int> uses_;
  std::vector<Part> parts_;
  std::string lines_;
  int num_names_ = 0;
  bool reads_captures_ = false;
  bool reads_variables_ = false;
};

}  // namespace

CudaBody print_body(const CudaFunction& function, CudaSlots& slots) {
  return Printer(function, slots).take();
}

}  // namespace fovea::expr
