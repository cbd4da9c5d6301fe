// The emulated twin of src/cuda/device/ptx/tcgen05.cuh.
#pragma once

#include "ptx/base.cuh"
#include "shared/tcgen05.h"

namespace fovea::cuda::ptx {

FOVEA_DEVICE constexpr bool is_tmem_allocation(int num_columns) {
  return num_columns >= 32 && num_columns <= 512 && (num_columns & (num_columns - 1)) == 0;
}

template <Tcgen05Kind kind, int cta_group>
FOVEA_DEVICE constexpr bool is_tcgen05_kind() {
  static_assert(cta_group == 1 || cta_group == 2, "cta_group is 1, or 2 for a pair of CTAs");
  return true;
}

/// The emulator has one list of kinds, those with scales last.
FOVEA_DEVICE constexpr emulator::TensorKind tensor_kind(Tcgen05Kind kind) {
  return static_cast<emulator::TensorKind>(kind);
}
FOVEA_DEVICE constexpr emulator::TensorKind tensor_kind(Tcgen05ScaledKind kind) {
  constexpr int kFirst = static_cast<int>(emulator::TensorKind::mxf8f6f4_block32);
  return static_cast<emulator::TensorKind>(kFirst + static_cast<int>(kind));
}

template <int num_columns, int cta_group = 1>
FOVEA_DEVICE void tcgen05_alloc(SharedAddress to, Site site = Site::here()) {
  static_assert(is_tmem_allocation(num_columns), "columns are a power of two from 32 to 512");
  emulator::tensor_alloc(to, num_columns, cta_group, {"tcgen05.alloc", site});
}

template <int num_columns, int cta_group = 1>
FOVEA_DEVICE void tcgen05_dealloc(TmemAddress from, Site site = Site::here()) {
  static_assert(is_tmem_allocation(num_columns), "columns are a power of two from 32 to 512");
  emulator::tensor_dealloc(from.bits, num_columns, cta_group, {"tcgen05.dealloc", site});
}

template <int cta_group = 1>
FOVEA_DEVICE void tcgen05_relinquish_alloc_permit(Site site = Site::here()) {
  emulator::tensor_relinquish(cta_group, {"tcgen05.relinquish_alloc_permit", site});
}

FOVEA_DEVICE void tcgen05_fence_before_thread_sync(Site site = Site::here()) {
  emulator::tensor_fence_before({"tcgen05.fence::before_thread_sync", site});
}

FOVEA_DEVICE void tcgen05_fence_after_thread_sync(Site site = Site::here()) {
  emulator::tensor_fence_after({"tcgen05.fence::after_thread_sync", site});
}

template <int cta_group = 1>
FOVEA_DEVICE void tcgen05_commit(SharedAddress barrier, Site site = Site::here()) {
  emulator::tensor_commit(barrier, 0, cta_group, {"tcgen05.commit", site});
}

template <int cta_group = 1>
FOVEA_DEVICE void tcgen05_commit_multicast(SharedAddress barrier, std::uint16_t cta_mask,
                                           Site site = Site::here()) {
  emulator::tensor_commit(barrier, cta_mask, cta_group, {"tcgen05.commit.multicast", site});
}

/// What every product says.
template <auto kind, int cta_group, class Descriptor>
inline emulator::TensorMma tensor_mma(TmemAddress d, SmemDescriptor b, Descriptor instruction,
                                      bool is_accumulating) {
  emulator::TensorMma form{};
  form.kind = tensor_kind(kind);
  form.cta_group = cta_group;
  form.d = d.bits;
  form.b = b.bits;
  form.instruction = instruction.bits;
  form.is_accumulating = is_accumulating;
  return form;
}

inline emulator::TensorMma with_a(emulator::TensorMma form, SmemDescriptor a) {
  form.a = a.bits;
  return form;
}
inline emulator::TensorMma with_a(emulator::TensorMma form, TmemAddress a) {
  form.a = a.bits;
  form.a_is_in_tensor_memory = true;
  return form;
}

template <Tcgen05Kind kind, int cta_group = 1>
FOVEA_DEVICE void tcgen05_mma_ss(TmemAddress d, SmemDescriptor a, SmemDescriptor b,
                                 InstructionDescriptor instruction, bool is_accumulating,
                                 Site site = Site::here()) {
  emulator::tensor_mma(with_a(tensor_mma<kind, cta_group>(d, b, instruction, is_accumulating), a),
                       {"tcgen05.mma", site});
}

template <Tcgen05Kind kind, int cta_group = 1>
FOVEA_DEVICE void tcgen05_mma_ts(TmemAddress d, TmemAddress a, SmemDescriptor b,
                                 InstructionDescriptor instruction, bool is_accumulating,
                                 Site site = Site::here()) {
  emulator::tensor_mma(with_a(tensor_mma<kind, cta_group>(d, b, instruction, is_accumulating), a),
                       {"tcgen05.mma", site});
}

template <Tcgen05Kind kind, int cta_group = 1>
FOVEA_DEVICE void tcgen05_mma_ss_masked(TmemAddress d, SmemDescriptor a, SmemDescriptor b,
                                        InstructionDescriptor instruction,
                                        const std::uint32_t (&disabled_lanes)[4 * cta_group],
                                        bool is_accumulating, Site site = Site::here()) {
  emulator::TensorMma form =
      with_a(tensor_mma<kind, cta_group>(d, b, instruction, is_accumulating), a);
  form.disabled_lanes = disabled_lanes;
  emulator::tensor_mma(form, {"tcgen05.mma", site});
}

template <Tcgen05Kind kind, int cta_group = 1>
FOVEA_DEVICE void tcgen05_mma_ts_masked(TmemAddress d, TmemAddress a, SmemDescriptor b,
                                        InstructionDescriptor instruction,
                                        const std::uint32_t (&disabled_lanes)[4 * cta_group],
                                        bool is_accumulating, Site site = Site::here()) {
  emulator::TensorMma form =
      with_a(tensor_mma<kind, cta_group>(d, b, instruction, is_accumulating), a);
  form.disabled_lanes = disabled_lanes;
  emulator::tensor_mma(form, {"tcgen05.mma", site});
}

template <Tcgen05ScaledKind kind, int cta_group = 1>
FOVEA_DEVICE void tcgen05_mma_scaled_ss(TmemAddress d, SmemDescriptor a, SmemDescriptor b,
                                        ScaledInstructionDescriptor instruction,
                                        TmemAddress a_scales, TmemAddress b_scales,
                                        bool is_accumulating, Site site = Site::here()) {
  emulator::TensorMma form =
      with_a(tensor_mma<kind, cta_group>(d, b, instruction, is_accumulating), a);
  form.a_scales = a_scales.bits;
  form.b_scales = b_scales.bits;
  emulator::tensor_mma(form, {"tcgen05.mma.block_scale", site});
}

template <Tcgen05ScaledKind kind, int cta_group = 1>
FOVEA_DEVICE void tcgen05_mma_scaled_ts(TmemAddress d, TmemAddress a, SmemDescriptor b,
                                        ScaledInstructionDescriptor instruction,
                                        TmemAddress a_scales, TmemAddress b_scales,
                                        bool is_accumulating, Site site = Site::here()) {
  emulator::TensorMma form =
      with_a(tensor_mma<kind, cta_group>(d, b, instruction, is_accumulating), a);
  form.a_scales = a_scales.bits;
  form.b_scales = b_scales.bits;
  emulator::tensor_mma(form, {"tcgen05.mma.block_scale", site});
}

template <TmemCopy shape, int cta_group = 1>
FOVEA_DEVICE void tcgen05_cp(TmemAddress to, SmemDescriptor from, Site site = Site::here()) {
  emulator::tensor_copy(static_cast<emulator::TensorCopyShape>(shape), to.bits, from.bits,
                        cta_group, {"tcgen05.cp", site});
}

}  // namespace fovea::cuda::ptx
