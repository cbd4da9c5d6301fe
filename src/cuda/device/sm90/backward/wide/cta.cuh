// What all roles of sm90/attention_backward_wide know: what follows from the spec, where things lie in shared memory.
// ../../attention_backward_wide.cuh has the picture; read load.cuh next.
#pragma once

#include "common/backward_work.cuh"
#include "common/ring.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/wgmma.cuh"
#include "shared/backward_params_sm90_wide.h"
#include "shared/backward_spec_sm90_wide.h"
#include "sm90/backward/posted_tile.cuh"
#include "sm90/role_warp.cuh"
#include "tile/matrix_descriptor.cuh"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::sm90 {

/// All that follows from the spec.
template <Sm90WideBackwardSpec spec>
struct WideTraits {
  static_assert(spec.element != Element::f32, "wgmma multiplies 16-bit elements here");
  static_assert(spec.dout_element == spec.element, "dout is multiplied with v, and P with dout");
  static_assert(spec.head_dim_qk % 64 == 0 && spec.head_dim_v % 64 == 0,
                "rows are whole panels of 128 bytes");
  static_assert(spec.head_dim_qk <= 256 && spec.head_dim_v <= 256,
                "sums of 64 rows are 128 registers of a thread");
  static_assert(spec.tile_walked == kSm90WideRows, "scores are tiles of 64 x 64");
  static_assert(spec.tile_owned == (spec.owns_keys ? 1 : 2) * kSm90WideRows,
                "two groups share 64 keys, or own 64 queries each");
  static_assert(spec.num_warps == 12, "two groups multiply, a warp loads");

  static constexpr int kRows = kSm90WideRows;
  static constexpr Sm90WideBackwardLayout kAt = sm90_wide_backward_layout(spec);
  static_assert(kAt.bytes <= 232448, "an SM has no more");
  static constexpr ptx::WgmmaType kType = wgmma_type(spec.element);

  // 64 rows of either side.
  static constexpr int kElementBytes = element_bytes(spec.element);
  using QkTile = SharedTile<kRows, kElementBytes * spec.head_dim_qk, Swizzle::bytes128>;
  using VTile = SharedTile<kRows, kElementBytes * spec.head_dim_v, Swizzle::bytes128>;

  // 65,536 registers: 2 * 232 + 40 = 3 * 168.
  static constexpr int kGroupRegisters = 232, kLoadRegisters = 40;

  static constexpr int kNumScores = kRows / 2;  // of a thread
};

/// What all roles know.
template <Sm90WideBackwardSpec spec>
struct WideCta : RoleWarp {
  using T = WideTraits<spec>;
  const Sm90WideBackwardParams& p;
  const OwnedTile owned;

  FOVEA_DEVICE_MEMBER std::int32_t kv_head() const {
    return spec.owns_keys ? owned.head : owned.head / p.common.forward.group;
  }
  FOVEA_DEVICE_MEMBER std::int32_t owned_length() const {
    return spec.owns_keys ? owned.sequence.seqlen_kv : owned.sequence.seqlen_q;
  }
  FOVEA_DEVICE_MEMBER std::int32_t walked_length() const {
    return spec.owns_keys ? owned.sequence.seqlen_q : owned.sequence.seqlen_kv;
  }

  // 64 rows each; of owned queries those of a group.
  FOVEA_DEVICE_MEMBER typename T::QkTile owned_qk(int group) const {
    return {smem + T::kAt.owned_qk + static_cast<SharedAddress>(group * T::QkTile::kBytes)};
  }
  FOVEA_DEVICE_MEMBER typename T::VTile owned_v(int group) const {
    return {smem + T::kAt.owned_v + static_cast<SharedAddress>(group * T::VTile::kBytes)};
  }
  FOVEA_DEVICE_MEMBER typename T::QkTile qk(int stage) const {
    return {smem + T::kAt.qk + static_cast<SharedAddress>(stage * T::QkTile::kBytes)};
  }
  FOVEA_DEVICE_MEMBER typename T::VTile v(int stage) const {
    return {smem + T::kAt.v + static_cast<SharedAddress>(stage * T::VTile::kBytes)};
  }
  FOVEA_DEVICE_MEMBER SharedAddress log_sum_at(int stage) const {
    return smem + T::kAt.log_sum + stage * sm90_wide_log_sum_bytes(spec);
  }
  FOVEA_DEVICE_MEMBER SharedAddress delta_at(int stage) const {
    return smem + T::kAt.delta + stage * 4 * T::kRows;
  }

  /// Of the i-th tile of the walk.
  FOVEA_DEVICE_MEMBER SharedAddress word_at(int i) const {
    return smem + T::kAt.words + 8 * (i % kSm90WideWords);
  }
  FOVEA_DEVICE_MEMBER PostedTile posted(int i) const {
    const auto words = ptx::ld_shared<ptx::U32x2>(word_at(i));
    return {words.x, static_cast<std::int32_t>(words.y)};
  }

  FOVEA_DEVICE_MEMBER void await_full(int kind, int stage, std::uint32_t parity) const {
    ptx::mbarrier_wait_parity(barrier(kind, stage), parity);
  }
};

/// 64 x 64 products of rows of one head: a bᵀ.
template <ptx::WgmmaType type, class Tile>
FOVEA_DEVICE void multiply_rows(float (&products)[Tile::kRows / 2], const Tile& a, const Tile& b) {
  const auto rows = k_major_descriptor(a);
  const auto columns = k_major_descriptor(b);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < Tile::kRowBytes / 32; ++i) {
    ptx::wgmma_ss<type, type, Tile::kRows>(products, advanced(rows, k_major_offset<Tile>(i)),
                                           advanced(columns, k_major_offset<Tile>(i)), i > 0);
  }
  ptx::wgmma_commit_group();
}

/// sums += pairs times rows, 64 x 64 pairs in registers. has_sums false: sums hold nothing yet.
template <ptx::WgmmaType type, class Tile>
FOVEA_DEVICE void add_rows(float (&sums)[Tile::kRowBytes / 4], const std::uint32_t (&pairs)[4][4],
                           const Tile& rows, bool has_sums) {
  const auto b = mn_major_descriptor(rows);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < Tile::kRows / 16; ++i) {
    ptx::wgmma_rs<type, type, Tile::kRowBytes / 2, ptx::Major::mn>(
        sums, pairs[i], advanced(b, mn_major_offset<Tile>(i)), i > 0 || has_sums);
  }
  ptx::wgmma_commit_group();
}

}  // namespace fovea::cuda::sm90
