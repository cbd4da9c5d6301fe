// Products of four bits with scales of groups, by tcgen05.mma: when they are issued is ../forward/multiply.cuh's
// affair. Read softmax.cuh next.
//
//   S = Q̂ K̂ᵀ     codes from shared memory, scales copied from behind them to tensor memory just before
//   O += P̂ V̂     P from tensor memory, where softmax has stored its codes; their scales were put into shared memory,
//                 because a warp reaches a quarter of the lanes, and the product reads them in all four
//
// A copy and a product behind it, from one thread, are in order; a product and the copy of the next scales over what
// it reads are not. But that copy is issued behind the group's p_full, which softmax gives when the scores of the kv
// tile have come, by a commit behind all that was issued before them: the sums of the kv tile before, too. Scores of
// the same kv tile are complete likewise. So each group has columns of its own for all four, and no order of issue is
// relied on.
#pragma once

#include "ptx/tcgen05.cuh"
#include "sm100/fp4/cta.cuh"
#include "tile/matrix_descriptor.cuh"
#include "tile/tcgen05_descriptor.cuh"

namespace fovea::cuda::sm100 {

template <Sm100Fp4Spec spec>
struct Fp4Products {
  using T = Traits<spec>;
  static constexpr bool kIsOf16 = spec.scale_group == 16;
  static constexpr ptx::Tcgen05ScaledKind kKind =
      kIsOf16 ? ptx::Tcgen05ScaledKind::mxf4nvf4_block16 : ptx::Tcgen05ScaledKind::mxf4_block32;
  static constexpr ptx::ScaledInstructionDescriptor kScores =
      scaled_instruction_descriptor<ScaledTensorProduct{
          .kind = kKind, .has_ue8m0_scales = !kIsOf16, .m = T::kGroupRows, .n = spec.tile_kv}>();
  static constexpr ptx::ScaledInstructionDescriptor kSums =
      scaled_instruction_descriptor<ScaledTensorProduct{
          .kind = kKind, .has_ue8m0_scales = !kIsOf16, .m = T::kGroupRows, .n = spec.head_dim_v}>();
  static constexpr bool kAwaitsSums = false;  // scores are not written over P

  const Cta<spec>& cta;
  const TensorMemory<spec> memory;

  FOVEA_DEVICE_MEMBER void multiply_keys(int /*q_stage*/, int k_stage, int group,
                                         bool are_new_rows) const {
    const Fp4Places<spec> places{cta};
    const ScaleColumns<spec> scales{memory.base, group};
    const SharedAddress q = places.queries(group), k = places.keys(k_stage);
    if (are_new_rows) copy_scales<T::kGroupRows>(scales.q(), q + T::QTile::kBytes, T::kQkSteps);
    copy_scales<spec.tile_kv>(scales.k(), k + T::KTile::kBytes, T::kQkSteps);
    const auto queries = smem_descriptor(k_major_descriptor(typename T::QTile{q}));
    const auto keys = smem_descriptor(k_major_descriptor(typename T::KTile{k}));
#pragma unroll
    for (int i = 0; i < T::kQkSteps; ++i) {
      ptx::tcgen05_mma_scaled_ss<kKind>(memory.s(group),
                                        advanced(queries, k_major_offset<typename T::QTile>(i)),
                                        advanced(keys, k_major_offset<typename T::KTile>(i)),
                                        kScores, scales_of_step<T::kGroupRows>(scales.q(), i),
                                        scales_of_step<spec.tile_kv>(scales.k(), i), i > 0);
    }
  }

  FOVEA_DEVICE_MEMBER void multiply_values(int v_stage, int group, bool is_first) const {
    constexpr int kStepColumns = kFp4Depth / 8;  // of P
    const Fp4Places<spec> places{cta};
    const ScaleColumns<spec> scales{memory.base, group};
    const SharedAddress v = places.values(v_stage);
    copy_scales<T::kGroupRows>(scales.p(), places.p_scales(group), T::kPvSteps);
    copy_scales<spec.head_dim_v>(scales.v(), v + T::VTile::kBytes, T::kPvSteps);
    const auto values = smem_descriptor(k_major_descriptor(typename T::VTile{v}));
#pragma unroll
    for (int i = 0; i < T::kPvSteps; ++i) {
      ptx::tcgen05_mma_scaled_ts<kKind>(
          memory.o(group), memory.p(group).plus_columns(kStepColumns * i),
          advanced(values, k_major_offset<typename T::VTile>(i)), kSums,
          scales_of_step<T::kGroupRows>(scales.p(), i),
          scales_of_step<spec.head_dim_v>(scales.v(), i), i > 0 || !is_first);
    }
  }

 private:
  /// Words of `rows` rows for each step, as fp4_copied_scale_word has them.
  template <int rows>
  FOVEA_DEVICE void copy_scales(ptx::TmemAddress to, SharedAddress from, int steps) {
#pragma unroll
    for (int i = 0; i < steps * rows / 128; ++i) {
      ptx::tcgen05_cp<ptx::TmemCopy::rows32x128b_warpx4>(
          to.plus_columns(kFp4CopyColumns * i), scales_descriptor(from + kFp4CopyBytes * i));
    }
  }

  template <int rows>
  FOVEA_DEVICE ptx::TmemAddress scales_of_step(ptx::TmemAddress first, int step) {
    return first.plus_columns(step * rows / 32);
  }
};

}  // namespace fovea::cuda::sm100
