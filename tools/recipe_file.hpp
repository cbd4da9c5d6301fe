// Recipe files: what `fovea calibrate` measured and chose, as JSON. A call takes the file's one recipe; what each head
// alone could take stands beside it for people.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fovea/quant.hpp"

namespace fovea::tools {

/// What a recipe costs a head, or all of them: ‖got - exact‖ / ‖exact‖ of out.
struct RecipeError {
  std::string quant;
  double error = 0;
};

struct HeadRecipe {
  std::int64_t q_head = 0;
  RecipeError chosen{};               // "none" where no recipe is within the accuracy
  std::vector<RecipeError> errors{};  // of every recipe that was measured
};

struct RecipeFile {
  std::string input;     // that was measured
  double accuracy = 0;   // that every head keeps with `chosen`
  RecipeError chosen{};  // of the worst head
  std::vector<HeadRecipe> heads{};
};

std::string to_json(const RecipeFile& file);

/// Whether a value of --quant names such a file: it ends in .json.
bool is_recipe_file(std::string_view text);

/// The recipe of a file. `option` starts the message of Failure(kBadInput).
Quantization read_recipe(std::string_view option, const std::string& path);

}  // namespace fovea::tools
