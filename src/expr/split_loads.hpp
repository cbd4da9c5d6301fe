// What a program loads by its key alone, or by its row alone, taken out of the formula: a kernel then computes it once
// for each key and each row of a tile, ahead of time, instead of at each score.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "expr/node.hpp"

namespace fovea::expr {

/// A formula over parts that follow from kv_idx and no row, or from the row and no key; batch, heads and lengths count
/// as neither. Parts are floats or ints.
struct SplitLoads {
  NodePtr formula;                  // reads them as scalars of the names below
  std::vector<NodePtr> keys, rows;  // what they are
};
std::string key_part_name(std::size_t i);  // "key.part_0": no captured scalar can have the name
std::string row_part_name(std::size_t i);
bool is_part_name(const std::string& name);

/// Empty where nothing is loaded by a key or a row alone, or too much of it for registers.
std::optional<SplitLoads> split_loads(const NodePtr& root);

}  // namespace fovea::expr
