// S = Q Kᵀ and dP = dO Vᵀ of a tile of queries and a tile of keys, left in shared memory as floats, for those who look
// at pairs one by one. Two ways with one face: by tensor cores, and by f32 multiply-adds. Chapter 1 of
// sm80/captured_gradients.cuh.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "shared/captured_params.h"
#include "sm80/attention_backward_f32.cuh"
#include "sm80/backward/owner.cuh"
#include "sm80/backward/sums.cuh"

namespace fovea::cuda::sm80 {

/// Where what is known of pairs and of queries lies in shared memory.
template <CapturedSpec spec>
struct PairLayout {
  static constexpr int kPitch = spec.tile_walked + 1;
  static constexpr int kScoresAt = captured_scores_at(spec);
  static constexpr int kDweightsAt = kScoresAt + 4 * spec.tile_owned * kPitch;
  static constexpr int kStatisticsAt = kDweightsAt + 4 * spec.tile_owned * kPitch;
  static constexpr int kThreads = spec.num_warps * 32;

  FOVEA_DEVICE int offset(int row, int key) { return 4 * (row * kPitch + key); }
};

template <CapturedSpec spec, class Mods>
struct MmaProducts {
  static constexpr Sm80BackwardSpec kRows{spec};
  using T = BackwardTraits<kRows>;
  using Sums = BackwardSums<kRows, Mods>;
  using Layout = PairLayout<spec>;
  static_assert(spec.stages == 1, "the next keys are loaded where the last ones were");

  const Owner<kRows> owner;

  FOVEA_DEVICE_MEMBER MmaProducts(const BackwardParams& b, const OwnedTile& tile)
      : owner(b, tile) {}

  FOVEA_DEVICE_MEMBER void load_queries() const {
    owner.load_owned();
    const RowStatistics& rows = owner.b.rows;
    const std::int64_t at =
        statistics_at<spec.is_varlen>(rows, owner.owned.sequence, owner.owned.head) +
        owner.owned.begin;
#pragma unroll 1
    for (int i = owner.warp * 32 + owner.lane; i < spec.tile_owned; i += Layout::kThreads) {
      const SharedAddress to = owner.smem + Layout::kStatisticsAt + 4 * i;
      ptx::st_shared(to, ptx::ld_global(rows.log_sum + at + i));
      ptx::st_shared(to + 4 * spec.tile_owned, ptx::ld_global(rows.delta + at + i));
      ptx::st_shared(to + 8 * spec.tile_owned, ptx::ld_global(rows.origin + at + i));
    }
  }
  FOVEA_DEVICE_MEMBER void load_keys(const WalkedTile& tile) const { owner.load_walked(tile, 0); }

  /// Until all rows are there, whoever loaded them.
  FOVEA_DEVICE_MEMBER void wait() const {
    wait_for_copies<spec.instructions>();
    ptx::sync_threads();
  }

  FOVEA_DEVICE_MEMBER void multiply() const {
    const SharedAddress keys = owner.stage_at(0);
    typename Sums::Products products;
    Sums::template multiply_rows<typename T::QkRows, T::kQkSteps>(owner, products, owner.smem,
                                                                  keys);
    store(Layout::kScoresAt, products);
    Sums::template multiply_rows<typename T::VRows, T::kVSteps>(
        owner, products, owner.smem + T::kOwnedVAt, keys + T::kWalkedVAt);
    store(Layout::kDweightsAt, products);
  }

 private:
  FOVEA_DEVICE_MEMBER void store(int to, const typename Sums::Products& products) const {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < T::kBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = owner.owned_row(i, e / 2) - owner.owned.begin;
          const int key = j * 8 + owner.lane % 4 * 2 + e % 2;
          ptx::st_shared(owner.smem + to + Layout::offset(row, key), products[i][j][e]);
        }
      }
    }
  }
};

/// Inputs of any dtypes and head dims, in full precision.
template <CapturedSpec spec, class Mods>
struct PlainProducts {
  static constexpr PlainBackwardSpec kRows{spec};
  using Rows = PlainBackward<kRows, Mods>;
  using Layout = PairLayout<spec>;
  static_assert(4 * Rows::kWeightsAt == Layout::kScoresAt &&
                    4 * Rows::kGradientsAt == Layout::kDweightsAt &&
                    4 * Rows::kRowsAt == Layout::kStatisticsAt,
                "S and dP lie where the kernel of gradients has P and dS");

  const Rows rows;

  FOVEA_DEVICE_MEMBER PlainProducts(const BackwardParams& b, const OwnedTile& tile)
      : rows(b, tile) {}

  FOVEA_DEVICE_MEMBER void load_queries() const { rows.load_owned(); }
  FOVEA_DEVICE_MEMBER void load_keys(const WalkedTile& tile) const {
    if (tile.idx >= 0) rows.load_walked(tile);
  }
  FOVEA_DEVICE_MEMBER void wait() const { ptx::sync_threads(); }

  FOVEA_DEVICE_MEMBER void multiply() const {
#pragma unroll 1
    for (int pair = rows.thread; pair < spec.tile_owned * spec.tile_walked;
         pair += Layout::kThreads) {
      const int row = pair / spec.tile_walked, key = pair % spec.tile_walked;
      const float score =
          product<spec.head_dim_qk>(row * Rows::kQkPitch, Rows::kWalkedQkAt + key * Rows::kQkPitch);
      const float dweight = product<spec.head_dim_v>(Rows::kOwnedVAt + row * Rows::kVPitch,
                                                     Rows::kWalkedVAt + key * Rows::kVPitch);
      ptx::st_shared(rows.smem + Layout::kScoresAt + Layout::offset(row, key), score);
      ptx::st_shared(rows.smem + Layout::kDweightsAt + Layout::offset(row, key), dweight);
    }
  }

 private:
  template <int depth>
  FOVEA_DEVICE_MEMBER float product(int a, int b) const {
    float sum = 0;
#pragma unroll 4
    for (int col = 0; col < depth; ++col)
      sum = ptx::fma_rn(rows.load_word(a + col), rows.load_word(b + col), sum);
    return sum;
  }
};

template <CapturedSpec spec, class Mods, bool multiplies_by_mma = spec.multiplies_by_mma>
struct ProductsOf {
  using Type = MmaProducts<spec, Mods>;
};
template <CapturedSpec spec, class Mods>
struct ProductsOf<spec, Mods, false> {
  using Type = PlainProducts<spec, Mods>;
};

}  // namespace fovea::cuda::sm80
