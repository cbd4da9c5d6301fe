// From captured tensors and scalars to kernel parameters, by the slots of the printed programs. Read range_tables.hpp
// for the tables that masks of captured tensors need besides.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "fovea/expr.hpp"

#include "cuda/device/shared/captures.h"
#include "expr/print_cuda.hpp"

namespace fovea::cuda {

/// Why kernels cannot take what these programs capture; empty: they can.
std::optional<std::string> captures_refusal(const expr::CudaProgram& program);

/// Where the capture of each slot stands in the programs of a call, found once by name.
class CaptureSlots {
 public:
  CaptureSlots() = default;
  /// The programs that were printed, or equal ones.
  CaptureSlots(const expr::CudaProgram& program, const ScoreMod& score, const MaskMod& mask)
      : CaptureSlots(program, {score.captures(), mask.captures()}) {}

  /// What the two programs capture; the score's may hold more than its formula reads, tangents of it.
  struct Captured {
    const fovea::Captures& score;
    const fovea::Captures& mask;
  };
  CaptureSlots(const expr::CudaProgram& program, const Captured& captured);

  /// The parameters of a call whose programs equal the plan's: their captures stand in the same order. No table of
  /// ranges yet.
  Captures bind(const ScoreMod& score, const MaskMod& mask) const {
    return bind({score.captures(), mask.captures()});
  }
  Captures bind(const Captured& captured) const;

 private:
  struct Place {
    expr::ProgramRole role = expr::ProgramRole::score;
    std::size_t idx = 0;  // among the captures of that program
  };
  std::vector<Place> tensors_, scalars_;
};

}  // namespace fovea::cuda
