// The end of a row tile: O, lse and row_max of a thread's row, and whether its sums are finite. O goes from tensor
// memory to memory, each thread its row, 16 bytes at a time: nothing is staged, and rows of no sequence cost nothing.
#pragma once

#include "common/element.cuh"
#include "common/element_pair.cuh"
#include "common/float_constants.cuh"
#include "common/passes.cuh"
#include "common/row_view.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/tcgen05_ld_st.cuh"
#include "ptx/warp.cuh"
#include "sm100/forward/cta.cuh"
#include "sm100/forward/row.cuh"
#include "sm90/values_of_pass.cuh"

namespace fovea::cuda::sm100 {

template <Sm100ForwardSpec spec, class Mods>
struct Output {
  using T = Traits<spec>;
  using MyRow = Row<spec, Mods>;
  using View = RowView<spec>;
  static constexpr int kAtOnce = 32;  // columns
  static constexpr Element kOutElement = View::kOutElement;
  static constexpr int kOutBytes = View::kOutBytes;
  static constexpr int kOfChunk = 16 / kOutBytes;

  const RowThread<spec> thread;

  /// `number`: of the row tile in this CTA, from 1 on.
  FOVEA_DEVICE_MEMBER void finish(const RowTile& tile, const MyRow& row, std::uint32_t number,
                                  Pass pass) const {
    const Work work = thread.cta.work_of(tile);
    const View view(common(), work, thread.row());
    const float factor = is_indicator(pass) ? MyRow::kIndicatorFactor : finish_row(view, row);
    float magnitude = 0;  // of all sums
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
    report(magnitude, view.exists ? factor : quiet_nan(), number, pass);
  }

 private:
  FOVEA_DEVICE_MEMBER const ForwardParams& common() const { return thread.cta.p.common; }

  /// What O is scaled by; writes lse and row_max.
  FOVEA_DEVICE_MEMBER float finish_row(const View& view, const MyRow& row) const {
    const float sum = row.sum[0];
    float factor = sum == 0.0F ? 0.0F : ptx::rcp_approx_ftz(sum);
    float lse = row.lse(0, sum);
    if (!spec.is_split && common().sinks != nullptr && !view.work.sequence.is_trailing) {
      const float sink = ptx::ld_global(common().sinks + view.q_head * common().sinks_stride);
      if (sum == 0.0F) {
        lse = sink;
      } else {
        const RowResult result = with_sink(lse, 1.0F, sink);
        factor *= result.factor;
        lse = result.lse;
      }
    }
    if (view.exists) {
      float greatest = 0;
      if constexpr (spec.wants_row_max) {
        greatest =
            finish_row_max(row.greatest[0], sum, sm90::ScoreUnit<spec, Mods>::natural(common()));
      }
      view.store_values(lse, sum, greatest);
    }
    if constexpr (spec.has_dropout) factor *= common().dropout_keep_scale;
    return factor;
  }

  /// A NaN or infinity among the sums (finite minus itself is 0), or sums that have left the normal range of floats
  /// below. In the first pass the first warp of the CTA to say so puts the row tile at the head of its list. If it is
  /// there still without NaN and infinity among the values, powers were too large, or too small. Rows whose factor is
  /// NaN have no say: they are nobody's, or NaN whatever the values are.
  FOVEA_DEVICE_MEMBER void report(float magnitude, float factor, std::uint32_t number,
                                  Pass pass) const {
    const bool is_large = !(magnitude - magnitude == 0.0F) && factor == factor;
    const bool is_small = magnitude < MyRow::kLeastSum && factor > 0.0F;  // 0: sees nothing
    if (!ptx::vote_any(is_large || is_small) || thread.cta.lane != 0) return;
    if (pass == Pass::all) {
      add_to_redo_list(number);
    } else if (pass == Pass::finite) {
      ptx::atom_exch_shared(thread.cta.smem + T::kAt.needs_low, 1U);
    }
  }

  /// Groups are never more than one row tile apart, as the order of products has it: so this one is the head of its
  /// list or not in it.
  FOVEA_DEVICE_MEMBER void add_to_redo_list(std::uint32_t number) const {
    const auto& cta = thread.cta;
    const auto id = ptx::ld_shared<std::uint32_t>(cta.id_at(number));
    const std::uint32_t before = ptx::atom_exch_shared(cta.redo_list_at(number % 2), id);
    if (before != id) ptx::st_global(cta.p.next_redo + id, static_cast<std::int32_t>(before));
  }

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
