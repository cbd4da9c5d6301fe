// Turns of a panel with whole tiles of keys through AMX, so that tile and vector instructions stand side by side. Three
// turns are on their way together:
//
//   tiles     turn n - 1: Vᵀ P, 32 channels at a time        | turn n + 1: K Qᵀ, half of the keys at a time
//   vectors   turn n: sums become scores, and their maxima   | turn n: half of the scores become codes
//             turn n - 1: sums of the channels before        |
//
// K Qᵀ of turn n + 1 overwrites the scores of turn n, half by half: what does not stay in the first-level cache costs
// two cycles a line. The arithmetic is that of code_products-inl.hpp, operation by operation: a tile that goes step by
// step and one that goes through here give the same bits.
//
// Bound: 48 products of 16 cycles; 36 tile stores of 17, which share nothing with other stores; some 4,700 vector
// operations. While a tile instruction is under way, and for 200 cycles after it, products, conversions, maxima and
// shifts of vectors have one port; only additions and logic keep two. So tile instructions come close together.
#pragma once

#if defined(__x86_64__)

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/kernels/amx.hpp"
#include "cpu/kernels/code_tiles_amx.hpp"
#include "cpu/kernels/codes.hpp"
#include "cpu/kernels/panel_amx_softmax.hpp"
#include "cpu/kernels/panel_amx_tiles.hpp"

namespace fovea::cpu::amx {

class CodeTurns {
 public:
  static std::size_t bytes() { return sizeof(Work); }

  static FOVEA_AMX_INT8 void push(CodePipeline& p, const CodeTurn& turn) {
    if (p.has_current) {
      run(p, &turn);
    } else {
      const CompilerFence fence;
      NoWork none;
      for (std::int64_t half = 0; half < 2; ++half) {
        multiply_keys(turn, half, none);
        store_code_sums(work_of(p).scores + half * kHalf, none);
      }
    }
    p.current = turn;
    p.has_current = true;
  }

  static FOVEA_AMX_INT8 void flush(CodePipeline& p) {
    if (!p.has_current) return;
    run(p, nullptr);
    NoWork none;
    multiply_values(p, none);
    add_block(p, num_blocks(p) - 1);
    p.has_current = p.has_prior = false;
  }

 private:
  static constexpr std::int64_t kKeys = CodeProducts::kPitch;
  static constexpr std::int64_t kHalf = kJobRows * kLanes;  // sums of a block
  static constexpr std::int64_t kQuads = kKeys / 4;
  static_assert(kKeys == 2 * kJobRows && kKeys == kTileBytes);
  // Tile instructions come in the first part of so many of the work beside them.
  static constexpr std::int64_t kTileDensity = 2;

  /// Of turns on their way.
  struct alignas(64) Work {
    float scores[2 * kHalf];  // of the current turn; before: sums of codes, s32
    std::int32_t quads[kQuads * kLanes];
    std::int32_t sums[2][kHalf];            // of the prior turn's values, two blocks of channels
    float weight[kLanes], rescale[kLanes];  // of the prior turn
  };

  static Work& work_of(const CodePipeline& p) { return *reinterpret_cast<Work*>(p.memory); }

  static std::int64_t num_blocks(const CodePipeline& p) {
    return p.has_prior ? (p.prior.values.head_dim + kJobRows - 1) / kJobRows : 0;
  }

  // ---- vector work ----

  /// Quads of keys, worked on in gaps between tile instructions.
  class Gaps {
   public:
    FOVEA_AMX_INT8_INLINE void start(std::int64_t num_gaps, std::int32_t num_quads) {
      num_gaps_ = static_cast<std::int32_t>(num_gaps);
      credit_ = 0;
      num_quads_ = remaining_ = num_quads;
    }
    FOVEA_AMX_INT8_INLINE void open() { credit_ += num_quads_; }
    FOVEA_AMX_INT8_INLINE bool takes_quad() {
      if (credit_ < num_gaps_) return false;
      credit_ -= num_gaps_;
      --remaining_;
      return true;
    }
    FOVEA_AMX_INT8_INLINE bool takes_rest() { return remaining_-- > 0; }

   private:
    std::int32_t num_gaps_ = 1, credit_ = 0, num_quads_ = 0, remaining_ = 0;
  };

  /// Sums become scores; their maxima, in two chains a vector.
  class Maxima {
   public:
    FOVEA_AMX_INT8_INLINE Maxima(const CodedKeys& keys, float* scores)
        : scale_(keys.scale), scores_(scores) {
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) even_[v] = odd_[v] = nothing();
    }
    FOVEA_AMX_INT8_INLINE void start(std::int64_t num_gaps) { gaps_.start(num_gaps, kQuads); }
    FOVEA_AMX_INT8_INLINE void fill_gap() {
      for (gaps_.open(); gaps_.takes_quad();) next_quad();
    }
    FOVEA_AMX_INT8_INLINE void finish() {
      while (gaps_.takes_rest()) next_quad();
    }
    FOVEA_AMX_INT8_INLINE __m512 greatest(int v) const { return _mm512_max_ps(even_[v], odd_[v]); }

   private:
    FOVEA_AMX_INT8_INLINE __m512 next_score(int key, int v) {
      float* const at = scores_ + key * kLanes + v * kVectorLanes;
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(at));
      const __m512 score = _mm512_mul_ps(sum, _mm512_set1_ps(scale_[key]));
      _mm512_store_ps(at, score);
      return score;
    }
    FOVEA_AMX_INT8_INLINE void next_quad() {
#pragma GCC unroll 2
      for (int key = 0; key < 4; key += 2) {
#pragma GCC unroll 3
        for (int v = 0; v < kVectors; ++v) {
          even_[v] = _mm512_max_ps(next_score(key, v), even_[v]);
          odd_[v] = _mm512_max_ps(next_score(key + 1, v), odd_[v]);
        }
      }
      scores_ += 4 * kLanes;
      scale_ += 4;
    }

    __m512 even_[kVectors], odd_[kVectors];
    const float* scale_;
    float* scores_;
    Gaps gaps_;
  };

  /// Of scores that a mask has changed.
  static FOVEA_AMX_INT8 void find_greatest(const float* scores, TileOrigins* origins) {
    for (int v = 0; v < kVectors; ++v) {
      __m512 greatest = nothing();
      for (std::int64_t key = 0; key < kKeys; ++key) {
        const __m512 score = _mm512_load_ps(scores + key * kLanes + v * kVectorLanes);
        greatest = _mm512_max_ps(score, greatest);
      }
      _mm512_store_ps(origins[v].greatest, greatest);
    }
  }

  /// Scores of four keys become codes.
  static FOVEA_AMX_INT8_INLINE __m512i next_codes(const float* scores, __m512 origin,
                                                  const Exponential& exponential, __m512& sum) {
    __m512i code[4];
#pragma GCC unroll 4
    for (int key = 0; key < 4; ++key) {
      const __m512 x = _mm512_sub_ps(_mm512_load_ps(scores + key * kLanes), origin);
      const __m512 p = exponential(x);
      sum = _mm512_add_ps(sum, p);
      // The nearest integer, in the low bits.
      code[key] =
          _mm512_castps_si512(_mm512_fmadd_ps(p, _mm512_set1_ps(255.0F), _mm512_set1_ps(0x1p+23F)));
    }
    constexpr int kOr = 0xfe, kOrAnd = 0xf8;  // a | b | c, a | (b & c)
    const __m512i later =
        _mm512_ternarylogic_epi32(_mm512_slli_epi32(code[1], 8), _mm512_slli_epi32(code[2], 16),
                                  _mm512_slli_epi32(code[3], 24), kOr);
    return _mm512_ternarylogic_epi32(later, code[0], _mm512_set1_epi32(0xff), kOrAnd);
  }

  /// Where the codes of half the keys come from and go to.
  struct CodesOfHalf {
    const float* octaves;
    const TileOrigins* origins;
    const float* scores;
    std::int32_t* quads;
    float* sums;  // [lanes], so far
  };

  /// One vector of rows after the other: registers hold no more.
  class Codes {
   public:
    FOVEA_AMX_INT8_INLINE Codes(const CodesOfHalf& half, std::int64_t num_gaps)
        : octaves_(half.octaves),
          origins_(half.origins),
          scores_(half.scores),
          quads_(half.quads),
          sums_(half.sums) {
      gaps_.start(num_gaps, kVectors * kQuads / 2);
      load_vector(0);
    }
    FOVEA_AMX_INT8_INLINE void fill_gap() {
      for (gaps_.open(); gaps_.takes_quad();) next_quad();
    }
    FOVEA_AMX_INT8_INLINE void finish() {
      while (gaps_.takes_rest()) next_quad();
    }

   private:
    FOVEA_AMX_INT8_INLINE void load_vector(int v) {
      vector_ = v;
      left_ = kQuads / 2;
      const std::int64_t lane = v * kVectorLanes;
      exponential_ = Exponential(_mm512_load_ps(octaves_ + lane));
      origin_ = _mm512_load_ps(origins_[v].origin);
      sum_ = _mm512_load_ps(sums_ + lane);
      from_ = scores_ + lane;
      to_ = quads_ + lane;
    }
    FOVEA_AMX_INT8_INLINE void next_quad() {
      _mm512_store_si512(to_, next_codes(from_, origin_, exponential_, sum_));
      from_ += 4 * kLanes;
      to_ += kLanes;
      if (--left_ > 0) return;
      _mm512_store_ps(sums_ + vector_ * kVectorLanes, sum_);
      if (vector_ + 1 < kVectors) load_vector(vector_ + 1);
    }

    const float* octaves_;
    const TileOrigins* origins_;
    const float* scores_;
    std::int32_t* quads_;
    float* sums_;
    Gaps gaps_;
    // Of the vector at work:
    int vector_ = 0;
    std::int32_t left_ = 0;
    Exponential exponential_{1.0F};
    __m512 origin_ = _mm512_setzero_ps(), sum_ = _mm512_setzero_ps();
    const float* from_ = nullptr;
    std::int32_t* to_ = nullptr;
  };

  /// A block of channels of the prior turn.
  static FOVEA_AMX_INT8_INLINE void add_block(const CodePipeline& p, std::int64_t block) {
    const Work& work = work_of(p);
    const std::int32_t* const sums = work.sums[block & 1];
    const std::int64_t channel = block * kJobRows;
    if (keeps_sums(work.rescale)) {
      add_code_sums<false>(p.prior.values, channel, sums, work.weight, work.rescale, p.prior.out);
    } else {
      add_code_sums<true>(p.prior.values, channel, sums, work.weight, work.rescale, p.prior.out);
    }
  }

  // ---- tile work ----

  static std::int64_t num_key_gaps(const CodeTurn& turn) {
    return turn.keys.pitch / kTileBytes * 2;
  }
  /// Of half the keys.
  template <class VectorWork>
  static FOVEA_AMX_INT8_INLINE void multiply_keys(const CodeTurn& turn, std::int64_t half,
                                                  VectorWork& work) {
    const std::int64_t pitch = turn.keys.pitch;
    const auto* const quads = static_cast<const std::int32_t*>(turn.queries);
    multiply_key_codes(turn.keys.codes + half * kJobRows * pitch, pitch, pitch, quads,
                       quads + pitch / 4 * kLanes, work);
  }

  static constexpr std::int64_t kBlockGaps = 2 + kStoreGaps;

  /// Of the prior turn, all but the sums of the last block added.
  template <class VectorWork>
  static FOVEA_AMX_INT8_INLINE void multiply_values(const CodePipeline& p, VectorWork& work) {
    const CodedValues& values = p.prior.values;
    const std::uint8_t* codes = values.codes;
    const std::int32_t* const quads = work_of(p).quads;
    const std::int64_t blocks = num_blocks(p);
    for (std::int64_t block = 0; block < blocks; ++block) {
      {
        const CompilerFence fence;
        multiply_value_codes(codes, values.pitch, kKeys, quads, work);
        store_code_sums(work_of(p).sums[block & 1], work);
      }
      if (block > 0) add_block(p, block - 1);
      codes += kJobRows * values.pitch;
    }
  }

  // ---- a turn ----

  static FOVEA_AMX_INT8 void run(CodePipeline& p, const CodeTurn* next) {
    const CodeTurn& turn = p.current;
    Work& work = work_of(p);
    const std::int64_t blocks = num_blocks(p);
    Maxima maxima(turn.keys, work.scores);
    maxima.start(std::max<std::int64_t>(1, kTileDensity * blocks * kBlockGaps));
    multiply_values(p, maxima);
    maxima.finish();
    TileOrigins origins[kVectors];
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) _mm512_store_ps(origins[v].greatest, maxima.greatest(v));
    if (turn.hide != nullptr) {
      turn.hide(turn.context, work.scores);
      find_greatest(work.scores, origins);
    }
    for (int v = 0; v < kVectors; ++v) {
      code_products_avx512()->raise_origins(turn, v * static_cast<int>(kVectorLanes), origins[v]);
    }
    alignas(64) float sums[kLanes] = {};
    const CodesOfHalf first{turn.octaves, origins, work.scores, work.quads, sums};
    const CodesOfHalf second{turn.octaves, origins, work.scores + kHalf,
                             work.quads + kQuads / 2 * kLanes, sums};
    {
      const CompilerFence fence;
      const std::int64_t gaps = next == nullptr ? 1 : kTileDensity * num_key_gaps(*next);
      Codes codes(first, gaps);
      if (next != nullptr) multiply_keys(*next, 0, codes);
      codes.finish();
    }
    {
      const CompilerFence fence;
      const std::int64_t gaps =
          next == nullptr ? 1 : kTileDensity * (num_key_gaps(*next) + kStoreGaps);
      Codes codes(second, gaps);
      if (next != nullptr) {
        store_code_sums(work.scores, codes);
        multiply_keys(*next, 1, codes);
      }
      codes.finish();
      NoWork none;
      if (next != nullptr) store_code_sums(work.scores + kHalf, none);
    }
    if (blocks > 0) add_block(p, blocks - 1);
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t lane = v * kVectorLanes;
      const __m512 weight = _mm512_load_ps(origins[v].weight);
      float* const row_sum = turn.rows.row_sum + lane;
      _mm512_store_ps(
          row_sum, _mm512_fmadd_ps(weight, _mm512_load_ps(sums + lane), _mm512_load_ps(row_sum)));
      _mm512_store_ps(work.weight + lane, _mm512_mul_ps(weight, _mm512_set1_ps(1.0F / 255)));
      _mm512_store_ps(work.rescale + lane, _mm512_load_ps(turn.rows.rescale + lane));
    }
    p.prior = turn;
    p.has_prior = true;
  }
};

}  // namespace fovea::cpu::amx

#endif
