#include "expr/parse.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <unordered_map>

#include "core/check.hpp"
#include "core/float_environment.hpp"
#include "expr/passes.hpp"
#include "expr/token.hpp"

namespace fovea::expr {

namespace {

constexpr std::string_view kLet = "let";

constexpr int kNotLevel = 4;
constexpr int kLoosestBinaryLevel = 2;

bool is_comparison(Op op) { return Op::lt <= op && op <= Op::ne; }

// Insertions, deletions, replacements and swaps of neighbours that make one word of the other.
int edit_distance(std::string_view a, std::string_view b) {
  const std::size_t width = b.size() + 1;
  std::vector<int> distance((a.size() + 1) * width);
  const auto at = [&](std::size_t i, std::size_t j) -> int& { return distance[i * width + j]; };
  for (std::size_t i = 0; i <= a.size(); ++i) at(i, 0) = static_cast<int>(i);
  for (std::size_t j = 0; j <= b.size(); ++j) at(0, j) = static_cast<int>(j);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const int replaced = at(i - 1, j - 1) + (a[i - 1] == b[j - 1] ? 0 : 1);
      at(i, j) = std::min({at(i - 1, j) + 1, at(i, j - 1) + 1, replaced});
      const bool is_swap = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (is_swap) at(i, j) = std::min(at(i, j), at(i - 2, j - 2) + 1);
    }
  }
  return distance.back();
}

// ", did you mean 'slopes'?", or nothing when no word is near.
std::string suggestion(std::string_view word, const std::vector<std::string>& known) {
  constexpr std::size_t kMaxLength = 40;
  if (word.size() > kMaxLength) return "";
  int best = static_cast<int>(std::max<std::size_t>(1, word.size() / 3)) + 1;
  std::string_view nearest;
  for (const std::string& candidate : known) {
    if (candidate.size() > kMaxLength) continue;
    const int distance = edit_distance(word, candidate);
    if (distance < best && distance < static_cast<int>(word.size())) {
      best = distance;
      nearest = candidate;
    }
  }
  return nearest.empty() ? "" : fmt::format(", did you mean '{}'?", nearest);
}

std::string joined(const std::vector<std::string>& words) {
  constexpr std::size_t kMaxWords = 20;
  std::string text;
  for (std::size_t i = 0; i < std::min(words.size(), kMaxWords); ++i) {
    text += (i == 0 ? "" : ", ") + shown(words[i]);
  }
  return words.size() > kMaxWords ? text + ", ..." : text;
}

/// What a name in a formula can stand for.
class Names {
 public:
  Names(const Captures& captures, std::string_view argument) {
    for (int i = 0; i < kNumVariables; ++i) {
      const auto variable = static_cast<Variable>(i);
      variables_.emplace(name(variable), variable);
      variable_names_.emplace_back(name(variable));
    }
    for (int i = 0; i < kNumOps; ++i) {
      const auto op = static_cast<Op>(i);
      const bool is_function = (info(op).precedence == 0 && info(op).arity > 0) || op == Op::select;
      if (!is_function) continue;
      functions_.emplace(info(op).name, op);
      function_names_.emplace_back(info(op).name);
    }
    for (const CapturedTensor& tensor : captures.tensors) {
      add_capture(tensor.name, argument);
      tensors_.emplace(tensor.name, std::make_shared<const CapturedTensor>(tensor));
    }
    for (const CapturedScalar& scalar : captures.scalars) {
      add_capture(scalar.name, argument);
      scalars_.emplace(scalar.name, std::make_shared<const CapturedScalar>(scalar));
    }
  }

  template <typename T>
  using Table = std::unordered_map<std::string, T>;

  template <typename T>
  static const T* find(const Table<T>& table, std::string_view word) {
    const auto found = table.find(std::string(word));
    return found == table.end() ? nullptr : &found->second;
  }

  const Variable* variable(std::string_view word) const { return find(variables_, word); }
  const Op* function(std::string_view word) const { return find(functions_, word); }
  const std::shared_ptr<const CapturedTensor>* tensor(std::string_view word) const {
    return find(tensors_, word);
  }
  const std::shared_ptr<const CapturedScalar>* scalar(std::string_view word) const {
    return find(scalars_, word);
  }

  /// Why this cannot be the name of a local part; empty: it can.
  std::optional<std::string> local_refusal(std::string_view word) const {
    if (tensor(word) != nullptr || scalar(word) != nullptr)
      return fmt::format("'{}' is captured; expected another name", shown(word));
    if (!name_refusal(word)) return std::nullopt;
    return fmt::format("'{}' is a word of the language; expected another name", shown(word));
  }

  std::string unknown_name(std::string_view word) const {
    std::vector<std::string> known = variable_names_;
    known.insert(known.end(), captured_names_.begin(), captured_names_.end());
    const std::string captured =
        captured_names_.empty() ? "there is none" : joined(captured_names_);
    return fmt::format("unknown name '{}'; expected a variable ({}) or a captured name ({}){}",
                       shown(word), joined(variable_names_), captured, suggestion(word, known));
  }

  std::string unknown_function(std::string_view word) const {
    return fmt::format("unknown function '{}'; expected one of {}{}", shown(word),
                       joined(function_names_), suggestion(word, function_names_));
  }

 private:
  void add_capture(const std::string& word, std::string_view argument) {
    if (const auto reason = name_refusal(word)) invalid(std::string(argument), *reason);
    if (std::find(captured_names_.begin(), captured_names_.end(), word) != captured_names_.end()) {
      invalid(std::string(argument),
              fmt::format("captured name '{}' is given twice; expected one name for each",
                          shown(word)));
    }
    captured_names_.push_back(word);
  }

  Table<Variable> variables_;
  Table<Op> functions_;
  Table<std::shared_ptr<const CapturedTensor>> tensors_;
  Table<std::shared_ptr<const CapturedScalar>> scalars_;
  std::vector<std::string> variable_names_, function_names_, captured_names_;
};

/// A part of the formula and where it begins. `is_literal`: made of numbers alone.
struct Part {
  NodePtr node;
  std::size_t column = 1;
  bool is_literal = false;
};

/// What `let` has named, and how deep it nests.
struct Local {
  Part part;
  int nesting = 0;
};

/// Recursive descent, one function per rule of the grammar; binary operators by precedence
/// climbing.
class Parser {
 public:
  Parser(std::string_view text, const Captures& captures, const ParseOptions& options)
      : options_(options), names_(captures, options.argument), lexer_(text, options.argument) {
    for (int i = 0; i < kNumOps; ++i) {
      const auto op = static_cast<Op>(i);
      if (info(op).arity == 2 && info(op).precedence > 0)
        binary_operators_.emplace(info(op).name, op);
    }
    advance();
  }

  NodePtr formula() {
    if (token_.kind == TokenKind::end) fail("the formula is empty; expected e.g. score * 2");
    while (token_.kind == TokenKind::name && token_.text == kLet) definition();
    Part result = ternary();
    if (is_symbol("=")) {
      fail("unexpected '='; expected '==' to compare, or 'let name = ...;' before the formula");
    }
    if (token_.kind != TokenKind::end) {
      fail(fmt::format("unexpected '{}'; expected an operator or the end of the formula",
                       shown(token_.text)));
    }
    return result.node;
  }

 private:
  // ---- tokens ----

  void advance() { token_ = lexer_.next(); }

  bool is_symbol(std::string_view symbol) const {
    return token_.kind == TokenKind::symbol && token_.text == symbol;
  }

  bool accept(std::string_view symbol) {
    if (!is_symbol(symbol)) return false;
    advance();
    return true;
  }

  void expect(std::string_view symbol, std::string_view purpose) {
    if (accept(symbol)) return;
    fail(fmt::format("{}; expected '{}' {}", got(), symbol, purpose));
  }

  std::string got() const {
    if (token_.kind == TokenKind::end) return "the formula ends here";
    return fmt::format("unexpected '{}'", shown(token_.text));
  }

  [[noreturn]] void fail(const std::string& message) const { fail_at(token_.column, message); }
  [[noreturn]] void fail_at(std::size_t column, const std::string& message) const {
    expr::fail_at(column, options_.argument, message);
  }

  // ---- limits ----

  class Nesting {
   public:
    explicit Nesting(Parser& parser) : parser_(parser) { parser_.note_nesting(++parser_.nesting_); }
    ~Nesting() { --parser_.nesting_; }
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;

   private:
    Parser& parser_;
  };

  void note_nesting(int nesting) {
    if (nesting > kMaxNesting) {
      fail(fmt::format("the formula nests more than {} deep; expected a simpler one", kMaxNesting));
    }
    deepest_ = std::max(deepest_, nesting);
  }

  void count_part(std::size_t column) {
    if (++num_parts_ > kMaxParts) {
      fail_at(column, fmt::format("the formula has more than {} parts (names, numbers, operators); "
                                  "expected a shorter one",
                                  kMaxParts));
    }
  }

  // ---- nodes ----

  static std::vector<NodePtr> nodes_of(const std::vector<Part>& parts) {
    std::vector<NodePtr> nodes;
    nodes.reserve(parts.size());
    for (const Part& part : parts) nodes.push_back(part.node);
    return nodes;
  }

  Part literal(NodePtr node) {
    count_part(token_.column);
    Part result{std::move(node), token_.column, true};
    advance();
    return result;
  }

  // `column` is that of the operator or function, for refusals.
  Part apply(Op op, const std::vector<Part>& operands, std::size_t column) {
    count_part(column);
    refuse_zero_divisor(op, operands);
    const std::vector<NodePtr> nodes = nodes_of(operands);
    if (const auto reason = refusal(op, nodes)) {
      fail_at(op == Op::select ? operands.front().column : column, *reason);
    }
    return {make(op, nodes), operands.front().column,
            std::all_of(operands.begin(), operands.end(),
                        [](const Part& part) { return part.is_literal; })};
  }

  void refuse_zero_divisor(Op op, const std::vector<Part>& operands) const {
    const bool is_division = op == Op::div || op == Op::floor_div || op == Op::mod;
    if (!is_division || !operands[1].is_literal) return;
    const NodePtr divisor = simplify(operands[1].node);
    if (divisor->op == Op::constant && divisor->int_value == 0 && divisor->float_value == 0) {
      fail_at(operands[1].column,
              fmt::format("'{}' divides by the constant zero; expected another divisor",
                          info(op).name));
    }
  }

  // ---- grammar ----

  /// let name = formula;
  void definition() {
    advance();
    if (token_.kind != TokenKind::name) fail(fmt::format("{}; expected a name after 'let'", got()));
    const std::string name(token_.text);
    if (const auto reason = names_.local_refusal(name)) fail(*reason);
    if (locals_.contains(name))
      fail(fmt::format("'{}' has been defined; expected another name", shown(name)));
    advance();
    expect("=", "and what the name stands for");
    deepest_ = 0;
    Part part = ternary();
    expect(";", "and the formula that reads it");
    locals_.emplace(name, Local{std::move(part), deepest_});
  }

  /// Where it is read, it nests as if it were written there.
  Part read(const Local& local, std::size_t column) {
    note_nesting(nesting_ + local.nesting);
    return {local.part.node, column, local.part.is_literal};
  }

  const Local* local(std::string_view word) const {
    const auto found = locals_.find(std::string(word));
    return found == locals_.end() ? nullptr : &found->second;
  }

  bool is_number(std::string_view word) const {
    return names_.variable(word) != nullptr || names_.scalar(word) != nullptr ||
           local(word) != nullptr;
  }

  Part ternary() {
    const Nesting nesting(*this);
    Part condition = binary(kLoosestBinaryLevel);
    if (!is_symbol("?")) return condition;
    const std::size_t column = token_.column;
    advance();
    Part a = ternary();
    expect(":", "and the other choice");
    Part b = ternary();
    return apply(Op::select, {std::move(condition), std::move(a), std::move(b)}, column);
  }

  const Op* binary_operator() const {
    if (token_.kind != TokenKind::symbol) return nullptr;
    const auto found = binary_operators_.find(token_.text);
    return found == binary_operators_.end() ? nullptr : &found->second;
  }

  Part binary(int loosest_level) {
    Part left = is_symbol("!") ? negation(loosest_level) : unary();
    bool is_compared = false;
    for (const Op* op = binary_operator(); op != nullptr; op = binary_operator()) {
      const int level = info(*op).precedence;
      if (level < loosest_level) break;
      if (is_comparison(*op) && is_compared) {
        fail(fmt::format(
            "comparisons do not chain; expected '&&' between two of them, or parentheses, "
            "before '{}'",
            token_.text));
      }
      is_compared = is_comparison(*op);
      const std::size_t column = token_.column;
      advance();
      Part right = binary(level + 1);
      left = apply(*op, {std::move(left), std::move(right)}, column);
    }
    return left;
  }

  Part negation(int loosest_level) {
    const Nesting nesting(*this);
    if (loosest_level > kNotLevel) {
      fail("'!' binds looser than the operator before it; expected parentheses, (!x)");
    }
    const std::size_t column = token_.column;
    advance();
    Part result = apply(Op::logical_not, {binary(kNotLevel)}, column);
    result.column = column;
    return result;
  }

  Part unary() {
    const Nesting nesting(*this);
    const std::size_t column = token_.column;
    const bool is_minus = is_symbol("-");
    if (!is_minus && !is_symbol("~")) return primary();
    advance();
    Part result =
        is_minus && is_least_int_magnitude()
            ? literal(make_constant(std::int64_t{std::numeric_limits<std::int32_t>::min()}))
            : apply(is_minus ? Op::neg : Op::bit_not, {unary()}, column);
    result.column = column;
    return result;
  }

  // 2147483648, which is an int only after a minus.
  bool is_least_int_magnitude() const {
    return token_.kind == TokenKind::integer && !token_.is_hexadecimal &&
           token_.int_value == std::uint64_t{1} << 31U;
  }

  Part primary() {
    switch (token_.kind) {
      case TokenKind::integer:
        return literal(make_constant(int_value()));
      case TokenKind::floating:
        return literal(make_constant(token_.float_value));
      case TokenKind::name:
        return named();
      case TokenKind::symbol:
      case TokenKind::end:
        break;
    }
    const std::size_t column = token_.column;
    if (!accept("(")) fail(fmt::format("{}; expected a number, a name or '('", got()));
    Part result = ternary();
    expect(")", fmt::format("to close the one in column {}", column));
    result.column = column;
    return result;
  }

  // Hexadecimal literals are bit patterns: 0xffffffff is -1.
  std::int64_t int_value() const {
    const std::uint64_t limit = token_.is_hexadecimal ? std::numeric_limits<std::uint32_t>::max()
                                                      : std::numeric_limits<std::int32_t>::max();
    if (token_.int_value > limit) {
      fail(fmt::format("the number {} is beyond 32 bits; expected at most {}, or a float",
                       shown(token_.text), std::numeric_limits<std::int32_t>::max()));
    }
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(token_.int_value));
  }

  Part named() {
    const Token word = token_;
    if (word.text == "true") return literal(make_constant(true));
    if (word.text == "false") return literal(make_constant(false));
    if (word.text == "inf") return literal(make_constant(std::numeric_limits<double>::infinity()));
    if (word.text == "nan") return literal(make_constant(std::numeric_limits<double>::quiet_NaN()));
    advance();
    if (is_symbol("(")) return call(word);
    if (is_symbol("[")) return load(word);
    count_part(word.column);
    if (const Variable* variable = names_.variable(word.text)) {
      if (*variable == Variable::score && !options_.may_read_score) {
        fail_at(word.column, "a mask cannot read 'score'; expected positions and captured names");
      }
      return {make_variable(*variable), word.column};
    }
    if (const auto* scalar = names_.scalar(word.text)) return {make_scalar(*scalar), word.column};
    if (const Local* found = local(word.text)) return read(*found, word.column);
    if (word.text == kLet) {
      fail_at(word.column,
              "'let' stands in a formula; expected it before: let x = q_idx - kv_idx; x * x");
    }
    if (const auto* tensor = names_.tensor(word.text)) {
      if ((*tensor)->view.rank() == 0) return {make_load(*tensor, {}), word.column};
      fail_at(word.column,
              fmt::format("'{0}' is a captured tensor of rank {1}; expected {0}[...] with {1} {2}",
                          shown(word.text), (*tensor)->view.rank(),
                          (*tensor)->view.rank() == 1 ? "index" : "indices"));
    }
    if (names_.function(word.text) != nullptr) {
      fail_at(word.column, fmt::format("'{0}' is a function; expected {0}(...)", word.text));
    }
    fail_at(word.column, names_.unknown_name(word.text));
  }

  // The parts between brackets; the opening one is the current token.
  std::vector<Part> list(std::string_view close) {
    advance();
    std::vector<Part> parts;
    if (accept(close)) return parts;
    do {
      parts.push_back(ternary());
    } while (accept(","));
    expect(close, "or ','");
    return parts;
  }

  Part call(const Token& word) {
    const Op* op = names_.function(word.text);
    if (op == nullptr) {
      if (names_.tensor(word.text) != nullptr) {
        fail_at(word.column,
                fmt::format("'{0}' is a captured tensor; expected {0}[...], with brackets",
                            shown(word.text)));
      }
      if (is_number(word.text)) {
        fail_at(word.column,
                fmt::format("'{}' is a number; expected a function before '('", shown(word.text)));
      }
      fail_at(word.column, names_.unknown_function(word.text));
    }
    const std::vector<Part> operands = list(")");
    const int arity = info(*op).arity;
    if (static_cast<int>(operands.size()) != arity) {
      fail_at(word.column, fmt::format("'{}' got {} {}; expected {}", word.text, operands.size(),
                                       operands.size() == 1 ? "argument" : "arguments", arity));
    }
    Part result = apply(*op, operands, word.column);
    result.column = word.column;
    return result;
  }

  Part load(const Token& word) {
    const auto* tensor = names_.tensor(word.text);
    if (tensor == nullptr) {
      fail_at(word.column,
              is_number(word.text)
                  ? fmt::format("'{}' is a number; expected a captured tensor before '['",
                                shown(word.text))
                  : names_.unknown_name(word.text));
    }
    const std::vector<Part> indices = list("]");
    count_part(word.column);
    if ((*tensor)->view.rank() == 0) {
      fail_at(word.column, fmt::format("'{0}' is a captured tensor of rank 0; expected {0} alone",
                                       shown(word.text)));
    }
    refuse_indices(word, **tensor, indices);
    return {make_load(*tensor, nodes_of(indices)), word.column};
  }

  // Points at the index that is wrong, or at the name when their number is.
  void refuse_indices(const Token& word, const CapturedTensor& tensor,
                      const std::vector<Part>& indices) const {
    if (static_cast<int>(indices.size()) != tensor.view.rank() || indices.empty()) {
      if (const auto reason = load_refusal(tensor, nodes_of(indices)))
        fail_at(word.column, *reason);
    }
    // Beside indices that cannot be wrong, a refusal is about this one.
    for (std::size_t dim = 0; dim < indices.size(); ++dim) {
      std::vector<NodePtr> nodes(indices.size(), make_variable(Variable::q_idx));
      nodes[dim] = indices[dim].is_literal ? simplify(indices[dim].node) : indices[dim].node;
      if (const auto reason = load_refusal(tensor, nodes)) fail_at(indices[dim].column, *reason);
    }
  }

  ParseOptions options_;
  Names names_;
  Lexer lexer_;
  Token token_;
  std::unordered_map<std::string_view, Op> binary_operators_;
  std::unordered_map<std::string, Local> locals_;
  int nesting_ = 0;
  int deepest_ = 0;  // nesting so far
  int num_parts_ = 0;
};

// A type that the whole formula must have is a matter of its first column.
NodePtr parse_program(std::string_view text, const Captures& captures, const ParseOptions& options,
                      bool wants_bool) {
  NodePtr node = parse(text, captures, options);
  const bool is_bool = node->type == ExprType::boolean;
  if (is_bool == wants_bool) return node;
  const char* hint = wants_bool ? "bool (true: visible), compare it with something"
                                : "a number, e.g. condition ? score : -inf";
  const std::size_t column = text.find_first_not_of(" \t\r\n") + 1;
  fail_at(column, options.argument,
          fmt::format("the formula is {}; expected {}", name(node->type), hint));
}

}  // namespace

NodePtr parse(std::string_view text, const Captures& captures, const ParseOptions& options) {
  return Parser(text, captures, options).formula();
}

}  // namespace fovea::expr

namespace fovea {

ScoreMod parse_score_mod(std::string_view text, const Captures& captures) {
  const FloatEnvironment environment;
  const expr::ParseOptions options{.argument = "score_mod"};
  return ScoreMod(Expr(expr::parse_program(text, captures, options, false)));
}

MaskMod parse_mask_mod(std::string_view text, const Captures& captures) {
  const FloatEnvironment environment;
  const expr::ParseOptions options{.argument = "mask_mod", .may_read_score = false};
  return MaskMod(Expr(expr::parse_program(text, captures, options, true)));
}

}  // namespace fovea
