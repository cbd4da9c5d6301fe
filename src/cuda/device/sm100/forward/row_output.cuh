// A thread's row of O on its way from tensor memory to memory, 16 bytes at a time: nothing is staged, and rows of no
// sequence cost nothing. What O is scaled by, and whether its sums are right, is for who calls: output.cuh.
#pragma once

#include "common/element.cuh"
#include "common/element_pair.cuh"
#include "common/passes.cuh"
#include "common/row_view.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/tcgen05_ld_st.cuh"
#include "sm100/forward/cta.cuh"
#include "sm90/values_of_pass.cuh"

namespace fovea::cuda::sm100 {

template <auto spec>
struct RowOutput {
  using T = Traits<spec>;
  using View = RowView<spec>;
  static constexpr int kAtOnce = 32;  // columns
  static constexpr Element kOutElement = View::kOutElement;
  static constexpr int kOutBytes = View::kOutBytes;
  static constexpr int kOfChunk = 16 / kOutBytes;

  const RowThread<spec> thread;

  FOVEA_DEVICE_MEMBER const ForwardParams& common() const { return thread.cta.p.common; }

  /// Sums times `factor` to where the row goes, if it is somebody's. The magnitude of all sums.
  FOVEA_DEVICE_MEMBER float store(const View& view, float factor, Pass pass) const {
    float magnitude = 0;
#pragma unroll 1
    for (int at = 0; at < spec.head_dim_v; at += kAtOnce) {
      float sums[kAtOnce];
      ptx::tcgen05_ld_32x32b(sums, thread.o().plus_columns(at));
      ptx::tcgen05_wait_ld(sums);
#pragma unroll
      for (float& x : sums) {
        magnitude += ptx::abs(x);
        x *= factor;
      }
      if (view.exists) write(view, at, sums, pass);
    }
    return magnitude;
  }

  /// Puts this row tile at the head of the list of those that are computed again. Groups are never more than one row
  /// tile apart, as the order of products has it: so it is the head of its list or not in it.
  FOVEA_DEVICE_MEMBER void add_to_redo_list(std::uint32_t number) const {
    const auto& cta = thread.cta;
    const auto id = ptx::ld_shared<std::uint32_t>(cta.id_at(number));
    const std::uint32_t before = ptx::atom_exch_shared(cta.redo_list_at(number % 2), id);
    if (before != id) ptx::st_global(cta.p.next_redo + id, static_cast<std::int32_t>(before));
  }

 private:
  /// Where a row goes; rows of partial states are as wide as the tile.
  struct OutRow {
    char* data;
    std::int64_t col_stride;
    std::int32_t width;
    bool is_aligned;  // 16 bytes of it are written at once

    FOVEA_DEVICE_MEMBER char* at(std::int32_t col) const {
      return data + kOutBytes * col_stride * col;
    }
  };

  FOVEA_DEVICE_MEMBER OutRow out_row(const View& view) const {
    if constexpr (spec.is_split) return {view.out(), 1, spec.head_dim_v, true};
    return {view.out(), common().out.col_stride, common().head_dim_v, common().is_out_aligned != 0};
  }

  /// Columns from `first` on, as many as there are. Of indicators, infinity to what is there.
  FOVEA_DEVICE_MEMBER void write(const View& view, int first, const float (&sums)[kAtOnce],
                                 Pass pass) const {
    const OutRow row = out_row(view);
#pragma unroll
    for (int i = 0; i < kAtOnce; i += kOfChunk) {
      const std::int32_t left = row.width - (first + i);
      float chunk[kOfChunk];
#pragma unroll
      for (int j = 0; j < kOfChunk; ++j) chunk[j] = sums[i + j];
      if (!is_indicator(pass) && row.is_aligned && left >= kOfChunk) {
        ptx::st_global(reinterpret_cast<ptx::U32x4*>(row.data + kOutBytes * (first + i)),
                       packed(chunk));
      } else {
        write_elements(row, first + i, least(left, kOfChunk), chunk, pass);
      }
    }
  }

  FOVEA_DEVICE ptx::U32x4 packed(const float (&x)[kOfChunk]) {
    if constexpr (kOutElement == Element::f32) {
      return {ptx::bit_cast<std::uint32_t>(x[0]), ptx::bit_cast<std::uint32_t>(x[1]),
              ptx::bit_cast<std::uint32_t>(x[2]), ptx::bit_cast<std::uint32_t>(x[3])};
    } else {
      return {pair_of<kOutElement>(x[0], x[1]), pair_of<kOutElement>(x[2], x[3]),
              pair_of<kOutElement>(x[4], x[5]), pair_of<kOutElement>(x[6], x[7])};
    }
  }

  FOVEA_DEVICE_MEMBER void write_elements(const OutRow& row, std::int32_t first, std::int32_t count,
                                          const float (&x)[kOfChunk], Pass pass) const {
#pragma unroll 1
    for (std::int32_t i = 0; i < count; ++i) {
      float sum = x[0];
#pragma unroll
      for (int j = 1; j < kOfChunk; ++j) sum = i == j ? x[j] : sum;
      if (is_indicator(pass))
        add_infinity(row.at(first + i), sum, pass);
      else
        store_element(row.at(first + i), kOutElement, 0, sum);
    }
  }

  /// To what is there, where it is reached: `indicator` is not 0.
  FOVEA_DEVICE_MEMBER void add_infinity(char* at, float indicator, Pass pass) const {
    if (indicator == 0.0F) return;
    if constexpr (kOutElement == Element::f32) {
      auto* const to = reinterpret_cast<float*>(at);
      ptx::st_global(to, ptx::ld_global(to) + infinity_of(pass));
    } else {
      auto* const to = reinterpret_cast<std::uint16_t*>(at);
      const std::uint32_t bits = sm90::with_infinity<kOutElement>(ptx::ld_global(to), 1U, pass);
      ptx::st_global(to, static_cast<std::uint16_t>(bits));
    }
  }
};

}  // namespace fovea::cuda::sm100
