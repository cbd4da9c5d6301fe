// The functions of one printed program, as the host compiler has them.
#pragma once

#include "common/captured_range.cuh"

namespace fovea::cuda {

struct PrintedProgram {
  float (*score)(float score, const Position& at, const Captures& captures);
  bool (*mask)(const Position& at, const Captures& captures);
  TileKind (*tile_kind)(const TileSpan& tile, const Captures& captures);
  /// Null where the mask is not one range of keys for each row.
  program::Int (*kv_first)(const Position& at, const Captures& captures);
  program::Int (*kv_last)(const Position& at, const Captures& captures);
};

}  // namespace fovea::cuda
