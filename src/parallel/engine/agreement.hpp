// All ranks have one problem, or all of them raise one error.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/communicator.hpp"

namespace fovea::parallel {

/// What ranks must have in common, in words: names and values, the same names in the same order on every rank.
using Facts = std::vector<std::pair<std::string, std::string>>;

class Agreement {
 public:
  /// Returns where all ranks say the same and no rank has a `problem`, which is its own error in words. A rank that has
  /// agreed to these facts before exchanges nothing.
  void reach(Communicator& ranks, std::string_view where, const Facts& facts,
             const std::string& problem);

 private:
  std::set<Facts> agreed_;
};

}  // namespace fovea::parallel
