#include <fmt/format.h>

#include <cstddef>

#include "core/check.hpp"
#include "expr/interval.hpp"
#include "expr/passes.hpp"
#include "expr/print.hpp"

namespace fovea::expr {

namespace {

constexpr std::size_t kMostShown = 256;  // bytes of a formula in a message

std::string shown(const Interval& range) {
  if (range.is_point()) return fmt::format("is {:.0f}", range.lo);
  return fmt::format("is in [{:.0f}, {:.0f}]", range.lo, range.hi);
}

}  // namespace

void refuse_out_of_range_loads(const NodePtr& root, const Box& bounds, std::string_view argument) {
  const IntervalProgram program(root);
  std::vector<Interval> values;
  program.evaluate_all(bounds, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Node& node = *program.nodes()[i];
    if (node.op != Op::load) continue;
    for (std::size_t dim = 0; dim < node.operands.size(); ++dim) {
      const Interval& range = values[static_cast<std::size_t>(program.operands(i)[dim])];
      const std::int64_t extent = node.tensor->view.size(static_cast<int>(dim));
      const bool can_be_inside =
          extent > 0 && range.lo < static_cast<double>(extent) && range.hi >= 0;
      if (can_be_inside) continue;
      invalid(
          std::string(argument),
          fmt::format(
              "index {} of '{}', {}, {}; expected 0 <= index < {}, the extent of that dimension",
              dim, node.name, print_up_to(*node.operands[dim], kMostShown), shown(range), extent));
    }
  }
}

}  // namespace fovea::expr
