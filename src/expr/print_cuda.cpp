#include "expr/print_cuda.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/check.hpp"
#include "expr/interval.hpp"
#include "expr/passes.hpp"
#include "expr/print.hpp"

namespace fovea::expr {

namespace {

// Longer parts get a name of their own: lines stay readable, and text stays linear in the formula.
constexpr std::size_t kMaxPart = 48;

// A formula of more parts than this, written out, is left out of the comment.
constexpr double kMaxComment = 60;

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
bool is_true(const Node& node) {
  return is_constant(node) && node.type == ExprType::boolean && node.int_value != 0;
}
bool is_score(const Node& node) {
  return node.op == Op::variable && node.variable == Variable::score;
}

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

// ---- slots ----

class Slots {
 public:
  explicit Slots(CudaProgram& program) : program_(program) {}

  void add_all(const std::vector<const Node*>& nodes, ProgramRole role) {
    for (const Node* node : nodes) {
      if (node->op == Op::load && !find(program_.tensors, role, node->name)) {
        program_.tensors.push_back({.role = role,
                                    .name = node->name,
                                    .dtype = node->dtype,
                                    .rank = static_cast<int>(node->operands.size())});
      }
      if (node->op == Op::scalar && !find(program_.scalars, role, node->name)) {
        program_.scalars.push_back({.role = role, .name = node->name, .type = node->type});
      }
    }
  }

  int of(const Node& node, ProgramRole role) const {
    const auto slot = node.op == Op::load ? find(program_.tensors, role, node.name)
                                          : find(program_.scalars, role, node.name);
    FOVEA_ASSERT(slot);
    return *slot;
  }

  /// The first load to run along a dimension has it in the table; another dimension of the same tensor does without.
  int range_dim(int slot, int wanted) {
    int& dim = program_.tensors[static_cast<std::size_t>(slot)].range_dim;
    if (dim == kNoRangeTable) dim = wanted;
    return dim == wanted ? wanted : kNoRangeTable;
  }

 private:
  template <typename Slot>
  static std::optional<int> find(const std::vector<Slot>& slots, ProgramRole role,
                                 const std::string& name) {
    const auto found = std::ranges::find_if(
        slots, [&](const Slot& slot) { return slot.role == role && slot.name == name; });
    if (found == slots.end()) return std::nullopt;
    return static_cast<int>(found - slots.begin());
  }

  CudaProgram& program_;
};

// ---- what is known of a formula's nodes ----

/// Of a node, from its operands: what it varies with, and whether a float was rounded on the way.
struct Reads {
  bool position = false;  // q_idx or kv_idx
  bool q_head = false;    // which heads share a tile
  bool rounds = false;    // a float that arithmetic made, or what was decided by one
};

bool rounds(const Node& node) {
  const bool is_arithmetic = Op::add <= node.op && node.op <= Op::pow;
  return node.op == Op::to_float || (is_arithmetic && node.type == ExprType::floating);
}

std::vector<Reads> find_reads(const IntervalProgram& program) {
  std::vector<Reads> result(program.nodes().size());
  for (std::size_t i = 0; i < result.size(); ++i) {
    const Node& node = *program.nodes()[i];
    Reads& reads = result[i];
    if (node.op == Op::variable) {
      reads.position = node.variable == Variable::q_idx || node.variable == Variable::kv_idx;
      reads.q_head = node.variable == Variable::q_head;
    }
    reads.rounds = rounds(node);
    for (const int operand : program.operands(i)) {
      const Reads& of_operand = result[static_cast<std::size_t>(operand)];
      reads.position |= of_operand.position;
      reads.q_head |= of_operand.q_head;
      reads.rounds |= of_operand.rounds;
    }
  }
  return result;
}

/// Does a small error of this operand stay small in the result? Not where the op decides, rounds, or has a pole or an edge of its domain.
bool is_smooth(const Node& user, std::size_t operand) {
  switch (user.op) {
    case Op::add:
    case Op::sub:
    case Op::mul:
    case Op::neg:
    case Op::min:
    case Op::max:
    case Op::abs:
    case Op::exp:
    case Op::exp2:
    case Op::tanh:
    case Op::sigmoid:
    case Op::select:
      return true;
    case Op::div:
      return operand == 0;
    default:
      return false;
  }
}

/// Nodes whose every use is smooth up to the result.
std::vector<bool> find_smooth(const IntervalProgram& program) {
  std::vector<bool> result(program.nodes().size(), true);
  for (std::size_t i = result.size(); i-- > 0;) {
    const std::vector<int>& operands = program.operands(i);
    for (std::size_t k = 0; k < operands.size(); ++k) {
      const bool stays = result[i] && is_smooth(*program.nodes()[i], k);
      if (!stays) result[static_cast<std::size_t>(operands[k])] = false;
    }
  }
  return result;
}

std::vector<int> count_uses(const IntervalProgram& program) {
  std::vector<int> uses(program.nodes().size(), 0);
  for (std::size_t i = 0; i < uses.size(); ++i) {
    for (const int operand : program.operands(i)) ++uses[static_cast<std::size_t>(operand)];
  }
  return uses;
}

// ---- one function's body ----

/// Values of one score, or ranges over a tile. On a tile, what no position, head or rounding touches stays a value.
enum class Domain : std::uint8_t { value, range };

struct Function {
  const IntervalProgram& program;
  ProgramRole role;
  Domain domain;
  SlotNames names;
};

class Body {
 public:
  Body(const Function& function, Slots& slots)
      : function_(function),
        slots_(slots),
        reads_(find_reads(function.program)),
        is_smooth_(find_smooth(function.program)),
        uses_(count_uses(function.program)) {
    if (function.domain == Domain::range) name_compared_sums();
    declare_leaves();
    for (std::size_t i = 0; i < reads_.size(); ++i) write(i);
  }

  const std::string& lines() const { return lines_; }
  const std::string& result() const { return parts_.back().text; }
  bool reads_captures() const { return reads_captures_; }
  bool reads_variables() const { return reads_variables_; }

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
    const bool is_leaf = node(i).operands.empty();
    const bool is_root = i + 1 == reads_.size();
    const bool is_shared = uses_[i] > 1 || node(i).op == Op::load;
    const bool is_named = !is_leaf && !is_root && (is_shared || part.text.size() > kMaxPart);
    if (is_named) {
      const std::string name = fmt::format("t{}", num_names_++);
      line(fmt::format("const {} {} = {};", type_name(node(i).type, part.domain), name, part.text),
           node(i).op == Op::load ? node(i).name : "");
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
      if (node->op == Op::scalar) declare_scalar(*node);
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

  const Function function_;
  Slots& slots_;
  std::vector<Reads> reads_;
  std::vector<bool> is_smooth_;
  std::vector<int> uses_;
  std::vector<Part> parts_;
  std::string lines_;
  int num_names_ = 0;
  bool reads_captures_ = false;
  bool reads_variables_ = false;
};

// ---- the struct ----

class Printer {
 public:
  Printer(const NodePtr& score, const NodePtr& mask, SlotNames names)
      : score_(score), mask_(mask), names_(names), slots_(program_) {
    slots_.add_all(score_.nodes(), ProgramRole::score);
    slots_.add_all(mask_.nodes(), ProgramRole::mask);
  }

  CudaProgram print() {
    const bool has_score = !is_score(root(score_));
    const bool has_mask = !is_true(root(mask_));
    const bool mask_reads_tensors =
        std::ranges::any_of(mask_.nodes(), [](const Node* node) { return node->op == Op::load; });
    program_.include = mask_reads_tensors ? "common/captured_range.cuh"
                       : has_mask         ? "common/range.cuh"
                                          : "common/program.cuh";
    program_.mods = fmt::format(
        "namespace program {{\n\n"
        "struct Mods {{\n"
        "  static constexpr bool has_score = {};\n"
        "  static constexpr bool has_mask = {};\n"
        "  static constexpr bool mask_reads_tensors = {};\n\n"
        "{}\n{}\n{}"
        "}};\n\n"
        "}}  // namespace program\n"
        "using program::Mods;\n",
        has_score, has_mask, mask_reads_tensors, score_function(), mask_function(),
        tile_function());
    return std::move(program_);
  }

 private:
  static const Node& root(const IntervalProgram& program) { return *program.nodes().back(); }

  std::string score_function() {
    const Body body({score_, ProgramRole::score, Domain::value, names_}, slots_);
    return fmt::format("{}  FOVEA_DEVICE float score(float{}, {}, {}) {{\n{}    return {};\n  }}\n",
                       comment(score_, ProgramRole::score),
                       reads(root(score_), Variable::score) ? " score" : "",
                       parameter("const Position&", "at", body.reads_variables()),
                       parameter("const Captures&", "captures", body.reads_captures()),
                       body.lines(), body.result());
  }

  std::string mask_function() {
    const Body body({mask_, ProgramRole::mask, Domain::value, names_}, slots_);
    return fmt::format("{}  FOVEA_DEVICE bool mask({}, {}) {{\n{}    return {};\n  }}\n",
                       comment(mask_, ProgramRole::mask),
                       parameter("const Position&", "at", body.reads_variables()),
                       parameter("const Captures&", "captures", body.reads_captures()),
                       body.lines(), body.result());
  }

  std::string tile_function() {
    const Body body({mask_, ProgramRole::mask, Domain::range, names_}, slots_);
    return fmt::format(
        "  FOVEA_DEVICE TileKind tile_kind({}, {}) {{\n{}    return {};\n  }}\n",
        parameter("const TileSpan&", "tile", body.reads_variables()),
        parameter("const Captures&", "captures", body.reads_captures()), body.lines(),
        is_true(root(mask_)) ? "TileKind::full" : fmt::format("kind_of({})", body.result()));
  }

  static std::string parameter(std::string_view type, std::string_view name, bool is_read) {
    return is_read ? fmt::format("{} {}", type, name) : std::string(type);
  }

  /// The formula as people write it, unless it is long.
  std::string comment(const IntervalProgram& program, ProgramRole role) const {
    std::vector<double> size;
    for (std::size_t i = 0; i < program.nodes().size(); ++i) {
      double total = 1;
      for (const int operand : program.operands(i))
        total += size[static_cast<std::size_t>(operand)];
      size.push_back(total);
    }
    if (size.back() > kMaxComment) return "";
    return fmt::format("  // {}\n", expr::print(*numbered(program, role)));
  }

  NodePtr numbered(const IntervalProgram& program, ProgramRole role) const {
    const NodePtr root = std::make_shared<const Node>(Printer::root(program));
    if (names_ == SlotNames::written) return root;
    std::unordered_map<std::string, std::string> numbers;
    for (const Node* node : program.nodes()) {
      if (node->op != Op::load && node->op != Op::scalar) continue;
      const std::string_view stem = node->op == Op::load ? "tensor" : "scalar";
      numbers.emplace(node->name, fmt::format("{}_{}", stem, slots_.of(*node, role)));
    }
    return rename_slots(root, [&](const std::string& name) { return numbers.at(name); });
  }

  CudaProgram program_;
  IntervalProgram score_, mask_;
  SlotNames names_;
  Slots slots_;
};

}  // namespace

CudaProgram print_cuda(const ScoreMod& score, const MaskMod& mask, SlotNames names) {
  return Printer(simplify(score.expr().shared()), simplify(mask.expr().shared()), names).print();
}

}  // namespace fovea::expr
