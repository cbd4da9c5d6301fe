// Products of codes of eight bits by vpdpbusd: four multiply-adds of u8 · s8 a lane and instruction, sums in s32.
// Layouts and contracts: codes.hpp. Highway of Debian 12 has no such operation, hence one intrinsic.
//
//   Sᵀ = K Qᵀ    K is the operand without sign: (code + 128) q sums to 128 Σ q too much, a number of the lane that
//                sums start from. Nothing is rounded.
//   Oᵀ += Vᵀ P   probabilities are the operand without sign as they are.
//
// Bound: the vpdpbusd rate, twice that of vdpbf16ps and four times that of f32 multiply-adds. The register blocks are
// those of panel-inl.hpp.

#if defined(FOVEA_CPU_KERNELS_CODE_PRODUCTS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_KERNELS_CODE_PRODUCTS_INL_HPP_
#undef FOVEA_CPU_KERNELS_CODE_PRODUCTS_INL_HPP_
#else
#define FOVEA_CPU_KERNELS_CODE_PRODUCTS_INL_HPP_
#endif

#include <cstdint>
#include <cstring>

#include "cpu/kernels/codes.hpp"
#include "hwy/highway.h"
// after highway.h: per-target headers
#include "cpu/kernels/round_probabilities-inl.hpp"

#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
#if HWY_TARGET == HWY_AVX3
#define FOVEA_DOT_TARGET HWY_TARGET_STR ",avx512vnni"
#else
#define FOVEA_DOT_TARGET HWY_TARGET_STR ",avxvnni"
#endif
#define FOVEA_DOT __attribute__((target(FOVEA_DOT_TARGET)))
#define FOVEA_DOT_INLINE FOVEA_DOT __attribute__((always_inline)) inline

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using SumTag = hn::RebindToSigned<FloatTag>;
using SumVector = hn::Vec<SumTag>;

/// Sums in registers have the type of their lanes: the vectors of 64-bit lanes that intrinsics and Highway take for all
/// integers make GCC 12 keep two copies of each, one of them in memory.
using Sums [[gnu::vector_size(sizeof(SumVector))]] = std::int32_t;
using Quads = decltype(SumVector::raw);

FOVEA_DOT_INLINE Sums dot_quads(Sums sum, Quads of_u8, Quads of_s8) {
#if HWY_TARGET == HWY_AVX3
  return reinterpret_cast<Sums>(_mm512_dpbusd_epi32(reinterpret_cast<Quads>(sum), of_u8, of_s8));
#else
  return reinterpret_cast<Sums>(
      _mm256_dpbusd_avx_epi32(reinterpret_cast<Quads>(sum), of_u8, of_s8));
#endif
}

FOVEA_DOT_INLINE Quads load_quads(const std::int32_t* at) { return hn::Load(SumTag(), at).raw; }

FOVEA_DOT_INLINE FloatVector to_floats(Sums sum) {
  return hn::ConvertTo(FloatTag(), SumVector{reinterpret_cast<Quads>(sum)});
}

/// Four codes in every lane.
FOVEA_DOT_INLINE Quads broadcast_quad(const std::uint8_t* at) {
  std::int32_t quad = 0;
  std::memcpy(&quad, at, sizeof(quad));
  return hn::Set(SumTag(), quad).raw;
}

inline constexpr std::int64_t num_quads(std::int64_t count) { return (count + 3) / 4; }

FOVEA_DOT inline void pack_code_queries(const std::uint8_t* const* rows, std::int64_t head_dim,
                                        void* queries) {
  alignas(64) static constexpr std::uint8_t kZeros[CodeProducts::pitch_of(kMaxHeadDim)] = {};
  auto* const quads = static_cast<std::int32_t*>(queries);
  const std::int64_t count = CodeProducts::pitch_of(head_dim) / 4;
  for (int lane = 0; lane < kPanelLanes; lane += kPackedLanes) {
    const float* words[kPackedLanes];  // four codes each, moved as they are
    for (int i = 0; i < kPackedLanes; ++i) {
      const std::uint8_t* const row = rows[lane + i] == nullptr ? kZeros : rows[lane + i];
      words[i] = reinterpret_cast<const float*>(row);
    }
    pack_lanes(words, count, static_cast<float*>(queries) + lane);
  }
  const SumTag d;
  const Quads ones = hn::Set(d, 0x01010101).raw;
  for (int lane = 0; lane < kPanelLanes; lane += kVectorLanes) {
    Sums sum{};
    for (std::int64_t i = 0; i < count; ++i)
      sum = dot_quads(sum, ones, load_quads(quads + i * kPanelLanes + lane));
    const SumVector correction = hn::ShiftLeft<7>(SumVector{reinterpret_cast<Quads>(sum)});
    hn::Store(hn::Neg(correction), d, quads + count * kPanelLanes + lane);
  }
}

template <int kRows>
FOVEA_DOT_INLINE void code_scores_block(const std::int32_t* queries,
                                        const std::int32_t* corrections, const CodedKeys& keys,
                                        std::int64_t key, std::int64_t quads,
                                        const LaneScales& lanes, float* out) {
  const FloatTag d;
  const std::uint8_t* const codes = keys.codes + key * keys.pitch;
  Sums sum[kRows][kPanelVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v)
      sum[r][v] = reinterpret_cast<Sums>(load_quads(corrections + v * kVectorLanes));
  }
  for (std::int64_t i = 0; i < quads; ++i) {
    Quads q[kPanelVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v)
      q[v] = load_quads(queries + i * kPanelLanes + v * kVectorLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Quads k = broadcast_quad(codes + r * keys.pitch + 4 * i);
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) sum[r][v] = dot_quads(sum[r][v], k, q[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const FloatVector of_key = hn::Set(d, keys.scale[key + r]);
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      const int lane = v * kVectorLanes;
      const FloatVector codes_sum = to_floats(sum[r][v]);
      FloatVector score = hn::Mul(codes_sum, of_key);
      if (lanes.shift != nullptr) {
        const FloatVector both = hn::Mul(of_key, hn::Load(d, lanes.scale + lane));
        score = hn::MulAdd(codes_sum, both, hn::Load(d, lanes.shift + lane));
      }
      hn::Store(score, d, out + (key + r) * kPanelLanes + lane);
    }
  }
}

FOVEA_DOT inline void code_scores(const void* queries, const CodedKeys& keys, std::int64_t head_dim,
                                  const LaneScales& lanes, float* scores) {
  const auto* const quads_of = static_cast<const std::int32_t*>(queries);
  const std::int32_t* const corrections =
      quads_of + CodeProducts::pitch_of(head_dim) / 4 * kPanelLanes;
  std::int64_t key = 0;
  for (; key + kBlockRows <= keys.count; key += kBlockRows) {
    code_scores_block<kBlockRows>(quads_of, corrections, keys, key, num_quads(head_dim), lanes,
                                  scores);
  }
  for (; key < keys.count; ++key)
    code_scores_block<1>(quads_of, corrections, keys, key, num_quads(head_dim), lanes, scores);
}

/// Adding it leaves the nearest integer, of 0 to 2^22, in the low bits.
inline constexpr float kIntegerShift = 0x1p+23F;

/// The codes of four keys' probabilities: bits above a code leave by the shift, and those of the first are taken off.
template <bool kDrops>
HWY_ATTR HWY_INLINE void round_quads(const QuantizedTile& tile, const PanelDropout& dropout,
                                     const float* greatest, const QuantizedRows& rows, int vector) {
  const FloatTag d;
  const SumTag di;
  constexpr float kMost = 255;
  const int lane = vector * kVectorLanes;
  TileOrigins of_tile;
  raise_origins({.pv = QuantFormat::int8}, tile, greatest + lane, rows, lane, of_tile);
  const FloatVector octaves = hn::Load(d, tile.octaves + lane);
  const FloatVector lowest = hn::Div(hn::Set(d, kZeroPower), octaves);
  const FloatVector origin = hn::Load(d, of_tile.origin);
  DropoutColumn column(dropout, vector);
  FloatVector sum = hn::Zero(d), kept = hn::Zero(d);
  auto* const quads = reinterpret_cast<std::int32_t*>(tile.scores) + lane;
  const auto code_of = [&](std::int64_t key) HWY_ATTR {
    const FloatVector x = hn::Sub(hn::Load(d, tile.scores + key * kPanelLanes + lane), origin);
    const FloatVector p = exp2_nonpositive(d, x, octaves, lowest);
    sum = hn::Add(sum, p);
    const FloatVector shifted = hn::MulAdd(p, hn::Set(d, kMost), hn::Set(d, kIntegerShift));
    if constexpr (kDrops) {
      const auto keeps = column.keeps(key);
      kept = hn::Add(kept, hn::IfThenElseZero(keeps, p));
      return hn::BitCast(di, hn::IfThenElseZero(keeps, shifted));
    } else {
      return hn::BitCast(di, shifted);
    }
  };
  const auto first_of = [&](std::int64_t key)
                            HWY_ATTR { return hn::And(code_of(key), hn::Set(di, 0xff)); };
  std::int64_t key = 0;
  for (; key + 4 <= tile.num_keys; key += 4) {
    const SumVector first = first_of(key);
    const SumVector second = hn::ShiftLeft<8>(code_of(key + 1));
    const SumVector third = hn::ShiftLeft<16>(code_of(key + 2));
    const SumVector fourth = hn::ShiftLeft<24>(code_of(key + 3));
    hn::Store(hn::Or(hn::Or(first, second), hn::Or(third, fourth)), di,
              quads + key / 4 * kPanelLanes);
  }
  if (key < tile.num_keys) {
    SumVector quad = first_of(key);
    if (key + 1 < tile.num_keys) quad = hn::Or(quad, hn::ShiftLeft<8>(code_of(key + 1)));
    if (key + 2 < tile.num_keys) quad = hn::Or(quad, hn::ShiftLeft<16>(code_of(key + 2)));
    hn::Store(quad, di, quads + key / 4 * kPanelLanes);
    key += 4;
  }
  for (key = key / 4; key < CodeProducts::pitch_of(tile.num_keys) / 4; ++key)
    hn::Store(hn::Zero(di), di, quads + key * kPanelLanes);
  const FloatVector weight = hn::Load(d, of_tile.weight);
  const FloatVector keep_scale = hn::Set(d, kDrops ? dropout.keep_scale : 1.0F);
  hn::Store(hn::Mul(hn::Mul(weight, hn::Set(d, 1 / kMost)), keep_scale), d, rows.weight + lane);
  add_weighted(weight, sum, rows.row_sum + lane);
  if constexpr (kDrops) add_weighted(hn::Mul(weight, keep_scale), kept, rows.kept_sum + lane);
}

HWY_ATTR inline void round_to_quads(const QuantizedTile& tile, const PanelDropout& dropout,
                                    const QuantizedRows& rows) {
  HWY_ALIGN float greatest[kPanelLanes];
  find_greatest(tile, greatest);
  for (int vector = 0; vector < kPanelVectors; ++vector) {
    if (dropout.threshold > 0) {
      round_quads<true>(tile, dropout, greatest, rows, vector);
    } else {
      round_quads<false>(tile, dropout, greatest, rows, vector);
    }
  }
}

HWY_ATTR inline void raise_origins_of_turn(const CodeTurn& turn, int lane, TileOrigins& of) {
  raise_origins({.pv = QuantFormat::int8}, {.octaves = turn.octaves}, of.greatest, turn.rows, lane,
                of);
}

/// Are sums so far multiplied by 1 alone?
HWY_ATTR inline bool keeps_sums(const QuantizedRows& rows) {
  const FloatTag d;
  auto keeps = hn::Eq(hn::Zero(d), hn::Zero(d));
  for (int lane = 0; lane < kPanelLanes; lane += kVectorLanes)
    keeps = hn::And(keeps, hn::Eq(hn::Load(d, rows.rescale + lane), hn::Set(d, 1.0F)));
  return hn::AllTrue(d, keeps);
}

template <bool kRescales, int kRows>
FOVEA_DOT_INLINE void code_values_block(const CodedValues& values, std::int64_t channel,
                                        const std::int32_t* probabilities,
                                        const QuantizedRows& rows, float* out) {
  const FloatTag d;
  const SumTag di;
  const std::uint8_t* const codes = values.codes + channel * values.pitch;
  Sums sum[kRows][kPanelVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) sum[r][v] = Sums{};
  }
  for (std::int64_t i = 0; i < num_quads(values.num_keys); ++i) {
    Quads p[kPanelVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v)
      p[v] = load_quads(probabilities + i * kPanelLanes + v * kVectorLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Quads value = broadcast_quad(codes + r * values.pitch + 4 * i);
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) sum[r][v] = dot_quads(sum[r][v], p[v], value);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const FloatVector scale = hn::Set(d, values.scale[channel + r]);
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      const int lane = v * kVectorLanes;
      float* const at = out + (channel + r) * kPanelLanes + lane;
      FloatVector before = hn::Load(d, at);
      if constexpr (kRescales) before = hn::Mul(before, hn::Load(d, rows.rescale + lane));
      const FloatVector factor = hn::Mul(hn::Load(d, rows.weight + lane), scale);
      hn::Store(hn::MulAdd(factor, to_floats(sum[r][v]), before), d, at);
    }
  }
}

template <bool kRescales>
FOVEA_DOT_INLINE void code_values(const CodedValues& values, const std::int32_t* probabilities,
                                  const QuantizedRows& rows, float* out) {
  std::int64_t channel = 0;
  for (; channel + kBlockRows <= values.head_dim; channel += kBlockRows)
    code_values_block<kRescales, kBlockRows>(values, channel, probabilities, rows, out);
  for (; channel < values.head_dim; ++channel)
    code_values_block<kRescales, 1>(values, channel, probabilities, rows, out);
}

FOVEA_DOT inline void accumulate_codes(const CodedValues& values, const void* probabilities,
                                       const QuantizedRows& rows, float* out) {
  const auto* const quads = static_cast<const std::int32_t*>(probabilities);
  if (keeps_sums(rows)) {
    code_values<false>(values, quads, rows, out);
  } else {
    code_values<true>(values, quads, rows, out);
  }
}

inline const CodeProducts& code_products() {
  static constexpr CodeProducts kProducts{.pack_queries = pack_code_queries,
                                          .scores = code_scores,
                                          .round_probabilities = round_to_quads,
                                          .accumulate = accumulate_codes,
                                          .raise_origins = raise_origins_of_turn};
  return kProducts;
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#undef FOVEA_DOT_INLINE
#undef FOVEA_DOT
#undef FOVEA_DOT_TARGET
#endif

#endif
