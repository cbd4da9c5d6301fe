// States of splits folded into those of groups, and these into the rows of the output (shared/split.h): what unit.cuh
// and cluster.cuh do with those of a row, in a warp.
#pragma once

#include "common/careful_row.cuh"
#include "common/codes_of_row.cuh"
#include "common/fold_splits.cuh"
#include "common/sequence.cuh"
#include "common/store_columns.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/split.h"
#include "sm90/decode/cta.cuh"
#include "team/join.cuh"
#include "team/team.cuh"

namespace fovea::cuda::sm90::decoding {

/// A split, or a group; of its columns four of each lane.
struct Part {
  float lse, beside;
  ptx::F32x4 columns;
};

/// What parts are folded to, but for the factor at the end.
struct Folded {
  FoldedSplits parts;
  ptx::F32x4 sums{0, 0, 0, 0};

  FOVEA_DEVICE_MEMBER void add(const Part& part) {
    const FoldStep step = parts.add(part.lse, part.beside);
    sums = fold(sums, step, part.columns);
  }

  /// A group, as a part.
  FOVEA_DEVICE_MEMBER Part finished_group() const {
    const RowResult result = parts.result();
    return {result.lse, beside_lse(result.lse, parts.sum, parts.row_max),
            times(sums, result.factor)};
  }
};

/// A row of a split key by key (common/careful_row.cuh), keys as the cache has them.
template <Sm90DecodeSpec spec, class Mods>
FOVEA_DEVICE void compute_carefully(const Cta<spec>& cta,
                                    const RowView<Layout<spec>::kWarpSpec>& row) {
  constexpr TeamSpec kWarpSpec = Layout<spec>::kWarpSpec;
  if constexpr (spec.has_codes()) {
    using Rows = CodesOfRow<spec.k_codes, spec.v_codes>;
    CarefulRow<kWarpSpec, Mods, Rows>(row, Rows{row.p, cta.p.k_scale, cta.p.v_scale, row.work})
        .run();
  } else {
    CarefulRow<kWarpSpec, Mods>(row).run();
  }
}

template <Sm90DecodeSpec spec, class Mods>
struct RowFold {
  using L = Layout<spec>;
  using Join = team::Join<L::kWarpSpec, Mods, typename L::Parts>;
  using Row = RowView<L::kWarpSpec>;
  /// Of the output.
  static constexpr TeamSpec kFinalSpec = [] {
    TeamSpec of_rows = L::kWarpSpec;
    of_rows.is_split = false;
    return of_rows;
  }();

  /// Of a split whose sums are not finite, key by key; from memory, where that leaves it.
  FOVEA_DEVICE_MEMBER static Part careful_part(const Cta<spec>& cta, const Row& r) {
    compute_carefully<spec, Mods>(cta, r);
    ptx::sync_warp();  // its lanes have other columns
    Part part{ptx::ld_global(r.p.partial_lse + r.partial_at()), -infinity(), {0, 0, 0, 0}};
    if (spec.wants_row_max || is_huge(part.lse))
      part.beside = ptx::ld_global(r.p.partial_max + r.partial_at());
    if (has_columns()) part.columns = ptx::ld_global(columns_of(r));
    ptx::sync_warp();  // before a group's state goes there
    return part;
  }

  FOVEA_DEVICE_MEMBER static Part part_of(const Cta<spec>& cta, const team::JoinedRow& joined,
                                          const Row& r) {
    if (!joined.is_finite) return careful_part(cta, r);
    return {joined.result.lse, beside_lse(joined.result.lse, joined.sum, joined.row_max),
            joined.columns};
  }

  /// What the combine kernel does at the end of a row.
  FOVEA_DEVICE_MEMBER static void store_row(const Row& of_split, const Folded& all) {
    const RowView<kFinalSpec> r = of_split.template as<kFinalSpec>();
    const float factor = store_values(r, all.parts, ptx::lane_idx() == 0);
    store_sums(r, 4 * ptx::lane_idx(), all.sums, factor);
  }

  /// Gives the factor of the row's sums.
  FOVEA_DEVICE_MEMBER static float store_values(const RowView<kFinalSpec>& r,
                                                const FoldedSplits& all, bool is_storing) {
    const ForwardParams& p = r.p;
    const float sink =
        p.sinks == nullptr ? -infinity() : ptx::ld_global(p.sinks + r.q_head * p.sinks_stride);
    const RowResult result = finish_row({all.top, all.sum}, 1.0F, sink);
    if (is_storing) r.store_values(result.lse, all.sum, finished_max(all.row_max, all.sum));
    return result.factor;
  }

  /// Of columns `col` to col + 3.
  FOVEA_DEVICE_MEMBER static void store_sums(const RowView<kFinalSpec>& r, int col,
                                             const ptx::F32x4& sums, float factor) {
    const ForwardParams& p = r.p;
    if (col >= p.head_dim_v) return;
    store_columns<spec.out_element>(p.out, r.out_at() + col * p.out.col_stride, p.head_dim_v - col,
                                    {finished(sums.x, factor), finished(sums.y, factor),
                                     finished(sums.z, factor), finished(sums.w, factor)});
  }

  FOVEA_DEVICE_MEMBER static bool has_columns() { return ptx::lane_idx() * 4 < spec.head_dim_v; }
  FOVEA_DEVICE_MEMBER static ptx::F32x4* columns_of(const Row& r) {
    return reinterpret_cast<ptx::F32x4*>(r.out()) + ptx::lane_idx();
  }
};

}  // namespace fovea::cuda::sm90::decoding
