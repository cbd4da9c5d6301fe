// O, lse and row_max on their way out; or partial states, where the problem is split. And whether the sums may stand:
// common/passes.cuh says what becomes of NaN and infinity in V. Chapter 5 of cdna/attention_forward.cuh, the last one.
//
// O goes straight from registers: a lane has four neighbouring columns of its row for each four sums, and with the
// other lane of the row 16 bytes.
#pragma once

#include "cdna/forward/compute.cuh"
#include "cdna/forward/wave.cuh"
#include "common/element.cuh"
#include "common/online_softmax.cuh"
#include "common/passes.cuh"
#include "common/row_view.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace fovea::cuda::cdna {

/// Four columns of a row.
template <Element element>
FOVEA_DEVICE void store_four(char* to, const float* x) {
  if constexpr (element == Element::f32) {
    ptx::st_global(reinterpret_cast<ptx::F32x4*>(to), ptx::F32x4{x[0], x[1], x[2], x[3]});
  } else if constexpr (element == Element::bf16) {
    ptx::st_global(reinterpret_cast<ptx::U32x2*>(to),
                   ptx::U32x2{ptx::cvt_bf16x2(x[0], x[1]), ptx::cvt_bf16x2(x[2], x[3])});
  } else {
    ptx::st_global(reinterpret_cast<ptx::U32x2*>(to),
                   ptx::U32x2{ptx::cvt_f16x2(x[0], x[1]), ptx::cvt_f16x2(x[2], x[3])});
  }
}

/// What this thread has stored.
template <Element element>
FOVEA_DEVICE float load_own(const char* from) {
  if constexpr (element == Element::f32) {
    return ptx::ld_global(reinterpret_cast<const float*>(from));
  } else {
    const std::uint32_t bits = ptx::ld_global(reinterpret_cast<const std::uint16_t*>(from));
    return element == Element::bf16 ? ptx::f32_of_bf16_lo(bits) : ptx::f32_of_f16_lo(bits);
  }
}

/// Where sums of indicators are not 0, infinity to what lies there: NaN where both signs come. A loop that is not
/// unrolled: its code is short where it is seldom run.
template <Element element>
FOVEA_DEVICE void add_to_four(char* to, const float* x, float reached) {
  std::uint32_t named = 0;
#pragma unroll
  for (std::uint32_t e = 0; e < 4; ++e) named |= (x[e] != 0 ? 1U : 0U) << e;
#pragma unroll 1
  for (; named != 0; named >>= 1U, to += element_bytes(element))
    if ((named & 1U) != 0) store_element(to, element, 0, load_own<element>(to) + reached);
}

template <CdnaForwardSpec spec, class Mods>
FOVEA_DEVICE void store_out(const Wave<spec>& wave, const RowView<spec>& row,
                            const Sums<spec, Mods>& sums, Pass pass) {
  using T = Traits<spec>;
  constexpr Element kElement = RowView<spec>::kOutElement;
  constexpr bool kIsCut =
      spec.has_padded_head_dim && !spec.is_split;  // partial states are the tile's
  char* const mine = row.out() + 4 * wave.half() * RowView<spec>::kOutBytes;
#pragma unroll
  for (int j = 0; j < T::kColBlocks; ++j) {
#pragma unroll
    for (int g = 0; g < ptx::kMfmaSums; g += 4) {
      if (kIsCut && j * T::kBlock + place_of_sum(g, wave.half()) >= wave.p.head_dim_v) continue;
      char* const to = mine + (j * T::kBlock + place_of_sum(g, 0)) * RowView<spec>::kOutBytes;
      const float* const x = &sums.out[j][g];
      if (is_indicator(pass)) {
        add_to_four<kElement>(to, x, infinity_of(pass));
      } else {
        store_four<kElement>(to, x);
      }
    }
  }
}

template <CdnaForwardSpec spec, class Mods>
FOVEA_DEVICE void finish(const Wave<spec>& wave, Sums<spec, Mods>& sums, Pass pass) {
  const ForwardParams& p = wave.p;
  // Note: of a number that a shuffle gives nothing is computed ahead. Else addresses of out, lse and row_max go through
  // the walk in registers, for passes are a loop around it.
  const int lane = ptx::shfl_idx(wave.lane, wave.lane);
  const RowView<spec> row = wave.row_of(lane);
  const RowState whole{sums.row.origin, sum_of_row(sums.row.sum)};
  if (!row.exists) return;
  if (!is_indicator(pass)) {
    const float unit = spec.is_prescaled ? 1.0F : p.softmax_scale;
    float sink = -infinity();
    if (!spec.is_split && p.sinks != nullptr && !wave.work.sequence.is_trailing)
      sink = ptx::ld_global(p.sinks + row.q_head * p.sinks_stride);
    RowResult result = finish_row(whole, unit, sink);
    if constexpr (spec.has_dropout) result.factor *= p.dropout_keep_scale;
    if (wave.half() == 0)
      row.store_values(result.lse, whole.sum, finish_row_max(sums.row_max, whole.sum, unit));
    sums.scale_out(result.factor);
  }
  store_out(wave, row, sums, pass);
}

/// The same answer in every thread of the workgroup.
template <CdnaForwardSpec spec, class Mods>
FOVEA_DEVICE bool is_finite(const Wave<spec>& wave, const Sums<spec, Mods>& sums) {
  using T = Traits<spec>;
  float zero = 0;
#pragma unroll
  for (int j = 0; j < T::kColBlocks; ++j)
#pragma unroll
    for (int g = 0; g < ptx::kMfmaSums; ++g) zero = ptx::fma_rn(sums.out[j][g], 0.0F, zero);
  const bool mine = ptx::vote_all(!is_nan(zero));
  const SharedAddress votes = wave.smem + T::kAt.votes;
  if (wave.lane == 0) ptx::st_shared(votes + wave.warp * 4, static_cast<std::uint32_t>(mine));
  ptx::sync_threads();
  bool all = true;
#pragma unroll
  for (int i = 0; i < spec.num_warps; ++i)
    all = all && ptx::ld_shared<std::uint32_t>(votes + i * 4) != 0;
  return all;
}

}  // namespace fovea::cuda::cdna
