#include "cpu/program.hpp"

#include <algorithm>

namespace fovea::cpu {

namespace {

// Measured with bench/micro/program_bench.cpp: shorter chunks pay for dispatch, longer ones leave
// L1 once a program needs more than a few registers.
constexpr std::int64_t kChunkScores = 1536;

// Of the widest vector: uniform values and keys are padded to it.
constexpr std::int64_t kVectorFloats = 16;

std::int64_t padded(std::int64_t count, std::int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

std::size_t register_bytes(std::int64_t values) {
  return static_cast<std::size_t>(padded(values, kVectorFloats)) * sizeof(float);
}

std::size_t offsets_bytes(std::int64_t count) {
  return static_cast<std::size_t>(padded(count, 8)) * sizeof(std::int64_t);
}

std::size_t count_of(const expr::Tape& tape, expr::Rate rate) {
  return static_cast<std::size_t>(tape.num_registers[static_cast<int>(rate)]);
}

// An instruction is at most a load, its operation, a store, a hiding and the store of that; then the end.
std::size_t steps_bytes(const expr::Tape& tape) {
  const std::size_t count = 5 * tape.code.size() + 1;
  return (count * sizeof(ProgramStep) + 63) / 64 * 64;
}

StepOp float_op(const expr::Instruction& instruction) {
  using expr::Op;
  switch (instruction.op) {
    case Op::add:
      return instruction.is_fused ? StepOp::multiply_add : StepOp::add;
    case Op::sub:
      return instruction.is_fused ? StepOp::negative_multiply_add : StepOp::sub;
    case Op::mul:
      return StepOp::mul;
    case Op::div:
      return StepOp::div;
    case Op::floor_div:
      return StepOp::floor_div;
    case Op::min:
      return StepOp::min;
    case Op::max:
      return StepOp::max;
    case Op::neg:
      return StepOp::neg;
    case Op::abs:
      return StepOp::abs;
    case Op::floor:
      return StepOp::floor;
    case Op::sqrt:
      return StepOp::sqrt;
    default:
      return StepOp::call;
  }
}

StepOp int_op(expr::Op op) {
  using expr::Op;
  switch (op) {
    case Op::add:
      return StepOp::int_add;
    case Op::sub:
      return StepOp::int_sub;
    case Op::mul:
      return StepOp::int_mul;
    case Op::min:
      return StepOp::int_min;
    case Op::max:
      return StepOp::int_max;
    case Op::neg:
      return StepOp::int_neg;
    case Op::abs:
      return StepOp::int_abs;
    case Op::floor:
      return StepOp::load;
    case Op::shl:
      return StepOp::shl;
    case Op::shr:
      return StepOp::shr;
    case Op::bit_and:
    case Op::logical_and:
      return StepOp::bit_and;
    case Op::bit_or:
    case Op::logical_or:
      return StepOp::bit_or;
    case Op::bit_xor:
      return StepOp::bit_xor;
    case Op::bit_not:
    case Op::logical_not:
      return StepOp::bit_not;
    default:
      return StepOp::call;
  }
}

StepOp comparison(expr::Op op, bool is_float) {
  using expr::Op;
  switch (op) {
    case Op::lt:
      return is_float ? StepOp::lt : StepOp::int_lt;
    case Op::le:
      return is_float ? StepOp::le : StepOp::int_le;
    case Op::gt:
      return is_float ? StepOp::gt : StepOp::int_gt;
    case Op::ge:
      return is_float ? StepOp::ge : StepOp::int_ge;
    case Op::eq:
      return is_float ? StepOp::eq : StepOp::int_eq;
    default:
      return is_float ? StepOp::ne : StepOp::int_ne;
  }
}

StepOp conversion(ExprType from, ExprType to) {
  if (from == ExprType::floating) return StepOp::float_to_int;
  if (to == ExprType::integer) return StepOp::bool_to_int;
  return from == ExprType::boolean ? StepOp::bool_to_float : StepOp::int_to_float;
}

/// The value is operand 0.
StepOp step_op(const expr::Instruction& instruction) {
  using expr::Op;
  const Op op = instruction.op;
  if (op < Op::add) return StepOp::call;  // leaves
  if (op == Op::select) return StepOp::select;
  if (op == Op::to_int || op == Op::to_float) {
    return conversion(instruction.operand_type, instruction.type);
  }
  const bool is_float = instruction.operand_type == ExprType::floating;
  if (Op::lt <= op && op <= Op::ne) return comparison(op, is_float);
  return instruction.type == ExprType::floating ? float_op(instruction) : int_op(op);
}

/// The same result with the two operands exchanged; `call` where there is no such op.
StepOp exchanged(StepOp op) {
  switch (op) {
    case StepOp::add:
    case StepOp::mul:
    case StepOp::int_add:
    case StepOp::int_mul:
    case StepOp::int_min:
    case StepOp::int_max:
    case StepOp::bit_and:
    case StepOp::bit_or:
    case StepOp::bit_xor:
    case StepOp::eq:
    case StepOp::ne:
    case StepOp::int_eq:
    case StepOp::int_ne:
    case StepOp::multiply_add:
    case StepOp::negative_multiply_add:
      return op;
    case StepOp::sub:
      return StepOp::reverse_sub;
    case StepOp::int_sub:
      return StepOp::int_reverse_sub;
    case StepOp::div:
      return StepOp::reverse_div;
    case StepOp::lt:
      return StepOp::gt;
    case StepOp::gt:
      return StepOp::lt;
    case StepOp::le:
      return StepOp::ge;
    case StepOp::ge:
      return StepOp::le;
    case StepOp::int_lt:
      return StepOp::int_gt;
    case StepOp::int_gt:
      return StepOp::int_lt;
    case StepOp::int_le:
      return StepOp::int_ge;
    case StepOp::int_ge:
      return StepOp::int_le;
    default:
      return StepOp::call;
  }
}

}  // namespace

StepForm step_form(const expr::Instruction& instruction, int value) {
  const StepOp op = step_op(instruction);
  const StepForm first{.op = op};
  if (value == 1) {
    const StepOp other = exchanged(op);
    return other == StepOp::call ? first : StepForm{.op = other, .value = 1, .x = 0, .y = 2};
  }
  if (value == 2 && op == StepOp::multiply_add) {
    return {.op = StepOp::add_product, .value = 2, .x = 0, .y = 1};
  }
  if (value == 2 && op == StepOp::negative_multiply_add) {
    return {.op = StepOp::sub_product, .value = 2, .x = 0, .y = 1};
  }
  return first;
}

ProgramLayout program_layout(const expr::Tape& tape, std::int64_t num_keys, int lanes) {
  ProgramLayout layout;
  const std::int64_t rows = kChunkScores / lanes;
  layout.chunk_keys = rows >= 4 ? rows / 4 * 4 : 1;  // loads are transposed in blocks of 4 keys
  const std::int64_t chunk_scores = layout.chunk_keys * lanes;
  layout.uniform_bytes = register_bytes(kVectorFloats);
  layout.query_bytes = register_bytes(lanes);
  layout.key_bytes = register_bytes(num_keys);
  layout.score_bytes = register_bytes(chunk_scores);
  layout.query_begin = count_of(tape, expr::Rate::uniform) * layout.uniform_bytes;
  layout.key_begin =
      layout.query_begin + count_of(tape, expr::Rate::per_query) * layout.query_bytes;
  layout.score_begin = layout.key_begin + count_of(tape, expr::Rate::per_key) * layout.key_bytes;
  layout.lane_offsets_begin =
      layout.score_begin + count_of(tape, expr::Rate::per_score) * layout.score_bytes;
  layout.key_offsets_begin = layout.lane_offsets_begin + offsets_bytes(lanes);
  layout.steps_begin = layout.key_offsets_begin + offsets_bytes(layout.chunk_keys);
  layout.total_bytes = layout.steps_begin + steps_bytes(tape);
  return layout;
}

std::size_t program_scratch_bytes(const expr::Tape& tape, std::int64_t max_keys, int lanes) {
  return program_layout(tape, std::max<std::int64_t>(max_keys, 1), std::max(lanes, 1)).total_bytes;
}

}  // namespace fovea::cpu
