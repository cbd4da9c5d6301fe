// The lines of one printed function: a formula's nodes in order, shared parts and loads under names. For
// print_cuda.cpp.
#pragma once

#include <cstdint>
#include <string>

#include "expr/cuda_slots.hpp"
#include "expr/interval.hpp"
#include "expr/print_cuda.hpp"

namespace fovea::expr {

/// Values of one score, or ranges over a tile. On a tile, what no position, head or rounding touches stays a value.
enum class Domain : std::uint8_t { value, range };

struct CudaFunction {
  const IntervalProgram& program;
  ProgramRole role;
  Domain domain;
  SlotNames names;
};

struct CudaBody {
  std::string lines;
  std::string result;  // the expression that is returned
  bool reads_captures = false;
  bool reads_variables = false;  // but the score, which is a parameter
};

CudaBody print_body(const CudaFunction& function, CudaSlots& slots);

}  // namespace fovea::expr
