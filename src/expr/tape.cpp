#include "expr/tape.hpp"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "expr/passes.hpp"

namespace fovea::expr {

namespace {

using DigestSet = std::unordered_set<Digest, DigestHash>;

/// The terms of a && b && ...; the formula itself when it is no conjunction.
std::vector<const Node*> conjuncts(const Node& root) {
  std::vector<const Node*> result;
  std::vector<const Node*> pending{&root};
  while (!pending.empty()) {
    const Node* node = pending.back();
    pending.pop_back();
    if (node->op == Op::logical_and) {
      pending.push_back(node->operands[1].get());
      pending.push_back(node->operands[0].get());
    } else {
      result.push_back(node);
    }
  }
  return result;
}

DigestSet reachable(const std::vector<const Node*>& roots) {
  DigestSet seen;
  std::vector<const Node*> pending(roots);
  while (!pending.empty()) {
    const Node* node = pending.back();
    pending.pop_back();
    if (!seen.insert(node->digest).second) continue;
    for (const NodePtr& operand : node->operands) pending.push_back(operand.get());
  }
  return seen;
}

std::int32_t slot_of(std::vector<std::string>& names, const std::string& name) {
  const auto found = std::find(names.begin(), names.end(), name);
  const auto slot = static_cast<std::int32_t>(found - names.begin());
  if (found == names.end()) names.push_back(name);
  return slot;
}

Rate rate_of(Variable variable) {
  switch (variable) {
    case Variable::score:
      return Rate::per_score;
    case Variable::q_idx:
    case Variable::q_head:
      return Rate::per_query;
    case Variable::kv_idx:
      return Rate::per_key;
    case Variable::batch:
    case Variable::kv_head:  // a tile's queries share one kv head
    case Variable::seqlen_q:
    case Variable::seqlen_kv:
      return Rate::uniform;
  }
  return Rate::uniform;
}

bool is_comparison(Op op) { return Op::lt <= op && op <= Op::ne; }

/// Calls visit(instruction index) for each operand, indices of loads included.
template <typename Visit>
void for_each_operand(const Instruction& instruction, Visit visit) {
  for (const std::int32_t operand : instruction.operands) {
    if (operand >= 0) visit(operand);
  }
  for (const std::int32_t index : instruction.indices) visit(index);
}

class Lowering {
 public:
  explicit Lowering(NodePtr root) : root_(std::move(root)) {}

  Tape run() {
    std::vector<const Node*> results{root_.get()};
    if (root_->type == ExprType::boolean) results = conjuncts(*root_);
    const DigestSet wanted = reachable(results);
    for (const Node* node : topological(*root_)) {
      if (wanted.contains(node->digest)) emit(*node);
    }
    if (root_->type == ExprType::boolean) {
      for (const Node* node : results) {
        tape_.code[static_cast<std::size_t>(index_of_.at(node->digest))].is_condition = true;
      }
    }
    fuse_products();
    const std::vector<std::int32_t> last_use = find_last_uses();
    allocate_registers(last_use);
    mark_what_feeds_only_next(last_use);
    return std::move(tape_);
  }

 private:
  Instruction& at(std::int32_t index) { return tape_.code[static_cast<std::size_t>(index)]; }

  void emit(const Node& node) {
    Instruction instruction;
    instruction.op = node.op;
    instruction.type = node.type;
    switch (node.op) {
      case Op::constant:
        instruction.int_value = static_cast<std::int32_t>(node.int_value);
        instruction.float_value = static_cast<float>(node.float_value);
        break;
      case Op::variable:
        instruction.variable = node.variable;
        instruction.rate = rate_of(node.variable);
        break;
      case Op::scalar:
        instruction.slot = slot_of(tape_.scalars, node.name);
        break;
      case Op::load:
        instruction.slot = slot_of(tape_.tensors, node.name);
        for (const NodePtr& operand : node.operands) {
          instruction.indices.push_back(index_of_.at(operand->digest));
        }
        break;
      default:
        for (std::size_t i = 0; i < node.operands.size(); ++i) {
          instruction.operands[i] = index_of_.at(node.operands[i]->digest);
        }
        instruction.operand_type = node.operands.back()->type;
    }
    for_each_operand(instruction, [&](std::int32_t operand) {
      instruction.rate = join(instruction.rate, at(operand).rate);
    });
    index_of_.emplace(node.digest, static_cast<std::int32_t>(tape_.code.size()));
    tape_.code.push_back(std::move(instruction));
  }

  std::vector<int> count_uses() const {
    std::vector<int> uses(tape_.code.size(), 0);
    for (const Instruction& instruction : tape_.code) {
      for_each_operand(instruction,
                       [&](std::int32_t operand) { ++uses[static_cast<std::size_t>(operand)]; });
    }
    return uses;
  }

  /// a * b + c and c - a * b in one instruction, where the product is computed for every score and
  /// read nowhere else.
  void fuse_products() {
    const std::vector<int> uses = count_uses();
    const auto is_private_product = [&](std::int32_t index) {
      const Instruction& product = at(index);
      return product.op == Op::mul && product.type == ExprType::floating &&
             product.rate == Rate::per_score && uses[static_cast<std::size_t>(index)] == 1;
    };
    std::vector<bool> is_dead(tape_.code.size(), false);
    for (Instruction& sum : tape_.code) {
      if ((sum.op != Op::add && sum.op != Op::sub) || sum.type != ExprType::floating) continue;
      std::int32_t product = sum.operands[1];
      std::int32_t addend = sum.operands[0];
      if (!is_private_product(product)) {
        if (sum.op == Op::sub || !is_private_product(addend)) continue;
        std::swap(product, addend);
      }
      sum.is_fused = true;
      sum.operands[0] = at(product).operands[0];
      sum.operands[1] = at(product).operands[1];
      sum.operands[2] = addend;
      is_dead[static_cast<std::size_t>(product)] = true;
    }
    remove(is_dead);
  }

  void remove(const std::vector<bool>& is_dead) {
    std::vector<std::int32_t> moved(tape_.code.size(), -1);
    std::vector<Instruction> kept;
    for (std::size_t i = 0; i < tape_.code.size(); ++i) {
      if (is_dead[i]) continue;
      Instruction instruction = std::move(tape_.code[i]);
      for (std::int32_t& operand : instruction.operands) {
        if (operand >= 0) operand = moved[static_cast<std::size_t>(operand)];
      }
      for (std::int32_t& index : instruction.indices) {
        index = moved[static_cast<std::size_t>(index)];
      }
      moved[i] = static_cast<std::int32_t>(kept.size());
      kept.push_back(std::move(instruction));
    }
    tape_.code = std::move(kept);
  }

  std::vector<std::int32_t> find_last_uses() const {
    std::vector<std::int32_t> last_use(tape_.code.size(), -1);
    for (std::size_t i = 0; i < tape_.code.size(); ++i) {
      for_each_operand(tape_.code[i], [&](std::int32_t operand) {
        last_use[static_cast<std::size_t>(operand)] = static_cast<std::int32_t>(i);
      });
    }
    return last_use;
  }

  void mark_what_feeds_only_next(const std::vector<std::int32_t>& last_use) {
    std::int32_t next = -1;  // the per_score instruction behind; who reads one is one itself
    for (std::size_t i = tape_.code.size(); i-- > 0;) {
      Instruction& instruction = tape_.code[i];
      if (instruction.rate != Rate::per_score || instruction.op == Op::variable) continue;
      instruction.feeds_only_next = next >= 0 && last_use[i] == next;
      next = static_cast<std::int32_t>(i);
    }
  }

  /// Linear scan over the per_score instructions; the other classes are small and keep all values.
  void allocate_registers(const std::vector<std::int32_t>& last_use) {
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(tape_.code.size()); ++i) {
      Instruction& instruction = at(i);
      if (instruction.rate != Rate::per_score) {
        instruction.target = tape_.num_registers[static_cast<int>(instruction.rate)]++;
        continue;
      }
      // A load writes its target while indices of later elements are still to be read.
      if (instruction.op == Op::load)
        take_register(instruction, last_use[static_cast<std::size_t>(i)]);
      for_each_operand(instruction, [&](std::int32_t operand) {
        if (last_use[static_cast<std::size_t>(operand)] == i) release_register(operand);
      });
      if (instruction.op != Op::load)
        take_register(instruction, last_use[static_cast<std::size_t>(i)]);
    }
  }

  void take_register(Instruction& instruction, std::int32_t last_use) {
    const bool is_score = instruction.op == Op::variable && instruction.variable == Variable::score;
    const bool is_read =
        last_use >= 0 || (instruction.is_condition && !is_comparison(instruction.op));
    if (is_score || !is_read) return;
    std::vector<std::int32_t>& free = free_registers_;
    if (free.empty()) free.push_back(tape_.num_registers[static_cast<int>(Rate::per_score)]++);
    instruction.target = free.back();
    free.pop_back();
    if (last_use < 0) free.push_back(instruction.target);
  }

  void release_register(std::int32_t index) {
    const Instruction& instruction = at(index);
    if (instruction.rate != Rate::per_score || instruction.target < 0) return;
    // An instruction may read one value twice.
    std::vector<std::int32_t>& free = free_registers_;
    if (std::find(free.begin(), free.end(), instruction.target) == free.end()) {
      free.push_back(instruction.target);
    }
  }

  NodePtr root_;
  Tape tape_;
  std::unordered_map<Digest, std::int32_t, DigestHash> index_of_;
  std::vector<std::int32_t> free_registers_;
};

}  // namespace

Rate join(Rate a, Rate b) {
  if (a == b || b == Rate::uniform) return a;
  return a == Rate::uniform ? b : Rate::per_score;
}

int Tape::num_per_score_ops() const {
  return static_cast<int>(std::count_if(code.begin(), code.end(), [](const Instruction& each) {
    return each.rate == Rate::per_score && each.op != Op::variable;
  }));
}

Tape lower(const NodePtr& root) { return Lowering(simplify(root)).run(); }

}  // namespace fovea::expr
