// Small kernels that show what an instruction does: each moves an image of bytes into shared memory or registers, runs
// the instruction, and writes every register and byte that came of it. NVRTC compiles them for the GPU, the host
// compiler for the emulator; cases.hpp says what they must give.
#pragma once

#include "params.h"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/exp_log.cuh"
#include "ptx/fence.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/mma_scaled.cuh"
#include "ptx/ordered.cuh"
#include "ptx/warp.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::conformance {

FOVEA_DEVICE int num_threads() { return ptx::block_dim().x; }

/// Bytes are multiples of 16.
FOVEA_DEVICE void fill_shared(ptx::SharedAddress to, const void* from, int bytes) {
  const auto* chunks = static_cast<const ptx::U32x4*>(from);
  for (int i = ptx::thread_idx().x; i < bytes / 16; i += num_threads()) {
    ptx::st_shared(to + 16 * i, ptx::ld_global(chunks + i));
  }
}

FOVEA_DEVICE void dump_shared(void* to, ptx::SharedAddress from, int bytes) {
  auto* chunks = static_cast<ptx::U32x4*>(to);
  for (int i = ptx::thread_idx().x; i < bytes / 16; i += num_threads()) {
    ptx::st_global(chunks + i, ptx::ld_shared<ptx::U32x4>(from + 16 * i));
  }
}

// ---- wgmma -------------------------------------------------------------------------------------

template <ptx::WgmmaType type>
struct SumOf {
  using Type = float;
};
template <>
struct SumOf<ptx::WgmmaType::s8> {
  using Type = std::int32_t;
};
template <>
struct SumOf<ptx::WgmmaType::u8> {
  using Type = std::int32_t;
};

template <class Sum, int count>
FOVEA_DEVICE void write_sums(void* out, const Sum (&d)[count]) {
  auto* to = static_cast<ptx::U32x4*>(out) + ptx::thread_idx().x * (count / 4);
  const auto bits = [](Sum x) { return ptx::bit_cast<std::uint32_t>(x); };
  for (int i = 0; i < count / 4; ++i) {
    ptx::st_global(to + i, ptx::U32x4{bits(d[4 * i]), bits(d[4 * i + 1]), bits(d[4 * i + 2]),
                                      bits(d[4 * i + 3])});
  }
}

/// d = a b, then d += a b of the next step of depth; d begins as ones, which the first product must not read.
/// in: the image of shared memory, n[0] bytes. out: d of each thread.
template <ptx::WgmmaType a, ptx::WgmmaType b, int n, ptx::Major a_major, ptx::Major b_major>
FOVEA_DEVICE void wgmma_ss(const Params& p) {
  const ptx::SharedAddress base = ptx::dynamic_shared();
  fill_shared(base, p.in, p.n[0]);
  ptx::fence_proxy_async_shared_cta();
  ptx::sync_threads();

  using Sum = typename SumOf<a>::Type;
  Sum d[n / 2];
  for (int i = 0; i < n / 2; ++i) d[i] = 1;
  const int offset = static_cast<int>(base & 0x3FFFFU);
  ptx::wgmma_fence();
  ptx::wgmma_ss<a, b, n, a_major, b_major>(d, advanced(p.a[0], offset), advanced(p.b[0], offset),
                                           false);
  ptx::wgmma_ss<a, b, n, a_major, b_major>(d, advanced(p.a[1], offset), advanced(p.b[1], offset),
                                           true);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  write_sums(p.out, d);
}

/// As wgmma_ss. in: the image, then registers of a: 128 threads x 4 words of step 0, the same of step 1.
template <ptx::WgmmaType a, ptx::WgmmaType b, int n, ptx::Major b_major>
FOVEA_DEVICE void wgmma_rs(const Params& p) {
  const ptx::SharedAddress base = ptx::dynamic_shared();
  fill_shared(base, p.in, p.n[0]);
  ptx::fence_proxy_async_shared_cta();
  ptx::sync_threads();

  const auto* registers =
      reinterpret_cast<const ptx::U32x4*>(static_cast<const char*>(p.in) + p.n[0]);
  const ptx::U32x4 first = ptx::ld_global(registers + ptx::thread_idx().x);
  const ptx::U32x4 second = ptx::ld_global(registers + 128 + ptx::thread_idx().x);
  const std::uint32_t a0[4] = {first.x, first.y, first.z, first.w};
  const std::uint32_t a1[4] = {second.x, second.y, second.z, second.w};

  using Sum = typename SumOf<a>::Type;
  Sum d[n / 2];
  for (int i = 0; i < n / 2; ++i) d[i] = 1;
  const int offset = static_cast<int>(base & 0x3FFFFU);
  ptx::wgmma_fence();
  ptx::wgmma_rs<a, b, n, b_major>(d, a0, advanced(p.b[0], offset), false);
  ptx::wgmma_rs<a, b, n, b_major>(d, a1, advanced(p.b[1], offset), true);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  write_sums(p.out, d);
}

// ---- one warp ----------------------------------------------------------------------------------

/// in: an image of 8192 bytes, then 32 row offsets to read, 32 to write, 32 to write transposed.
/// out: per lane 4 + 4 + 2 + 2 words of ldmatrix x4, x4.trans, x2, x2.trans; then the image after stmatrix x4 and
/// x4.trans of the words that ldmatrix x4 gave.
FOVEA_DEVICE void matrices(const Params& p) {
  constexpr int kImage = 8192;
  const ptx::SharedAddress base = ptx::dynamic_shared();
  fill_shared(base, p.in, kImage);
  ptx::sync_threads();
  const int lane = ptx::lane_idx();
  const auto* rows = reinterpret_cast<const std::int32_t*>(static_cast<const char*>(p.in) + kImage);
  const ptx::SharedAddress row = base + ptx::ld_global(rows + lane);
  const ptx::U32x4 x4 = ptx::ldmatrix_x4(row), x4_trans = ptx::ldmatrix_x4_trans(row);
  const ptx::U32x2 x2 = ptx::ldmatrix_x2(row), x2_trans = ptx::ldmatrix_x2_trans(row);
  auto* out = static_cast<std::uint32_t*>(p.out) + 12 * lane;
  ptx::st_global(reinterpret_cast<ptx::U32x4*>(out), x4);
  ptx::st_global(reinterpret_cast<ptx::U32x4*>(out + 4), x4_trans);
  ptx::st_global(reinterpret_cast<ptx::U32x2*>(out + 8), x2);
  ptx::st_global(reinterpret_cast<ptx::U32x2*>(out + 10), x2_trans);
  ptx::sync_threads();
  ptx::stmatrix_x4(base + ptx::ld_global(rows + 32 + lane), x4);
  ptx::stmatrix_x4_trans(base + ptx::ld_global(rows + 64 + lane), x4);
  ptx::sync_threads();
  dump_shared(static_cast<std::uint32_t*>(p.out) + 12 * 32, base, kImage);
}

enum class Product { bf16, f16, f16_halves, tf32, e4m3 };

/// in: per lane 4 words of a, 2 of b, 2 unused, 4 of d before. out: 4 of d.
template <Product product>
FOVEA_DEVICE void mma(const Params& p) {
  const int lane = ptx::block_idx().x * 32 + ptx::lane_idx();
  const auto* in = static_cast<const ptx::U32x4*>(p.in) + 3 * lane;
  const ptx::U32x4 a4 = ptx::ld_global(in), b = ptx::ld_global(in + 1), d4 = ptx::ld_global(in + 2);
  const std::uint32_t a[4] = {a4.x, a4.y, a4.z, a4.w};
  float d[4] = {ptx::bit_cast<float>(d4.x), ptx::bit_cast<float>(d4.y), ptx::bit_cast<float>(d4.z),
                ptx::bit_cast<float>(d4.w)};
  if constexpr (product == Product::bf16) {
    ptx::mma_m16n8k16<Element::bf16>(d, a, b.x, b.y);
  } else if constexpr (product == Product::f16) {
    ptx::mma_m16n8k16<Element::f16>(d, a, b.x, b.y);
  } else if constexpr (product == Product::e4m3) {
    ptx::mma_m16n8k32_e4m3(d, a, b.x, b.y);
  } else if constexpr (product == Product::f16_halves) {
    ptx::mma_m16n8k8_f16(d, a[0], a[1], b.x);
    ptx::mma_m16n8k8_f16(d, a[2], a[3], b.y);
  } else {
    ptx::mma_m16n8k8_tf32(d, a, b.x, b.y);
  }
  ptx::st_global(static_cast<ptx::F32x4*>(p.out) + lane, ptx::F32x4{d[0], d[1], d[2], d[3]});
}

/// in: per lane 4 words of a, 2 of b, scales of a and of b, 4 of d before. out: 4 of d.
template <ptx::GroupScales scales, int a_thread, int b_thread>
FOVEA_DEVICE void mma_scaled(const Params& p) {
  const int lane = ptx::block_idx().x * 32 + ptx::lane_idx();
  const auto* in = static_cast<const ptx::U32x4*>(p.in) + 3 * lane;
  const ptx::U32x4 a4 = ptx::ld_global(in), b4 = ptx::ld_global(in + 1);
  const auto* before = reinterpret_cast<const float*>(in + 2);
  const std::uint32_t a[4] = {a4.x, a4.y, a4.z, a4.w}, b[2] = {b4.x, b4.y};
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = ptx::ld_global(before + i);
  ptx::mma_m16n8k64_e2m1<scales, a_thread, b_thread>(d, a, b, b4.z, b4.w);
  ptx::st_global(static_cast<ptx::F32x4*>(p.out) + lane, ptx::F32x4{d[0], d[1], d[2], d[3]});
}

/// in: per thread 8 floats. out: a word.
FOVEA_DEVICE void codes_of_four_bits(const Params& p) {
  const int thread = ptx::thread_idx().x;
  float x[8];
  for (int i = 0; i < 8; ++i)
    x[i] = ptx::ld_global(static_cast<const float*>(p.in) + 8 * thread + i);
  ptx::st_global(static_cast<std::uint32_t*>(p.out) + thread, ptx::cvt_e2m1x8(x));
}

// ---- one thread --------------------------------------------------------------------------------

inline constexpr int kNumExact = 25, kNumApproximate = 7;

/// in: per thread 3 words. out: kNumExact + kNumApproximate words, in the order below.
FOVEA_DEVICE void arithmetic(const Params& p) {
  const int i = ptx::block_idx().x * num_threads() + ptx::thread_idx().x;
  const auto* in = static_cast<const std::uint32_t*>(p.in) + 3 * i;
  const std::uint32_t ua = ptx::ld_global(in), ub = ptx::ld_global(in + 1),
                      uc = ptx::ld_global(in + 2);
  const float a = ptx::bit_cast<float>(ua), b = ptx::bit_cast<float>(ub),
              c = ptx::bit_cast<float>(uc);
  const auto bits = [](float x) { return ptx::bit_cast<std::uint32_t>(x); };
  const std::uint32_t out[kNumExact + kNumApproximate] = {
      ptx::cvt_bf16x2(a, b),
      ptx::cvt_f16x2(a, b),
      ptx::cvt_rna_tf32(a),
      bits(ptx::f32_of_bf16_lo(ua)),
      bits(ptx::f32_of_bf16_hi(ua)),
      bits(ptx::f32_of_f16_lo(ua)),
      bits(ptx::f32_of_f16_hi(ua)),
      ptx::mul_bf16x2(ua, ub),
      ptx::mul_f16x2(ua, ub),
      bits(ptx::fma_rn_ftz(a, b, c)),
      bits(ptx::fma_rn(a, b, c)),
      bits(ptx::add_rn(a, b)),
      bits(ptx::mul_rn(a, b)),
      bits(ptx::div_rn(a, b)),
      bits(ptx::sqrt_rn(a)),
      bits(ptx::max_ftz(a, b)),
      bits(ptx::min_ftz(a, b)),
      bits(ptx::abs(a)),
      bits(ptx::abs_ftz(a)),
      bits(ptx::max_nan(a, b)),
      bits(ptx::min_ftz(ptx::max_ftz(a, b), c)),
      ptx::ordered_cvt_bf16x2(a, b),
      ptx::ordered_cvt_f16x2(a, b),
      bits(ptx::ordered_fma_rn_ftz(a, b, c)),
      bits(ptx::ordered_add_rn_ftz(a, b)),
      bits(ptx::ex2_approx_ftz(a)),
      bits(ptx::lg2_approx_ftz(a)),
      bits(ptx::rcp_approx_ftz(a)),
      bits(ptx::tanh_approx(a)),
      bits(ptx::exp_f32(a)),
      bits(ptx::log_f32(a)),
      bits(ptx::ordered_ex2_approx_ftz(a)),
  };
  auto* to = static_cast<std::uint32_t*>(p.out) + (kNumExact + kNumApproximate) * i;
  for (int k = 0; k < kNumExact + kNumApproximate; ++k) ptx::st_global(to + k, out[k]);
}

/// Each thread copies four times from 16 bytes of its own: 16 bytes with n[0] + thread % 17 of them read, 16 or none, 8
/// with up to 8, 4 with 0 or 4. in: 16 bytes per thread. out: 64 bytes per thread.
FOVEA_DEVICE void copies(const Params& p) {
  const int thread = ptx::thread_idx().x;
  const ptx::SharedAddress base = ptx::dynamic_shared();
  const char* from = static_cast<const char*>(p.in) + 16 * thread;
  const ptx::SharedAddress to = base + 64 * thread;
  for (int i = 0; i < 4; ++i) ptx::st_shared(to + 16 * i, ptx::U32x4{~0U, ~0U, ~0U, ~0U});
  ptx::cp_async_16(to, from, thread % 17);
  ptx::cp_async_16_or_zero(to + 16, from, thread % 3 == 0);
  ptx::cp_async_8(to + 32, from, thread % 9);
  ptx::cp_async_4(to + 48, from, thread % 2 * 4);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  ptx::sync_threads();
  dump_shared(p.out, base, 64 * num_threads());
}

}  // namespace fovea::cuda::conformance
