// The walk of one item: a chunk of keys loaded once, all rows of its group a few panels at a time, five products for
// each tile that a panel sees; then dK and dV of the chunk. Read dq_sums.hpp next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/backward/call.hpp"
#include "cpu/backward/captured_sums.hpp"
#include "cpu/backward/dq_sums.hpp"
#include "cpu/backward/row_panel.hpp"
#include "cpu/backward/schedule.hpp"
#include "cpu/backward/tile_scores.hpp"

namespace fovea::cpu {

class ChunkWalk {
 public:
  /// Captured gradients are added to the sums of `task`.
  ChunkWalk(const BackwardCall& call, const BackwardItem& item, std::int64_t task,
            const DqSums& dq_sums, CapturedSums& captured, const BackwardScratch& scratch)
      : call_(call),
        item_(item),
        task_(task),
        dq_sums_(dq_sums),
        captured_(captured),
        scratch_(scratch) {}

  void run();

 private:
  void clear_sums() const;
  void load_chunk() const;
  void walk_panels(const RowRange& rows);
  bool is_seen_by(const GradientPanel& panel) const;
  void load_gradients(GradientPanel& panel) const;
  void step(const GradientTile& tile, std::size_t index);
  void add_products(const GradientTile& tile, std::size_t index) const;
  float* key_sums(float* sums, const GradientTile& tile, std::int64_t head_dim) const;
  void write_keys(const TensorView& view, const float* sums, std::int64_t head_dim) const;

  const BackwardCall& call_;
  const BackwardItem& item_;
  const std::int64_t task_;
  const DqSums& dq_sums_;
  CapturedSums& captured_;
  const BackwardScratch& scratch_;
};

}  // namespace fovea::cpu
