#include "cpu/plain_panel.hpp"

#include <algorithm>

#include "core/scalar_io.hpp"

namespace fovea::cpu {
namespace {

constexpr std::int64_t kProgramKeys = 128;  // run through a program at once

using RunProgram = void (*)(const expr::Tape& tape, const ProgramTile& tile);

void run(RunProgram run_tile, const BoundProgram& program, const PlainPanel& panel, int lanes,
         float* scores, std::byte* scratch) {
  if (program.empty()) return;
  const Sequence& s = panel.sequence;
  for (std::int64_t key = 0; key < s.seqlen_kv; key += kProgramKeys) {
    run_tile(program.tape.tape, {.scores = scores + key * lanes,
                                 .num_keys = std::min(kProgramKeys, s.seqlen_kv - key),
                                 .lanes = lanes,
                                 .kv_begin = key,
                                 .q_idx = panel.q_idx.data(),
                                 .q_head = panel.q_head.data(),
                                 .batch = static_cast<std::int32_t>(s.index),
                                 .kv_head = static_cast<std::int32_t>(panel.kv_head),
                                 .seqlen_q = static_cast<std::int32_t>(s.seqlen_q),
                                 .seqlen_kv = static_cast<std::int32_t>(s.seqlen_kv),
                                 .tensors = program.bindings.tensors.data(),
                                 .scalars = program.bindings.scalars.data(),
                                 .scratch = scratch});
  }
}

}  // namespace

void load_row(const TensorView& view, const RowPlace& at, std::span<double> row) {
  std::fill(row.begin(), row.end(), 0.0);
  if (!view) return;
  const Rows rows(view);
  const std::byte* data = rows.at(at.batch, at.row, at.head);
  for (std::size_t i = 0; i < row.size(); ++i)
    row[i] = load_scalar(data, rows.dtype, static_cast<std::int64_t>(i) * rows.col_stride);
}

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

PlainPanel plain_panel(const Sequence& sequence, const RowsOfHead& rows, std::int64_t group,
                       int lanes) {
  PlainPanel panel{.sequence = sequence, .kv_head = rows.kv_head, .num_rows = rows.count};
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    // Padding lanes repeat the last row, so that programs read what exists.
    const std::int64_t row = rows.begin + std::min(lane, rows.count - 1);
    panel.q_idx.push_back(static_cast<std::int32_t>(row % sequence.seqlen_q));
    panel.q_head.push_back(
        static_cast<std::int32_t>(rows.kv_head * group + row / sequence.seqlen_q));
  }
  return panel;
}

std::size_t plain_scratch_bytes(const BoundProgram& program, const PanelKernels& kernels) {
  return program.empty() ? 0
                         : program_scratch_bytes(program.tape.tape, kProgramKeys, kernels.lanes);
}

void run_score(const BoundProgram& program, const PanelKernels& kernels, const PlainPanel& panel,
               float* scores, std::byte* scratch) {
  run(kernels.run_score, program, panel, kernels.lanes, scores, scratch);
}

void run_mask(const BoundProgram& program, const PanelKernels& kernels, const PlainPanel& panel,
              float* scores, std::byte* scratch) {
  run(kernels.run_mask, program, panel, kernels.lanes, scores, scratch);
}

}  // namespace fovea::cpu
