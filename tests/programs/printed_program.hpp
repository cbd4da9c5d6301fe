// The functions of one printed program, as the host compiler has them.
#pragma once

#include "common/captured_range.cuh"

namespace fovea::cuda {

struct PrintedProgram {
  float (*score)(float score, const Position& at, const Captures& captures);
  bool (*mask)(const Position& at, const Captures& captures);
  TileKind (*tile_kind)(const TileSpan& tile, const Captures& captures);
  /// Null where the mask is not one range of keys for each row.
  program::Int (*kv_first)(const Position& at, const Captures& captures) = nullptr;
  program::Int (*kv_last)(const Position& at, const Captures& captures) = nullptr;
  /// Null where the program adds no line along the keys.
  float (*score_slope)(const Position& at, const Captures& captures) = nullptr;
  /// Null where the line is straight.
  program::Int (*score_bend)(const Position& at, const Captures& captures) = nullptr;
  float (*score_slope_behind)(const Position& at, const Captures& captures) = nullptr;
  /// The programs again, from what is loaded once for each key and row; null where nothing is.
  float (*score_by_parts)(float score, const Position& at, const Captures& captures) = nullptr;
  bool (*mask_by_parts)(const Position& at, const Captures& captures) = nullptr;
};

/// A part of a key may not know the row, nor the other way round.
inline Position without_row(Position at) {
  at.q_idx = -99;
  return at;
}
inline Position without_key(Position at) {
  at.kv_idx = -99;
  return at;
}

template <class Mods>
constexpr PrintedProgram printed_program() {
  PrintedProgram result{&Mods::score, &Mods::mask, &Mods::tile_kind};
  if constexpr (Mods::has_kv_limits) {
    result.kv_first = &Mods::kv_first;
    result.kv_last = &Mods::kv_last;
  }
  if constexpr (Mods::has_score_slope || Mods::has_score_bend)
    result.score_slope = &Mods::score_slope;
  if constexpr (Mods::has_score_bend) {
    result.score_bend = &Mods::score_bend;
    result.score_slope_behind = &Mods::score_slope_behind;
  }
  if constexpr (Mods::has_score_parts) {
    result.score_by_parts = [](float score, const Position& at, const Captures& captures) {
      return Mods::score_by_parts(score, at, Mods::score_key(without_row(at), captures),
                                  Mods::score_row(without_key(at), captures), captures);
    };
  }
  if constexpr (Mods::has_mask_parts) {
    result.mask_by_parts = [](const Position& at, const Captures& captures) {
      return Mods::mask_by_parts(at, Mods::mask_key(without_row(at), captures),
                                 Mods::mask_row(without_key(at), captures), captures);
    };
  }
  return result;
}

}  // namespace fovea::cuda
