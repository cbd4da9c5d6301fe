// Between the two products: scale, score program and mask of one panel's tile. Read non_finite.hpp next.
#pragma once

#include <cstdint>

#include "cpu/forward/call.hpp"
#include "cpu/forward/row_panel.hpp"

namespace fovea::cpu {

/// Scores of one panel and tile, and what remains to be done with them.
struct TileStep {
  const RowPanel* panel = nullptr;
  std::int64_t tile = 0, num_keys = 0;
  VisiblePart seen{};
  float* scores = nullptr;
};

/// In place; a hidden key's scores are -inf.
void apply_programs(const TileStep& step, const ForwardCall& call, const ForwardScratch& scratch);

/// What the softmax of this step drops.
PanelDropout dropout_of(const TileStep& step, const ForwardCall& call);

}  // namespace fovea::cpu
