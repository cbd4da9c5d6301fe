// Softmax and O of one tile, with P and V in four bits. Chapter 3 of sm120/attention_fp4.cuh.
//
//   p_j = p_max 2^(s_j c - m c)       m: the row's greatest score so far
//   code_j = e2m1(p_j / scale_g),  scale_g = greatest p_j of group g / 6         two levels: rows, then groups of keys
//   O += Σ_g scale_g code · V,  l += Σ p_j                                       of p before they are rounded
//
// Groups' maxima are those of scores, of which the row's maximum is taken anyway; one more power for each gives the
// greatest p, the same bits as that p itself. Rounding errors of the fma could make it more than p_max, which would
// cost powers of two an octave: it is limited.
//
// A lane has keys 8 c to 8 c + 7 of each 32, c = lane mod 4: as codes they are a register of an A operand. Scales of a
// row's four groups of a product of 64 keys are put together by one exchange between lanes that hold different groups.
//
// A tile's products get accumulators of their own, which take what was summed before times its step of the reference:
// one fma for each sum and tile, whether references move or not.
#pragma once

#include "common/float_constants.cuh"
#include "common/four_bit_groups.cuh"
#include "common/online_softmax.cuh"
#include "common/quad_reduce.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"
#include "shared/fp4.h"
#include "sm120/fp4/scores.cuh"
#include "team/team.cuh"

namespace fovea::cuda::sm120 {

/// What a thread has of its warp's 16 rows; as Sums of team/compute.cuh, for what writes results.
template <Fp4ForwardSpec spec, class Mods>
struct Fp4Sums {
  static constexpr TeamSpec kTeam = fp4_team_spec(spec);
  static constexpr bool kAreCodes = false;  // are scores?
  static constexpr int kColBlocks = spec.head_dim_v / 8;
  static constexpr int kSteps = kQuantizedTile / kFp4Depth;  // of a product over keys
  static constexpr int kBlocks = kQuantizedTile / 32;        // of keys
  static constexpr float kPMax = fp4_p_max(spec.group);
  using Tile = JoinedTile<spec.head_dim_v, kQuantizedTile / 2>;

  float out[1][kColBlocks][4];
  Fp4Queries<spec, Mods> queries;
  float reference[2];  // the greatest score so far
  float sum[2];        // of this thread's keys
  float rescale[2];    // what the tile's reference makes of sums before it
  std::uint32_t codes[kSteps][4];
  std::uint32_t scales[kSteps];  // lane 4 r + h: of row r + 8 h

  FOVEA_DEVICE_MEMBER void start() {
    reference[0] = reference[1] = -infinity();
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int j = 0; j < kColBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[0][j][e] = 0;
  }

  // ---- softmax ---------------------------------------------------------------------------------

  /// Equal scores where a row sees the key, NaN too.
  FOVEA_DEVICE_MEMBER static void shrink(Scores& s) {
#pragma unroll
    for (int i = 0; i < kQuantizedTile / 2; ++i)
      s[i / 4][i % 4] = s[i / 4][i % 4] == -infinity() ? -infinity() : 0.0F;
  }

  /// P of s, as codes.
  FOVEA_DEVICE_MEMBER void softmax(const team::Team<kTeam>& team, const Scores& s) {
    std::uint32_t bits[2][kBlocks];
    const float c = spec.is_prescaled ? kLog2E : team.p.softmax_scale_log2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float greatest[kBlocks];
      const OriginStep step = move_reference(half, row_maxima(s, half, greatest), c);
      float of_row = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const float top = ptx::min_ftz(probability(greatest[b], step), kPMax);
        const GroupScale scale = fast_scale(top);
        bits[half][b] = scale.bits;
        codes[b / 2][b % 2 * 2 + half] = codes_of_keys(s, b, half, step, scale.reciprocal, of_row);
      }
      sum[half] = ptx::fma_rn(sum[half], rescale[half], of_row);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const std::uint32_t* const upper = bits[0] + 2 * i;
      const std::uint32_t* const lower = bits[1] + 2 * i;
      scales[i] = team.lane % 2 == 0 ? word_of(upper) : word_of(lower);
      if constexpr (spec.group == 16) scales[i] |= ptx::shfl_bfly(scales[i], 2) << 8;
    }
  }

  // ---- the second product ----------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void multiply_values(SharedAddress values, int lane) {
    const Tile tile{values};
    const SharedAddress v_row = tile.chunk(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int block = 0; block < kColBlocks; block += 4) {
      const auto words =
          scale_words<kSteps>(values + fp4_codes_bytes(spec.head_dim_v), lane, block * 8);
      float of_tile[4][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const U32x4 b = ptx::ldmatrix_x4(Tile::chunk_ahead(v_row, 2 * step) +
                                           (block + j) * 8 * Tile::kRowPitch);
          multiply<kScales<spec>>(of_tile[j], codes[step], b.x, b.y, scales[step], words.step[step],
                                  0, j);
          multiply<kScales<spec>>(of_tile[j + 1], codes[step], b.z, b.w, scales[step],
                                  words.step[step], 0, j + 1);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          out[0][block + j][e] = ptx::fma_rn(out[0][block + j][e], rescale[e / 2], of_tile[j][e]);
    }
  }

  // ---- the end ---------------------------------------------------------------------------------

  /// Sums of probabilities, of which the greatest is 1.
  FOVEA_DEVICE_MEMBER void take_p_max_out() {
    constexpr float kUnit = 1.0F / kPMax;
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] *= kUnit;
#pragma unroll
    for (int j = 0; j < kColBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[0][j][e] *= kUnit;
  }

  /// A row of this thread, its sum that of all four; scores lack q · μ where no program has read them.
  FOVEA_DEVICE_MEMBER RowState whole_row(int, int half) const {
    return {greatest(0, half), quad_sum(sum[half])};
  }
  FOVEA_DEVICE_MEMBER float greatest(int, int half) const {
    return spec.is_prescaled ? reference[half] : reference[half] + queries.of_mean[half];
  }

 private:
  /// Of a row in each group of 16 or 32 keys that holds keys of this lane; the greatest of them all.
  FOVEA_DEVICE float row_maxima(const Scores& s, int half, float (&greatest)[kBlocks]) {
    float of_row = -infinity();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float top = s[4 * b][2 * half];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        top = ptx::max_ftz(ptx::max_ftz(top, s[4 * b + j][2 * half]), s[4 * b + j][2 * half + 1]);
      top = ptx::max_ftz(top, ptx::shfl_bfly(top, 1));
      if constexpr (spec.group == 32) top = ptx::max_ftz(top, ptx::shfl_bfly(top, 2));
      greatest[b] = top;
      of_row = ptx::max_ftz(of_row, top);
    }
    if constexpr (spec.group == 16) of_row = ptx::max_ftz(of_row, ptx::shfl_bfly(of_row, 2));
    return of_row;
  }

  /// References follow the row's maximum, as the recipe says; a row that has seen no key subtracts 0.
  FOVEA_DEVICE_MEMBER OriginStep move_reference(int half, float greatest, float c) {
    constexpr float kLog2PMax = spec.group == 16 ? 11.392317422778761F : 2.584962500721156F;
    const float before = reference[half];
    reference[half] = ptx::max_ftz(before, greatest);
    const float origin = reference[half] == -infinity() ? 0.0F : reference[half];
    rescale[half] = ptx::ex2_approx_ftz((before - origin) * c);
    OriginStep step{rescale[half], 0, c};
    if constexpr (Mods::has_score) step.c = unit_of(origin, c);
    step.minus_origin_c = ptx::fma_rn(-origin, step.c, kLog2PMax);
    return step;
  }

  /// scale_of_group with an approximate reciprocal: p are approximate, too. That of a scale of 0 is infinite; whatever
  /// codes that makes are multiplied by 0.
  FOVEA_DEVICE GroupScale fast_scale(float greatest) {
    if constexpr (spec.group == 16) {
      const std::uint32_t bits = ptx::cvt_e4m3x2(greatest * kOneSixth, 0.0F);
      return {bits, ptx::rcp_approx_ftz(value_of_scale(bits))};
    } else {
      return scale_of_group<32>(greatest);
    }
  }

  /// This lane's keys of a block of 32.
  FOVEA_DEVICE std::uint32_t codes_of_keys(const Scores& s, int b, int half, const OriginStep& step,
                                           float reciprocal, float& sum) {
    float p[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      p[i] = probability(s[4 * b + i / 2][2 * half + i % 2], step);
      sum += p[i];
    }
    return codes_of_eight(p, reciprocal);
  }

  /// Scales of the groups of this lane's keys in the word that a product of 64 keys reads: those of 16 numbers in every
  /// second byte, from the first or the second on.
  FOVEA_DEVICE std::uint32_t word_of(const std::uint32_t* bits) {
    return bits[0] | bits[1] << (spec.group == 16 ? 16 : 8);
  }
};

}  // namespace fovea::cuda::sm120
