// Quantization::accuracy: which recipe a plan takes of those whose error is allowed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/quant.hpp"

namespace fovea {

struct RecipeChoice {
  Quantization quant{};                         // none: as without a recipe
  std::string why{};                            // empty where the problem states no accuracy
  std::vector<Explanation::Refused> refused{};  // recipes that were tried before
};

/// Why a problem with a recipe cannot run, or is no faster than without one; empty: it is faster.
using RecipeObstacle = std::function<std::string(const Problem& problem)>;

/// The recipe of a problem that states an accuracy, largest error first: what rounds more is faster. The recipe that it
/// names where it states none.
RecipeChoice choose_recipe(const Problem& problem, const RecipeObstacle& obstacle);

/// What stands in the way of recipes on the device of the problem.
std::string recipe_obstacle(const Problem& problem);

/// A problem with the recipe that its accuracy chooses.
struct Chosen {
  Problem problem;
  RecipeChoice choice;
};
Chosen with_chosen_recipe(const Problem& problem);

/// Says in an explanation what was chosen, and why.
void explain_choice(const RecipeChoice& choice, Explanation& explanation);

}  // namespace fovea
