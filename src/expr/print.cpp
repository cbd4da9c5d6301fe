#include "expr/print.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

#include "core/check.hpp"

namespace fovea::expr {

namespace {

constexpr int kTernaryLevel = 1;
constexpr int kComparisonLevel = 5;
constexpr int kPrefixLevel = 12;
constexpr int kPrimaryLevel = 13;

// Parts of one formula that are worth no name are written out each time.
constexpr std::size_t kMaxText = std::size_t{1} << 20U;

// Bytes of a name, number or operator, about; and how many a name has to save.
constexpr double kTokenLength = 5;
constexpr double kWorthAName = 64;

std::string float_text(double value) {
  std::string text = fmt::format("{}", static_cast<float>(value));
  const bool looks_like_float = text.find_first_of(".en") != std::string::npos;
  return looks_like_float ? text : text + ".0";
}

std::string constant_text(const Node& node) {
  if (node.type == ExprType::boolean) return node.int_value != 0 ? "true" : "false";
  if (node.type == ExprType::integer) return fmt::format("{}", node.int_value);
  return std::isnan(node.float_value) ? "nan" : float_text(node.float_value);
}

bool is_negative(const Node& constant) {
  return constant.int_value < 0 ||
         (std::signbit(constant.float_value) && !std::isnan(constant.float_value));
}

bool is_conversion(const Node& node) { return node.op == Op::to_int || node.op == Op::to_float; }

bool is_comparison(Op op) { return Op::lt <= op && op <= Op::ne; }

// Tightness of the printed form; a context that needs more gets parentheses.
int level_of(const Node& node) {
  if (node.op == Op::constant) return is_negative(node) ? kPrefixLevel : kPrimaryLevel;
  const int level = info(node.op).precedence;
  return level == 0 ? kPrimaryLevel : level;
}

bool makes(const Node& node, const std::vector<NodePtr>& operands) {
  return !refusal(node.op, operands) && make(node.op, operands)->digest == node.digest;
}

// The operands as a person writes them: conversions that `make` would insert are left out.
std::vector<NodePtr> written_operands(const Node& node) {
  const std::size_t count = node.operands.size();
  if (node.op == Op::load) {
    std::vector<NodePtr> indices = node.operands;
    for (NodePtr& index : indices) {
      const bool is_from_bool =
          index->op == Op::to_int && index->operands[0]->type == ExprType::boolean;
      if (is_from_bool) index = NodePtr(index->operands[0]);
    }
    return indices;
  }
  // At most eight ways to leave out conversions; fewest left first, the leftmost kept where one
  // must stay.
  unsigned convertible = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (is_conversion(*node.operands[i])) convertible |= 1U << i;
  }
  for (unsigned kept = 0; kept < (1U << count); ++kept) {
    if ((kept & ~convertible) != 0) continue;
    std::vector<NodePtr> operands = node.operands;
    for (std::size_t i = 0; i < count; ++i) {
      const bool is_left_out = ((convertible & ~kept) >> i & 1U) != 0;
      if (is_left_out) operands[i] = node.operands[i]->operands[0];
    }
    if (kept == convertible || makes(node, operands)) return operands;
  }
  return node.operands;
}

// Writes from a stack of things still to be written, so that depth costs no call stack.
class Printer {
 public:
  /// Stops once the text is longer than `most`.
  explicit Printer(std::size_t most) : most_(most) {}

  std::string print(const Node& root) {
    for (const Node* part : parts_worth_a_name(root)) {
      std::string name = free_name();
      text_ += fmt::format("let {} = ", name);
      write_all(*part);
      text_ += "; ";
      names_.emplace(part->digest, std::move(name));
    }
    write_all(root);
    return std::move(text_);
  }

 private:
  /// Operands before users. What is written several times gets a name where that saves a line or so.
  std::vector<const Node*> parts_worth_a_name(const Node& root) {
    const std::vector<const Node*> nodes = topological(root);
    std::unordered_map<Digest, double, DigestHash> length, times;
    for (const Node* node : nodes) {
      if (node->op == Op::load || node->op == Op::scalar) taken_.insert(node->name);
      double& sum = length[node->digest] = kTokenLength + static_cast<double>(node->name.size());
      for (const NodePtr& operand : written(*node)) sum += length.at(operand->digest);
    }
    std::vector<const Node*> parts;
    times[root.digest] = 1;
    for (std::size_t i = nodes.size(); i-- > 0;) {
      const Node& node = *nodes[i];
      double& count = times[node.digest];  // 0: a conversion that is left out
      const bool has_name = (count - 1) * length.at(node.digest) >= kWorthAName;
      if (has_name && !node.operands.empty()) {
        parts.push_back(&node);
        count = 1;
      }
      for (const NodePtr& operand : written(node)) times[operand->digest] += count;
    }
    std::reverse(parts.begin(), parts.end());
    return parts;
  }

  std::string free_name() {
    for (;;) {
      std::string name = fmt::format("t{}", num_names_++);
      if (!taken_.contains(name)) return name;
    }
  }

  void write_all(const Node& root) {
    stack_.push_back({.node = &root});
    while (!stack_.empty() && text_.size() <= most_) {
      const Piece piece = std::move(stack_.back());
      stack_.pop_back();
      if (piece.node == nullptr) {
        text_ += piece.text;
      } else {
        write(*piece.node, piece.level);
      }
    }
  }

  struct Piece {
    const Node* node = nullptr;
    int level = 0;  // what the context needs
    std::string text = {};
  };

  void write(const Node& node, int level) {
    if (const auto name = names_.find(node.digest); name != names_.end()) {
      text_ += name->second;
      return;
    }
    std::vector<Piece> pieces = pieces_of(node);
    const bool needs_parentheses = level_of(node) < level;
    if (needs_parentheses) text_ += '(';
    if (needs_parentheses) stack_.push_back({.text = ")"});
    for (; !pieces.empty(); pieces.pop_back()) stack_.push_back(std::move(pieces.back()));
  }

  std::vector<Piece> pieces_of(const Node& node) {
    if (node.op == Op::constant) return {{.text = constant_text(node)}};
    if (node.op == Op::variable) return {{.text = std::string(name(node.variable))}};
    const bool is_name = node.op == Op::scalar || (node.op == Op::load && node.operands.empty());
    if (is_name) return {{.text = node.name}};
    const std::vector<NodePtr>& operands = written(node);
    if (node.op == Op::load) return list(node.name + "[", operands, "]");
    const OpInfo& row = info(node.op);
    if (row.precedence == 0) return list(fmt::format("{}(", row.name), operands, ")");
    if (node.op == Op::select) {
      return {{.node = operands[0].get(), .level = kTernaryLevel + 1},
              {.text = " ? "},
              {.node = operands[1].get(), .level = kTernaryLevel},
              {.text = " : "},
              {.node = operands[2].get(), .level = kTernaryLevel}};
    }
    if (row.arity == 1) {
      return {{.text = std::string(row.name)},
              {.node = operands[0].get(), .level = row.precedence}};
    }
    // Operators of one level group to the left; comparisons do not group at all.
    const int left_level = is_comparison(node.op) ? kComparisonLevel + 1 : row.precedence;
    return {{.node = operands[0].get(), .level = left_level},
            {.text = fmt::format(" {} ", row.name)},
            {.node = operands[1].get(), .level = row.precedence + 1}};
  }

  static std::vector<Piece> list(std::string open, const std::vector<NodePtr>& operands,
                                 std::string close) {
    std::vector<Piece> pieces{{.text = std::move(open)}};
    for (const NodePtr& operand : operands) {
      if (operand != operands.front() || pieces.size() > 1) pieces.push_back({.text = ", "});
      pieces.push_back({.node = operand.get(), .level = kTernaryLevel});
    }
    pieces.push_back({.text = std::move(close)});
    return pieces;
  }

  const std::vector<NodePtr>& written(const Node& node) {
    const auto found = written_.find(node.digest);
    if (found != written_.end()) return found->second;
    return written_.emplace(node.digest, written_operands(node)).first->second;
  }

  std::size_t most_;
  std::string text_;
  std::vector<Piece> stack_;
  std::unordered_map<Digest, std::vector<NodePtr>, DigestHash> written_;
  std::unordered_map<Digest, std::string, DigestHash> names_;  // of parts written so far
  std::unordered_set<std::string> taken_;                      // by what the formula captures
  int num_names_ = 0;
};

}  // namespace

std::string print(const Node& root) {
  std::string text = Printer(kMaxText).print(root);
  if (text.size() > kMaxText) {
    invalid("formula",
            fmt::format("its text is beyond {} bytes; expected less repetition", kMaxText));
  }
  return text;
}

std::string print_up_to(const Node& root, std::size_t most) {
  std::string text = Printer(most).print(root);
  if (text.size() <= most) return text;
  text.resize(most);
  return text + " ...";
}

}  // namespace fovea::expr

namespace fovea {

std::string to_string(const Expr& expr) { return expr::print(expr.node()); }

}  // namespace fovea
