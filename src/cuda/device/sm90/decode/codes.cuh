// Products of a warp over a cache of codes. Read compute.cuh for when they are made.
//
//   S = unit scale_k (Q' K),  O = (P scale_v / limit) V limit        Q' = Q / unit, in f16
//
// Codes become f16, which holds both kinds exactly and costs least (common/f16_codes.cuh): of int8 2.5 instructions a
// pair, of e4m3 1 for keys and 1.5 for values. So all operands are f16, whose range is that of neither bf16 nor
// scales: each row of Q is divided by a power of two, and weights by the least power of two that no scale of a value so
// far is above; the products that they are made of are multiplied by it again. Q loses nothing: an element keeps all
// its bits down to 2^-31 of its row's greatest. Weights keep the 11 bits of f16 down to 2^-21 of the greatest.
//
//   K   ldmatrix: chunk c of 16 codes is step c, of which lane l has codes 4 (l % 4) to 4 (l % 4) + 3; of Q the same
//   V   ldmatrix.trans: of chunk c and keys 2 (l % 4), 2 (l % 4) + 1 columns 2 (l / 4), 2 (l / 4) + 1: a block of O has
//       the even columns of a chunk, the next one the odd ones
#pragma once

#include "common/f16_codes.cuh"
#include "common/online_softmax.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"
#include "sm90/decode/cta.cuh"
#include "team/compute.cuh"
#include "team/scores.cuh"
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

/// How a warp multiplies codes, and what it has for that beside its sums.
template <Sm90DecodeSpec spec, class Mods>
class CodedProducts {
  using L = Layout<spec>;
  using T = typename L::T;
  using Team = team::Team<L::kWarpSpec>;
  using Sums = team::Sums<L::kWarpSpec, Mods>;
  using Fragments = typename Sums::Fragments;
  static_assert(!spec.has_padded_head_dim, "rows are whole chunks");

 public:
  static constexpr int kQkChunks = spec.head_dim_qk / 16, kVChunks = spec.head_dim_v / 16;

  /// A operands of Q Kᵀ are on their way, straight from memory. Rows that do not exist are the first one: nobody asks
  /// for what becomes of them.
  FOVEA_DEVICE_MEMBER void ask_for_queries(const Team& team) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int mine = team.my_row(0, half);
      const RowView<L::kWarpSpec> row = team.row_at(team.row_at(mine).exists ? mine : 0);
      const char* const from = static_cast<const char*>(team.p.q.data) +
                               (row.query_at() + team.lane % 4 * 4) * T::kElement.bytes;
#pragma unroll
      for (int c = 0; c < kQkChunks; ++c) {
        const auto four = ptx::ld_global_nc(reinterpret_cast<const ptx::U32x2*>(from + c * 32));
        queries_[c][half] = four.x;
        queries_[c][half + 2] = four.y;
      }
    }
    exponents_ = 0;
  }

  /// For a split of the rows that were asked for last.
  FOVEA_DEVICE_MEMBER void start() {
    if constexpr (spec.element == Element::bf16) {
      if (exponents_ == 0) exponents_ = make_f16(0) | make_f16(1) << 8;
    }
    set_limit(kLeastLimit);
  }

  /// S = Q Kᵀ. scales: of the slice's keys.
  template <class Tile>
  FOVEA_DEVICE_MEMBER void multiply_keys(const Team& team, Fragments& s, const Tile& keys,
                                         SharedAddress scales) const {
    const SharedAddress row = keys.chunk(team.lane % 8 + team.lane / 16 * 8, team.lane / 8 % 2);
#pragma unroll
    for (int j = 0; j < T::kKeyBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][j][e] = 0;
        // Of two chunks all keys: as many sums side by side as there are blocks of them.
#pragma unroll
    for (int c = 0; c < kQkChunks; c += 2) {
#pragma unroll
      for (int j = 0; j < T::kKeyBlocks; j += 2) {
        const ptx::U32x4 words =
            ptx::ldmatrix_x4(Tile::chunk_ahead(row, c) + j * 8 * Tile::kRowPitch);
        multiply_chunk(s[0][j], queries_[c], words.x);
        multiply_chunk(s[0][j], queries_[c + 1], words.y);
        multiply_chunk(s[0][j + 1], queries_[c], words.z);
        multiply_chunk(s[0][j + 1], queries_[c + 1], words.w);
      }
    }
    for_each_pair<T::kKeyBlocks>(team.lane, scales, [&](int j, const ptx::F32x2& scale) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        s[0][j][2 * half] *= unit(half) * scale.x;
        s[0][j][2 * half + 1] *= unit(half) * scale.y;
      }
    });
  }

  /// O += P V. scales: of the slice's values.
  template <class Tile>
  FOVEA_DEVICE_MEMBER void multiply_values(const Team& team, Sums& sums, Fragments& p,
                                           const Tile& values, SharedAddress scales) {
    admit_scales(team, sums, scales);
    const float per_limit = power_of_two(2 * kBias + kTopOfWeight - limit());
    for_each_pair<T::kKeyBlocks>(team.lane, scales, [&](int j, const ptx::F32x2& scale) {
      const float x = scale.x * per_limit, y = scale.y * per_limit;
      p[0][j][0] *= x, p[0][j][1] *= y, p[0][j][2] *= x, p[0][j][3] *= y;
    });
    const SharedAddress row = values.chunk(team.lane % 16, team.lane / 16);
#pragma unroll
    for (int step = 0; step < T::kPvSteps; ++step) {
      std::uint32_t weights[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* const pair = &p[0][step * 2 + e / 2][e % 2 * 2];
        weights[e] = ptx::cvt_f16x2(pair[0], pair[1]);
      }
#pragma unroll
      for (int c = 0; c < kVChunks; c += 2) {
        const ptx::U32x4 words =
            ptx::ldmatrix_x4_trans(Tile::chunk_ahead(row, c) + step * 16 * Tile::kRowPitch);
        add_columns(sums, c, weights, words.x, words.y);
        add_columns(sums, c + 1, weights, words.z, words.w);
      }
    }
  }

  /// O of a row, in the order of its columns: a lane has four neighbours of each chunk.
  FOVEA_DEVICE_MEMBER void put_columns(SharedAddress to, const Sums& sums, int half) const {
    const float factor = power_of_two(limit() - kTopOfWeight);
#pragma unroll
    for (int c = 0; c < kVChunks; ++c) {
      const float* const even = &sums.out[0][2 * c][half * 2];
      const float* const odd = &sums.out[0][2 * c + 1][half * 2];
      ptx::st_shared(
          to + (c * 16 + ptx::lane_idx() % 4 * 4) * 4,
          ptx::F32x4{even[0] * factor, odd[0] * factor, even[1] * factor, odd[1] * factor});
    }
  }

 private:
  /// A row of Q is less than 2^15 then.
  static constexpr std::uint32_t kTopOfQuery = 14;

  FOVEA_DEVICE_MEMBER std::uint32_t limit() const { return exponents_ >> 16; }
  FOVEA_DEVICE_MEMBER void set_limit(std::uint32_t exponent) {
    exponents_ = (exponents_ & 0xffffU) | exponent << 16;
  }
  FOVEA_DEVICE_MEMBER float unit(int half) const {
    if constexpr (spec.element != Element::bf16) return 1.0F;
    return power_of_two(exponents_ >> (8 * half) & 0xffU);
  }

  /// Turns a row into f16 and says by what power of two it was divided.
  FOVEA_DEVICE_MEMBER std::uint32_t make_f16(int half) {
    float greatest = 0;
#pragma unroll
    for (int i = 0; i < 2 * kQkChunks; ++i) {
      const std::uint32_t pair = queries_[i / 2][half + i % 2 * 2];
      greatest = ptx::max_ftz(greatest, ptx::abs(ptx::f32_of_bf16_lo(pair)));
      greatest = ptx::max_ftz(greatest, ptx::abs(ptx::f32_of_bf16_hi(pair)));
    }
    const std::uint32_t found = biased_exponent(team::greatest_of_quad(greatest));
    const std::uint32_t exponent = found < kLeastExponent ? kLeastExponent : found;
    const float factor = power_of_two(2 * kBias + kTopOfQuery - exponent);
#pragma unroll
    for (int i = 0; i < 2 * kQkChunks; ++i) {
      std::uint32_t& pair = queries_[i / 2][half + i % 2 * 2];
      pair = ptx::cvt_f16x2(ptx::mul_rn(ptx::f32_of_bf16_lo(pair), factor),
                            ptx::mul_rn(ptx::f32_of_bf16_hi(pair), factor));
    }
    return exponent - kTopOfQuery;
  }

  FOVEA_DEVICE_MEMBER static void multiply_chunk(float (&s)[4], const std::uint32_t (&queries)[4],
                                                 std::uint32_t word) {
    const F16Pairs keys = f16_pairs<spec.k_codes>(word);
    ptx::mma_m16n8k16<Element::f16>(s, queries, keys.first, keys.second);
  }

  /// Where one is above the limit, that rises, and sums so far are divided anew.
  FOVEA_DEVICE_MEMBER void admit_scales(const Team& team, Sums& sums, SharedAddress scales) {
    const std::uint32_t before = limit(),
                        after = limit_above<spec.tile_kv>(before, team.lane, scales);
    if (after == before) return;
    set_limit(after);
    const float rescale = rescale_of_limits(before, after);
#pragma unroll
    for (int j = 0; j < T::kColBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.out[0][j][e] *= rescale;
  }

  /// Of 16 keys and a chunk of columns: `keys` are the first eight, `others` those behind them.
  FOVEA_DEVICE_MEMBER static void add_columns(Sums& sums, int chunk,
                                              const std::uint32_t (&weights)[4], std::uint32_t keys,
                                              std::uint32_t others) {
    const F16Pairs a = f16_pairs_of_rows<spec.v_codes>(keys);
    const F16Pairs b = f16_pairs_of_rows<spec.v_codes>(others);
    ptx::mma_m16n8k16<Element::f16>(sums.out[0][2 * chunk], weights, a.first, b.first);
    ptx::mma_m16n8k16<Element::f16>(sums.out[0][2 * chunk + 1], weights, a.second, b.second);
  }

  std::uint32_t queries_[kQkChunks][4];
  // A byte each, in one register: of two rows the power of two which Q is times what is multiplied, 0 while it is not
  // f16 yet; and the one that no scale of a value is above, so far.
  std::uint32_t exponents_ = 0;
};

}  // namespace fovea::cuda::sm90::decoding
