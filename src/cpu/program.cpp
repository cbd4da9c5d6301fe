#include "cpu/program.hpp"

#include <algorithm>

namespace fovea::cpu {

namespace {

// Measured with bench/micro/program_bench.cpp: shorter chunks pay for dispatch, longer ones leave
// L1 once a program needs more than a few registers.
constexpr std::int64_t kChunkScores = 768;

// Of the widest vector: uniform values and keys are padded to it.
constexpr std::int64_t kVectorFloats = 16;

std::int64_t padded(std::int64_t count, std::int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

std::size_t register_bytes(std::int64_t values) {
  return static_cast<std::size_t>(padded(values, kVectorFloats)) * sizeof(float);
}

std::size_t offsets_bytes(std::int64_t count) {
  return static_cast<std::size_t>(padded(count, 8)) * sizeof(std::int64_t);
}

std::size_t count_of(const expr::Tape& tape, expr::Rate rate) {
  return static_cast<std::size_t>(tape.num_registers[static_cast<int>(rate)]);
}

}  // namespace

ProgramLayout program_layout(const expr::Tape& tape, std::int64_t num_keys, int lanes) {
  ProgramLayout layout;
  const std::int64_t rows = kChunkScores / lanes;
  layout.chunk_keys = rows >= 4 ? rows / 4 * 4 : 1;  // loads are transposed in blocks of 4 keys
  const std::int64_t chunk_scores = layout.chunk_keys * lanes;
  layout.uniform_bytes = register_bytes(kVectorFloats);
  layout.query_bytes = register_bytes(chunk_scores);
  layout.key_bytes = register_bytes(num_keys);
  layout.score_bytes = register_bytes(chunk_scores);
  layout.query_begin = count_of(tape, expr::Rate::uniform) * layout.uniform_bytes;
  layout.key_begin =
      layout.query_begin + count_of(tape, expr::Rate::per_query) * layout.query_bytes;
  layout.score_begin = layout.key_begin + count_of(tape, expr::Rate::per_key) * layout.key_bytes;
  layout.lane_offsets_begin =
      layout.score_begin + count_of(tape, expr::Rate::per_score) * layout.score_bytes;
  layout.key_offsets_begin = layout.lane_offsets_begin + offsets_bytes(lanes);
  layout.total_bytes = layout.key_offsets_begin + offsets_bytes(layout.chunk_keys);
  return layout;
}

std::size_t program_scratch_bytes(const expr::Tape& tape, std::int64_t max_keys, int lanes) {
  return program_layout(tape, std::max<std::int64_t>(max_keys, 1), std::max(lanes, 1)).total_bytes;
}

}  // namespace fovea::cpu
