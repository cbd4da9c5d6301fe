#include "cpu/forward/split_states.hpp"

#include <cstring>

#include "cpu/row_state.hpp"

namespace fovea::cpu {

std::size_t SplitStates::state_floats() const {
  return static_cast<std::size_t>(cpu::state_floats(call_.problem.head_dim_v));
}

// ---- side by side ----

float* SplitStates::partial(const ForwardItem& rows, std::int64_t lane) const {
  const std::int64_t splits = max_splits(call_.spec, call_.problem);
  const std::int64_t split = rows.tile_begin / call_.spec.tiles_per_split;
  const std::int64_t group = rows.sequence.index * call_.problem.num_heads_kv + rows.kv_head;
  const std::int64_t num_rows = max_split_rows(call_.spec, call_.problem);
  const std::int64_t row = (group * splits + split) * num_rows + rows.row_begin + lane;
  return partials_ + static_cast<std::size_t>(row) * state_floats();
}

void SplitStates::keep(const ForwardItem& rows, std::int64_t lane, const float* state) const {
  std::memcpy(partial(rows, lane), state, state_floats() * sizeof(float));
}

void SplitStates::merge(std::int64_t sequence, std::int64_t kv_head,
                        const ForwardResults& results) const {
  ForwardItem rows{.sequence = call_.sequence(sequence), .kv_head = kv_head};
  const std::int64_t splits = schedule_.num_splits(rows.sequence);
  if (splits == 1 || call_.problem.num_heads_q == 0) return;
  rows.row_end = schedule_.num_rows(rows.sequence);
  for (std::int64_t lane = 0; lane < rows.row_end; ++lane) {
    rows.tile_begin = 0;
    float* state = partial(rows, lane);
    for (std::int64_t split = 1; split < splits; ++split) {
      rows.tile_begin = split * call_.spec.tiles_per_split;
      merge_state(state, partial(rows, lane), call_.problem.head_dim_v);
    }
    results.finish_row(rows, lane, state);
  }
}

// ---- in turn ----

float* SplitStates::merged(const ForwardItem& item, std::int64_t kv_head, std::int64_t lane,
                           const ForwardScratch& scratch) const {
  if (!schedule_.is_few(item.sequence))
    return scratch.merged + static_cast<std::size_t>(lane) * state_floats();
  const std::int64_t row = (kv_head - item.kv_head) * kFewRows + lane;
  return scratch.few.merged + static_cast<std::size_t>(row) * state_floats();
}

void SplitStates::add(const ForwardItem& item, std::int64_t split, const ForwardItem& rows,
                      std::int64_t lane, const float* state, const ForwardScratch& scratch) const {
  float* into = merged(item, rows.kv_head, lane, scratch);
  if (split == 0) {
    std::memcpy(into, state, state_floats() * sizeof(float));
  } else {
    merge_state(into, state, call_.problem.head_dim_v);
  }
}

void SplitStates::finish(const ForwardItem& item, const ForwardScratch& scratch,
                         const ForwardResults& results) const {
  for (ForwardItem rows = item; rows.kv_head < item.kv_head + item.num_heads; ++rows.kv_head) {
    for (std::int64_t lane = 0; lane < item.num_rows(); ++lane)
      results.finish_row(rows, lane, merged(item, rows.kv_head, lane, scratch));
  }
}

}  // namespace fovea::cpu
