// What a warp does over a cache of codes: products, and the softmax between them. Read compute.cuh for when.
//
//   S  = unit scale_k (Q' K)                    Q' = Q / unit: in fixed point, or f16
//   Oᵀ = Vᵀ (Pᵀ scale_v / limit) limit
//
// Rows are eights, one or two of a warp: an n of mma.sync each. A lane has the scores of row l / 4 of each and of keys
// 2 (l % 4), 2 (l % 4) + 1 of each eight keys, which are the P that it needs; of Oᵀ rows 2 (l % 4) and the next, and of
// each chunk of 16 columns 2 (l / 4) and the next. So eight rows take half of the products of values that sixteen do,
// and half of the registers for sums.
//
//   K of int8   are multiplied as they lie, by m16n8k32: rows 0 to 7 of A are upper bytes of Q in fixed point, rows 8
//               to 15 lower ones. Sums are integers, and exact. Chunk c of 16 codes: lane l has codes 4 (l % 4) to
//               4 (l % 4) + 3; of Q the same
//   K of e4m3   become f16 by one instruction a pair; rows 8 to 15 of A are the other eight, or zeros
//   V           ldmatrix.trans: of chunk c and keys 2 (l % 4), 2 (l % 4) + 1 columns 2 (l / 4), 2 (l / 4) + 1; even
//               ones are rows 0 to 7 of A, odd ones 8 to 15. They become f16: of int8 2.5 instructions a pair, of
//               e4m3 1.5
//
// Fixed point has 2^14 steps up to the power of two above a row's greatest element. An element below 2^-6 of that keeps
// fewer bits than bf16 has; what it loses is a 64th of what the greatest one lost when it was rounded. Rows with
// infinity or NaN become NaN, so that they are computed key by key. Operands in f16 have the range of neither bf16 nor
// scales: each row of Q is divided by a power of two, and weights by the least power of two that no scale of a value so
// far is above; the products that they are made of are multiplied by it again. Of Q in f16 an element keeps all its
// bits down to 2^-31 of its row's greatest. Weights keep the 11 bits of f16 down to 2^-21 of the greatest.
#pragma once

#include "common/f16_codes.cuh"
#include "common/float_constants.cuh"
#include "common/online_softmax.cuh"
#include "common/position.cuh"
#include "common/quad_reduce.cuh"
#include "common/score.cuh"
#include "common/tile_walk.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"
#include "sm90/decode/cta.cuh"
#include "team/compute.cuh"
#include "team/team.cuh"

namespace fovea::cuda::sm90::decoding {

/// A power of two, by the bits of its exponent.
FOVEA_DEVICE float power_of_two(std::uint32_t biased) { return ptx::bit_cast<float>(biased << 23); }
/// The exponent of a number that is not negative; 0 of what is no normal number, 255 of infinity.
FOVEA_DEVICE std::uint32_t biased_exponent(float x) {
  return ptx::bit_cast<std::uint32_t>(x) >> 23;
}

inline constexpr std::uint32_t kBias = 127;
/// Weights are less than 2^15, for probabilities are at most 2^kOriginSlack.
inline constexpr std::uint32_t kTopOfWeight = 7;
static_assert(kOriginSlack + kTopOfWeight <= 15);
/// From here on both a power of two and its inverse are normal numbers; smaller elements of Q keep their bits.
inline constexpr std::uint32_t kLeastExponent = 15, kLeastLimit = 28;

/// visit(block of keys, scales of the two neighbours that this lane has).
template <int num_blocks, class Visit>
FOVEA_DEVICE void for_each_pair(int lane, SharedAddress scales, Visit&& visit) {
#pragma unroll
  for (int j = 0; j < num_blocks; ++j)
    visit(j, ptx::ld_shared<ptx::F32x2>(scales + 4 * (8 * j + lane % 4 * 2)));
}

/// The exponent of the least power of two that neither the one of `limit` nor a scale is above. NaN is above every one,
/// and raises none.
template <int num_keys>
FOVEA_DEVICE std::uint32_t limit_above(std::uint32_t limit, int lane, SharedAddress scales) {
  static_assert(32 % num_keys == 0, "lanes have keys");
  const float mine = ptx::abs(ptx::ld_shared<float>(scales + 4 * (lane % num_keys)));
  if (!ptx::vote_any(!(mine <= power_of_two(limit)))) return limit;
  float greatest = mine;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    greatest = ptx::max_ftz(greatest, ptx::shfl_bfly(greatest, distance));
  const std::uint32_t exponent = biased_exponent(greatest);
  if (exponent < limit) return limit;
  return exponent < 255 ? exponent + 1 : 255;
}

/// Of sums so far, where the limit has risen.
FOVEA_DEVICE float rescale_of_limits(std::uint32_t before, std::uint32_t after) {
  const std::uint32_t rise = after - before;
  return rise < kBias ? power_of_two(kBias - rise) : 0.0F;
}

/// Eights of rows that a warp has.
template <Sm90DecodeSpec spec>
inline constexpr int kEights = has_few_rows(spec) ? 1 : 2;

/// What has been summed so far.
template <Sm90DecodeSpec spec>
struct SumsOfCodes {
  float out[kEights<spec>][spec.head_dim_v / 16][4];
  RowState rows[kEights<spec>];
  float row_max[kEights<spec>];

  FOVEA_DEVICE_MEMBER void start() {
#pragma unroll
    for (int o = 0; o < kEights<spec>; ++o) {
      rows[o] = empty_row();
      row_max[o] = -infinity();
    }
    for_each([](float& sum, int, int) { sum = 0; });
  }

  /// visit(sum, eight, row of the two of it that this lane has).
  template <class Visit>
  FOVEA_DEVICE_MEMBER void for_each(Visit&& visit) {
#pragma unroll
    for (int o = 0; o < kEights<spec>; ++o)
#pragma unroll
      for (auto& chunk : out[o])
#pragma unroll
        for (int e = 0; e < 4; ++e) visit(chunk[e], o, e % 2);
  }
};

template <Sm90DecodeSpec spec, class Mods>
class CodedProducts {
  using L = Layout<spec>;
  using T = typename L::T;
  using Team = team::Team<L::kWarpSpec>;
  using Sums = SumsOfCodes<spec>;
  static constexpr int kEights = decoding::kEights<spec>;
  using Scores = float[kEights][T::kKeyBlocks][2];
  static constexpr bool kIsInt8 = spec.k_codes == Codes::int8;
  static constexpr int kQkChunks = spec.head_dim_qk / 16, kVChunks = spec.head_dim_v / 16;
  static_assert(!spec.has_padded_head_dim && kQkChunks % 2 == 0, "rows are pairs of whole chunks");
  static_assert(!spec.has_dropout, "caches have none");

 public:
  /// Operands are on their way, straight from memory. Rows that do not exist are the first one: nobody asks for what
  /// becomes of them.
  FOVEA_DEVICE_MEMBER void ask_for_queries(const Team& team) {
#pragma unroll
    for (int o = 0; o < kEights; ++o) {
      const int mine = team.my_row(0, o);
      const RowView<L::kWarpSpec> row = team.row_at(team.row_at(mine).exists ? mine : 0);
      const char* const from = static_cast<const char*>(team.p.q.data) +
                               (row.query_at() + team.lane % 4 * 4) * T::kElement.bytes;
#pragma unroll
      for (int c = 0; c < kQkChunks; ++c) {
        const auto four = ptx::ld_global_nc(reinterpret_cast<const ptx::U32x2*>(from + c * 32));
        queries_[o][c][0] = four.x;
        queries_[o][c][1] = four.y;
      }
      units_[o] = 0;
    }
  }

  /// For a split of the rows that were asked for last.
  FOVEA_DEVICE_MEMBER void start() {
#pragma unroll
    for (int o = 0; o < kEights; ++o)
      if (units_[o] == 0) units_[o] = make_operands(queries_[o]);
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
    const float factor = power_of_two(limit_ - kTopOfWeight);
#pragma unroll
    for (int o = 0; o < kEights; ++o) {
      RowState row = sums.rows[o];
      row.sum = quad_sum(row.sum);
      const int mine = team.my_row(0, o);
      if (team.lane % 4 == 0 && team.row_at(mine).exists)
        parts.put_state(part, mine, row, spec.wants_row_max ? sums.row_max[o] : 0.0F);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int of_sums = mine - team.lane / 4 + team.lane % 4 * 2 + e;
        if (!team.row_at(of_sums).exists) continue;
        const SharedAddress to = parts.at(part, of_sums) + team.lane / 4 * 8;
#pragma unroll
        for (int c = 0; c < kVChunks; ++c)
          ptx::st_shared(to + c * 64,
                         ptx::F32x2{sums.out[o][c][e] * factor, sums.out[o][c][2 + e] * factor});
      }
    }
  }

 private:
  /// Of int8 a row of Q is less than 2^14 then, of e4m3 less than 2^15.
  static constexpr std::uint32_t kTopOfQuery = kIsInt8 ? 13 : 14;
  static constexpr float kUpperByte = 256.0F;
  using Queries = std::uint32_t[kQkChunks][2];

  /// Element `i` of the four that this lane has of a chunk.
  FOVEA_DEVICE_MEMBER static float query(const Queries& queries, int chunk, int i) {
    const std::uint32_t pair = queries[chunk][i / 2];
    if constexpr (spec.element == Element::bf16)
      return i % 2 == 0 ? ptx::f32_of_bf16_lo(pair) : ptx::f32_of_bf16_hi(pair);
    return i % 2 == 0 ? ptx::f32_of_f16_lo(pair) : ptx::f32_of_f16_hi(pair);
  }

  /// Of a row; says what it is times what is multiplied.
  FOVEA_DEVICE_MEMBER static float make_operands(Queries& queries) {
    if constexpr (!kIsInt8 && spec.element == Element::f16) return 1.0F;
    // Of bits as integers NaN is the greatest.
    std::uint32_t greatest = 0;
#pragma unroll
    for (int c = 0; c < kQkChunks; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        greatest = greater(greatest, ptx::bit_cast<std::uint32_t>(ptx::abs(query(queries, c, i))));
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
      for (int i = 0; i < 4; ++i) scaled[i] = ptx::mul_rn(query(queries, c, i), factor);
      if constexpr (kIsInt8) {
        split_bytes(queries[c], scaled);
      } else {
        queries[c][0] = ptx::cvt_f16x2(scaled[0], scaled[1]);
        queries[c][1] = ptx::cvt_f16x2(scaled[2], scaled[3]);
      }
    }
    return kIsInt8 && found == 255 ? quiet_nan() : power_of_two(exponent - kTopOfQuery);
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

  // ---- keys --------------------------------------------------------------------------------------

  /// Of a block of eight keys: int8 has sums of bytes of each eight rows, e4m3 of all.
  using KeySums = float[kIsInt8 ? kEights : 1][T::kKeyBlocks][4];

  template <class Tile>
  FOVEA_DEVICE_MEMBER void multiply_keys(const Team& team, Scores& s, const Tile& keys,
                                         SharedAddress scales) const {
    const SharedAddress row = keys.chunk(team.lane % 8 + team.lane / 16 * 8, team.lane / 8 % 2);
    KeySums sums;
#pragma unroll
    for (auto& of_rows : sums)
#pragma unroll
      for (auto& block : of_rows)
#pragma unroll
        for (float& sum : block) sum = kIsInt8 ? kIntegerOrigin : 0.0F;
#pragma unroll
    for (int c = 0; c < kQkChunks; c += 2) {
#pragma unroll
      for (int j = 0; j < T::kKeyBlocks; j += 2) {
        const ptx::U32x4 words =
            ptx::ldmatrix_x4(Tile::chunk_ahead(row, c) + j * 8 * Tile::kRowPitch);
        multiply_chunks(sums, j, c, words.x, words.y);
        multiply_chunks(sums, j + 1, c, words.z, words.w);
      }
    }
    for_each_pair<T::kKeyBlocks>(team.lane, scales, [&](int j, const ptx::F32x2& scale) {
#pragma unroll
      for (int o = 0; o < kEights; ++o) {
        s[o][j][0] = product_of(sums, o, j, 0) * (units_[o] * scale.x);
        s[o][j][1] = product_of(sums, o, j, 1) * (units_[o] * scale.y);
      }
    });
  }

  /// Two neighbouring chunks of eight keys.
  FOVEA_DEVICE_MEMBER void multiply_chunks(KeySums& sums, int j, int c, std::uint32_t first,
                                           std::uint32_t second) const {
    if constexpr (kIsInt8) {
#pragma unroll
      for (int o = 0; o < kEights; ++o) {
        const std::uint32_t bytes[4] = {queries_[o][c][0], queries_[o][c][1], queries_[o][c + 1][0],
                                        queries_[o][c + 1][1]};
        ptx::mma_m16n8k32_s8(sums[o][j], bytes, first, second);
      }
    } else {
      multiply_chunk(sums[0][j], c, first);
      multiply_chunk(sums[0][j], c + 1, second);
    }
  }
  FOVEA_DEVICE_MEMBER void multiply_chunk(float (&sums)[4], int c, std::uint32_t word) const {
    std::uint32_t rows[4] = {queries_[0][c][0], 0, queries_[0][c][1], 0};
    if constexpr (kEights > 1) rows[1] = queries_[1][c][0], rows[3] = queries_[1][c][1];
    const F16Pairs keys = f16_pairs<spec.k_codes>(word);
    ptx::mma_m16n8k16<Element::f16>(sums, rows, keys.first, keys.second);
  }

  FOVEA_DEVICE_MEMBER static float product_of(const KeySums& sums, int eight, int j, int key) {
    if constexpr (!kIsInt8) return sums[0][j][2 * eight + key];
    const float* const bytes = sums[kIsInt8 ? eight : 0][j];
    return ptx::fma_rn(bytes[key] - kIntegerOrigin, kUpperByte, bytes[2 + key] - kIntegerOrigin);
  }

  // ---- softmax -----------------------------------------------------------------------------------

  template <class Visit>
  FOVEA_DEVICE_MEMBER static void for_each_score(const Team& team, Scores& s, VisitedTile slice,
                                                 Visit&& visit) {
#pragma unroll
    for (int o = 0; o < kEights; ++o) {
      Position at = team.row_at(team.my_row(0, o)).position();
#pragma unroll
      for (int j = 0; j < T::kKeyBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          at.kv_idx = slice.idx * spec.tile_kv + j * 8 + team.lane % 4 * 2 + e;
          visit(s[o][j][e], at);
        }
      }
    }
  }

  /// s becomes P; moves the rows' origins, and with them what has been summed so far.
  FOVEA_DEVICE_MEMBER static void softmax(const Team& team, Sums& sums, Scores& s) {
    const float c = L::kWarpSpec.is_prescaled ? kLog2E : team.p.softmax_scale_log2;
    float rescale[kEights];
    bool is_rescaled = false;
#pragma unroll
    for (int o = 0; o < kEights; ++o) {
      float greatest = s[o][0][0];
#pragma unroll
      for (const auto& pair : s[o])
#pragma unroll
        for (const float score : pair) greatest = ptx::max_ftz(greatest, score);
      greatest = quad_max(greatest);
      const OriginStep step = move_origin<Mods::has_score>(sums.rows[o], greatest, c);
      if constexpr (spec.wants_row_max) sums.row_max[o] = ptx::max_ftz(sums.row_max[o], greatest);
      rescale[o] = step.rescale;
      is_rescaled = is_rescaled || step.rescale != 1.0F;
      float sum = 0;
#pragma unroll
      for (auto& pair : s[o]) {
#pragma unroll
        for (float& score : pair) {
          score = probability(score, step);
          sum += score;
        }
      }
      sums.rows[o].sum += sum;
    }
    if (!ptx::vote_any(is_rescaled)) return;
    const int first = team.lane % 4 * 8;  // a lane that has the row of its first sums
    float of_sums[kEights][2];
#pragma unroll
    for (int o = 0; o < kEights; ++o)
#pragma unroll
      for (int e = 0; e < 2; ++e) of_sums[o][e] = ptx::shfl_idx(rescale[o], first + 4 * e);
    sums.for_each([&](float& out, int o, int row) { out *= of_sums[o][row]; });
  }

  // ---- values ------------------------------------------------------------------------------------

  template <class Tile>
  FOVEA_DEVICE_MEMBER void multiply_values(const Team& team, Sums& sums, Scores& p,
                                           const Tile& values, SharedAddress scales) {
    admit_scales(team, sums, scales);
    const float per_limit = power_of_two(2 * kBias + kTopOfWeight - limit_);
    for_each_pair<T::kKeyBlocks>(team.lane, scales, [&](int j, const ptx::F32x2& scale) {
      const float x = scale.x * per_limit, y = scale.y * per_limit;
#pragma unroll
      for (int o = 0; o < kEights; ++o) p[o][j][0] *= x, p[o][j][1] *= y;
    });
    const SharedAddress row = values.chunk(team.lane % 16, team.lane / 16);
#pragma unroll
    for (int step = 0; step < T::kPvSteps; ++step) {
      std::uint32_t weights[kEights][2];
#pragma unroll
      for (int o = 0; o < kEights; ++o)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          weights[o][e] = ptx::cvt_f16x2(p[o][2 * step + e][0], p[o][2 * step + e][1]);
#pragma unroll
      for (int c = 0; c < kVChunks; c += 2) {
        const ptx::U32x4 words =
            ptx::ldmatrix_x4_trans(Tile::chunk_ahead(row, c) + step * 16 * Tile::kRowPitch);
        add_columns(sums, c, words.x, words.y, weights);
        add_columns(sums, c + 1, words.z, words.w, weights);
      }
    }
  }

  /// Where one is above the limit, that rises, and sums so far are divided anew.
  FOVEA_DEVICE_MEMBER void admit_scales(const Team& team, Sums& sums, SharedAddress scales) {
    const std::uint32_t before = limit_;
    limit_ = limit_above<spec.tile_kv>(before, team.lane, scales);
    if (limit_ == before) return;
    const float rescale = rescale_of_limits(before, limit_);
    sums.for_each([&](float& out, int, int) { out *= rescale; });
  }

  /// Of 16 keys and a chunk of columns: `keys` are the first eight, `others` those behind them.
  FOVEA_DEVICE_MEMBER static void add_columns(Sums& sums, int chunk, std::uint32_t keys,
                                              std::uint32_t others,
                                              const std::uint32_t (&weights)[kEights][2]) {
    const F16Pairs a = f16_pairs_of_rows<spec.v_codes>(keys);
    const F16Pairs b = f16_pairs_of_rows<spec.v_codes>(others);
    const std::uint32_t columns[4] = {a.first, a.second, b.first, b.second};
#pragma unroll
    for (int o = 0; o < kEights; ++o)
      ptx::mma_m16n8k16<Element::f16>(sums.out[o][chunk], columns, weights[o][0], weights[o][1]);
  }

  // Of a chunk four elements as they come; then their upper bytes and their lower ones, or two pairs of f16.
  std::uint32_t queries_[kEights][kQkChunks][2];
  float units_[kEights] = {};  // what Q is times what is multiplied; 0: as it came
  std::uint32_t limit_ = 0;    // the power of two that no scale of a value is above, so far
};

}  // namespace fovea::cuda::sm90::decoding
