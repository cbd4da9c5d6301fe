// What a warp does where no more than eight rows share the keys of a cache of codes: half an m of mma.sync, so that the
// other half is used otherwise. Read codes.cuh for what they have in common with those of sixteen.
//
//   S  = Q Kᵀ    int8: rows 0 to 7 of A are the upper bytes of Q in fixed point, rows 8 to 15 its lower ones; codes are
//                multiplied as they lie, sums of both are integers, and exact. e4m3: f16, and zeros.
//   Oᵀ = Vᵀ Pᵀ   rows are the n of 8: half as many products, sums of half as many registers. S of a lane are the P that
//                it needs. V as in codes.cuh: of a chunk of 16 columns the even ones are rows 0 to 7 of A, odd ones 8 to 15
//
// A lane has the scores of row l / 4 and keys 2 (l % 4), 2 (l % 4) + 1 of each eight; of Oᵀ rows 2 (l % 4) and the next,
// and of each chunk columns 2 (l / 4) and the next.
//
// Fixed point has 2^14 steps up to the power of two above a row's greatest element: 15 bits and a sign, where bf16 has 8.
// An element below 2^-6 of the greatest keeps fewer bits than bf16 has; beside the greatest one's own rounding that is a
// 64th. Rows with infinity or NaN become NaN, so they are computed key by key.
#pragma once

#include "common/f16_codes.cuh"
#include "common/float_constants.cuh"
#include "common/online_softmax.cuh"
#include "common/position.cuh"
#include "common/score.cuh"
#include "common/tile_walk.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"
#include "sm90/decode/codes.cuh"
#include "sm90/decode/cta.cuh"
#include "team/compute.cuh"
#include "team/team.cuh"

namespace fovea::cuda::sm90::decoding {

/// What has been summed so far.
template <Sm90DecodeSpec spec>
struct SumsOfFewRows {
  float out[spec.head_dim_v / 16][4];
  RowState row;
  float row_max;

  FOVEA_DEVICE_MEMBER void start() {
    row = empty_row();
    row_max = -infinity();
    for_each([](float& sum, int) { sum = 0; });
  }

  /// visit(sum, row of the two that this lane has).
  template <class Visit>
  FOVEA_DEVICE_MEMBER void for_each(Visit&& visit) {
#pragma unroll
    for (auto& chunk : out)
#pragma unroll
      for (int e = 0; e < 4; ++e) visit(chunk[e], e % 2);
  }
};

template <Sm90DecodeSpec spec, class Mods>
class FewRowsOfCodes {
  using L = Layout<spec>;
  using T = typename L::T;
  using Team = team::Team<L::kWarpSpec>;
  using Sums = SumsOfFewRows<spec>;
  using Scores = float[T::kKeyBlocks][2];
  static constexpr bool kIsInt8 = spec.k_codes == Codes::int8;
  static constexpr int kQkChunks = spec.head_dim_qk / 16, kVChunks = spec.head_dim_v / 16;
  static_assert(!spec.has_padded_head_dim && kQkChunks % 2 == 0, "rows are pairs of whole chunks");
  static_assert(!spec.has_dropout, "caches have none");

 public:
  /// Operands are on their way, straight from memory. Rows that do not exist are the first one.
  FOVEA_DEVICE_MEMBER void ask_for_queries(const Team& team) {
    const int mine = team.lane / 4;
    const RowView<L::kWarpSpec> row = team.row_at(team.row_at(mine).exists ? mine : 0);
    const char* const from = static_cast<const char*>(team.p.q.data) +
                             (row.query_at() + team.lane % 4 * 4) * T::kElement.bytes;
#pragma unroll
    for (int c = 0; c < kQkChunks; ++c) {
      const auto four = ptx::ld_global_nc(reinterpret_cast<const ptx::U32x2*>(from + c * 32));
      queries_[c][0] = four.x;
      queries_[c][1] = four.y;
    }
    unit_ = 0;
  }

  /// For a split of the rows that were asked for last.
  FOVEA_DEVICE_MEMBER void start() {
    if (unit_ == 0) make_operands();
    limit_ = kLeastLimit;
  }

  /// A slice: its keys, its values, and the scales of both.
  template <class KTile, class VTile>
  FOVEA_DEVICE_MEMBER void add_slice(const Team& team, Sums& sums, const KTile& keys,
                                     const VTile& values, SharedAddress key_scales,
                                     SharedAddress value_scales, VisitedTile slice) {
    Scores s;
    multiply_keys(team, s, keys, key_scales);
    if constexpr (L::kWarpSpec.is_prescaled) {
      for_each_score(team, s, slice, [&](float& score, const Position& at) {
        modify_score<Mods>(score, at, team.p);
      });
    }
    if (!slice.is_full) {
      for_each_score(team, s, slice, [&](float& score, const Position& at) {
        mask_score<Mods>(score, at, team.work.kv_end, team.p.captures);
      });
    }
    softmax(team, sums, s);
    multiply_values(team, sums, s, values, value_scales);
  }

  /// What the warp leaves for those that join its rows.
  FOVEA_DEVICE_MEMBER void put_rows(const Team& team, const Sums& sums,
                                    const typename L::Parts& parts, int part) const {
    RowState row = sums.row;
    row.sum += ptx::shfl_bfly(row.sum, 1);
    row.sum += ptx::shfl_bfly(row.sum, 2);
    const int mine = team.lane / 4;
    if (team.lane % 4 == 0 && team.row_at(mine).exists)
      parts.put_state(part, mine, row, spec.wants_row_max ? sums.row_max : 0.0F);
    const float factor = power_of_two(limit_ - kTopOfWeight);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int of_sums = team.lane % 4 * 2 + e;
      if (!team.row_at(of_sums).exists) continue;
      const SharedAddress to = parts.at(part, of_sums) + team.lane / 4 * 8;
#pragma unroll
      for (int c = 0; c < kVChunks; ++c)
        ptx::st_shared(to + c * 64,
                       ptx::F32x2{sums.out[c][e] * factor, sums.out[c][2 + e] * factor});
    }
  }

 private:
  /// Of int8 a row of Q is less than 2^14 then, of e4m3 less than 2^15.
  static constexpr std::uint32_t kTopOfQuery = kIsInt8 ? 13 : 14;
  static constexpr float kUpperByte = 256.0F;

  /// Element `i` of the four that this lane has of a chunk.
  FOVEA_DEVICE_MEMBER float query(int chunk, int i) const {
    const std::uint32_t pair = queries_[chunk][i / 2];
    if constexpr (spec.element == Element::bf16)
      return i % 2 == 0 ? ptx::f32_of_bf16_lo(pair) : ptx::f32_of_bf16_hi(pair);
    return i % 2 == 0 ? ptx::f32_of_f16_lo(pair) : ptx::f32_of_f16_hi(pair);
  }

  FOVEA_DEVICE_MEMBER void make_operands() {
    if constexpr (!kIsInt8 && spec.element == Element::f16) {
      unit_ = 1;
      return;
    }
    // Of bits as integers NaN is the greatest.
    std::uint32_t greatest = 0;
#pragma unroll
    for (int c = 0; c < kQkChunks; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        greatest = greater(greatest, ptx::bit_cast<std::uint32_t>(ptx::abs(query(c, i))));
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2)
      greatest = greater(greatest, ptx::shfl_bfly(greatest, distance));
    const std::uint32_t found = greatest >> 23;
    const std::uint32_t exponent = found < kLeastExponent ? kLeastExponent : found;
    const float factor = power_of_two(2 * kBias + kTopOfQuery - exponent);
#pragma unroll
    for (int c = 0; c < kQkChunks; ++c) {
      float scaled[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) scaled[i] = ptx::mul_rn(query(c, i), factor);
      if constexpr (kIsInt8) {
        split_bytes(queries_[c], scaled);
      } else {
        queries_[c][0] = ptx::cvt_f16x2(scaled[0], scaled[1]);
        queries_[c][1] = ptx::cvt_f16x2(scaled[2], scaled[3]);
      }
    }
    unit_ = kIsInt8 && found == 255 ? quiet_nan() : power_of_two(exponent - kTopOfQuery);
  }

  FOVEA_DEVICE_MEMBER static std::uint32_t greater(std::uint32_t a, std::uint32_t b) {
    return a > b ? a : b;
  }

  /// Upper bytes, and what is left, from -128 to 127.
  FOVEA_DEVICE_MEMBER static void split_bytes(std::uint32_t (&bytes)[2], const float (&scaled)[4]) {
    float upper[4], lower[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float whole = ptx::cvt_rni(scaled[i]);
      upper[i] = ptx::cvt_rni(ptx::fma_rn(whole, 1 / kUpperByte, 0x1p-10F));  // halves go up
      lower[i] = ptx::fma_rn(upper[i], -kUpperByte, whole);
    }
    bytes[0] = ptx::cvt_s8x4(upper[0], upper[1], upper[2], upper[3]);
    bytes[1] = ptx::cvt_s8x4(lower[0], lower[1], lower[2], lower[3]);
  }

  template <class Tile>
  FOVEA_DEVICE_MEMBER void multiply_keys(const Team& team, Scores& s, const Tile& keys,
                                         SharedAddress scales) const {
    const SharedAddress row = keys.chunk(team.lane % 8 + team.lane / 16 * 8, team.lane / 8 % 2);
    float sums[T::kKeyBlocks][4];
#pragma unroll
    for (auto& block : sums)
#pragma unroll
      for (float& sum : block) sum = kIsInt8 ? kIntegerOrigin : 0.0F;
#pragma unroll
    for (int c = 0; c < kQkChunks; c += 2) {
#pragma unroll
      for (int j = 0; j < T::kKeyBlocks; j += 2) {
        const ptx::U32x4 words =
            ptx::ldmatrix_x4(Tile::chunk_ahead(row, c) + j * 8 * Tile::kRowPitch);
        multiply_chunks(sums[j], c, words.x, words.y);
        multiply_chunks(sums[j + 1], c, words.z, words.w);
      }
    }
    for_each_pair<T::kKeyBlocks>(team.lane, scales, [&](int j, const ptx::F32x2& scale) {
      s[j][0] = product_of(sums[j], 0) * (unit_ * scale.x);
      s[j][1] = product_of(sums[j], 1) * (unit_ * scale.y);
    });
  }

  /// Two neighbouring chunks of eight keys.
  FOVEA_DEVICE_MEMBER void multiply_chunks(float (&sums)[4], int c, std::uint32_t first,
                                           std::uint32_t second) const {
    if constexpr (kIsInt8) {
      const std::uint32_t rows[4] = {queries_[c][0], queries_[c][1], queries_[c + 1][0],
                                     queries_[c + 1][1]};
      ptx::mma_m16n8k32_s8(sums, rows, first, second);
    } else {
      multiply_chunk(sums, c, first);
      multiply_chunk(sums, c + 1, second);
    }
  }
  FOVEA_DEVICE_MEMBER void multiply_chunk(float (&sums)[4], int c, std::uint32_t word) const {
    const std::uint32_t rows[4] = {queries_[c][0], 0, queries_[c][1], 0};
    const F16Pairs keys = f16_pairs<spec.k_codes>(word);
    ptx::mma_m16n8k16<Element::f16>(sums, rows, keys.first, keys.second);
  }

  FOVEA_DEVICE_MEMBER static float product_of(const float (&sums)[4], int key) {
    if constexpr (!kIsInt8) return sums[key];
    return ptx::fma_rn(sums[key] - kIntegerOrigin, kUpperByte, sums[2 + key] - kIntegerOrigin);
  }

  template <class Visit>
  FOVEA_DEVICE_MEMBER static void for_each_score(const Team& team, Scores& s, VisitedTile slice,
                                                 Visit&& visit) {
    Position at = team.row_at(team.lane / 4).position();
#pragma unroll
    for (int j = 0; j < T::kKeyBlocks; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        at.kv_idx = slice.idx * spec.tile_kv + j * 8 + team.lane % 4 * 2 + e;
        visit(s[j][e], at);
      }
    }
  }

  /// s becomes P; moves the row's origin, and with it what has been summed so far.
  FOVEA_DEVICE_MEMBER static void softmax(const Team& team, Sums& sums, Scores& s) {
    float greatest = s[0][0];
#pragma unroll
    for (const auto& pair : s)
#pragma unroll
      for (const float score : pair) greatest = ptx::max_ftz(greatest, score);
    greatest = team::greatest_of_quad(greatest);
    const float c = L::kWarpSpec.is_prescaled ? kLog2E : team.p.softmax_scale_log2;
    const OriginStep step = move_origin<Mods::has_score>(sums.row, greatest, c);
    if constexpr (spec.wants_row_max) sums.row_max = ptx::max_ftz(sums.row_max, greatest);
    float sum = 0;
#pragma unroll
    for (auto& pair : s) {
#pragma unroll
      for (float& score : pair) {
        score = probability(score, step);
        sum += score;
      }
    }
    sums.row.sum += sum;
    if (!ptx::vote_any(step.rescale != 1.0F)) return;
    const int first = team.lane % 4 * 8;  // a lane that has the row of its first sums
    const float rescale[2] = {ptx::shfl_idx(step.rescale, first),
                              ptx::shfl_idx(step.rescale, first + 4)};
    sums.for_each([&](float& out, int row) { out *= rescale[row]; });
  }

  template <class Tile>
  FOVEA_DEVICE_MEMBER void multiply_values(const Team& team, Sums& sums, Scores& p,
                                           const Tile& values, SharedAddress scales) {
    const std::uint32_t before = limit_;
    limit_ = limit_above<spec.tile_kv>(before, team.lane, scales);
    if (limit_ != before) {
      const float rescale = rescale_of_limits(before, limit_);
      sums.for_each([&](float& out, int) { out *= rescale; });
    }
    const float per_limit = power_of_two(2 * kBias + kTopOfWeight - limit_);
    for_each_pair<T::kKeyBlocks>(team.lane, scales, [&](int j, const ptx::F32x2& scale) {
      p[j][0] *= scale.x * per_limit;
      p[j][1] *= scale.y * per_limit;
    });
    const SharedAddress row = values.chunk(team.lane % 16, team.lane / 16);
#pragma unroll
    for (int step = 0; step < T::kPvSteps; ++step) {
      const std::uint32_t first = ptx::cvt_f16x2(p[2 * step][0], p[2 * step][1]);
      const std::uint32_t second = ptx::cvt_f16x2(p[2 * step + 1][0], p[2 * step + 1][1]);
#pragma unroll
      for (int c = 0; c < kVChunks; c += 2) {
        const ptx::U32x4 words =
            ptx::ldmatrix_x4_trans(Tile::chunk_ahead(row, c) + step * 16 * Tile::kRowPitch);
        add_columns(sums.out[c], words.x, words.y, first, second);
        add_columns(sums.out[c + 1], words.z, words.w, first, second);
      }
    }
  }

  /// Of 16 keys and a chunk of columns: `keys` are the first eight, `others` those behind them.
  FOVEA_DEVICE_MEMBER static void add_columns(float (&out)[4], std::uint32_t keys,
                                              std::uint32_t others, std::uint32_t first,
                                              std::uint32_t second) {
    const F16Pairs a = f16_pairs_of_rows<spec.v_codes>(keys);
    const F16Pairs b = f16_pairs_of_rows<spec.v_codes>(others);
    const std::uint32_t columns[4] = {a.first, a.second, b.first, b.second};
    ptx::mma_m16n8k16<Element::f16>(out, columns, first, second);
  }

  // Of a chunk four elements as they come; then their upper bytes and their lower ones, or two pairs of f16.
  std::uint32_t queries_[kQkChunks][2];
  float unit_ = 0;           // what Q is times what is multiplied; 0: as it came
  std::uint32_t limit_ = 0;  // the power of two that no scale of a value is above, so far
};

}  // namespace fovea::cuda::sm90::decoding
