// A panel of an item: up to `lanes` rows side by side, what they see, and their sums so far. Read tile_walk.hpp next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/forward/call.hpp"
#include "cpu/forward/schedule.hpp"
#include "cpu/forward/workspace.hpp"
#include "cpu/visible_keys.hpp"

namespace fovea::cpu {

using LaneSet = std::uint64_t;  // a bit for each row of a panel

struct RowPanel {
  ForwardItem rows;
  std::byte* queries;
  float* out;  // Oᵀ
  PanelState state;
  const std::int32_t* q_idx;   // [lanes]; padding lanes repeat the last row
  const std::int32_t* q_head;  // [lanes]
  int num_vectors;
  VisibleKeys keys{};
  SeenKeys seen{};     // null where only the mask program knows
  KeyRange reach{};    // from the first key that it sees to the last
  VisiblePart part{};  // of the current tile
  bool is_started = false, is_done = false;

  bool ends_before(std::int64_t key) const { return reach.begin + reach.count <= key; }
};

/// The item's rows, a panel at a time: places in the problem and what they see. Nothing is read of the rows.
std::vector<RowPanel> panels_of(const ForwardCall& call, const ForwardItem& item,
                                const ForwardScratch& scratch);

/// The queries as numbers, for these kernels.
void pack_queries(const RowPanel& panel, const ForwardCall& call, const PanelKernels& kernels,
                  const ForwardScratch& scratch);

/// Sums of nothing.
void start(RowPanel& panel, const ForwardCall& call);

/// Called with the rows of one panel (or of one head, where rows are few), a lane of them and its state
/// (row_state.hpp).
using EmitState = std::function<void(const ForwardItem&, std::int64_t, float*)>;

/// The states of the rows whose bit is set, in order.
void emit_states(const RowPanel& panel, LaneSet wanted, const ForwardCall& call,
                 const ForwardScratch& scratch, const EmitState& emit);

}  // namespace fovea::cpu
