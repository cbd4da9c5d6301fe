// The scores of a thread's row in a kv tile: programs, and what the row does not see. Called by softmax.cuh.
//
// All threads of a warp are at the same key at the same time: what a key alone decides of a program is computed by one
// lane for all (common/program_parts.cuh has the same for fragments).
#pragma once

#include "common/float_constants.cuh"
#include "common/position.cuh"
#include "common/program_parts.cuh"
#include "common/row_view.cuh"
#include "ptx/math.cuh"
#include "ptx/ordered.cuh"
#include "sm100/forward/cta.cuh"
#include "sm90/forward/score_unit.cuh"
#include "sm90/forward/softcap.cuh"

namespace fovea::cuda::sm100 {

/// Parts of a tile of keys, which the lanes hold, and of a thread's row.
template <class Program, int num_keys>
struct PartsOfRow {
  using Key = typename Program::Key;
  using Row = typename Program::Row;
  static_assert(num_keys % 32 == 0, "a lane holds as many of them as any other");
  Key keys[num_keys / 32];
  Row row;

  /// `at`: the thread's row, and the tile's first key.
  FOVEA_DEVICE_MEMBER void load(Position at, const Captures& captures) {
    if constexpr (!__is_empty(Row)) row = Program::row(at, captures);
    if constexpr (!__is_empty(Key)) {
      at.kv_idx += ptx::lane_idx();
#pragma unroll
      for (int i = 0; i < num_keys / 32; ++i, at.kv_idx += 32) keys[i] = Program::key(at, captures);
    }
  }

  /// Of the i-th key. All lanes of the warp must ask.
  FOVEA_DEVICE_MEMBER Key key(int i) const { return shuffled(keys[i / 32], i % 32); }
};

template <auto spec, class Mods>
struct Scores {
  static constexpr int kKeys = spec.tile_kv;
  static constexpr int kAtOnce = 16;  // keys that a program is evaluated for
  using Score = ScoreInParts<Mods>;
  using Mask = MaskInParts<Mods>;

  const RowThread<spec> thread;
  float s[kKeys];
  KvTile kv_tile = KvTile::none();

  // What programs need for it, from look_ahead.
  PartsOfRow<Score, kKeys> score_parts;
  PartsOfRow<Mask, kKeys> mask_parts;
  float line_base, line_slope;  // what scores get added from key to key, log2
  sm90::Softcap cap;

  FOVEA_DEVICE_MEMBER explicit Scores(const RowThread<spec>& of_thread) : thread(of_thread) {
    if constexpr (Mods::has_softcap)
      cap = sm90::Softcap::of(Mods::softcap(common().captures), common().softmax_scale);
  }

  /// Before the scores of this kv tile are there: loads that the product hides.
  FOVEA_DEVICE_MEMBER void look_ahead(const RowTile& tile, KvTile to_come) {
    kv_tile = to_come;
    const Position at = first_position(tile);
    if constexpr (Mods::has_score_parts) score_parts.load(at, common().captures);
    if constexpr (Mods::has_mask_parts) {
      if (!kv_tile.is_full()) mask_parts.load(at, common().captures);
    }
    if constexpr (Mods::has_score_slope) {
      line_base = kLog2E * Mods::score(0.0F, at, common().captures);
      line_slope = kLog2E * Mods::score_slope(at, common().captures);
    }
  }

  /// What the score program makes of them; where that are logarithms, less `base`.
  FOVEA_DEVICE_MEMBER void modify(const RowTile& tile, float base) {
    if constexpr (Mods::has_score_slope) {
      const float first = line_base - base;
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        s[i] = ptx::fma_rn(s[i], common().softmax_scale_log2,
                           ptx::fma_rn(line_slope, static_cast<float>(i), first));
      }
    } else if constexpr (Mods::has_softcap) {
      const float bases[2] = {base, base};
      using Part = float[kAtOnce];
#pragma unroll
      for (int i = 0; i < kKeys; i += kAtOnce) cap.apply(reinterpret_cast<Part&>(s[i]), bases);
    } else if constexpr (spec.is_prescaled) {
      const Position first = first_position(tile);
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        s[i] *= common().softmax_scale;
        if constexpr (Mods::has_score) {
          s[i] = Score::value(s[i], in_turn(first, i), score_parts.key(i), score_parts.row,
                              common().captures);
        }
      }
    }
  }

  /// What the row does not see becomes -inf, whatever it was.
  FOVEA_DEVICE_MEMBER void mask(const RowTile& tile) {
    const std::int32_t num_keys =
        thread.cta.place_of(tile).seqlen_kv - kv_tile.idx() * spec.tile_kv;
    const Position first = first_position(tile);
    if constexpr (Mods::has_kv_limits || !Mods::has_mask) {
      mask_by_limits(first, num_keys);
    } else {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const bool is_visible =
            Mask::value(in_turn(first, i), mask_parts.key(i), mask_parts.row, common().captures);
        if (i >= num_keys || !is_visible) s[i] = -infinity();
      }
    }
  }

  /// Where indicators are summed, keys that a row sees are as good as equal: scores of any size come within 2 of 0,
  /// -inf stays.
  FOVEA_DEVICE_MEMBER void shrink() {
#pragma unroll
    for (float& x : s) x = ptx::mul_rn(x, 0x1p-126F);
  }

 private:
  FOVEA_DEVICE_MEMBER const ForwardParams& common() const { return thread.cta.p.common; }

  /// Of the i-th key, given the first one's; known behind the score kAtOnce keys before alone: else ptxas computes what
  /// programs want of all keys at once, and has too few registers beside the scores. (Given one key of each kAtOnce to
  /// wait for, it computes that one's score first.)
  FOVEA_DEVICE_MEMBER Position in_turn(Position at, int i) const {
    if (i >= kAtOnce) {
      at.kv_idx = static_cast<std::int32_t>(ptx::ordered_and_or(
          ptx::bit_cast<std::uint32_t>(s[i - kAtOnce]),
          ptx::bit_cast<std::uint32_t>(thread.cta.p.zero), static_cast<std::uint32_t>(at.kv_idx)));
    }
    at.kv_idx += i;
    return at;
  }

  /// Of the row's score with the tile's first key.
  FOVEA_DEVICE_MEMBER Position first_position(const RowTile& tile) const {
    const Work work = thread.cta.work_of(thread.cta.posted(tile));
    Position at = RowView<spec>(common(), work, thread.row()).position();
    at.kv_idx = kv_tile.idx() * spec.tile_kv;
    return at;
  }

  /// Two comparisons with constants for each score.
  FOVEA_DEVICE_MEMBER void mask_by_limits(const Position& at, std::int32_t num_keys) {
    std::int32_t first = 0;
    std::int32_t last = num_keys - 1;
    if constexpr (Mods::has_kv_limits) {
      // Relative to the tile's first key, in the range of ints: positions are below 2^28.
      const std::int32_t of_mask = Mods::kv_last(at, common().captures).value;
      last = least((of_mask < -1 ? -1 : of_mask) - at.kv_idx, last);
      const std::int32_t from = Mods::kv_first(at, common().captures).value;
      first = from > at.kv_idx ? from - at.kv_idx : 0;
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (i > last || i < first) s[i] = -infinity();
    }
  }
};

}  // namespace fovea::cuda::sm100
