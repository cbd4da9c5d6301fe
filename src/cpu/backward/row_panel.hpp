// A panel of rows on its way through the tiles: positions, Qᵀ, dOᵀ, what it sees. Read tile_scores.hpp next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/backward/call.hpp"
#include "cpu/visible_keys.hpp"

namespace fovea::cpu {

struct GradientPanel {
  const BackwardScratch::Panel* memory = nullptr;
  RowRange rows;
  int num_vectors = 0;
  bool is_dout_finite = true;
  VisibleKeys keys{};

  std::int64_t num_rows() const { return rows.count(); }
  RowOfHead row(std::int64_t lane) const { return {memory->q_idx[lane], memory->q_head[lane]}; }
};

/// Positions, Qᵀ and what the panel sees. scratch.rows holds its rows of q until the next panel starts.
GradientPanel start_panel(const BackwardCall& call, const RowRange& rows,
                          const BackwardScratch::Panel& memory, const BackwardScratch& scratch);

/// What is known of the rows (BackwardMemory), and dOᵀ.
void load_douts(const GradientPanel& panel, const BackwardCall& call);

}  // namespace fovea::cpu
