#include "expr/cuda_facts.hpp"

namespace fovea::expr {

namespace {

bool rounds(const Node& node) {
  const bool is_arithmetic = Op::add <= node.op && node.op <= Op::pow;
  return node.op == Op::to_float || (is_arithmetic && node.type == ExprType::floating);
}

/// Does a small error of this operand stay small in the result? Not where the op decides, rounds, or has a pole or an
/// edge of its domain.
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
    case Op::sin:
    case Op::cos:
    case Op::erf:
    case Op::expm1:
    case Op::select:
      return true;
    case Op::div:
      return operand == 0;
    default:
      return false;
  }
}

}  // namespace

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

}  // namespace fovea::expr
