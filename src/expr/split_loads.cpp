#include "expr/split_loads.hpp"

#include <fmt/format.h>

#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "expr/passes.hpp"

namespace fovea::expr {
namespace {

// A kernel holds four registers for each part of a key, two for each of a row.
constexpr std::size_t kMaxParts = 2;

enum class Kind : std::uint8_t { neither, key, row };

class Splitter {
 public:
  explicit Splitter(const NodePtr& root) {
    const std::vector<const Node*> nodes = topological(*root);
    for (const Node* node : nodes) facts_.emplace(node->digest, facts_of(*node));
    for (const Node* node : nodes) {
      for (const NodePtr& operand : node->operands) {
        if (kind(*operand) != kind(*node)) parts_.insert(operand->digest);
      }
    }
    parts_.insert(root->digest);
    split_.formula = rewrite(root, [this](const NodePtr& node) { return taken_out(node); });
  }

  std::optional<SplitLoads> take() {
    const std::size_t most = std::max(split_.keys.size(), split_.rows.size());
    if (most == 0 || most > kMaxParts) return std::nullopt;
    return std::move(split_);
  }

 private:
  struct Facts {
    bool reads_score = false, reads_row = false, reads_key = false;
    bool loads = false, loads_by_key = false;
  };

  Facts facts_of(const Node& node) const {
    Facts facts;
    if (node.op == Op::variable) {
      facts.reads_score = node.variable == Variable::score;
      facts.reads_row = node.variable == Variable::q_idx;
      facts.reads_key = node.variable == Variable::kv_idx;
    }
    for (const NodePtr& operand : node.operands) {
      const Facts& of_operand = facts_.at(operand->digest);
      facts.reads_score |= of_operand.reads_score;
      facts.reads_row |= of_operand.reads_row;
      facts.reads_key |= of_operand.reads_key;
      facts.loads |= of_operand.loads;
      facts.loads_by_key |= of_operand.loads_by_key;
    }
    if (node.op == Op::load) {
      facts.loads = true;
      facts.loads_by_key = facts.reads_key;
    }
    return facts;
  }

  Kind kind(const Node& node) const {
    const Facts& facts = facts_.at(node.digest);
    if (facts.reads_score) return Kind::neither;
    if (facts.loads_by_key && !facts.reads_row) return Kind::key;
    return facts.loads && !facts.reads_key ? Kind::row : Kind::neither;
  }

  /// The part's name in place of the part. A node that holds one already is another by now, and stays.
  NodePtr taken_out(const NodePtr& node) {
    if (!parts_.contains(node->digest)) return nullptr;
    const Kind kind = this->kind(*node);
    if (kind == Kind::neither) return nullptr;
    const bool is_key = kind == Kind::key;
    std::vector<NodePtr>& parts = is_key ? split_.keys : split_.rows;
    const std::string name = is_key ? key_part_name(parts.size()) : row_part_name(parts.size());
    const bool is_boolean = node->type == ExprType::boolean;
    parts.push_back(is_boolean ? make(Op::to_int, {node}) : node);
    const CapturedScalar unnamed{"part", parts.back()->type, 0};
    const NodePtr part =
        with_name(*make_scalar(std::make_shared<const CapturedScalar>(unnamed)), name);
    return is_boolean ? make(Op::ne, {part, make_constant(std::int64_t{0})}) : part;
  }

  std::unordered_map<Digest, Facts, DigestHash> facts_;
  std::unordered_set<Digest, DigestHash> parts_;  // operands of another kind of node, and the root
  SplitLoads split_;
};

}  // namespace

std::string key_part_name(std::size_t i) { return fmt::format("key.part_{}", i); }
std::string row_part_name(std::size_t i) { return fmt::format("row.part_{}", i); }
bool is_part_name(const std::string& name) { return name.find('.') != std::string::npos; }

std::optional<SplitLoads> split_loads(const NodePtr& root) { return Splitter(root).take(); }

}  // namespace fovea::expr
