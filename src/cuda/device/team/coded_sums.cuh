// Softmax and O of one tile where P and V are codes of e4m3: chapter 4 of sm80/attention_forward.cuh for kernels of
// eight bits (compute.cuh is the one of 16), and how their values are copied.
//
//   O += scale_t (P̂ V̂),  l += P̂ 1                                                           shared/quantize_v.h
//
// V lies transposed in memory, with its keys in the order in which a thread's scores, packed by fours, are an A operand
// of mma.m16n8k32: so P needs no shuffle, and V is read by ldmatrix as K is.
//
// Codes of P take a quarter of the registers of the scores that they are made of, which are free then. So a tile's
// products of 16 columns get accumulators of their own and are added to O in f32 by the scale of the tile's values: an
// fma for each sum, and no more than two or four products are summed in an accumulator, of which GPUs of 8.9 keep some
// 22 bits. Row sums are one more product, by a register of ones.
//
// Dropped codes count in row sums all the same: the product by ones comes before they are dropped. Scores of programs
// come to the softmax as natural ones.
//
// Where codes of P are exponentials, rounded, a warp has 16 rows, and S of 64 or 128 keys there: their maximum is
// what the codes are relative to. Row sums are of what is rounded, in f32. Scales of V are of channels, and O is
// multiplied by them at the end, or one of a sequence and head, which the kernel before writes beside each tile.
//
// Every tile takes a maximum: with exponentials gone, the tensor cores wait for no instruction of the softmax. So a
// reference that must move costs no more than its step, and a row's first leaves no room above: there is none to save.
#pragma once

#include "common/coded_softmax.cuh"
#include "common/quad_reduce.cuh"
#include "common/tile_walk.cuh"
#include "common/value_codes.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "shared/forward_params_sm80.h"
#include "shared/forward_spec.h"
#include "shared/quantize_v.h"
#include "shared/rounding.h"
#include "team/code_scores.cuh"
#include "team/compute.cuh"
#include "team/load.cuh"
#include "team/scores.cuh"
#include "team/team.cuh"
#include "tile/fragment.cuh"

namespace fovea::cuda::team {

/// As Sums of compute.cuh, and in its place: SumsOf.
template <TeamSpec spec, class Mods>
struct CodedSums {
  using T = Traits<spec>;
  using Fragments = ScoreFragments<spec>;
  static constexpr bool kAreCodes = Scores<spec, Mods>::kAreCodes;  // are scores?
  static constexpr bool kRounds = rounds_exponentials(spec.rounding);
  static constexpr ScoreKind kKind = !kAreCodes ? ScoreKind::natural
                                     : qk_codes(spec.rounding) == Codes::int8
                                         ? ScoreKind::codes
                                         : ScoreKind::float_codes;
  using Rows = CodedRows<spec.tile_kv, spec.head_dim_v, spec.wants_row_max, kKind, kRounds>;
  static constexpr int kSteps = spec.tile_kv / 32;  // of a product's depth
  static_assert(spec.tile_kv % 32 == 0 && kQuantizedTile % spec.tile_kv == 0,
                "keys of a tile are whole products, and values of it share a scale");
  static_assert(spec.multiplies_codes, "what rows have in common lies beside their codes");
  static_assert(!kRounds || (spec.tile_kv == spec.scale_tile && !spec.is_split),
                "codes depend on all keys of their tile, and of those before");

  float out[T::kRowBlocks][T::kColBlocks][4];
  Scores<spec, Mods> scores;
  Rows rows[T::kRowBlocks];
  typename Rows::Probabilities probabilities[T::kRowBlocks];
  float scale;  // of the tile's values, where they have one

  FOVEA_DEVICE_MEMBER void start() {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
      rows[i].begin();
      rows[i].greatest[0] = rows[i].greatest[1] = -infinity();
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[i][j][e] = 0;
    }
  }

  /// Before they are multiplied. Indicators are codes of 1, and have no scale.
  FOVEA_DEVICE_MEMBER void look_at_values(const Team<spec>& team, VisitedTile tile, Pass pass) {
    if constexpr (T::kHasChannelScales) return;
    scale = is_indicator(pass) ? 1.0F : ptx::ld_global(scale_of(team, tile));
  }

  // ---- softmax ---------------------------------------------------------------------------------

  /// Among what a row sees, where scores may be NaN.
  FOVEA_DEVICE_MEMBER void look_for_nan(Fragments& s) {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) rows[i].look_for_nan(in_one_row(s[i]));
  }

  /// P of s; moves the rows' references, and with them what has been summed so far.
  FOVEA_DEVICE_MEMBER void softmax(const Team<spec>& team, Fragments& s) {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (kAreCodes) {
          rows[i].unit[half] = scores.codes.unit(team, i, half);
        } else {
          rows[i].base[half] = team.p.softmax_scale_log2 * scores.codes.of_mean(team, i, half);
        }
      }
      const auto& of_rows = in_one_row(s[i]);
      const float headroom = kRounds ? scores.codes.rounded->log2_p_max : 0.0F;
      if (rows[i].template raise<false>(of_rows, headroom)) rows[i].scale(in_one_row(out[i]));
      if constexpr (kRounds) {
        rows[i].round_exponentials(of_rows, probabilities[i]);
      } else {
        float unused[2];
        rows[i].template exponentiate<true, 0>(of_rows, probabilities[i], unused, 0.0F, 0.0F);
      }
    }
    if constexpr (!kRounds) add_row_sums();
  }

  /// Of the codes, which are in row sums by now. Four of a word: two blocks of keys, two of each.
  FOVEA_DEVICE_MEMBER void drop(const Team<spec>& team, Fragments&, VisitedTile tile) {
    for_each_dropped(team, tile, [&](int i, int first, int count, std::uint32_t dropped) {
#pragma unroll
      for (int at = 0; at < count / 2; ++at) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int step = (first + 2 * at) / 4;
          probabilities[i][step][(first / 2 + at) % 2 * 2 + half] &=
              ~dropped_bytes(dropped >> (8 * at + 2 * half));
        }
      }
    });
  }

  // ---- the second product ----------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void multiply_values(const Team<spec>& team, const Fragments&,
                                           const typename T::VTile& values) {
    const SharedAddress v_row = values.chunk(team.lane % 8 + team.lane / 16 * 8, team.lane / 8 % 2);
#pragma unroll
    for (int j = 0; j < T::kColBlocks; j += 2) {
      float of_tile[T::kRowBlocks][2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const U32x4 b =
            ptx::ldmatrix_x4(T::VTile::chunk_ahead(v_row, 2 * step) + j * 8 * T::VTile::kRowPitch);
#pragma unroll
        for (int i = 0; i < T::kRowBlocks; ++i) {
          ptx::mma_m16n8k32_e4m3(of_tile[i][0], probabilities[i][step], b.x, b.y);
          ptx::mma_m16n8k32_e4m3(of_tile[i][1], probabilities[i][step], b.z, b.w);
        }
      }
#pragma unroll
      for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& sum = out[i][j + e / 4][e % 4];
          const float add = of_tile[i][e / 4][e % 4];
          sum = T::kHasChannelScales ? sum + add : ptx::fma_rn(add, scale, sum);
        }
    }
  }

  // ---- the end ---------------------------------------------------------------------------------

  /// A row of this thread: its sum is whole. The origin is log2 where scores are codes, else natural, and less what all
  /// scores of the row have in common.
  FOVEA_DEVICE_MEMBER RowState whole_row(int i, int half) const {
    const auto& of = rows[i];
    float sum = of.sum[half];
    if constexpr (kRounds) {
      sum = quad_sum(sum);
      return {of.greatest_origin(half, scores.codes.rounded->log2_p_max),
              sum * unit_of_sum(i, half)};
    }
    return {kAreCodes ? of.reference[half] - Rows::kLog2Excess : of.origin(half), sum};
  }

  /// What O is multiplied by, to be relative to what a whole row is.
  FOVEA_DEVICE_MEMBER float unit_of_sum(int i, int half) const {
    if constexpr (!kRounds) return 1.0F;
    return rows[i].unit_of_sum(half, scores.codes.rounded->reciprocal_of_p_max);
  }

  /// O, where channels have scales.
  FOVEA_DEVICE_MEMBER void scale_columns(const Team<spec>& team) {
    const auto scales =
        ptx::bit_cast<const float*>(ptx::ld_shared<std::uint64_t>(team.smem + T::kAt.value_scales));
#pragma unroll
    for (int j = 0; j < T::kColBlocks; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float of_channel = ptx::ld_global(scales + j * 8 + team.lane % 4 * 2 + e);
#pragma unroll
        for (int i = 0; i < T::kRowBlocks; ++i) {
          out[i][j][e] *= of_channel;
          out[i][j][e + 2] *= of_channel;
        }
      }
    }
  }
  FOVEA_DEVICE_MEMBER float greatest(int i, int half) const { return rows[i].greatest[half]; }

 private:
  /// Bits 0, 1, 4 and 5 as bytes of ones.
  FOVEA_DEVICE std::uint32_t dropped_bytes(std::uint32_t bits) {
    const std::uint32_t pairs = (bits & 0x3U) | (bits & 0x30U) << 12U;
    return ((pairs | pairs << 7U) & 0x01010101U) * 0xffU;
  }

  FOVEA_DEVICE const float* scale_of(const Team<spec>& team, VisitedTile tile) {
    const auto first =
        ptx::bit_cast<const float*>(ptx::ld_shared<std::uint64_t>(team.smem + T::kAt.value_scales));
    return first + tile.idx / (kQuantizedTile / spec.tile_kv);
  }

  /// All columns of such a product are the same.
  FOVEA_DEVICE_MEMBER void add_row_sums() {
    constexpr std::uint32_t kOnes = kOneCode * 0x01010101U;
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
      float of_tile[4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        ptx::mma_m16n8k32_e4m3(of_tile, probabilities[i][step], kOnes, kOnes);
      rows[i].sum[0] += of_tile[0];
      rows[i].sum[1] += of_tile[2];
    }
  }
};

/// What a kernel sums by.
template <TeamSpec spec, class Mods, bool sums_codes>
struct SumsOf {
  using Type = Sums<spec, Mods>;
};
template <TeamSpec spec, class Mods>
struct SumsOf<spec, Mods, true> {
  using Type = CodedSums<spec, Mods>;
};

/// Four codes of each word, as this pass wants them: of a tile that has arrived, by the whole team.
template <TeamSpec spec>
FOVEA_DEVICE void rewrite_value_codes(const Team<spec>& team,
                                      const typename Traits<spec>::VTile& values, VisitedTile tile,
                                      Pass pass) {
  using T = Traits<spec>;
  constexpr int kWords = spec.tile_kv / 4;  // of a row
  const Work work = team.kept_work();
  const auto head =
      ptx::bit_cast<const char*>(ptx::ld_shared<std::uint64_t>(team.smem + T::kAt.value_head));
#pragma unroll 1
  for (int at = team.warp * 32 + team.lane; at < spec.head_dim_v * kWords; at += T::kThreads) {
    const int channel = at / kWords;
    const int byte = at % kWords * 4;
    const SharedAddress word = values.at(channel, byte);
    const auto codes = ptx::ld_shared<std::uint32_t>(word);
    const auto given = [&](int i) -> std::uint32_t {
      if constexpr (spec.takes_codes) return 0x7fc0U;  // NaN of bf16: e4m3 has no infinity
      const std::int32_t key = tile.idx * spec.tile_kv + key_of_byte(byte + i);
      const char* const row = kv_row<spec>(team.p, work, team.p.v, head, key);
      return ptx::ld_global(reinterpret_cast<const std::uint16_t*>(row) +
                            channel * team.p.v.col_stride);
    };
    ptx::st_shared(word, codes_of_pass<spec.element>(codes, pass, given));
  }
  team.meet();
}

}  // namespace fovea::cuda::team
