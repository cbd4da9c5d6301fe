// Which captured tensor or scalar stands in which slot of printed text. For print_cuda.cpp and cuda_body.cpp.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "expr/print_cuda.hpp"

namespace fovea::expr {

/// Fills the slots of a CudaProgram, in order of first use.
class CudaSlots {
 public:
  explicit CudaSlots(CudaProgram& program) : program_(program) {}

  void add_all(const std::vector<const Node*>& nodes, ProgramRole role) {
    for (const Node* node : nodes) {
      if (node->op == Op::load && !find(program_.tensors, role, node->name)) {
        program_.tensors.push_back({.role = role,
                                    .name = node->name,
                                    .dtype = node->dtype,
                                    .rank = static_cast<int>(node->operands.size())});
      }
      if (node->op == Op::scalar && !find(program_.scalars, role, node->name)) {
        program_.scalars.push_back({.role = role, .name = node->name, .type = node->type});
      }
    }
  }

  int of(const Node& node, ProgramRole role) const {
    const auto slot = node.op == Op::load ? find(program_.tensors, role, node.name)
                                          : find(program_.scalars, role, node.name);
    FOVEA_ASSERT(slot);
    return *slot;
  }

  /// The first load to run along a dimension has it in the table; another dimension of the same tensor does without.
  int range_dim(int slot, int wanted) {
    int& dim = program_.tensors[static_cast<std::size_t>(slot)].range_dim;
    if (dim == kNoRangeTable) dim = wanted;
    return dim == wanted ? wanted : kNoRangeTable;
  }

 private:
  template <typename Slot>
  static std::optional<int> find(const std::vector<Slot>& slots, ProgramRole role,
                                 const std::string& name) {
    const auto found = std::ranges::find_if(
        slots, [&](const Slot& slot) { return slot.role == role && slot.name == name; });
    if (found == slots.end()) return std::nullopt;
    return static_cast<int>(found - slots.begin());
  }

  CudaProgram& program_;
};

}  // namespace fovea::expr
