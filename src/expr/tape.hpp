// A formula lowered for tiles: straight-line code over registers, each instruction as rare as its
// operands allow.
//
// A score tile is [keys][lanes], lanes being queries. A value is computed once per call (uniform),
// once per lane (per_query), once per key (per_key) or for every score (per_score). The vector code
// that executes a tape is src/cpu/kernels/program-inl.hpp; a tape knows nothing of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "expr/node.hpp"

namespace fovea::expr {

enum class Rate : std::uint8_t { uniform, per_query, per_key, per_score };

/// The join: what depends on queries and on keys differs for every score.
Rate join(Rate a, Rate b);

struct Instruction {
  Op op = Op::constant;
  ExprType type = ExprType::floating;          // of the result
  ExprType operand_type = ExprType::floating;  // of the operands (comparisons differ from theirs)
  Rate rate = Rate::uniform;
  Variable variable = Variable::score;  // variable
  /// Register, unique within its rate class; -1 where none is needed: the variable score, a
  /// comparison that only hides scores, and the result of a score program (it replaces the score).
  std::int32_t target = -1;
  std::int32_t operands[3] = {-1, -1, -1};  // instruction indices
  std::vector<std::int32_t> indices;        // load: instruction indices, one per dimension
  std::int32_t slot = -1;                   // load: into tensors; scalar: into scalars
  std::int32_t int_value = 0;               // constant of type integer or boolean
  float float_value = 0;                    // constant of type floating
  bool is_fused = false;
  bool is_condition = false;     // a mask program hides the score where this is false
  bool feeds_only_next = false;  // per_score: the next per_score instruction alone reads it
};

struct Tape {
  /// Operands before users. A float formula's value is the last instruction's. A bool formula is
  /// true where all its conditions are: each hides scores on its own, and the conjunction itself is
  /// not computed.
  std::vector<Instruction> code;
  std::vector<std::string> tensors;  // slot names in order of first use
  std::vector<std::string> scalars;
  int num_registers[4] = {0, 0, 0, 0};  // by Rate; per_score registers are reused once dead

  bool empty() const { return code.empty(); }
  /// Instructions executed for every score: what the program costs.
  int num_per_score_ops() const;
};

/// Simplifies, orders, fuses and allocates registers.
Tape lower(const NodePtr& root);

}  // namespace fovea::expr
