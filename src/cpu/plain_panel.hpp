// What double backward and probabilities share: rows in fp64, and the programs over a few rows and all keys of their
// sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu/bound_program.hpp"
#include "cpu/kernels/panel.hpp"
#include "cpu/operands.hpp"

namespace fovea::cpu {

/// Where a row of a dense or packed tensor lies.
struct RowPlace {
  std::int64_t batch = 0, row = 0, head = 0;
};

/// Zeros where the tensor is not given.
void load_row(const TensorView& view, const RowPlace& at, std::span<double> row);

double dot(std::span<const double> a, std::span<const double> b);

/// Null where there is nothing to run.
inline expr::NodePtr formula_of(const ScoreMod& score) {
  return score.is_identity() ? nullptr : score.expr().shared();
}
inline expr::NodePtr formula_of(const MaskMod& mask) {
  return mask.is_all_visible() ? nullptr : mask.expr().shared();
}

/// Up to `lanes` rows of one kv head. Scores against all keys of their sequence are [keys][lanes].
struct PlainPanel {
  Sequence sequence{};
  std::int64_t kv_head = 0;
  std::int64_t num_rows = 0;
  std::vector<std::int32_t> q_idx{}, q_head{};  // [lanes]; padding lanes repeat the last row

  RowPlace place(std::int64_t lane) const {
    const auto at = static_cast<std::size_t>(lane);
    return {sequence.batch_offset, sequence.q_begin + q_idx[at], q_head[at]};
  }
};

/// Of the rows of a kv head, query head by query head.
struct RowsOfHead {
  std::int64_t kv_head = 0;
  std::int64_t begin = 0, count = 0;
};
PlainPanel plain_panel(const Sequence& sequence, const RowsOfHead& rows, std::int64_t group,
                       int lanes);

/// What run_score and run_mask need of this program, at a boundary of 64 bytes.
std::size_t plain_scratch_bytes(const BoundProgram& program, const PanelKernels& kernels);
/// Scores of a panel become those of the program; an empty one leaves them. Scores lie at a boundary of 64 bytes.
void run_score(const BoundProgram& program, const PanelKernels& kernels, const PlainPanel& panel,
               float* scores, std::byte* scratch);
/// -inf where the program hides a key.
void run_mask(const BoundProgram& program, const PanelKernels& kernels, const PlainPanel& panel,
              float* scores, std::byte* scratch);

}  // namespace fovea::cpu
