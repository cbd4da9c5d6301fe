// How the caller's workspace is cut up for attention forward. Read carver.hpp first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/candidates.hpp"
#include "cpu/carver.hpp"
#include "cpu/kernels/panel.hpp"
#include "cpu/key_source.hpp"
#include "cpu/row_state.hpp"

namespace fovea::cpu {

inline constexpr std::int64_t kRowsAtOnce = 16;  // that leave a panel: a cache line of each column

/// What one worker writes while it computes an item.
struct WorkerScratch {
  std::byte* queries = nullptr;        // [panels] packed panels
  std::byte* out = nullptr;            // [panels] Oᵀ, fp32
  float* row_max = nullptr;            // [panels][lanes]
  float* origin = nullptr;             // [panels][lanes]
  float* row_sum = nullptr;            // [panels][lanes]
  float* rescale = nullptr;            // [lanes]
  std::int32_t* q_idx = nullptr;       // [panels][lanes]
  std::int32_t* q_head = nullptr;      // [panels][lanes]
  std::int32_t* seen_begin = nullptr;  // [panels][lanes]
  std::int32_t* seen_end = nullptr;    // [panels][lanes]
  const std::byte** rows = nullptr;    // [lanes]
  std::byte* keys = nullptr;           // one converted tile
  std::byte* values = nullptr;         // one tile
  float* scores = nullptr;             // one panel's tile
  std::byte* pipeline = nullptr;       // of kernels that have one
  float* extra = nullptr;   // one panel's Oᵀ: what values that are not finite add (careful pass)
  float* states = nullptr;  // [kRowsAtOnce][state_pitch]: of rows on their way out
  float* merged = nullptr;  // [lanes][head_dim_v + 2]: the state of earlier splits
  std::byte* program = nullptr;

  static WorkerScratch carve(Carver& carver, const ForwardSpec& spec, const PanelKernels& kernels,
                             std::int64_t head_dim_qk, std::int64_t head_dim_v,
                             std::size_t program_bytes);
};

/// Heads that a worker walks together where each has few rows.
inline constexpr std::int64_t kMaxHeadsAtOnce = 8;

/// What a worker needs besides for sequences of few rows: kFewRows for each head.
struct FewRowsScratch {
  float* queries = nullptr;        // [heads][kFewRows][padded(head_dim_qk)]
  float* scores = nullptr;         // [heads][kFewRows][tile_kv]
  float* sums = nullptr;           // [heads][kFewRows][padded(head_dim_v)]
  float* extra = nullptr;          // [kFewRows][padded(head_dim_v)], see WorkerScratch
  float* row_max = nullptr;        // [heads][lanes]
  float* origin = nullptr;         // [heads][lanes]
  float* row_sum = nullptr;        // [heads][lanes]
  float* rescale = nullptr;        // [heads][lanes]
  std::int32_t* q_idx = nullptr;   // [heads][lanes]
  std::int32_t* q_head = nullptr;  // [heads][lanes]
  float* merged = nullptr;         // [heads][kFewRows][state_floats]: of earlier splits

  static std::int64_t padded(std::int64_t width) { return (width + 15) / 16 * 16; }
  static FewRowsScratch carve(Carver& carver, const ForwardSpec& spec,
                              const ForwardProblem& problem);
};

/// What a worker needs besides where keys lie in pages or are codes: the rows of a tile and of the next, and room to
/// gather a tile. Of the next tile scales are not asked for: they are few.
struct CacheScratch {
  RowList key_rows{};    // [tile_kv]
  RowList value_rows{};  // [tile_kv]
  RowList next_key_rows{};
  RowList next_value_rows{};
  std::byte* keys = nullptr;    // [tile_kv, head_dim_qk] in the dtype of k, of codes in f32
  std::byte* values = nullptr;  // [tile_kv, head_dim_v] in the dtype of v, of codes in f32

  /// Nothing where the problem's keys lie at one stride and are numbers.
  static CacheScratch carve(Carver& carver, const ForwardSpec& spec, const ForwardProblem& problem);
};

struct ForwardScratch : WorkerScratch {
  FewRowsScratch few{};
  CacheScratch cached{};
};

/// All of a call's workspace.
struct ForwardMemory {
  std::int64_t* first_item = nullptr;  // [num_sequences + 1]: work items before each sequence
  std::vector<ForwardScratch> workers;
  // [num_sequences][num_heads_kv][splits][rows][state_floats]; null where splits run in turn
  float* partials = nullptr;

  static ForwardMemory carve(Carver& carver, const ForwardSpec& spec, const ForwardProblem& problem,
                             std::size_t program_bytes, int num_threads);
};

}  // namespace fovea::cpu
