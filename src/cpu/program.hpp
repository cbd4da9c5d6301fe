// What a score or mask program needs to run on one tile of scores, on any target. Executed by
// kernels/program-inl.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fovea/tensor.hpp"

#include "expr/tape.hpp"

namespace fovea::cpu {

/// The scores of up to `lanes` queries and `num_keys` keys, key-major: scores[key * lanes + lane].
struct ProgramTile {
  float* scores = nullptr;  // in, out; 64-byte aligned
  std::int64_t num_keys = 0;
  int lanes = 0;  // a multiple of the target's vector length; padding lanes repeat a valid row
  std::int64_t kv_begin = 0;             // kv_idx of the first key
  const std::int32_t* q_idx = nullptr;   // [lanes]
  const std::int32_t* q_head = nullptr;  // [lanes]
  std::int32_t batch = 0, kv_head = 0;
  std::int32_t seqlen_q = 0, seqlen_kv = 0;
  const TensorView* tensors = nullptr;  // by slot of the tape
  const double* scalars = nullptr;      // by slot of the tape
  std::byte* scratch = nullptr;  // program_scratch_bytes(tape, max keys, lanes), 64-byte aligned
};

/// Where a tape's registers lie in scratch, as byte offsets; all are multiples of 64.
struct ProgramLayout {
  /// Keys of one chunk: per_score instructions run on chunks of whole key rows, long enough that
  /// dispatch costs little and short enough that registers stay in L1.
  std::int64_t chunk_keys = 0;
  std::size_t uniform_bytes = 0;  // of one register: the value repeated for a whole vector
  std::size_t query_bytes = 0;    // of one register: the lanes, repeated for every key of a chunk
  std::size_t key_bytes = 0;      // of one register: one value per key
  std::size_t score_bytes = 0;    // of one register: one chunk
  std::size_t query_begin = 0, key_begin = 0, score_begin = 0;  // uniform registers begin at 0
  std::size_t lane_offsets_begin = 0,
              key_offsets_begin = 0;  // int64 each: element offsets of loads
  std::size_t total_bytes = 0;
};

ProgramLayout program_layout(const expr::Tape& tape, std::int64_t num_keys, int lanes);

/// Bytes of scratch for tiles of up to max_keys x lanes scores.
std::size_t program_scratch_bytes(const expr::Tape& tape, std::int64_t max_keys, int lanes);

}  // namespace fovea::cpu
