// What a program loads by its key alone or its row alone (expr/split_loads.hpp), computed once for a tile and held by a
// warp: lane l has keys l, l + 32, ... of the tile, and hands them to the others by shuffles. Evaluated score by score,
// a mask of documents loads 64 times in each thread, one load behind the other for want of registers: 22,000 clocks a
// tile, where its products take 2,048.
//
// For fragments as wgmma has them: a thread owns two rows, 8 apart, and of each 8 keys the two from 2 * (lane % 4) on.
#pragma once

#include "common/position.cuh"
#include "ptx/base.cuh"
#include "ptx/warp.cuh"
#include "shared/captures.h"

namespace fovea::cuda {

struct NoPart {};

/// The score program, whether it comes in parts or not.
template <class Mods, bool has_parts = Mods::has_score_parts>
struct ScoreInParts {
  using Key = NoPart;
  using Row = NoPart;
  FOVEA_DEVICE float value(float score, const Position& at, Key, Row, const Captures& captures) {
    return Mods::score(score, at, captures);
  }
};
template <class Mods>
struct ScoreInParts<Mods, true> {
  using Key = typename Mods::ScoreKey;
  using Row = typename Mods::ScoreRow;
  FOVEA_DEVICE Key key(const Position& at, const Captures& captures) {
    return Mods::score_key(at, captures);
  }
  FOVEA_DEVICE Row row(const Position& at, const Captures& captures) {
    return Mods::score_row(at, captures);
  }
  FOVEA_DEVICE float value(float score, const Position& at, const Key& key, const Row& row,
                           const Captures& captures) {
    return Mods::score_by_parts(score, at, key, row, captures);
  }
};

/// The mask program likewise.
template <class Mods, bool has_parts = Mods::has_mask_parts>
struct MaskInParts {
  using Key = NoPart;
  using Row = NoPart;
  FOVEA_DEVICE bool value(const Position& at, Key, Row, const Captures& captures) {
    return Mods::mask(at, captures);
  }
};
template <class Mods>
struct MaskInParts<Mods, true> {
  using Key = typename Mods::MaskKey;
  using Row = typename Mods::MaskRow;
  FOVEA_DEVICE Key key(const Position& at, const Captures& captures) {
    return Mods::mask_key(at, captures);
  }
  FOVEA_DEVICE Row row(const Position& at, const Captures& captures) {
    return Mods::mask_row(at, captures);
  }
  FOVEA_DEVICE bool value(const Position& at, const Key& key, const Row& row,
                          const Captures& captures) {
    return Mods::mask_by_parts(at, key, row, captures);
  }
};

/// The words of `value` that another lane has.
template <class T>
FOVEA_DEVICE T shuffled(const T& value, std::int32_t lane) {
  if constexpr (__is_empty(T)) {
    return value;
  } else {
    struct Words {
      std::uint32_t word[sizeof(T) / 4];
    };
    auto words = ptx::bit_cast<Words>(value);
    for (std::uint32_t& word : words.word) word = ptx::shfl_idx(word, lane);
    return ptx::bit_cast<T>(words);
  }
}

/// Parts of a tile of `num_keys` keys and a thread's two rows.
template <class Program, int num_keys>
struct TileParts {
  using Key = typename Program::Key;
  using Row = typename Program::Row;
  static_assert(num_keys % 32 == 0, "a lane holds as many keys as any other");
  Key keys[num_keys / 32];
  Row rows[2];

  /// `at`: the thread's first row and the tile's first key.
  FOVEA_DEVICE_MEMBER void load(Position at, const Captures& captures) {
    const std::int32_t first_row = at.q_idx;
    const std::int32_t first_key = at.kv_idx + ptx::lane_idx();
    if constexpr (!__is_empty(Key)) {
#pragma unroll
      for (std::int32_t i = 0; i < num_keys / 32; ++i) {
        at.kv_idx = first_key + 32 * i;
        keys[i] = Program::key(at, captures);
      }
    }
    if constexpr (!__is_empty(Row)) {
#pragma unroll
      for (std::int32_t r = 0; r < 2; ++r) {
        at.q_idx = first_row + 8 * r;
        rows[r] = Program::row(at, captures);
      }
    }
  }

  /// Of the key that is `column` further on than the thread's first: a multiple of 8, or one more. All lanes of the
  /// warp must ask.
  FOVEA_DEVICE_MEMBER Key key(std::int32_t column) const {
    return shuffled(keys[column / 32], column % 32 + 2 * (ptx::lane_idx() % 4));
  }
};

}  // namespace fovea::cuda
