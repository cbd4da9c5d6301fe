// Who computes a tile, where its things lie in shared memory, and which row is whose. Chapter 1 of
// sm80/attention_forward.cuh; read load.cuh next.
#pragma once

#include "common/row_addresses.cuh"
#include "common/row_view.cuh"
#include "common/sequence.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"
#include "shared/rounding.h"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::team {

using ptx::SharedAddress;
using ptx::U32x4;

template <TeamSpec spec>
struct Traits {
  static_assert(spec.element != Element::f32, "mma.m16n8k16 multiplies 16-bit elements");
  static constexpr ElementTraits kElement = element_traits(spec.element);
  static constexpr int kThreads = spec.num_warps * 32;
  static constexpr int kWarpRows = spec.tile_q / spec.num_warps;
  static_assert(kWarpRows % 16 == 0, "a warp owns whole blocks of 16 rows");
  static constexpr int kRowBlocks = kWarpRows / 16;
  static_assert(spec.tile_kv % kElement.k_step == 0, "keys are the second product's k");
  static constexpr int kKeyBlocks = spec.tile_kv / 8;
  static constexpr int kColBlocks = spec.head_dim_v / 8;
  static constexpr int kQkSteps = spec.head_dim_qk / kElement.k_step;
  static constexpr int kPvSteps = spec.tile_kv / kElement.k_step;
  /// Else Q is read again for every tile: with two blocks of rows there are no registers for it.
  static constexpr bool kKeepsQueries = spec.keeps_queries;
  /// Of V as codes; else its tiles have scales.
  static constexpr bool kHasChannelScales = spec.sums_codes && spec.rounding == Rounding::lanes;
  /// Beside Philox, and where packed rows begin anywhere, the walk has no registers for what only a second pass would
  /// need: where the sequence's queries begin.
  static constexpr bool kForgetsQueries = spec.is_varlen || spec.has_dropout;

  /// Of a stage. By TMA in panels of its boxes; by threads in rows of any number of chunks.
  template <int rows, int row_bytes>
  using StagedTile = SharedTile<rows, row_bytes, widest_swizzle(row_bytes),
                                spec.has_panels ? Panels::apart : Panels::joined>;
  using KTile = StagedTile<spec.tile_kv, kElement.bytes * spec.head_dim_qk>;
  /// Codes have a row for each channel: mma wants their depth side by side, and the depth of P V are keys.
  using VTile = StagedTile<spec.sums_codes ? spec.head_dim_v : spec.tile_kv,
                           spec.sums_codes ? spec.tile_kv : kElement.bytes * spec.head_dim_v>;
  /// Of a warp.
  using QTile = JoinedTile<kWarpRows, kElement.bytes * spec.head_dim_qk>;
  using OutTile = JoinedTile<kWarpRows, kElement.bytes * spec.head_dim_v>;

  static constexpr Sm80ForwardLayout kAt = sm80_forward_layout(spec);
  static constexpr int kWorkWords = sizeof(Work) / 8;
  static_assert(!spec.smooths_v || (spec.multiplies_codes && !spec.has_dropout),
                "the mean of V comes back times the row's sum, of which nothing is dropped");
  static_assert(sizeof(Work) == kSm80WorkBytes, "host and device count the same bytes");
};

/// Where row 0 of head 0 lies, of the sequence's queries.
template <TeamSpec spec>
FOVEA_DEVICE const char* queries_begin(const Work& work, const BshdParam& q) {
  const std::int64_t at =
      work.sequence.q_batch * q.batch_stride + work.sequence.q_row * q.row_stride;
  return static_cast<const char*>(q.data) + at * Traits<spec>::kElement.bytes;
}

/// Where row 0 of the kv head lies; paged: where it would lie in page 0.
template <TeamSpec spec>
FOVEA_DEVICE const char* head_of(const Work& work, const BshdParam& t) {
  std::int64_t at = work.kv_head * t.head_stride;
  if constexpr (!spec.is_paged)
    at += work.sequence.kv_batch * t.batch_stride + work.sequence.kv_row * t.row_stride;
  return static_cast<const char*>(t.data) + at * Traits<spec>::kElement.bytes;
}

/// The warps that share a tile, as one thread of them sees it: a CTA, or one of several teams in it, its shared memory
/// apart from the others'.
template <TeamSpec spec>
struct Team {
  using T = Traits<spec>;

  const ForwardParams& p;
  Work work;
  const SharedAddress smem;
  const int warp;
  int lane;

  /// Of all its warps.
  FOVEA_DEVICE_MEMBER static void meet() {
    if constexpr (spec.num_warps == 1) {
      ptx::sync_warp();
    } else {
      ptx::sync_threads();
    }
  }

  // ---- which row is which ----------------------------------------------------------------------

  /// `row` of the tile.
  FOVEA_DEVICE_MEMBER RowView<spec> row_at(int row) const { return {p, work, row}; }

  /// Row of the tile that this thread's accumulators of (row block, half) belong to.
  FOVEA_DEVICE_MEMBER int my_row(int block, int half) const {
    return warp * T::kWarpRows + block * 16 + half * 8 + lane / 4;
  }

  FOVEA_DEVICE_MEMBER bool warp_has_rows() const { return row_at(warp * T::kWarpRows).exists; }

  // ---- shared memory ---------------------------------------------------------------------------

  /// Q of this warp; later its part of O.
  FOVEA_DEVICE_MEMBER SharedAddress warp_smem() const {
    return smem + T::kAt.q + warp * T::kAt.warp_bytes;
  }

  FOVEA_DEVICE_MEMBER typename T::KTile keys_at(int stage) const {
    return {smem + T::kAt.stages + stage * (T::kAt.key_bytes + T::kAt.value_bytes)};
  }
  FOVEA_DEVICE_MEMBER typename T::VTile values_at(int stage) const {
    return {keys_at(stage).base + T::kAt.key_bytes};
  }

  // Note: the walk has no registers left for what only the end needs, so that lies in shared memory meanwhile.

  struct WorkWords {
    std::uint64_t word[T::kWorkWords];
  };

  FOVEA_DEVICE_MEMBER void keep_work() const {
    const auto words = ptx::bit_cast<WorkWords>(work);
    if (warp != 0 || lane != 0) return;
#pragma unroll
    for (int i = 0; i < T::kWorkWords; ++i)
      ptx::st_shared(smem + T::kAt.work + i * 8, words.word[i]);
    ptx::st_shared(smem + T::kAt.key_head, ptx::bit_cast<std::uint64_t>(head_of<spec>(work, p.k)));
    ptx::st_shared(smem + T::kAt.value_head,
                   ptx::bit_cast<std::uint64_t>(head_of<spec>(work, p.v)));
    if constexpr (T::kForgetsQueries) {
      ptx::st_shared(smem + T::kAt.queries_begin,
                     ptx::bit_cast<std::uint64_t>(queries_begin<spec>(work, p.q)));
    }
  }

  FOVEA_DEVICE_MEMBER Work kept_work() const {
    WorkWords words;
#pragma unroll
    for (int i = 0; i < T::kWorkWords; ++i)
      words.word[i] = ptx::ld_shared<std::uint64_t>(smem + T::kAt.work + i * 8);
    return ptx::bit_cast<Work>(words);
  }

  /// The compiler takes this for news, and computes addresses of the end there, not before the walk.
  FOVEA_DEVICE_MEMBER void renew_lane() { lane = ptx::shfl_idx(lane, lane); }
};

/// A team at the end of its walk, with the work that was kept.
template <TeamSpec spec>
struct AtEnd {
  const Team<spec>& team;
  const Work& work;

  FOVEA_DEVICE_MEMBER RowView<spec> row_at(int row) const { return {team.p, work, row}; }
};

}  // namespace fovea::cuda::team
