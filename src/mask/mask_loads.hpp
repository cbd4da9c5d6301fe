// Bounds of what a mask program's loads yield while their indices run over intervals.
//
// A load with one index that depends on positions (t[batch, kv_idx]) has a range table, read from the data once. A load
// with several (a dense mask) is scanned where asked, at the tile itself, and unknown above it: no table of seqlen_q x
// seqlen_kv.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_set>
#include <vector>

#include "expr/interval.hpp"
#include "expr/node.hpp"
#include "mask/range_table.hpp"

namespace fovea::mask {

/// Which nodes of a program change from score to score of one head.
class PositionReads {
 public:
  /// `nodes` in topological order.
  explicit PositionReads(const std::vector<const expr::Node*>& nodes);
  bool operator()(const expr::Node& node) const { return found_.contains(node.digest); }

 private:
  std::unordered_set<expr::Digest, expr::DigestHash> found_;
};

enum class Scan : std::uint8_t { forbidden, allowed };

class MaskLoads {
 public:
  MaskLoads() = default;
  /// Takes the loads among `nodes` (in topological order) and builds their tables from what `captures` has under their
  /// slots' names. A tensor without data is legal: it may yield anything.
  MaskLoads(const std::vector<const expr::Node*>& nodes, const Captures& captures);

  const TensorView& view(const expr::Node& load) const { return find(load).view; }
  /// `indices` have been clamped into the tensor.
  expr::Interval range(const expr::Node& load, const expr::Interval* indices, Scan scan) const;

  /// True when the data of one (batch, head) has to be read position by position.
  bool depend_on_positions() const;

 private:
  struct Load {
    const expr::Node* node = nullptr;
    TensorView view{};
    int num_position_dims = 0;  // dimensions whose index depends on positions
    int last_position_dim = 0;
    std::optional<RangeTable> table;  // where num_position_dims is 1 and there is data
  };

  const Load& find(const expr::Node& load) const;

  std::vector<Load> loads_;
};

}  // namespace fovea::mask
