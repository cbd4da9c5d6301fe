// What a score or mask program needs to run on one tile of scores, on any target. Executed by
// kernels/program-inl.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fovea/tensor.hpp"

#include "expr/tape.hpp"

namespace fovea::cpu {

/// The scores of up to `lanes` queries and `num_keys` keys, key-major: scores[key * lanes + lane].
struct ProgramTile {
  float* scores = nullptr;  // in, out; 64-byte aligned
  std::int64_t num_keys = 0;
  int lanes = 0;  // a multiple of the target's vector length; padding lanes repeat a valid row
  std::int64_t kv_begin = 0;             // kv_idx of the first key
  const std::int32_t* q_idx = nullptr;   // [lanes]
  const std::int32_t* q_head = nullptr;  // [lanes]
  std::int32_t batch = 0, kv_head = 0;
  std::int32_t seqlen_q = 0, seqlen_kv = 0;
  const TensorView* tensors = nullptr;  // by slot of the tape
  const double* scalars = nullptr;      // by slot of the tape
  std::byte* scratch = nullptr;  // program_scratch_bytes(tape, max keys, lanes), 64-byte aligned
  // The same queries are asked about keys this far behind soon: dense masks and biases are fetched meanwhile. 0: not.
  std::int64_t keys_ahead = 0;
  float factor = 1;  // of a score program: scores are multiplied by it first
};

/// What is done with the elements of a load: they become a register, are added to the scores, or hide these where they
/// are false. The last two only where nobody else reads them.
enum class LoadUse : std::uint8_t { keep, add, hide };

/// Operations on `value`, which a step finds in registers and leaves there (program_steps-inl.hpp). x and y are
/// operands.
enum class StepOp : std::uint8_t {
  call,   // none of these: an instruction that is executed in a pass of its own
  end,    // of the steps
  load,   // x
  store,  // to x, where others read it
  // floats
  add,
  sub,
  reverse_sub,  // x - value
  mul,
  multiply_add,           // value x + y
  negative_multiply_add,  // y - value x
  add_product,            // value + x y
  sub_product,            // value - x y
  div,
  reverse_div,  // x / value
  floor_div,
  min,
  max,
  neg,
  abs,
  floor,
  sqrt,
  // ints
  int_add,
  int_sub,
  int_reverse_sub,
  int_mul,
  int_min,
  int_max,
  int_neg,
  int_abs,
  shl,
  shr,
  // bits of ints and bools
  bit_and,
  bit_or,
  bit_xor,
  bit_not,
  // comparisons of floats, of ints
  lt,
  le,
  gt,
  ge,
  eq,
  ne,
  int_lt,
  int_le,
  int_gt,
  int_ge,
  int_eq,
  int_ne,
  // choices
  select,  // value ? x : y
  hide,    // value ? x : -inf
  // conversions
  int_to_float,
  bool_to_float,
  float_to_int,
  bool_to_int,
};

/// How an operand's values lie: one for each score, for each lane or key, or one for all.
enum class StepLayout : std::uint8_t { scores, lanes, keys, uniform };

struct StepOperand {
  float* data = nullptr;  // of the first block of a chunk
  std::int64_t block_stride = 0;
  std::int64_t chunk_stride = 0;
  StepLayout layout = StepLayout::uniform;
};

/// One operation of a program on a tile, its operands found.
struct ProgramStep {
  StepOp op = StepOp::call;
  // from `value`, with a value for each score; not for ops of two operands
  bool loads_value = false;
  bool is_last = false;  // of a group: a store
  StepOperand value{}, x{}, y{};
  const expr::Instruction* instruction = nullptr;  // of a call
  LoadUse use = LoadUse::keep;                     // of a call that is a load
  void (*functions[2])() = {};  // StepFunction of the target: for blocks of six vectors, of one
};

/// How an instruction becomes a step, by which of its operands is the value in registers.
struct StepForm {
  StepOp op = StepOp::call;
  int value = 0, x = 1, y = 2;  // operands of the instruction
};

/// With operand `value` in registers; an op that cannot have it there wants operand 0 instead.
StepForm step_form(const expr::Instruction& instruction, int value);

/// Where a tape's registers lie in scratch, as byte offsets; all are multiples of 64.
struct ProgramLayout {
  /// Keys of one chunk: per_score instructions run on chunks of whole key rows, long enough that
  /// dispatch costs little and short enough that registers stay in L1.
  std::int64_t chunk_keys = 0;
  std::size_t uniform_bytes = 0;  // of one register: the value repeated for a whole vector
  std::size_t query_bytes = 0;    // of one register: one value per lane
  std::size_t key_bytes = 0;      // of one register: one value per key
  std::size_t score_bytes = 0;    // of one register: one chunk
  std::size_t query_begin = 0, key_begin = 0, score_begin = 0;  // uniform registers begin at 0
  std::size_t lane_offsets_begin = 0,
              key_offsets_begin = 0;  // int64 each: element offsets of loads
  std::size_t steps_begin = 0;        // ProgramStep each
  std::size_t total_bytes = 0;
};

ProgramLayout program_layout(const expr::Tape& tape, std::int64_t num_keys, int lanes);

/// Bytes of scratch for tiles of up to max_keys x lanes scores.
std::size_t program_scratch_bytes(const expr::Tape& tape, std::int64_t max_keys, int lanes);

}  // namespace fovea::cpu
