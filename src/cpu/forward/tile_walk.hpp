// The walk of one item over its kv tiles: load a tile once, then for each panel that sees it both products and what
// lies between them. What is read or written next is fetched meanwhile. Read score_programs.hpp next.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "cpu/forward/call.hpp"
#include "cpu/forward/row_panel.hpp"
#include "cpu/forward/score_programs.hpp"

namespace fovea::cpu {

class TileWalk {
 public:
  TileWalk(const ForwardCall& call, const ForwardItem& item, const ForwardScratch& scratch);

  /// Calls done(panel) as soon as a panel's sums are complete.
  void run(const std::function<void(const RowPanel&)>& done);

  /// With values that are not finite taken out of the products and added where they are seen; of an item of one panel.
  const RowPanel& run_carefully(const PanelKernels& kernels);

 private:
  void start_if_new(RowPanel& panel, const PanelKernels& kernels);
  bool enter(std::int64_t tile);
  std::int64_t first_tile() const;
  KeyTile load_tile(const PanelKernels& kernels, bool is_careful) const;

  void multiply(RowPanel& panel, const KeyTile& keys, NextTile& next) const;
  void multiply_carefully(RowPanel& panel, const KeyTile& keys, const PanelKernels& kernels,
                          NextTile& next) const;
  TileStep scores_of(const RowPanel& panel, const KeyTile& keys, const PanelKernels& kernels,
                     NextTile& next) const;
  void add_values(const TileStep& step, const PanelKernels& kernels, NextTile& next) const;

  NextTile next_fetches();
  std::size_t find_due_rows();
  TileSource rows_of(const Rows& tensor, const RowPanel& panel, std::int64_t head_dim) const;

  bool has_pipeline() const;
  PanelPipeline pipeline() const;
  PanelTurn turn_of(const RowPanel& panel, const KeyTile& keys) const;
  static void prepare_part(const PanelTurn& turn, KeyRange part, float* scores);

  const ForwardCall& call_;
  const ForwardItem& item_;
  const ForwardScratch& scratch_;
  std::vector<RowPanel> panels_;
  // The current tile, its keys, and how many panels see some of them.
  std::int64_t tile_ = 0, kv_begin_ = 0, kv_end_ = 0;
  std::int64_t num_seeing_ = 0;
  std::array<TileSource, 2 * kMaxPanels> due_rows_{};  // of queries and of out
};

}  // namespace fovea::cpu
