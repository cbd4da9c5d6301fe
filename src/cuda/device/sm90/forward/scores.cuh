// The scores of a kv tile: their product, programs, and what a row does not see. What follows them, softmax or its
// gradient, is not known here. Called by compute.cuh.
#pragma once

#include "common/float_constants.cuh"
#include "common/position.cuh"
#include "common/program_parts.cuh"
#include "common/row_view.cuh"
#include "ptx/math.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/forward/code_scores.cuh"
#include "sm90/forward/cta.cuh"
#include "sm90/forward/score_unit.cuh"
#include "sm90/forward/softcap.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::sm90 {

/// A thread's scores of the kv tile that was multiplied last, two rows of them. Where heads share a tile no program
/// reads q_head.
template <Sm90ForwardSpec spec, class Mods>
struct Scores {
  using T = Traits<spec>;
  static constexpr int kScores = spec.tile_kv / 2;
  using Unit = ScoreUnit<spec, Mods>;
  static constexpr bool kKeepsCodes = Unit::kKeepsCodes;
  static constexpr std::int32_t kLastOffset =
      spec.tile_kv - 7;  // of a thread's keys from its first
  static constexpr bool kLooksAtLinesLate = Unit::kIsArgument;
  using Score = ScoreInParts<Mods>;
  using Mask = MaskInParts<Mods>;

  static_assert(spec.heads_per_tile == 1 || !(Mods::has_score_parts || Mods::has_mask_parts),
                "parts are loaded for two rows of a head, 8 apart");

  const ComputingWarp<spec> warp;
  float s[kScores];
  CodeScores<spec> codes;  // where s is a product of codes
  KvTile kv_tile = KvTile::none();

  // What programs need for it, from look_ahead.
  TileParts<Score, spec.tile_kv> score_parts;
  TileParts<Mask, spec.tile_kv> mask_parts;
  float line_base[2], line_slope[2];  // what a row's scores get added from key to key, log2
  bool is_bent;                       // in this tile, for a row of this thread
  Softcap cap;
  ApproximateSoftcap approximate_cap;

  FOVEA_DEVICE_MEMBER explicit Scores(const ComputingWarp<spec>& of_warp)
      : warp(of_warp), codes(of_warp) {
    if constexpr (Mods::has_softcap) {
      const ForwardParams& common = warp.cta.p.common;
      const float of_score = Mods::softcap(common.captures);
      if constexpr (Unit::kApproximatesCap)
        approximate_cap = ApproximateSoftcap::of(of_score, common.softmax_scale, Unit::kOctave);
      else
        cap = Softcap::of(of_score, common.softmax_scale);
    }
  }

  /// Before the first scores of a row tile: loads that the product hides.
  FOVEA_DEVICE_MEMBER void look_at_rows(const RowTile& tile, KvTile first, int q_stage) {
    if constexpr (spec.multiplies_codes) codes.look_at_rows(tile, first, q_stage);
  }

  /// As soon as the kv tile behind that of look_ahead is known.
  FOVEA_DEVICE_MEMBER void look_further(const RowTile& tile, KvTile next) {
    if constexpr (spec.multiplies_codes) codes.look_further(tile, next);
  }

  /// Before the scores of this kv tile are there: likewise. is_known_full: where the compiler may know it, so that
  /// steps without a mask have no code for what one reads (80 instructions of 420 with documents).
  template <bool is_known_full>
  FOVEA_DEVICE_MEMBER void look_ahead(const RowTile& tile, KvTile to_come) {
    kv_tile = to_come;
    const Captures& captures = warp.cta.p.common.captures;
    const Work work = warp.work_of(tile);
    if constexpr (spec.multiplies_codes) codes.look_at_keys();
    Position at = row(work, 0).position();
    at.kv_idx = kv_tile.idx() * spec.tile_kv;
    if constexpr (Mods::has_score_parts && !Unit::kHasLine) score_parts.load(at, captures);
    if constexpr (Mods::has_mask_parts && !is_known_full && !spec.has_coarse_mask) {
      if (!kv_tile.is_full()) mask_parts.load(at, captures);
    }
    if constexpr (Unit::kHasLine && !kLooksAtLinesLate) look_at_lines(tile);
  }

  /// Before a product is issued, or its turn is awaited: of a row tile's first, and of all others.
  FOVEA_DEVICE_MEMBER void begin_sums() {
    if constexpr (kKeepsCodes) codes.begin_sums();
  }
  FOVEA_DEVICE_MEMBER void begin_sums_behind() {
    if constexpr (kKeepsCodes) codes.begin_sums_behind(s);
  }

  /// S = Q Kᵀ, given where the group's queries and the tile's keys lie: a group of products that is under way then.
  FOVEA_DEVICE_MEMBER void issue(ptx::MatrixDescriptor queries, ptx::MatrixDescriptor keys) {
    using QTile = typename T::QTile;
    using KTile = typename T::KTile;
    if constexpr (spec.multiplies_codes) {
      codes.issue(queries, keys);
    } else {
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < T::kQkSteps; ++i) {
        ptx::wgmma_ss<T::kType, T::kType, spec.tile_kv>(
            s, advanced(queries, k_major_offset<QTile>(i)),
            advanced(keys, k_major_offset<KTile>(i)), i > 0);
      }
      ptx::wgmma_commit_group();
    }
  }

  /// What the score program makes of them; where that are logarithms, less the base of each of the two rows.
  FOVEA_DEVICE_MEMBER void modify(const RowTile& tile, const float (&base)[2]) {
    const ForwardParams& common = warp.cta.p.common;
    if constexpr (spec.multiplies_codes) codes.take(s);
    if constexpr (Unit::kHasLine) {
      if constexpr (kLooksAtLinesLate) look_at_lines(tile);
      add_lines(tile, base);
    } else if constexpr (Unit::kApproximatesCap) {
      const float none[2] = {none_of(base[0]), none_of(base[1])};
      const float factor[2] = {codes.factor(0), codes.factor(1)};
      approximate_cap.apply(s, factor, codes.of_mean, none);
    } else if constexpr (Mods::has_softcap) {
      if constexpr (spec.multiplies_codes) codes.multiply_out(s, 1.0F);
      cap.apply(s, base);
    } else if constexpr (spec.is_prescaled) {
      if constexpr (spec.multiplies_codes) codes.multiply_out(s, common.softmax_scale);
      for_each_score(tile, score_parts,
                     [&](float& x, int, const Position& at, const auto& key, const auto& row) {
                       if constexpr (!spec.multiplies_codes) x *= common.softmax_scale;
                       if constexpr (Mods::has_score)
                         x = Score::value(x, at, key, row, common.captures);
                     });
    }
  }

  /// Where codes are multiplied, rows and keys that are not rounded still lack their scores. Of this thread's.
  FOVEA_DEVICE_MEMBER bool lacks_given_products() const {
    if constexpr (spec.multiplies_codes) return codes.has_unrounded();
    return false;
  }

  /// These get them, of products of what was given, which are not finite. Whether there were such. `base`: as modify
  /// had it.
  FOVEA_DEVICE_MEMBER bool give_products(const RowTile& tile, const float (&base)[2]) {
    if constexpr (spec.multiplies_codes) {
      const bool is_given = ptx::vote_any(codes.has_unrounded());
      if (is_given) {
        codes.restore_unrounded(tile, kv_tile.idx(), s, [&](float product, int r, int offset) {
          return score_of_given(tile, product, r, offset, base);
        });
      }
      return is_given;
    }
    return false;
  }

  /// Where indicators are summed, keys that a row sees are as good as equal: scores of any size come within 2 of 0,
  /// -inf stays.
  FOVEA_DEVICE_MEMBER void shrink() {
#pragma unroll
    for (float& x : s) {
      if constexpr (kKeepsCodes)
        x = ptx::fma_rn(x, 0x1p-126F, kIntegerOrigin);
      else if constexpr (Unit::kIsArgument)
        x = ptx::fma_rn(x, 0x1p-126F, Unit::kNone);
      else
        x = ptx::mul_rn(x, 0x1p-126F);
    }
  }

  /// What a row does not see becomes -inf, whatever it was.
  FOVEA_DEVICE_MEMBER void mask(const RowTile& tile) {
    if constexpr (Mods::has_kv_limits || !Mods::has_mask) {
      mask_by_limits(tile);
    } else if constexpr (spec.has_coarse_mask) {
      mask_by_pieces(tile);
      mask_by_limits(tile);  // keys behind the last
    } else {
      const ForwardParams& common = warp.cta.p.common;
      const std::int32_t num_keys = warp.cta.place_of(tile).seqlen_kv - first_column();
      for_each_score(
          tile, mask_parts,
          [&](float& x, int offset, const Position& at, const auto& key, const auto& row) {
            const bool is_visible = offset < num_keys && Mask::value(at, key, row, common.captures);
            if (!is_visible) x = -infinity();
          });
    }
  }

 private:
  /// What a logarithm of 0 comes as, less this base.
  FOVEA_DEVICE float none_of(float base) { return Unit::kNone - Unit::kOctave * base; }

  /// Of row r, less its base: what the line is at this thread's first column.
  FOVEA_DEVICE_MEMBER float line_at_first(int r, float base) const {
    const float first = line_base[r] - base;
    if constexpr (Unit::kIsArgument) return ptx::fma_rn(Unit::kOctave, first, Unit::kNone);
    return first;
  }

  FOVEA_DEVICE_MEMBER void look_at_lines(const RowTile& tile) {
    const Work work = warp.work_of(tile);
    Position at = row(work, 0).position();
    at.kv_idx = first_column();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      at.q_idx = row(work, r).q_idx;
      look_at_line(r, at, warp.cta.p.common.captures);
    }
  }

  /// `at`: of row r, the thread's first column.
  FOVEA_DEVICE_MEMBER void look_at_line(int r, const Position& at, const Captures& captures) {
    line_base[r] = kLog2E * Mods::score(0.0F, at, captures);
    line_slope[r] = kLog2E * Mods::score_slope(at, captures);
    if constexpr (Mods::has_score_bend) {
      const std::int32_t bend = Mods::score_bend(at, captures).value - at.kv_idx;
      if (bend <= 0) line_slope[r] = kLog2E * Mods::score_slope_behind(at, captures);
      is_bent = (r > 0 && is_bent) || (bend > 0 && bend < kLastOffset);
    }
  }

  FOVEA_DEVICE_MEMBER void add_lines(const RowTile& tile, const float (&base)[2]) {
    const float of_product = Unit::kOctave * warp.cta.p.common.softmax_scale_log2;
    float unit[2] = {of_product, of_product};
    float first[2], slope[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      first[r] = line_at_first(r, base[r]);
      slope[r] = Unit::kOctave * line_slope[r];
      if constexpr (spec.multiplies_codes) {
        unit[r] = of_product * codes.factor(r);
        if constexpr (!Unit::kIsArgument)
          first[r] = ptx::fma_rn(of_product, codes.of_mean[r], first[r]);
      }
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int r = i / 2 % 2;
      const auto offset = static_cast<float>(8 * (i / 4) + i % 2);
      s[i] = ptx::fma_rn(s[i], unit[r], ptx::fma_rn(slope[r], offset, first[r]));
    }
    // A tile or two of a row of tiles.
    if constexpr (Mods::has_score_bend) {
      if (ptx::vote_any(is_bent)) bend_lines(tile);
    }
  }

  /// Behind its bend each row gets what the other slope adds.
  FOVEA_DEVICE_MEMBER void bend_lines(const RowTile& tile) {
    const Captures& captures = warp.cta.p.common.captures;
    const Work work = warp.work_of(tile);
    Position at = row(work, 0).position();
    at.kv_idx = first_column();
    float bend[2], growth[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      at.q_idx = row(work, r).q_idx;
      const std::int32_t offset = Mods::score_bend(at, captures).value - at.kv_idx;
      bend[r] = static_cast<float>(offset);
      growth[r] = Unit::kOctave * kLog2E *
                  (Mods::score_slope_behind(at, captures) - Mods::score_slope(at, captures));
      if (offset <= 0 || offset >= kLastOffset) growth[r] = 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int r = i / 2 % 2;
      const auto offset = static_cast<float>(8 * (i / 4) + i % 2);
      s[i] = ptx::fma_rn(growth[r], ptx::max_ftz(offset - bend[r], 0.0F), s[i]);
    }
  }

  /// What modify makes of a product of given numbers, of row r and the key that is so much further on than the first.
  FOVEA_DEVICE_MEMBER float score_of_given(const RowTile& tile, float product, int r, int offset,
                                           const float (&base)[2]) const {
    const ForwardParams& common = warp.cta.p.common;
    // A selection, or indices would put both into memory.
    const float of_row = r == 0 ? base[0] : base[1];
    if constexpr (Unit::kApproximatesCap)
      return approximate_cap.of_product(product, none_of(of_row));
    if constexpr (Mods::has_softcap) return cap.of_score(product, of_row);
    if constexpr (Mods::has_score && !Unit::kHasLine) {
      Position at = row(warp.work_of(tile), r).position();
      at.kv_idx = first_column() + offset;
      return Mods::score(product * common.softmax_scale, at, common.captures);
    }
    // A line adds nothing to what is not finite.
    return spec.is_prescaled ? product * common.softmax_scale : product;
  }

  /// This thread's row r of two.
  FOVEA_DEVICE_MEMBER RowView<spec> row(const Work& work, int r) const {
    return {warp.cta.p.common, work, warp.row(r)};
  }

  /// Of this thread in this kv tile.
  FOVEA_DEVICE_MEMBER std::int32_t first_column() const {
    return kv_tile.idx() * spec.tile_kv + 2 * (warp.cta.lane % 4);
  }

  /// visit(score, its key's distance from first_column, position, part of its key, part of its row) for every score of
  /// this thread.
  template <class Parts, class Visit>
  FOVEA_DEVICE_MEMBER void for_each_score(const RowTile& tile, const Parts& parts, Visit&& visit) {
    const Work work = warp.work_of(tile);
    Position at = row(work, 0).position();
    const std::int32_t q_idx[2] = {row(work, 0).q_idx, row(work, 1).q_idx};
    const std::int32_t column = first_column();
#pragma unroll
    for (int n = 0; n < kScores / 2; ++n) {
      const int offset = 8 * (n / 2) + n % 2;
      const auto key = parts.walked(offset / 32, offset % 32);
      at.kv_idx = column + offset;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        at.q_idx = q_idx[r];
        visit(s[4 * (n / 2) + 2 * r + n % 2], offset, at, key, parts.rows[r]);
      }
    }
  }

  /// The mask has one value for a warp's rows and kCoarseKeys keys, and is evaluated once for those.
  FOVEA_DEVICE_MEMBER void mask_by_pieces(const RowTile& tile) {
    static_assert(spec.heads_per_tile == 1, "rows of a warp are neighbours");
    const Work work = warp.work_of(tile);
    Position at = row(work, 0).position();
#pragma unroll
    for (int piece = 0; piece < spec.tile_kv / kCoarseKeys; ++piece) {
      at.kv_idx = kv_tile.idx() * spec.tile_kv + kCoarseKeys * piece;
      const bool is_visible = Mods::mask(at, warp.cta.p.common.captures);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * piece + i] = is_visible ? s[4 * piece + i] : -infinity();
    }
  }

  /// Two comparisons with constants for each score.
  FOVEA_DEVICE_MEMBER void mask_by_limits(const RowTile& tile) {
    const Work work = warp.work_of(tile);
    const std::int32_t column = first_column();
    std::int32_t first[2] = {0, 0};
    std::int32_t last[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      last[r] = work.sequence.seqlen_kv - 1;
      if constexpr (Mods::has_kv_limits) {
        const Position at = row(work, r).position();
        const std::int32_t of_mask = Mods::kv_last(at, warp.cta.p.common.captures).value;
        last[r] = of_mask < last[r] ? of_mask : last[r];
        first[r] = Mods::kv_first(at, warp.cta.p.common.captures).value;
      }
      // Relative to this thread's first column, in the range of ints: positions are below 2^28.
      last[r] = (last[r] < -1 ? -1 : last[r]) - column;
      first[r] = first[r] > column ? first[r] - column : 0;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const std::int32_t offset = 8 * (i / 4) + i % 2;
      if (offset > last[i / 2 % 2] || offset < first[i / 2 % 2]) s[i] = -infinity();
    }
  }
};

}  // namespace fovea::cuda::sm90
