// Q rounded to eight bits before attention, for kernels that read its codes as they read those of K:
// sm80/attention_quantized. Hopper's kernel rounds rows when they have arrived (sm90/forward/query_codes.cuh).
//
//   code = rint(q / scale),  scale = greatest |q| of the row / 127
//
// Rows may share scales: neighbours, or rows n mod 8 of every 16 or 32, which a lane of mma's accumulators holds. Their
// greatest magnitudes meet in shared memory. Rounding::given: codes are e4m3, by the scale of the sequence and kv head.
//
// A CTA takes 128 rows of one head. They lie in its lanes as keys do, so that a row is some neighbours'. Nothing is
// subtracted; beside the codes of a row is q · μ, which its scores lack: of the row as given, rotated or not. Numbers
// lack nothing.
#pragma once

#include "common/head_tiles.cuh"
#include "common/quantize_k.cuh"
#include "common/round_to_codes.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/quantize_kv.h"

namespace fovea::cuda {

template <QuantizeKvSpec spec>
struct QuantizeQ {
  using Keys = QuantizeK<spec>;
  using Tiles = typename Keys::Tiles;
  using Rows = typename Keys::Rows;

  const QuantizeQParams& p;
  const Keys keys;

  /// The tile of this number, among those of all sequences and heads.
  FOVEA_DEVICE_MEMBER void run(std::int32_t number) const {
    const HeadTile tile = queries().tile(number);
    if (tile.begin < queries().length(tile.sequence)) round(tile);
  }

 private:
  FOVEA_DEVICE_MEMBER Tiles queries() const {
    return {p.q,        p.cu_seqlens_q, p.total_q,  keys.p.num_sequences,
            p.seqlen_q, p.num_heads_q,  p.num_tiles};
  }

  static constexpr bool kSharesScales = spec.q_span > 1;
  static_assert(kQuantizedTile % spec.q_span == 0 && spec.q_span % spec.q_step == 0);

  FOVEA_DEVICE_MEMBER void round(const HeadTile& tile) const {
    const Rows rows = queries().rows(tile.sequence, tile.head);
    typename Keys::Chunks chunks;
#pragma unroll
    for (int step = 0; step < Keys::kSteps; ++step)
      chunks[step] = keys.load(rows, std::int64_t{tile.begin} + keys.row_of(step));
    if constexpr (kSharesScales) share_scales(chunks);
    float given = 0.0F;
    if constexpr (Keys::kIsGiven) given = given_scale(p.scales, tile.sequence, tile.head / p.group);
    EightNumbers mean{};
    if constexpr (!spec.writes_numbers) keys.read_mean(tile.sequence, tile.head / p.group, mean);
#pragma unroll
    for (int step = 0; step < Keys::kSteps; ++step) {
      EightNumbers x;
      const bool is_rounded = unpack_finite(chunks[step], x);
      QuantizedRow beside = beside_of(x, mean);
      if constexpr (Keys::kIsGiven) beside.scale = given;
      if constexpr (kSharesScales)
        beside.scale = ptx::ld_shared<float>(scale_at(keys.row_of(step)));
      const ptx::U32x2 codes = codes_of<Keys::kCodes>(x, factor_of_codes<spec>(beside.scale));
      const std::int32_t row = tile.begin + keys.row_of(step);
      if constexpr (spec.writes_numbers) {
        const ptx::U32x4 numbers = keys.numbers_of_row(codes, beside.scale, mean);
        if (row < rows.count) store(tile.row + row, is_rounded ? numbers : chunks[step]);
      } else if (row < rows.count) {
        store(tile.row + row, codes, {is_rounded ? beside.scale : 0.0F, beside.of_mean});
      }
    }
  }

  /// Zeros of a row that is not finite. Is it?
  FOVEA_DEVICE_MEMBER bool unpack_finite(const ptx::U32x4& chunk, EightNumbers& x) const {
    const bool is_finite = !keys.is_mine(Keys::unrounded_rows(chunk));
    unpack<spec.element>(is_finite ? chunk : ptx::U32x4{}, x);
    return is_finite;
  }

  // ---- rows that share scales ----

  FOVEA_DEVICE_MEMBER ptx::SharedAddress greatest_at(int row) const { return keys.smem + 4 * row; }
  FOVEA_DEVICE_MEMBER ptx::SharedAddress scale_at(int row) const {
    return greatest_at(kQuantizedTile + row);
  }

  /// A thread for each row of the tile looks at those that it shares with.
  FOVEA_DEVICE_MEMBER void share_scales(const typename Keys::Chunks& chunks) const {
#pragma unroll
    for (int step = 0; step < Keys::kSteps; ++step) {
      EightNumbers x;
      unpack_finite(chunks[step], x);
      keys.rotate_row(x);
      float greatest = greatest_of(x);
#pragma unroll
      for (int apart = 1; apart < Keys::kLanes; apart *= 2)
        greatest = ptx::max_ftz(greatest, ptx::shfl_bfly(greatest, apart));
      if (keys.channel == 0) ptx::st_shared(greatest_at(keys.row_of(step)), greatest);
    }
    ptx::sync_threads();
    if (keys.thread < kQuantizedTile) {
      const int first = keys.thread / spec.q_span * spec.q_span + keys.thread % spec.q_step;
      float greatest = 0;
#pragma unroll 1
      for (int row = first; row < first + spec.q_span; row += spec.q_step)
        greatest = ptx::max_ftz(greatest, ptx::ld_shared<float>(greatest_at(row)));
      ptx::st_shared(scale_at(keys.thread), scale_of_codes(greatest));
    }
    ptx::sync_threads();
  }

  /// Of the row whose channels this lane and its neighbours hold, with a scale of its own. x becomes what is rounded.
  FOVEA_DEVICE_MEMBER QuantizedRow beside_of(EightNumbers& x, const EightNumbers& mean) const {
    float of_mean = 0;
#pragma unroll
    for (int d = 0; d < 8; ++d) of_mean = ptx::fma_rn(x[d], mean[d], of_mean);
    keys.rotate_row(x);
    float greatest = greatest_of(x);
#pragma unroll
    for (int apart = 1; apart < Keys::kLanes; apart *= 2) {
      of_mean += ptx::shfl_bfly(of_mean, apart);
      greatest = ptx::max_ftz(greatest, ptx::shfl_bfly(greatest, apart));
    }
    return {scale_of_codes(greatest), of_mean};
  }

  /// `row`: of those of all sequences and heads.
  FOVEA_DEVICE_MEMBER void store(std::int64_t row, const ptx::U32x4& numbers) const {
    ptx::st_global(reinterpret_cast<ptx::U32x4*>(p.numbers + row * Keys::kHeadDim + keys.channel),
                   numbers);
  }

  FOVEA_DEVICE_MEMBER void store(std::int64_t row, ptx::U32x2 codes,
                                 const QuantizedRow& beside) const {
    ptx::st_global(reinterpret_cast<ptx::U32x2*>(p.codes + row * Keys::kHeadDim + keys.channel),
                   codes);
    if (keys.channel == 0) ptx::st_global(const_cast<QuantizedRow*>(p.beside.rows) + row, beside);
  }
};

}  // namespace fovea::cuda
