// How the caller's workspace is cut up for attention backward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/attention_backward.hpp"
#include "cpu/carver.hpp"
#include "cpu/kernels/gradient.hpp"

namespace fovea::cpu {

/// What all workers share.
struct BackwardMemory {
  std::int64_t* first_block = nullptr;  // [num_sequences + 1]: blocks of rows before each sequence
  // By row: [batch, num_heads_q, seqlen_q], or packed [num_heads_q, total_q]; see SoftmaxGradient.
  float* origin = nullptr;
  float* log_sum = nullptr;
  float* delta = nullptr;
  // [chunks or 1][rows][head_dim_qk]; null where dq itself holds the sums.
  float* dq_sums = nullptr;

  static BackwardMemory carve(Carver& carver, const GradientProblem& problem,
                              const BackwardSchedule& schedule);
};

/// May dq itself hold its sums?
bool sums_into_dq(const GradientProblem& problem, const BackwardSchedule& schedule);

/// What one worker writes while it computes an item.
struct BackwardScratch {
  /// One panel of queries.
  struct Panel {
    std::byte* queries = nullptr;     // Qᵀ
    std::byte* douts = nullptr;       // dOᵀ
    std::byte* query_rows = nullptr;  // Q where `accumulate_rows` wants it, non-finite elements 0
    std::byte* dout_rows = nullptr;   // dO, likewise
    float* dq = nullptr;              // dQᵀ
    std::int32_t* q_idx = nullptr;    // [lanes]
    std::int32_t* q_head = nullptr;   // [lanes]
    float* origin = nullptr;          // [lanes]
    float* log_sum = nullptr;         // [lanes]
    float* delta = nullptr;           // [lanes]
    float** dq_rows = nullptr;        // [lanes] where the columns of dQᵀ go
    const std::byte** dout_source = nullptr;  // [lanes]
  };
  std::vector<Panel> panels;
  const std::byte** rows = nullptr;  // [lanes]
  float* ones = nullptr;             // [lanes]

  // Of the chunk, tile by tile.
  KeyTile* keys = nullptr;            // [tiles]
  KeyTile* values = nullptr;          // [tiles] V where `scores` wants keys
  std::byte* key_buffer = nullptr;    // [tiles] converted K
  std::byte* value_buffer = nullptr;  // [tiles] converted V
  std::byte* key_columns = nullptr;   // [tiles] K where `accumulate` wants values, non-finite 0
  float* dk = nullptr;                // [keys][row_pitch(head_dim_qk)]
  float* dv = nullptr;                // [keys][row_pitch(head_dim_v)]

  // Of one panel's tile, [keys][lanes].
  float* scores = nullptr;      // then probabilities
  float* products = nullptr;    // dP, then dS
  float* raw_scores = nullptr;  // before the program
  float* derivative = nullptr;  // of the program; also values of captured gradients
  float* seen = nullptr;        // masked scores, where rows of dO are not finite
  std::int64_t* offsets = nullptr;
  std::byte* program = nullptr;

  static BackwardScratch carve(Carver& carver, const GradientProblem& problem,
                               const BackwardPlan& plan);
};

}  // namespace fovea::cpu
