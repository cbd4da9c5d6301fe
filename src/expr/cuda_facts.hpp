// What the printer of CUDA text knows of a formula's nodes before it writes one. For cuda_body.cpp.
#pragma once

#include <vector>

#include "expr/interval.hpp"

namespace fovea::expr {

/// Of a node, from its operands: what it varies with, and whether a float was rounded on the way.
struct Reads {
  bool position = false;  // q_idx or kv_idx
  bool q_head = false;    // which heads share a tile
  bool rounds = false;    // a float that arithmetic made, or what was decided by one
};

/// By node of the program, as the other two.
std::vector<Reads> find_reads(const IntervalProgram& program);

/// Nodes whose every use is smooth up to the result: a small error of theirs stays small.
std::vector<bool> find_smooth(const IntervalProgram& program);

std::vector<int> count_uses(const IntervalProgram& program);

}  // namespace fovea::expr
