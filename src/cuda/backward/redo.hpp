// Tiles that sm80/attention_backward computes again behind a kernel of wgmma, which multiplies what a row does not see
// by 0: which problems may have such tiles, and the words that stand for them (RedoTiles).
#pragma once

#include <array>
#include <cstdint>

#include "cuda/backward/attention_backward.hpp"
#include "cuda/backward/launch.hpp"
#include "cuda/device/shared/backward_params.h"
#include "problem/backward.hpp"

namespace fovea::cuda {

/// Rows do not see all keys of a tile.
bool hides_keys(const ForwardProblem& problem);

/// Gradients that are not finite are computed again: pairs that are hidden or dropped may have made them so.
bool asks_redo(const GradientProblem& problem);

/// Words that stand for tiles of keys (tile_place).
std::int64_t num_key_words(const GradientProblem& problem);

/// Of RedoTiles of keys and of queries: a word for all tiles, and one for each. All are 0 before a kernel asks.
std::int64_t num_redo_words(const GradientProblem& problem);

/// Gives RedoTiles their places in num_redo_words.
void place_redo(const GradientProblem& problem, std::int32_t* words, BackwardParams& params);

/// What a step that computes tiles again takes, and its grid: as many CTAs as the machine has room for.
struct RedoLaunch {
  BackwardParams params{};
  std::uint32_t num_ctas = 0;
};
/// `num_tiles` of the step (BackwardLaunch). After place_redo.
RedoLaunch redo_launch(const BackwardPlan& plan, const BackwardStep& step,
                       const BackwardParams& params, std::uint32_t num_tiles);

/// Of each of the plan's steps that computes tiles again, where the step stands.
using RedoLaunches = std::array<RedoLaunch, kMostBackwardSteps>;
RedoLaunches redo_launches(const BackwardPlan& plan, const BackwardParams& params,
                           const BackwardLaunch& common);

}  // namespace fovea::cuda
