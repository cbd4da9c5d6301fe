// Scores, softmax and O of one tile, in a wave's registers. Chapter 4 of cdna/attention_forward.cuh; read store.cuh
// next.
#pragma once

#include "cdna/forward/load.cuh"
#include "cdna/forward/tiles.cuh"
#include "cdna/forward/wave.cuh"
#include "common/dropout.cuh"
#include "common/online_softmax.cuh"
#include "common/passes.cuh"
#include "common/position.cuh"
#include "common/score.cuh"
#include "common/tile_walk.cuh"
#include "ptx/lds_transpose.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace fovea::cuda::cdna {

/// Two probabilities, rounded to nearest. gfx942 has no instruction for bf16: ties go away from 0 there, which takes
/// three where ties to even take ten. A NaN may get lost so; its row's sum has it.
template <CdnaForwardSpec spec>
FOVEA_DEVICE std::uint32_t pack_probabilities(float lo, float hi) {
  if constexpr (spec.element == Element::f16) {
    return ptx::cvt_f16x2(lo, hi);
  } else if constexpr (spec.gfx == 0x950) {
    return ptx::cvt_bf16x2(lo, hi);
  } else {
    constexpr std::uint32_t kHalf = 0x8000U;
    return upper_halves(ptx::bit_cast<std::uint32_t>(lo) + kHalf,
                        ptx::bit_cast<std::uint32_t>(hi) + kHalf);
  }
}

/// What a lane brings of Vᵀ to the second product: eight values of one column.
template <CdnaForwardSpec spec, bool reads_transposed>
struct ValueOperands {
  using T = Traits<spec>;
  using Tile = typename T::Values;

  SharedAddress first;

  FOVEA_DEVICE_MEMBER ValueOperands(const Wave<spec>& wave, int stage)
      : first(wave.values(stage).chunk(wave.half(), wave.column())) {}

  FOVEA_DEVICE_MEMBER U32x4 of(int step, int block) const {
    return ptx::ld_shared<U32x4>(first + 2 * step * Tile::kUnitBytes +
                                 block * T::kBlock * kChunkBytes);
  }
};

/// As rows lie in memory: 16 lanes read four keys of 16 columns, and then the four that are eight further on.
template <CdnaForwardSpec spec>
struct ValueOperands<spec, true> {
  using T = Traits<spec>;
  using Tile = typename T::Values;
  static constexpr int kReadLanes = 16, kReadKeys = 4, kPartBytes = 8, kBlockBytes = 64;
  static_assert(Tile::permutation(key_in_unit(kReadKeys)) == Tile::permutation(0) &&
                    Tile::permutation(T::kStep) == Tile::permutation(0),
                "keys of a lane are permuted alike");

  SharedAddress first;

  FOVEA_DEVICE_MEMBER ValueOperands(const Wave<spec>& wave, int stage)
      : first(wave.values(stage).at(
            first_key_of_unit(wave.half()) + wave.lane % kReadLanes / kReadKeys,
            wave.column() / kReadLanes * (kBlockBytes / 2) + wave.lane % kReadKeys * kPartBytes)) {}

  FOVEA_DEVICE_MEMBER U32x4 of(int step, int block) const {
    const SharedAddress at = (first ^ static_cast<SharedAddress>(block * kBlockBytes)) +
                             step * T::kStep * Tile::kRowBytes;
    const ptx::U32x2 lo = ptx::ds_read_b64_tr_b16<spec.element>(at);
    const ptx::U32x2 hi =
        ptx::ds_read_b64_tr_b16<spec.element>(at + key_in_unit(kReadKeys) * Tile::kRowBytes);
    return {lo.x, lo.y, hi.x, hi.y};
  }
};

/// Of the two lanes that share a row.
FOVEA_DEVICE float sum_of_row(float mine) { return mine + ptx::shfl_bfly(mine, 32); }
FOVEA_DEVICE float greatest_of_row(float mine) {
  return ptx::max_ftz(mine, ptx::shfl_bfly(mine, 32));
}

/// What a lane has of its row.
template <CdnaForwardSpec spec, class Mods>
struct Sums {
  using T = Traits<spec>;
  using Scores = Block[T::kKeyBlocks];

  Queries<spec> queries;
  Block out[T::kColBlocks];
  RowState row;
  float row_max;

  FOVEA_DEVICE_MEMBER void start() {
    row = empty_row();
    row_max = -infinity();
#pragma unroll
    for (int j = 0; j < T::kColBlocks; ++j)
#pragma unroll
      for (int g = 0; g < ptx::kMfmaSums; ++g) out[j][g] = 0;
  }

  // ---- scores ----------------------------------------------------------------------------------

  /// Sᵀ = K Qᵀ.
  FOVEA_DEVICE_MEMBER void multiply_keys(const Wave<spec>& wave, int stage, Scores& s) const {
    using Tile = typename T::Keys;
    const SharedAddress first = wave.keys(stage).at(wave.column(), wave.half() * kChunkBytes);
#pragma unroll
    for (int j = 0; j < T::kKeyBlocks; ++j)
#pragma unroll
      for (int g = 0; g < ptx::kMfmaSums; ++g) s[j][g] = 0;
#pragma unroll
    for (int step = 0; step < T::kQkSteps; ++step) {
      // Chunk 2 step + half of the lane's row; rows of the blocks behind are permuted alike.
      static_assert(Tile::permutation(T::kBlock) == Tile::permutation(0), "blocks are alike");
      const SharedAddress at = first ^ static_cast<SharedAddress>(2 * step * kChunkBytes);
#pragma unroll
      for (int j = 0; j < T::kKeyBlocks; ++j) {
        const auto keys = ptx::ld_shared<U32x4>(at + j * T::kBlock * Tile::kRowBytes);
        multiply<spec>(s[j], keys, queries[step]);
      }
    }
  }

  /// visit(score, position) for every score of this lane.
  template <class Visit>
  FOVEA_DEVICE_MEMBER static void for_each_score(const Wave<spec>& wave, VisitedTile tile,
                                                 Scores& s, Visit&& visit) {
    Position at = wave.row().position();
    const std::int32_t begin = tile.idx * spec.tile_kv;
#pragma unroll
    for (int j = 0; j < T::kKeyBlocks; ++j) {
#pragma unroll
      for (int g = 0; g < ptx::kMfmaSums; ++g) {
        at.kv_idx = begin + j * T::kBlock + place_of_sum(g, wave.half());
        visit(s[j][g], at);
      }
    }
  }

  /// Scale and score program, where scores are scaled one by one; then what the row does not see becomes -inf.
  FOVEA_DEVICE_MEMBER static void modify(const Wave<spec>& wave, Scores& s, VisitedTile tile) {
    if constexpr (spec.is_prescaled) {
      for_each_score(wave, tile, s, [&](float& score, const Position& at) {
        modify_score<Mods>(score, at, wave.p);
      });
    }
    if (tile.is_full) return;
    for_each_score(wave, tile, s, [&](float& score, const Position& at) {
      mask_score<Mods>(score, at, wave.work.kv_end, wave.p.captures);
    });
  }

  /// Equal scores where the row sees the key, NaN too: all P are equal then, relative to an origin of 0.
  FOVEA_DEVICE_MEMBER static void shrink(Scores& s) {
#pragma unroll
    for (int j = 0; j < T::kKeyBlocks; ++j)
#pragma unroll
      for (int g = 0; g < ptx::kMfmaSums; ++g)
        s[j][g] = s[j][g] == -infinity() ? -infinity() : 0.0F;
  }

  // ---- softmax ---------------------------------------------------------------------------------

  /// s becomes P; moves the row's origin, and with it what has been summed so far.
  FOVEA_DEVICE_MEMBER void softmax(const Wave<spec>& wave, Scores& s) {
    float greatest = s[0][0];
#pragma unroll
    for (int j = 0; j < T::kKeyBlocks; ++j)
#pragma unroll
      for (int g = 0; g < ptx::kMfmaSums; ++g) greatest = ptx::max_ftz(greatest, s[j][g]);
    greatest = greatest_of_row(greatest);
    if constexpr (spec.wants_row_max) row_max = ptx::max_ftz(row_max, greatest);
    const float c = spec.is_prescaled ? kLog2E : wave.p.softmax_scale_log2;
    const OriginStep step = move_origin<Mods::has_score>(row, greatest, c);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < T::kKeyBlocks; ++j) {
#pragma unroll
      for (int g = 0; g < ptx::kMfmaSums; ++g) {
        s[j][g] = probability(s[j][g], step);
        sum += s[j][g];
      }
    }
    row.sum += sum;
    if (!ptx::vote_any(step.rescale != 1.0F)) return;
    scale_out(step.rescale);
  }

  /// Four neighbouring keys of a lane are one evaluation of the generator. Decisions of a block first: a loop that is
  /// not unrolled draws them, and scores need no more than a bit each.
  FOVEA_DEVICE_MEMBER static void drop(const Wave<spec>& wave, Scores& s, VisitedTile tile) {
    const DropoutKeyOf<spec> key = dropout_key<spec>(wave.p);
    const RowView<spec> row = wave.row();
    const std::int32_t first = tile.idx * (spec.tile_kv / 4) + wave.half();
#pragma unroll
    for (int j = 0; j < T::kKeyBlocks; ++j) {
      std::uint32_t dropped = 0;
#pragma unroll 1
      for (int i = 0; i < ptx::kMfmaSums / 4; ++i) {
        const ptx::U32x4 words =
            random_words(key, wave.work.sequence.idx, row.q_head, row.q_idx, first + 8 * j + 2 * i);
        const std::uint32_t bits =
            (is_dropped(wave.p, words.x) ? 1U : 0U) | (is_dropped(wave.p, words.y) ? 2U : 0U) |
            (is_dropped(wave.p, words.z) ? 4U : 0U) | (is_dropped(wave.p, words.w) ? 8U : 0U);
        dropped |= bits << static_cast<std::uint32_t>(4 * i);
      }
#pragma unroll
      for (int g = 0; g < ptx::kMfmaSums; ++g)
        if ((dropped >> static_cast<std::uint32_t>(g) & 1U) != 0) s[j][g] = 0;
    }
  }

  // ---- the second product ----------------------------------------------------------------------

  /// Oᵀ += Vᵀ Pᵀ: eight sums of Sᵀ, rounded, are what the lane brings.
  FOVEA_DEVICE_MEMBER void multiply_values(const Wave<spec>& wave, int stage, const Scores& s) {
    const ValueOperands<spec, T::kCdna.reads_transposed> values(wave, stage);
#pragma unroll
    for (int step = 0; step < T::kKeyBlocks * T::kStepsOfBlock; ++step) {
      const float* const x = &s[step / T::kStepsOfBlock][step % T::kStepsOfBlock * 8];
      const U32x4 probabilities{
          pack_probabilities<spec>(x[0], x[1]), pack_probabilities<spec>(x[2], x[3]),
          pack_probabilities<spec>(x[4], x[5]), pack_probabilities<spec>(x[6], x[7])};
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j)
        multiply<spec>(out[j], values.of(step, j), probabilities);
    }
  }

  FOVEA_DEVICE_MEMBER void scale_out(float factor) {
#pragma unroll
    for (int j = 0; j < T::kColBlocks; ++j)
#pragma unroll
      for (int g = 0; g < ptx::kMfmaSums; ++g) out[j][g] *= factor;
  }
};

}  // namespace fovea::cuda::cdna
