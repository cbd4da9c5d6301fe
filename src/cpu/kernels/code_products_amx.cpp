// Products of codes of eight bits by AMX: a tile instruction multiplies 16 rows by 16 lanes over 64 codes and sums in
// s32. Layouts and contracts: codes.hpp.
//
//   Sᵀ[16 keys][16 lanes]  += K[16 keys][64 d] · Qᵀ quads[16 quads of d][16 lanes]           u8 · s8
//   Oᵀ[16 d][16 lanes]     += Vᵀ[16 d][64 keys] · P quads[16 quads of keys][16 lanes]        s8 · u8
//
// Bound: 2048 multiply-adds and additions a cycle in the tile unit; vectors turn sums into scores, scores into codes
// and sums into Oᵀ, and take three times as long at head_dim 128. What they do with one block of sums stands beside the
// tile instructions of the next, which a core does at the same time. Whole tiles of 64 keys go through
// code_pipeline_amx.hpp; what is here takes the rest: tiles of other sizes, dropout, rows that are not finite.
#include "cpu/kernels/codes.hpp"

#if defined(__x86_64__)

#include <cstdint>

#include "cpu/kernels/amx.hpp"
#include "cpu/kernels/code_pipeline_amx.hpp"
#include "cpu/kernels/code_tiles_amx.hpp"

namespace fovea::cpu {
namespace {

using amx::CompilerFence;
using amx::kLanes;
using amx::kVectorLanes;

constexpr std::int64_t kBlock = CodeProducts::kBlock;
static_assert(kBlock == amx::kJobRows && CodeProducts::kPitch == amx::kTileBytes);

/// In place: sums of `count` keys from `key` on become scores.
FOVEA_AMX_INT8_INLINE void to_scores(const CodedKeys& keys, std::int64_t key, std::int64_t count,
                                     const LaneScales& lanes, float* scores) {
  for (std::int64_t i = key; i < key + count; ++i) {
    const __m512 of_key = _mm512_set1_ps(keys.scale[i]);
#pragma GCC unroll 3
    for (std::int64_t lane = 0; lane < kLanes; lane += kVectorLanes) {
      float* const at = scores + i * kLanes + lane;
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(at));
      __m512 score = _mm512_mul_ps(sum, of_key);
      if (lanes.shift != nullptr) {
        const __m512 both = _mm512_mul_ps(of_key, _mm512_load_ps(lanes.scale + lane));
        score = _mm512_fmadd_ps(sum, both, _mm512_load_ps(lanes.shift + lane));
      }
      _mm512_store_ps(at, score);
    }
  }
}

FOVEA_AMX_INT8 void scores(const void* queries, const CodedKeys& keys, std::int64_t head_dim,
                           const LaneScales& lanes, float* out) {
  const auto* const quads = static_cast<const std::int32_t*>(queries);
  const std::int64_t depth = CodeProducts::pitch_of(head_dim);
  const std::int32_t* const corrections = quads + depth / 4 * kLanes;
  std::int64_t done = 0;
  for (std::int64_t key = 0; key < keys.count; key += kBlock) {
    {
      const CompilerFence fence;
      amx::NoWork none;
      amx::multiply_key_codes(keys.codes + key * keys.pitch, keys.pitch, depth, quads, corrections,
                              none);
      amx::store_code_sums(out + key * kLanes, none);
    }
    if (key > 0) to_scores(keys, done, kBlock, lanes, out);
    done = key;
  }
  to_scores(keys, done, keys.count - done, lanes, out);
}

template <bool kRescales>
FOVEA_AMX_INT8 void accumulate_blocks(const CodedValues& values, const std::int32_t* quads,
                                      const QuantizedRows& rows, float* out) {
  alignas(64) std::int32_t sums[2][kBlock * kLanes];
  std::int64_t done = 0;
  int half = 0;
  for (std::int64_t channel = 0; channel < values.head_dim; channel += kBlock, half ^= 1) {
    {
      const CompilerFence fence;
      amx::NoWork none;
      amx::multiply_value_codes(values.codes + channel * values.pitch, values.pitch,
                                values.num_keys, quads, none);
      amx::store_code_sums(sums[half], none);
    }
    if (channel > 0)
      amx::add_code_sums<kRescales>(values, done, sums[half ^ 1], rows.weight, rows.rescale, out);
    done = channel;
  }
  amx::add_code_sums<kRescales>(values, done, sums[half ^ 1], rows.weight, rows.rescale, out);
}

FOVEA_AMX_INT8 void accumulate(const CodedValues& values, const void* probabilities,
                               const QuantizedRows& rows, float* out) {
  const auto* const quads = static_cast<const std::int32_t*>(probabilities);
  if (amx::keeps_sums(rows.rescale)) {
    accumulate_blocks<false>(values, quads, rows, out);
  } else {
    accumulate_blocks<true>(values, quads, rows, out);
  }
}

CodeProducts make_products() {
  CodeProducts products = *code_products_avx512();
  products.scores = scores;
  products.accumulate = accumulate;
  products.pipeline_bytes = amx::CodeTurns::bytes;
  products.push = amx::CodeTurns::push;
  products.flush = amx::CodeTurns::flush;
  return products;
}

}  // namespace

const CodeProducts* code_products_amx() {
  static const CodeProducts products = make_products();
  return &products;
}

}  // namespace fovea::cpu

#else

namespace fovea::cpu {
const CodeProducts* code_products_amx() { return nullptr; }
}  // namespace fovea::cpu

#endif
