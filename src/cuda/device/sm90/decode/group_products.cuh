// Products of a warpgroup over boxes of keys: of 64 rows, however many of them there are. Read compute.cuh for when
// they are made, ptx/wgmma.cuh for how.
//
//   S = Q Kᵀ   Q in shared memory, for both warpgroups; K as it came: a row of B is a key
//   O += P V   P in registers, where S was; V as it came: a column of B is a key
#pragma once

#include "ptx/wgmma.cuh"
#include "sm90/decode/cta.cuh"
#include "team/compute.cuh"
#include "team/scores.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::sm90::decoding {

template <Sm90DecodeSpec spec, class Mods>
struct ProductsOfGroup {
  using L = Layout<spec>;
  using T = typename L::T;
  using KTile = typename L::KTile;
  using VTile = typename L::VTile;
  using QTile = typename L::QTile;
  using Sums = team::Sums<L::kWarpSpec, Mods>;
  using Fragments = typename Sums::Fragments;
  static constexpr ptx::WgmmaType kType = wgmma_type(spec.element);

  /// S = Q Kᵀ.
  FOVEA_DEVICE_MEMBER static void multiply_keys(const QTile& queries, Fragments& s,
                                                const KTile& keys) {
    const auto a = k_major_descriptor(queries);
    const auto b = k_major_descriptor(keys);
    auto& scores = accumulators<spec.tile_kv>(s[0][0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < T::kQkSteps; ++i) {
      ptx::wgmma_ss<kType, kType, spec.tile_kv>(scores, advanced(a, k_major_offset<QTile>(i)),
                                                advanced(b, k_major_offset<KTile>(i)), i > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
  }

  /// O += P V; s is P.
  FOVEA_DEVICE_MEMBER static void multiply_values(Sums& sums, const Fragments& s,
                                                  const VTile& values) {
    constexpr int kSteps = T::kPvSteps;
    std::uint32_t p[kSteps][4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* pair = &s[0][i * 2 + e / 2][e % 2 * 2];
        p[i][e] = team::pack<spec.element>(pair[0], pair[1]);
      }
    auto& out = accumulators<spec.head_dim_v>(sums.out[0][0]);
    const auto b = mn_major_descriptor(values);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ptx::wgmma_rs<kType, kType, spec.head_dim_v, ptx::Major::mn>(
          out, p[i], advanced(b, mn_major_offset<VTile>(i)), true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
  }

 private:
  /// Of n columns, given those of the first eight: blocks of eight columns follow each other as in fragments of
  /// mma.sync.
  template <int n>
  FOVEA_DEVICE_MEMBER static float (&accumulators(float (&first)[4]))[n / 2] {
    return reinterpret_cast<float(&)[n / 2]>(first);
  }
};

}  // namespace fovea::cuda::sm90::decoding
