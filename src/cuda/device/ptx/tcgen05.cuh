// The tensor core of sm_100 and sm_103 and its memory (TensorCore 5th Generation Family Instructions; sm_100a,
// sm_103a).
//
// Tensor memory is 128 lanes x 512 columns of 32 bits to an SM, allocated by columns. Warp w reaches lanes 32 (w % 4)
// and up of its CTA's. A product reads a from shared or tensor memory, b from shared memory, and writes d to tensor
// memory; one thread issues it. Nothing here is in order but by these rules:
//
//   tcgen05_mma_*, tcgen05_cp   asynchronous. In order of issue, from one thread: products of one shape into one d, and
//                               a copy before a product. Nothing else: not a product that reads what the next one
//                               writes over.
//   tcgen05_commit              one arrival on an mbarrier once all that this thread issued before is complete.
//   tcgen05_ld_*, tcgen05_st_*  asynchronous; complete after tcgen05_wait_ld, tcgen05_wait_st of the same warp.
//   from thread to thread       tcgen05_fence_before_thread_sync; arrive, or a barrier; the other one's wait;
//                               tcgen05_fence_after_thread_sync. A commit implies the first of these.
//
// The same thread issues products and the commit that tracks them: branch on elect_one() once. All of a kernel's
// instructions are of one cta_group; with 2, two CTAs of a cluster whose ranks differ in bit 0 work as a pair: each
// holds half of a's rows and half of b's columns, at the same addresses, and one thread of one of them issues.
// Descriptors: tile/tcgen05_descriptor.cuh. Loads and stores: ptx/tcgen05_ld_st.cuh.
#pragma once

#include "ptx/base.cuh"
#include "shared/tcgen05.h"

#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
#define FOVEA_HAS_TCGEN05 1
#else
#define FOVEA_HAS_TCGEN05 0
#endif
static_assert(
    FOVEA_HAS_TCGEN05,
    "tcgen05 and tensor memory exist on sm_100a and sm_103a alone; compile for one of these");

namespace fovea::cuda::ptx {

FOVEA_DEVICE constexpr bool is_tmem_allocation(int num_columns) {
  return num_columns >= 32 && num_columns <= 512 && (num_columns & (num_columns - 1)) == 0;
}

// ---- spellings ----------------------------------------------------------------------------------------------

template <Tcgen05Kind kind>
struct Tcgen05KindText;
template <>
struct Tcgen05KindText<Tcgen05Kind::f16> {
  static constexpr char kText[] = "f16";
};
template <>
struct Tcgen05KindText<Tcgen05Kind::tf32> {
  static constexpr char kText[] = "tf32";
};
template <>
struct Tcgen05KindText<Tcgen05Kind::f8f6f4> {
  static constexpr char kText[] = "f8f6f4";
};
template <>
struct Tcgen05KindText<Tcgen05Kind::i8> {
  static constexpr char kText[] = "i8";
};

template <Tcgen05ScaledKind kind>
struct Tcgen05ScaledKindText;
template <>
struct Tcgen05ScaledKindText<Tcgen05ScaledKind::mxf8f6f4_block32> {
  static constexpr char kText[] = "mxf8f6f4.block_scale.block32";
};
template <>
struct Tcgen05ScaledKindText<Tcgen05ScaledKind::mxf4_block32> {
  static constexpr char kText[] = "mxf4.block_scale.block32";
};
template <>
struct Tcgen05ScaledKindText<Tcgen05ScaledKind::mxf4nvf4_block32> {
  static constexpr char kText[] = "mxf4nvf4.block_scale.block32";
};
template <>
struct Tcgen05ScaledKindText<Tcgen05ScaledKind::mxf4nvf4_block16> {
  static constexpr char kText[] = "mxf4nvf4.block_scale.block16";
};

template <TmemCopy shape>
struct TmemCopyText;
template <>
struct TmemCopyText<TmemCopy::rows128x256b> {
  static constexpr char kText[] = "128x256b";
};
template <>
struct TmemCopyText<TmemCopy::rows128x128b> {
  static constexpr char kText[] = "128x128b";
};
template <>
struct TmemCopyText<TmemCopy::rows64x128b_warpx2_02_13> {
  static constexpr char kText[] = "64x128b.warpx2::02_13";
};
template <>
struct TmemCopyText<TmemCopy::rows64x128b_warpx2_01_23> {
  static constexpr char kText[] = "64x128b.warpx2::01_23";
};
template <>
struct TmemCopyText<TmemCopy::rows32x128b_warpx4> {
  static constexpr char kText[] = "32x128b.warpx4";
};

/// i8 has no instruction on sm_103.
template <Tcgen05Kind kind, int cta_group>
FOVEA_DEVICE constexpr bool is_tcgen05_kind() {
  static_assert(cta_group == 1 || cta_group == 2, "cta_group is 1, or 2 for a pair of CTAs");
#if !defined(__CUDA_ARCH_FEAT_SM100_ALL)
  static_assert(kind != Tcgen05Kind::i8,
                "products of 8-bit integers exist on sm_100a, not on sm_103a");
#endif
  return true;
}

// ---- allocation ---------------------------------------------------------------------------------------------

/// tcgen05.alloc: `num_columns` columns of all lanes; the address of the first, lane 0, goes to the word of shared
/// memory `to` by an ordinary store. One converged warp, of a pair one in each CTA, with the other already running.
/// Waits while another CTA of the SM holds the columns. No allocation of a CTA may be larger than an earlier one.
template <int num_columns, int cta_group = 1>
FOVEA_DEVICE void tcgen05_alloc(SharedAddress to) {
  static_assert(is_tmem_allocation(num_columns), "columns are a power of two from 32 to 512");
  asm volatile("tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to),
               "n"(num_columns), "n"(cta_group)
               : "memory");
}

/// tcgen05.dealloc: gives back what one tcgen05_alloc gave. One converged warp, of a pair one in each CTA, after all
/// accesses: loads waited for, products committed and awaited. Every allocation ends so before the CTA does.
template <int num_columns, int cta_group = 1>
FOVEA_DEVICE void tcgen05_dealloc(TmemAddress from) {
  static_assert(is_tmem_allocation(num_columns), "columns are a power of two from 32 to 512");
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(from.bits),
               "n"(num_columns), "n"(cta_group)
               : "memory");
}

/// tcgen05.relinquish_alloc_permit: this CTA allocates no more, so that another one of the SM need not wait to be sure
/// of it. One converged warp, straight after the last tcgen05_alloc.
template <int cta_group = 1>
FOVEA_DEVICE void tcgen05_relinquish_alloc_permit() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::%0.sync.aligned;" ::"n"(cta_group));
}

// ---- order --------------------------------------------------------------------------------------------------

/// tcgen05.fence::before_thread_sync: what this thread did in tensor memory, as far as it is complete or pipelined,
/// comes before the arrival or barrier that follows.
FOVEA_DEVICE void tcgen05_fence_before_thread_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

/// tcgen05.fence::after_thread_sync: what this thread does in tensor memory from now on comes after the wait or barrier
/// before it.
FOVEA_DEVICE void tcgen05_fence_after_thread_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

/// tcgen05.commit: one arrival on `barrier` once all products and copies that this thread issued before are complete.
/// One thread, the one that issued them.
template <int cta_group = 1>
FOVEA_DEVICE void tcgen05_commit(SharedAddress barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::%1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier),
      "n"(cta_group)
      : "memory");
}

/// tcgen05.commit.multicast::cluster: the arrival on the barrier at the same offset in each CTA of the cluster whose
/// bit of `cta_mask` is set.
template <int cta_group = 1>
FOVEA_DEVICE void tcgen05_commit_multicast(SharedAddress barrier, std::uint16_t cta_mask) {
  asm volatile(
      "tcgen05.commit.cta_group::%2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
      "[%0], "
      "%1;" ::"r"(barrier),
      "h"(cta_mask), "n"(cta_group)
      : "memory");
}

// ---- products -----------------------------------------------------------------------------------------------

/// tcgen05.mma, a and b in shared memory: d = a b, or d += a b. One thread. 32 bytes of depth of a row of a.
template <Tcgen05Kind kind, int cta_group = 1>
FOVEA_DEVICE void tcgen05_mma_ss(TmemAddress d, SmemDescriptor a, SmemDescriptor b,
                                 InstructionDescriptor instruction, bool is_accumulating) {
  static_assert(is_tcgen05_kind<kind, cta_group>());
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.cta_group::%5.kind::%6 [%0], %1, %2, %3, "
      "p; "
      "}" ::"r"(d.bits),
      "l"(a.bits), "l"(b.bits), "r"(instruction.bits), "r"(static_cast<int>(is_accumulating)),
      "n"(cta_group), "C"(Tcgen05KindText<kind>::kText));
}

/// tcgen05.mma, a in tensor memory: row r in lane r, its 32 bytes in the eight columns from a on.
template <Tcgen05Kind kind, int cta_group = 1>
FOVEA_DEVICE void tcgen05_mma_ts(TmemAddress d, TmemAddress a, SmemDescriptor b,
                                 InstructionDescriptor instruction, bool is_accumulating) {
  static_assert(is_tcgen05_kind<kind, cta_group>());
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.cta_group::%5.kind::%6 [%0], [%1], %2, "
      "%3, p; "
      "}" ::"r"(d.bits),
      "r"(a.bits), "l"(b.bits), "r"(instruction.bits), "r"(static_cast<int>(is_accumulating)),
      "n"(cta_group), "C"(Tcgen05KindText<kind>::kText));
}

/// tcgen05.mma with disable-output-lane: lane i of d is not written where bit i % 32 of disabled_lanes[i / 32] is set;
/// of a pair, the first four words are those of the even CTA.
template <Tcgen05Kind kind, int cta_group = 1>
FOVEA_DEVICE void tcgen05_mma_ss_masked(TmemAddress d, SmemDescriptor a, SmemDescriptor b,
                                        InstructionDescriptor instruction,
                                        const std::uint32_t (&disabled_lanes)[4 * cta_group],
                                        bool is_accumulating) {
  static_assert(is_tcgen05_kind<kind, cta_group>());
  const std::uint32_t(&off)[4 * cta_group] = disabled_lanes;
  if constexpr (cta_group == 1) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.cta_group::1.kind::%5 [%0], %1, %2, %3, "
        "{%6, %7, %8, %9}, p; }" ::"r"(d.bits),
        "l"(a.bits), "l"(b.bits), "r"(instruction.bits), "r"(static_cast<int>(is_accumulating)),
        "C"(Tcgen05KindText<kind>::kText), "r"(off[0]), "r"(off[1]), "r"(off[2]), "r"(off[3]));
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.cta_group::2.kind::%5 [%0], %1, %2, %3, "
        "{%6, %7, %8, %9, %10, %11, %12, %13}, p; }" ::"r"(d.bits),
        "l"(a.bits), "l"(b.bits), "r"(instruction.bits), "r"(static_cast<int>(is_accumulating)),
        "C"(Tcgen05KindText<kind>::kText), "r"(off[0]), "r"(off[1]), "r"(off[2]), "r"(off[3]),
        "r"(off[4]), "r"(off[5]), "r"(off[6]), "r"(off[7]));
  }
}

/// The same, a in tensor memory.
template <Tcgen05Kind kind, int cta_group = 1>
FOVEA_DEVICE void tcgen05_mma_ts_masked(TmemAddress d, TmemAddress a, SmemDescriptor b,
                                        InstructionDescriptor instruction,
                                        const std::uint32_t (&disabled_lanes)[4 * cta_group],
                                        bool is_accumulating) {
  static_assert(is_tcgen05_kind<kind, cta_group>());
  const std::uint32_t(&off)[4 * cta_group] = disabled_lanes;
  if constexpr (cta_group == 1) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.cta_group::1.kind::%5 [%0], [%1], %2, "
        "%3, "
        "{%6, %7, %8, %9}, p; }" ::"r"(d.bits),
        "r"(a.bits), "l"(b.bits), "r"(instruction.bits), "r"(static_cast<int>(is_accumulating)),
        "C"(Tcgen05KindText<kind>::kText), "r"(off[0]), "r"(off[1]), "r"(off[2]), "r"(off[3]));
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.cta_group::2.kind::%5 [%0], [%1], %2, "
        "%3, "
        "{%6, %7, %8, %9, %10, %11, %12, %13}, p; }" ::"r"(d.bits),
        "r"(a.bits), "l"(b.bits), "r"(instruction.bits), "r"(static_cast<int>(is_accumulating)),
        "C"(Tcgen05KindText<kind>::kText), "r"(off[0]), "r"(off[1]), "r"(off[2]), "r"(off[3]),
        "r"(off[4]), "r"(off[5]), "r"(off[6]), "r"(off[7]));
  }
}

/// tcgen05.mma.block_scale: each block of a row of a, and of a column of b, times its scale. Scales lie in tensor
/// memory: block k of row r is byte k of column r / 32 in lane r % 32, and the same in the other quarters of lanes.
template <Tcgen05ScaledKind kind, int cta_group = 1>
FOVEA_DEVICE void tcgen05_mma_scaled_ss(TmemAddress d, SmemDescriptor a, SmemDescriptor b,
                                        ScaledInstructionDescriptor instruction,
                                        TmemAddress a_scales, TmemAddress b_scales,
                                        bool is_accumulating) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0; tcgen05.mma.cta_group::%7.kind::%8 [%0], %1, %2, %3, "
      "[%4], [%5], p; }" ::"r"(d.bits),
      "l"(a.bits), "l"(b.bits), "r"(instruction.bits), "r"(a_scales.bits), "r"(b_scales.bits),
      "r"(static_cast<int>(is_accumulating)), "n"(cta_group),
      "C"(Tcgen05ScaledKindText<kind>::kText));
}

/// The same, a in tensor memory.
template <Tcgen05ScaledKind kind, int cta_group = 1>
FOVEA_DEVICE void tcgen05_mma_scaled_ts(TmemAddress d, TmemAddress a, SmemDescriptor b,
                                        ScaledInstructionDescriptor instruction,
                                        TmemAddress a_scales, TmemAddress b_scales,
                                        bool is_accumulating) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0; tcgen05.mma.cta_group::%7.kind::%8 [%0], [%1], %2, "
      "%3, "
      "[%4], [%5], p; }" ::"r"(d.bits),
      "r"(a.bits), "l"(b.bits), "r"(instruction.bits), "r"(a_scales.bits), "r"(b_scales.bits),
      "r"(static_cast<int>(is_accumulating)), "n"(cta_group),
      "C"(Tcgen05ScaledKindText<kind>::kText));
}

// ---- copies -------------------------------------------------------------------------------------------------

/// tcgen05.cp: rows of shared memory to tensor memory, 16 bytes to four columns. One thread; of a pair, for both CTAs,
/// each from its own shared memory.
template <TmemCopy shape, int cta_group = 1>
FOVEA_DEVICE void tcgen05_cp(TmemAddress to, SmemDescriptor from) {
  asm volatile("tcgen05.cp.cta_group::%2.%3 [%0], %1;" ::"r"(to.bits), "l"(from.bits),
               "n"(cta_group), "C"(TmemCopyText<shape>::kText));
}

}  // namespace fovea::cuda::ptx
