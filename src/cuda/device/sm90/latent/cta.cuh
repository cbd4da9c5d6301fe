// What all warps of the latent kernel know: what follows from the spec, where things lie in shared memory, and what the
// loading warp posts. ../decode_latent.cuh has the picture; read load.cuh next.
#pragma once

#include "common/ring.cuh"
#include "common/row_view.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "shared/forward_params_sm90.h"
#include "shared/forward_spec.h"
#include "sm90/role_warp.cuh"
#include "tile/matrix_descriptor.cuh"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::sm90::latent {

/// All that follows from the spec.
template <Sm90LatentSpec spec>
struct Layout {
  static_assert(spec.element != Element::f32, "wgmma multiplies 16-bit elements here");
  static_assert(spec.head_dim_qk == 576 && spec.head_dim_v == 512,
                "O is two warpgroups' registers, and P fits the columns that are no values");
  static_assert(spec.tile_q == 64 && spec.tile_kv == 64, "a tile of S is one product's");
  static_assert(spec.is_split, "results are partial states, which the combine kernel finishes");
  static constexpr ElementTraits kElement = element_traits(spec.element);
  static_assert(kElement.can_be_mn_major, "rows of V are its depth in P V");
  static constexpr ptx::WgmmaType kType = wgmma_type(spec.element);
  static constexpr int kGroups = 2;
  static constexpr int kComputingWarps = 4 * kGroups;
  static_assert(spec.num_warps == kComputingWarps + 4,
                "one warp loads, of a group that gives its registers away");
  /// 168 of each of three groups at the launch.
  static constexpr int kComputeRegisters = 216;
  static constexpr int kLoadRegisters = 72;
  static constexpr int kBuffers = 2;
  static_assert(spec.stages == kBuffers, "a buffer is one group's: its scores");
  static constexpr int kRecords = kLatentRecords;
  static constexpr int kGroupCols = spec.head_dim_v / kGroups;
  static constexpr int kUsedRows = kQueriesOfTile<spec> * spec.heads_per_tile;

  using QTile = SharedTile<64, kElement.bytes * spec.head_dim_qk, Swizzle::bytes128>;
  using KTile = QTile;
  using VTile =
      SharedTile<64, kElement.bytes * kGroupCols, Swizzle::bytes128>;  // the columns of one group
  using PTile = SharedTile<64, 128, Swizzle::bytes128>;
  static constexpr int kPanels = QTile::kPanels;
  /// Parts of a tile that arrive on their own, so that scores begin with the first.
  static constexpr int kParts = 3;
  static constexpr int kPanelsOfPart = kLatentPanelsOfBox;
  static_assert(kParts * kPanelsOfPart == kPanels, "parts are whole boxes");
  static constexpr int kValuePanels = spec.head_dim_v / kElement.of_panel;

  static constexpr Sm90LatentLayout kAt = sm90_latent_layout(spec);
  static_assert(kParts == kAt.num_parts && kGroups == kLatentGroups,
                "host and device count the same bytes");
};

/// What is posted beside a tile.
struct PostedTile {
  std::uint32_t word;  // idx * 4 + is_full * 2 + is_last
  FOVEA_DEVICE_MEMBER static PostedTile of(VisitedTile tile, bool is_last) {
    return {static_cast<std::uint32_t>(tile.idx) * 4 + (tile.is_full ? 2U : 0U) +
            (is_last ? 1U : 0U)};
  }
  FOVEA_DEVICE_MEMBER std::int32_t idx() const { return static_cast<std::int32_t>(word >> 2); }
  FOVEA_DEVICE_MEMBER bool is_full() const { return (word & 2U) != 0; }
  FOVEA_DEVICE_MEMBER bool is_last() const { return (word & 1U) != 0; }
};

/// A unit of work, and whether its rows see any tile.
struct Unit {
  Work work;
  std::uint64_t has_tiles;
};

template <Sm90LatentSpec spec>
struct Cta : RoleWarp {
  using L = Layout<spec>;
  const Sm90LatentParams& p;

  FOVEA_DEVICE_MEMBER typename L::QTile queries() const { return {smem + L::kAt.queries}; }
  FOVEA_DEVICE_MEMBER typename L::KTile keys(int buffer) const {
    return {smem + L::kAt.tiles + buffer * L::KTile::kBytes};
  }
  /// The columns of the tile that are this group's values.
  FOVEA_DEVICE_MEMBER typename L::VTile values(int buffer, int group) const {
    return {keys(buffer).panel(group * L::VTile::kPanels)};
  }
  /// In the columns of the tile that are no values.
  FOVEA_DEVICE_MEMBER typename L::PTile probabilities(int buffer) const {
    return {keys(buffer).panel(L::kValuePanels)};
  }
  FOVEA_DEVICE_MEMBER SharedAddress full(int buffer, int part) const {
    return barrier(L::kAt.full, buffer * L::kParts + part);
  }
  FOVEA_DEVICE_MEMBER SharedAddress stats_at(int buffer, int row) const {
    return smem + L::kAt.stats + (buffer * 64 + row) * 8;
  }
  FOVEA_DEVICE_MEMBER SharedAddress part_at(int group, int row) const {
    return smem + L::kAt.parts + (group * 64 + row) * kLatentPartBytes;
  }
  FOVEA_DEVICE_MEMBER SharedAddress word_of(int buffer) const {
    return smem + L::kAt.words + 8 * buffer;
  }

  /// Rows behind those that TMA writes are never anybody's; they must be numbers that someone wrote.
  FOVEA_DEVICE_MEMBER void clear_rows_without_queries() const {
    if constexpr (L::kUsedRows < 64) {
      constexpr int kChunks = (64 - L::kUsedRows) * 8 * L::kPanels;
#pragma unroll 1
      for (int i = 32 * warp + lane; i < kChunks; i += 32 * spec.num_warps) {
        const int row = L::kUsedRows + i / (8 * L::kPanels);
        ptx::st_shared(queries().chunk(row, i % (8 * L::kPanels)), ptx::U32x4{});
      }
      ptx::fence_proxy_async_shared_cta();
    }
  }

  // ---- units that the loading warp posts ---------------------------------------------------------

  FOVEA_DEVICE_MEMBER void post_unit(const Unit& unit, Ring<L::kRecords>& records) const {
    await(barrier(L::kAt.read, records.stage), records.parity);
    if (lane == 0) {
      const SharedAddress to = smem + L::kAt.records + records.stage * kLatentRecordBytes;
      const auto words = ptx::bit_cast<UnitWords>(unit);
#pragma unroll
      for (int i = 0; i < kUnitWords; ++i) ptx::st_shared(to + 4 * i, words.word[i]);
    }
    release(barrier(L::kAt.posted, records.stage));
    records.advance();
  }

  /// The unit stays where it is until it is given back: kept_unit reads it again.
  FOVEA_DEVICE_MEMBER Unit take_unit(const Ring<L::kRecords>& records) const {
    ptx::mbarrier_wait_parity(barrier(L::kAt.posted, records.stage), records.parity);
    return kept_unit(records);
  }
  FOVEA_DEVICE_MEMBER Unit kept_unit(const Ring<L::kRecords>& records) const {
    const SharedAddress from = smem + L::kAt.records + records.stage * kLatentRecordBytes;
    UnitWords words;
#pragma unroll
    for (int i = 0; i < kUnitWords; ++i) words.word[i] = word_at(from + 4 * i);
    return ptx::bit_cast<Unit>(words);
  }
  FOVEA_DEVICE_MEMBER void give_back_unit(Ring<L::kRecords>& records) const {
    release(barrier(L::kAt.read, records.stage));
    records.advance();
  }

 private:
  static constexpr int kUnitWords = sizeof(Unit) / 4;
  static_assert(sizeof(Unit) <= kLatentRecordBytes, "a record holds a unit");
  struct UnitWords {
    std::uint32_t word[kUnitWords];
  };
};

}  // namespace fovea::cuda::sm90::latent
