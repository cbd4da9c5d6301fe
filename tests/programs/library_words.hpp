// Library masks and scores whose printed text is kept in golden/, to be read by people: what a change of the printer
// does to them shows in its diff.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fovea/expr.hpp"

namespace fovea::testing {

struct LibraryWord {
  std::string name;
  ScoreMod score;
  MaskMod mask;
};

/// Of tensors that stay alive as long as the process.
const std::vector<LibraryWord>& library_words();

/// The printed text, with the slots and their tables of ranges behind it.
std::string golden_text(const LibraryWord& word);

}  // namespace fovea::testing
