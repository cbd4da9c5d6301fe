// One panel's part of a tile between the products: scores as the forward pass has them, probabilities and gradients of
// scores. Read chunk_walk.hpp next.
#pragma once

#include <cstdint>

#include "cpu/backward/call.hpp"
#include "cpu/backward/captured_sums.hpp"
#include "cpu/backward/row_panel.hpp"

namespace fovea::cpu {

struct GradientTile {
  const GradientPanel& panel;
  std::int64_t kv_begin;  // of the tile
  VisiblePart seen;

  std::int64_t num_keys() const { return seen.range.count; }
  std::int64_t first_seen() const { return kv_begin + seen.range.begin; }
};

/// scratch.scores = mask(program(scale · K Qᵀ)), as in the forward pass; without a program the scale is left to the
/// softmax. Where a derivative reads it, scratch.raw_scores is the score before the program.
void compute_scores(const GradientTile& tile, const KeyTile& keys, const BackwardCall& call,
                    const BackwardScratch& scratch);

/// scratch.products = dP.
void compute_dout_products(const GradientTile& tile, const KeyTile& values,
                           const BackwardCall& call, const BackwardScratch& scratch);

/// From scores and dP to P and dS.
SoftmaxGradient softmax_step(const GradientTile& tile, const BackwardCall& call,
                             const BackwardScratch& scratch);

/// scratch.products: from gradients by the final score to gradients by q · k. Those of what the program captures are
/// added to the sums of the task.
void through_program(const GradientTile& tile, std::int64_t task, CapturedSums& captured,
                     const BackwardCall& call, const BackwardScratch& scratch);

}  // namespace fovea::cpu
