// O, lse and row_max on their way out; or partial states, where the problem is split. Chapter 4 of sm80/attention_forward.cuh; read
// passes.cuh next.
#pragma once

#include "common/online_softmax.cuh"
#include "common/sequence.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"
#include "sm80/forward/compute.cuh"
#include "sm80/forward/team.cuh"
#include "tile/swizzled_rows.cuh"

namespace fovea::cuda::sm80 {

template <ForwardSpec spec>
FOVEA_DEVICE std::int64_t partial_row(const AtEnd<spec>& end, const Row& r) {
  const ForwardParams& p = end.team.p;
  const std::int64_t row =
      (end.work.sequence.q_batch * p.num_heads_q + r.q_head) * p.seqlen_q + r.q_idx;
  return row * p.max_splits + end.work.split;
}

template <ForwardSpec spec>
FOVEA_DEVICE char* out_row(const AtEnd<spec>& end, const Row& r) {
  const ForwardParams& p = end.team.p;
  if constexpr (spec.is_split) {
    return reinterpret_cast<char*>(p.partial_out + partial_row(end, r) * spec.head_dim_v);
  }
  const Sequence& sequence = end.work.sequence;
  const std::int64_t at = sequence.q_batch * p.out.batch_stride +
                          (sequence.q_row + r.q_idx) * p.out.row_stride +
                          r.q_head * p.out.head_stride;
  return static_cast<char*>(const_cast<void*>(p.out.data)) + at * Traits<spec>::kOutBytes;
}

template <ForwardSpec spec>
FOVEA_DEVICE std::int64_t out_col_bytes(const ForwardParams& p) {
  constexpr int kOutBytes = Traits<spec>::kOutBytes;
  return spec.is_split ? kOutBytes : p.out.col_stride * kOutBytes;
}

template <Element element>
FOVEA_DEVICE void store_element(char* to, float value) {
  if constexpr (element == Element::f32) {
    ptx::st_global(reinterpret_cast<float*>(to), value);
  } else {
    ptx::st_global(reinterpret_cast<std::uint16_t*>(to),
                   static_cast<std::uint16_t>(pack<element>(value, 0.0F)));
  }
}

template <ForwardSpec spec>
FOVEA_DEVICE void store_row_values(const AtEnd<spec>& end, const Row& r, float lse,
                                   float greatest) {
  const ForwardParams& p = end.team.p;
  if constexpr (spec.is_split) {
    ptx::st_global(p.partial_lse + partial_row(end, r), lse);
    if constexpr (spec.wants_row_max) ptx::st_global(p.partial_max + partial_row(end, r), greatest);
  } else {
    const Sequence& sequence = end.work.sequence;
    const std::int64_t row = sequence.q_row + r.q_idx;
    if (p.lse != nullptr) {
      ptx::st_global(p.lse + sequence.q_batch * p.lse_batch_stride + r.q_head * p.lse_head_stride +
                         row * p.lse_row_stride,
                     lse);
    }
    if constexpr (spec.wants_row_max) {
      ptx::st_global(p.row_max + sequence.q_batch * p.row_max_batch_stride +
                         r.q_head * p.row_max_head_stride + row * p.row_max_row_stride,
                     greatest);
    }
  }
}

/// Straight from registers.
template <ForwardSpec spec, class Mods>
FOVEA_DEVICE void store_f32(const AtEnd<spec>& end, const Sums<spec, Mods>& sums) {
  using T = Traits<spec>;
  const ForwardParams& p = end.team.p;
  const std::int64_t step = out_col_bytes<spec>(p);
#pragma unroll
  for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row r = end.row_at(end.team.my_row(i, half));
      if (!r.exists) continue;
      char* to = out_row(end, r) + end.team.lane % 4 * 2 * step;
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j, to += 8 * step) {
        const int col = j * 8 + end.team.lane % 4 * 2;
        if (spec.is_split || col < p.head_dim_v)
          store_element<Element::f32>(to, sums.out[i][j][half * 2]);
        if (spec.is_split || col + 1 < p.head_dim_v)
          store_element<Element::f32>(to + step, sums.out[i][j][half * 2 + 1]);
      }
    }
  }
}

/// The warp's part of O into its part of shared memory, where Q was. The lanes find each other's elements there.
template <Element element, ForwardSpec spec, class Mods>
FOVEA_DEVICE void stage_out(const AtEnd<spec>& end, const Sums<spec, Mods>& sums) {
  using T = Traits<spec>;
  using Rows = typename T::OutRows;
  const SharedAddress mine = end.team.warp_smem();
  ptx::sync_warp();
#pragma unroll
  for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j)
        ptx::st_shared(
            mine + Rows::offset(i * 16 + half * 8 + end.team.lane / 4, j) + end.team.lane % 4 * 4,
            pack<element>(sums.out[i][j][half * 2], sums.out[i][j][half * 2 + 1]));
  ptx::sync_warp();
}

template <ForwardSpec spec>
FOVEA_DEVICE void store_chunks(const AtEnd<spec>& end) {
  using T = Traits<spec>;
  using Rows = typename T::OutRows;
#pragma unroll 4
  for (int at = end.team.lane; at < T::kWarpRows * Rows::kChunks; at += 32) {
    const int row = at / Rows::kChunks;
    const int chunk = at % Rows::kChunks;
    const Row r = end.row_at(end.team.warp * T::kWarpRows + row);
    if (!r.exists) continue;
    if (spec.has_padded_head_dim && chunk * tile::kChunkElements >= end.team.p.head_dim_v) continue;
    const auto value = ptx::ld_shared<U32x4>(end.team.warp_smem() + Rows::offset(row, chunk));
    ptx::st_global(reinterpret_cast<U32x4*>(out_row(end, r) + chunk * tile::kChunkBytes), value);
  }
}

/// Every staged element that exists, one by one, with its place in O.
template <Element element, ForwardSpec spec, class Visit>
FOVEA_DEVICE void for_each_staged(const AtEnd<spec>& end, Visit&& visit) {
  using T = Traits<spec>;
  using Rows = typename T::OutRows;
#pragma unroll 1
  for (int row = 0; row < T::kWarpRows; ++row) {
    const Row r = end.row_at(end.team.warp * T::kWarpRows + row);
    if (!r.exists) continue;
    char* to = out_row(end, r);
#pragma unroll 1
    for (int col = end.team.lane; col < end.team.p.head_dim_v; col += 32) {
      const std::uint32_t bits = ptx::ld_shared<std::uint16_t>(
          end.team.warp_smem() + Rows::offset(row, col / tile::kChunkElements) +
          col % tile::kChunkElements * 2);
      visit(to + col * out_col_bytes<spec>(end.team.p),
            element == Element::bf16 ? ptx::f32_of_bf16_lo(bits) : ptx::f32_of_f16_lo(bits));
    }
  }
}

template <ForwardSpec spec, class Mods>
FOVEA_DEVICE void store_out(const AtEnd<spec>& end, const Sums<spec, Mods>& sums) {
  constexpr Element kOutElement = Traits<spec>::kOutElement;
  if constexpr (kOutElement == Element::f32) {
    store_f32(end, sums);
  } else {
    stage_out<kOutElement>(end, sums);
    if (spec.has_aligned_rows || end.team.p.is_out_aligned != 0) {
      store_chunks(end);
    } else {
      for_each_staged<kOutElement>(
          end, [&](char* to, float value) { store_element<kOutElement>(to, value); });
    }
  }
}

/// Sums of the row's four threads; then O, lse and row_max.
template <ForwardSpec spec, class Mods>
FOVEA_DEVICE void finish(const AtEnd<spec>& end, Sums<spec, Mods>& sums) {
  using T = Traits<spec>;
  const ForwardParams& p = end.team.p;
  const float unit = spec.is_prescaled ? 1.0F : p.softmax_scale;
#pragma unroll
  for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowState row = sums.rows[i][half];
      row.sum += ptx::shfl_bfly(row.sum, 1);
      row.sum += ptx::shfl_bfly(row.sum, 2);
      const Row r = end.row_at(end.team.my_row(i, half));
      float sink = -infinity();
      if (!spec.is_split && p.sinks != nullptr && !end.work.sequence.is_trailing && r.exists)
        sink = ptx::ld_global(p.sinks + r.q_head * p.sinks_stride);
      RowResult result = finish_row(row, unit, sink);
      if constexpr (spec.has_dropout) result.factor *= p.dropout_keep_scale;
#pragma unroll
      for (int j = 0; j < T::kColBlocks; ++j) {
        sums.out[i][j][half * 2] *= result.factor;
        sums.out[i][j][half * 2 + 1] *= result.factor;
      }
      if (r.exists && end.team.lane % 4 == 0) {
        store_row_values(end, r, result.lse, finish_row_max(sums.row_max[i][half], row.sum, unit));
      }
    }
  }
  store_out(end, sums);
}

}  // namespace fovea::cuda::sm80
