// The products, which one thread issues. Read key_gradients.cuh next.
//
//   S0 | dP0 dV0 S1 dK0 dQ0 | dV1 dP1 S2 dK1 dQ1 | dV2 dP2 S3 ...
//
// Powers of a tile have dK and dQ of the tile before to hide under, dS the scores of the next one, and dQ is read out
// of tensor memory while dV is multiplied. What orders them:
//
//   S over P            dv_done: P has been multiplied. dP stands between, so that nobody waits for it
//   dV                  p_full: the scores have been read, P is there
//   dP over dS or dQ    dq_empty: dQ has been read, so all that was issued before it is complete; behind dP threads
//                       store the next dS, in tensor memory and in shared memory
//   dK, dQ              ds_full: dP has been read, dS is there, in tensor memory and in shared memory
//   dQ over dS          issue order, or dk_done (Sm100BackwardSpec::awaits_keys)
//   buffers given back  commits: all that was issued before is complete
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/cta.cuh"
#include "tile/matrix_descriptor.cuh"
#include "tile/tcgen05_descriptor.cuh"

namespace fovea::cuda::sm100 {

template <Sm100BackwardSpec spec>
struct MultiplyBackward {
  using T = BackwardTraits<spec>;
  static constexpr TensorType kType =
      spec.element == Element::f16 ? TensorType::f16 : TensorType::bf16;
  /// Of keys and queries: S and dP.
  static constexpr ptx::InstructionDescriptor kPairs = instruction_descriptor<TensorProduct{
      .a = kType, .b = kType, .m = T::kKeys, .n = spec.tile_q}>();
  /// Sums of a tile's queries, for each key: dV and dK.
  static constexpr ptx::InstructionDescriptor kKeySums = instruction_descriptor<TensorProduct{
      .a = kType, .b = kType, .m = T::kKeys, .n = spec.head_dim_qk, .b_major = ptx::Major::mn}>();
  /// Of the keys, for each query: dQ.
  static constexpr ptx::InstructionDescriptor kQuerySums =
      instruction_descriptor<TensorProduct{.a = kType,
                                           .b = kType,
                                           .m = spec.tile_q,
                                           .n = spec.head_dim_qk,
                                           .a_major = ptx::Major::mn,
                                           .b_major = ptx::Major::mn}>();
  static constexpr bool kAwaitsKeys =
      spec.awaits_keys && BackwardTensorMemory<spec>::kAt.is_dq_over_ds;

  const BackwardCta<spec>& cta;
  const BackwardTensorMemory<spec> memory;
  Ring<T::kStages> stages{0};
  Ring<1> tiles{0};  // of the barriers with a phase for each tile

  FOVEA_DEVICE_MEMBER MultiplyBackward(const BackwardCta<spec>& of_cta,
                                       const BackwardTensorMemory<spec>& of_memory)
      : cta(of_cta), memory(of_memory) {}

  FOVEA_DEVICE_MEMBER void run() {
    cta.await(cta.barrier(T::kAt.k_full, 0), 0);
    if (ptx::vote_any(cta.posted(0).is_none())) return;
    await_queries();
    issue_scores();
    cta.await(cta.barrier(T::kAt.v_full, 0), 0);
    for (int i = 0;; ++i) {
      const bool is_first = i == 0;
      const bool is_last = ptx::vote_any(cta.posted(i).is_last());
      cta.await(cta.barrier(T::kAt.dout_full, stages.stage), stages.parity);
      if (is_first) issue_probability_gradients();
      cta.await(cta.barrier(T::kAt.p_full, 0), tiles.parity);
      issue_value_sums(is_first, is_last);
      if (!is_first) {
        cta.await(cta.barrier(T::kAt.dq_empty, 0), tiles.parity ^ 1U);
        issue_probability_gradients();
      }
      const int stage = stages.stage;
      stages.advance();
      if (!is_last) {
        await_queries();
        cta.await(cta.barrier(T::kAt.dv_done, 0), tiles.parity);
        issue_scores();
      }
      cta.await(cta.barrier(T::kAt.ds_full, 0), tiles.parity);
      issue_key_sums(stage, is_first);
      if constexpr (kAwaitsKeys) cta.await(cta.barrier(T::kAt.dk_done, 0), tiles.parity);
      issue_query_sums(is_last);
      if (is_last) return;
      tiles.advance();
    }
  }

 private:
  FOVEA_DEVICE_MEMBER void await_queries() const {
    cta.await(cta.barrier(T::kAt.q_full, stages.stage), stages.parity);
  }

  FOVEA_DEVICE_MEMBER void commit(int barrier, int i = 0) const {
    ptx::tcgen05_commit(cta.barrier(barrier, i));
  }

  /// a bᵀ of tiles whose rows run along the depth.
  template <class ATile, class BTile>
  FOVEA_DEVICE_MEMBER void issue_pairs(ptx::TmemAddress d, SharedAddress a_at,
                                       SharedAddress b_at) const {
    const auto a = smem_descriptor(k_major_descriptor(ATile{a_at}));
    const auto b = smem_descriptor(k_major_descriptor(BTile{b_at}));
    ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
    for (int i = 0; i < ATile::kRowBytes / 32; ++i) {
      ptx::tcgen05_mma_ss<ptx::Tcgen05Kind::f16>(d, advanced(a, k_major_offset<ATile>(i)),
                                                 advanced(b, k_major_offset<BTile>(i)), kPairs,
                                                 i > 0);
    }
  }

  /// Sᵀ = K Qᵀ.
  FOVEA_DEVICE_MEMBER void issue_scores() const {
    if (!ptx::elect_one()) return;
    issue_pairs<typename T::KTile, typename T::QTile>(memory.s(0), cta.smem + T::kAt.k,
                                                      cta.q_at(stages.stage));
    commit(T::kAt.s_full);
  }

  /// dPᵀ = V doutᵀ.
  FOVEA_DEVICE_MEMBER void issue_probability_gradients() const {
    if (!ptx::elect_one()) return;
    issue_pairs<typename T::VTile, typename T::DoutTile>(memory.dp(0), cta.smem + T::kAt.v,
                                                         cta.dout_at(stages.stage));
    commit(T::kAt.dp_full);
  }

  /// d += aᵀ b, a in tensor memory: 16 queries are eight columns, of which a group has half in one piece.
  template <class Tile, class Columns>
  FOVEA_DEVICE_MEMBER void issue_sums(ptx::TmemAddress d, Columns&& columns_of, SharedAddress b_at,
                                      bool is_first) const {
    constexpr int kSteps = T::kQueries / 16;  // of a group
    const auto b = smem_descriptor(mn_major_descriptor(Tile{b_at}));
    ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
    for (int i = 0; i < T::kGroups * kSteps; ++i) {
      ptx::tcgen05_mma_ts<ptx::Tcgen05Kind::f16>(
          d, columns_of(i / kSteps).plus_columns(i % kSteps * 8),
          advanced(b, mn_major_offset<Tile>(i)), kKeySums, i > 0 || !is_first);
    }
  }

  /// dV += Pᵀ dout.
  FOVEA_DEVICE_MEMBER void issue_value_sums(bool is_first, bool is_last) const {
    if (!ptx::elect_one()) return;
    issue_sums<typename T::DoutTile>(
        memory.dv(), [&](int group) { return memory.s(group); }, cta.dout_at(stages.stage),
        is_first);
    if (!is_last) commit(T::kAt.dv_done);
  }

  /// dK += dSᵀ Q.
  FOVEA_DEVICE_MEMBER void issue_key_sums(int stage, bool is_first) const {
    if (!ptx::elect_one()) return;
    issue_sums<typename T::QTile>(
        memory.dk(), [&](int group) { return memory.dp(group); }, cta.q_at(stage), is_first);
    if constexpr (kAwaitsKeys) commit(T::kAt.dk_done);
    commit(T::kAt.stage_empty, stage);
  }

  /// dQ = dS K, of this tile of keys.
  FOVEA_DEVICE_MEMBER void issue_query_sums(bool is_last) const {
    if (!ptx::elect_one()) return;
    using DsTile = typename T::DsTile;
    using KTile = typename T::KTile;
    const auto a = smem_descriptor(mn_major_descriptor(DsTile{cta.ds_at(0)}));
    const auto b = smem_descriptor(mn_major_descriptor(KTile{cta.smem + T::kAt.k}));
    ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
    for (int i = 0; i < T::kKeys / 16; ++i) {
      ptx::tcgen05_mma_ss<ptx::Tcgen05Kind::f16>(
          memory.dq(), advanced(a, mn_major_offset<DsTile>(i)),
          advanced(b, mn_major_offset<KTile>(i)), kQuerySums, i > 0);
    }
    commit(T::kAt.dq_full);
    if (is_last) commit(T::kAt.sums_full);
  }
};

}  // namespace fovea::cuda::sm100
