// What a program loads by its key alone or its row alone (expr/split_loads.hpp), computed once for a tile and held by a
// warp: lane l has keys l, l + 32, ... of the tile, and hands them to the others by shuffles. Evaluated score by score,
// a mask of documents loads 64 times in each thread, one load behind the other for want of registers: 22,000 clocks a
// tile, where its products take 2,048.
//
// For fragments as wgmma has them: a thread owns two rows, 8 apart, and of each 8 keys the two from 2 * (lane % 4) on.
// Where gradients of keys are summed it is the other way round.
#pragma once

#include "common/position.cuh"
#include "common/tile_walk.cuh"
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

/// Parts of a tile of `num_walked` keys, which the lanes hold, and of a thread's two rows. Along queries, where scores
/// are transposed: of a tile of rows, and of two keys.
template <class Program, int num_walked, WalkAxis axis = WalkAxis::keys>
struct TileParts {
  using Key = typename Program::Key;
  using Row = typename Program::Row;
  static_assert(num_walked % 32 == 0, "a lane holds as many of them as any other");
  static constexpr bool kWalksKeys = axis == WalkAxis::keys;
  static constexpr int kHeld = num_walked / 32;
  Key keys[kWalksKeys ? kHeld : 2];
  Row rows[kWalksKeys ? 2 : kHeld];

  /// `at`: the first of the tile, and the thread's first of the other side.
  FOVEA_DEVICE_MEMBER void load(Position at, const Captures& captures) {
    const std::int32_t first_key = at.kv_idx + (kWalksKeys ? ptx::lane_idx() : 0);
    const std::int32_t first_row = at.q_idx + (kWalksKeys ? 0 : ptx::lane_idx());
    if constexpr (!__is_empty(Key)) {
#pragma unroll
      for (std::int32_t i = 0; i < (kWalksKeys ? kHeld : 2); ++i) {
        at.kv_idx = first_key + (kWalksKeys ? 32 : 8) * i;
        keys[i] = Program::key(at, captures);
      }
    }
    if constexpr (!__is_empty(Row)) {
#pragma unroll
      for (std::int32_t i = 0; i < (kWalksKeys ? 2 : kHeld); ++i) {
        at.q_idx = first_row + (kWalksKeys ? 8 : 32) * i;
        rows[i] = Program::row(at, captures);
      }
    }
  }

  /// Of the key, or along queries the row, that is `offset` further on than the thread's first of the 32 of number
  /// `chunk`: a multiple of 8, or one more. All lanes of the warp must ask.
  FOVEA_DEVICE_MEMBER auto walked(std::int32_t chunk, std::int32_t offset) const {
    const std::int32_t lane = offset + 2 * (ptx::lane_idx() % 4);
    if constexpr (kWalksKeys) {
      return shuffled(keys[chunk], lane);
    } else {
      return shuffled(rows[chunk], lane);
    }
  }
};

/// Which pairs of a tile and of a thread's two rows (along queries, two keys) the mask shows, for masks in parts.
template <class Mods, int num_walked, WalkAxis axis>
struct SeenPairs {
  using Mask = MaskInParts<Mods>;
  Position first;  // of the thread
  TileParts<Mask, num_walked, axis> parts;

  /// `walked_begin`: the tile's first key, or row.
  FOVEA_DEVICE SeenPairs of(const Position& first, std::int32_t walked_begin,
                            const Captures& captures) {
    SeenPairs pairs{first, {}};
    Position at = first;
    (axis == WalkAxis::keys ? at.kv_idx : at.q_idx) = walked_begin;
    pairs.parts.load(at, captures);
    return pairs;
  }

  /// Of the 32 walked ones of number `chunk`, a bit for each score in the order of fragments: bit 4 j + 2 half + e. A
  /// loop, after each round of which the mask's registers are free again: unrolled, it spills.
  FOVEA_DEVICE_MEMBER std::uint32_t bits(int chunk, const Captures& captures) const {
    std::uint32_t seen = 0;
#pragma unroll 1
    for (int begin = 0; begin < 32; begin += 8) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const auto walked = parts.walked(chunk, begin + e);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool is_seen = sees(32 * chunk + begin + e, half, walked, captures);
          seen |= (is_seen ? 1U : 0U) << static_cast<std::uint32_t>(begin / 2 + 2 * half + e);
        }
      }
    }
    return seen;
  }

 private:
  template <class Part>
  FOVEA_DEVICE_MEMBER bool sees(std::int32_t offset, int half, const Part& walked,
                                const Captures& captures) const {
    Position at = first;
    if constexpr (axis == WalkAxis::keys) {
      at.kv_idx += offset;
      at.q_idx += 8 * half;
      return exists(at) && Mask::value(at, walked, parts.rows[half], captures);
    } else {
      at.q_idx += offset;
      at.kv_idx += 8 * half;
      return exists(at) && Mask::value(at, parts.keys[half], walked, captures);
    }
  }
  FOVEA_DEVICE bool exists(const Position& at) {
    return at.q_idx < at.seqlen_q && at.kv_idx < at.seqlen_kv;
  }
};

}  // namespace fovea::cuda
