// Products by a warpgroup, accumulators in registers, operands in shared memory (Warpgroup Level Matrix; sm_90a): d = a
// b, or d += a b, of 64 rows, n columns and 32 bytes of depth. A warpgroup is four warps that start at a multiple of
// four; all of its lanes run each function together, in the order
//
//   wgmma_fence            before the first product after anybody touched d or an a in registers
//   wgmma_ss, wgmma_rs     any number; products of one shape into one d follow each other without a fence
//   wgmma_commit_group
//   wgmma_wait_group<n>    only then d, an a in registers, and operands in shared memory may be touched
//
// Shared memory that ordinary stores wrote needs fence_proxy_async_shared_cta and a barrier first; what TMA wrote, the
// mbarrier. The bodies are in generated/wgmma_<type of a>.cuh, written by generated/wgmma_forms.py: a unit includes
// those that it uses, for reading all of them takes NVRTC longer than compiling a small kernel. Descriptors are made by
// tile/matrix_descriptor.cuh; which thread holds which element: tile/fragment.cuh.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

/// What a and b hold; sums are f32, of s8 and u8 s32. A depth of 32 bytes is 16 elements, or 32 of 8 bits.
enum class WgmmaType : std::uint8_t { bf16, f16, e4m3, e5m2, s8, u8 };

/// Which dimension of an operand is contiguous in shared memory. Types of 8 bits know Major::k only.
enum class Major : std::uint8_t { k, mn };

/// Where an operand lies in shared memory, and how (tile/matrix_descriptor.cuh).
using MatrixDescriptor = std::uint64_t;

FOVEA_DEVICE constexpr bool is_16_bit(WgmmaType type) {
  return type == WgmmaType::bf16 || type == WgmmaType::f16;
}

/// May a and b be multiplied with n columns? bf16 and f16 with themselves, e4m3 and e5m2 with each other, s8 and u8
/// with each other; n is a multiple of 8, for integers above 32 of 16, up to 256.
FOVEA_DEVICE constexpr bool is_wgmma_form(WgmmaType a, WgmmaType b, int n) {
  const bool is_integer = a == WgmmaType::s8 || a == WgmmaType::u8;
  const bool is_b_integer = b == WgmmaType::s8 || b == WgmmaType::u8;
  const bool is_pair = is_16_bit(a) || is_16_bit(b) ? a == b : is_integer == is_b_integer;
  return is_pair && n >= 8 && n <= 256 && n % (is_integer && n > 32 ? 16 : 8) == 0;
}

/// The bodies of one pair of types and one n; specialised in generated/.
template <WgmmaType a_type, WgmmaType b_type, int n>
struct WgmmaForm;

/// The same descriptor, but for the compiler: what follows from it is computed here, not ahead of the loop around it.
FOVEA_DEVICE MatrixDescriptor computed_here(MatrixDescriptor descriptor) {
  asm volatile("" : "+l"(descriptor));
  return descriptor;
}

/// What d holds is wanted no more: nothing need keep it until a product that does not accumulate writes it.
template <int n>
FOVEA_DEVICE void wgmma_forget(float (&d)[n]) {
#pragma unroll
  for (float& sum : d) asm volatile("" : "=f"(sum));
}

/// wgmma.fence.
FOVEA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// wgmma.commit_group: closes the group of the products since the last one.
FOVEA_DEVICE void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// wgmma.wait_group N: all but the N newest groups are complete; N is at most 7.
template <int N>
FOVEA_DEVICE void wgmma_wait_group() {
  static_assert(N >= 0 && N <= 7);
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/// wgmma.mma_async, a and b in shared memory. is_accumulating false: d = a b. `Sum` is float, of 8-bit integers
/// std::int32_t.
template <WgmmaType a_type, WgmmaType b_type, int n, Major a_major = Major::k,
          Major b_major = Major::k, class Sum>
FOVEA_DEVICE void wgmma_ss(Sum (&d)[n / 2], MatrixDescriptor a, MatrixDescriptor b,
                           bool is_accumulating) {
  static_assert(is_wgmma_form(a_type, b_type, n), "no such product");
  static_assert(is_16_bit(a_type) || (a_major == Major::k && b_major == Major::k),
                "operands of 8 bits are K-major");
  WgmmaForm<a_type, b_type, n>::template ss<a_major, b_major>(d, a, b, is_accumulating);
}

/// wgmma.mma_async, a in registers: the fragment of 64 x 32 bytes.
template <WgmmaType a_type, WgmmaType b_type, int n, Major b_major = Major::k, class Sum>
FOVEA_DEVICE void wgmma_rs(Sum (&d)[n / 2], const std::uint32_t (&a)[4], MatrixDescriptor b,
                           bool is_accumulating) {
  static_assert(is_wgmma_form(a_type, b_type, n), "no such product");
  static_assert(is_16_bit(a_type) || b_major == Major::k, "operands of 8 bits are K-major");
  WgmmaForm<a_type, b_type, n>::template rs<b_major>(d, a, b, is_accumulating);
}

}  // namespace fovea::cuda::ptx
