// The emulated twin of src/cuda/device/ptx/wgmma.cuh. An `a` in registers is read as late as its wait: it must be an
// lvalue that lives until then.
#pragma once

#include <limits>

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

enum class WgmmaType : std::uint8_t { bf16, f16, e4m3, e5m2, s8, u8 };
enum class Major : std::uint8_t { k, mn };

using MatrixDescriptor = std::uint64_t;

FOVEA_DEVICE constexpr bool is_16_bit(WgmmaType type) {
  return type == WgmmaType::bf16 || type == WgmmaType::f16;
}

FOVEA_DEVICE constexpr bool is_wgmma_form(WgmmaType a, WgmmaType b, int n) {
  const bool is_integer = a == WgmmaType::s8 || a == WgmmaType::u8;
  const bool is_b_integer = b == WgmmaType::s8 || b == WgmmaType::u8;
  const bool is_pair = is_16_bit(a) || is_16_bit(b) ? a == b : is_integer == is_b_integer;
  return is_pair && n >= 8 && n <= 256 && n % (is_integer && n > 32 ? 16 : 8) == 0;
}

FOVEA_DEVICE constexpr emulator::Format format_of(WgmmaType type) {
  switch (type) {
    case WgmmaType::bf16:
      return emulator::Format::bf16;
    case WgmmaType::f16:
      return emulator::Format::f16;
    case WgmmaType::e4m3:
      return emulator::Format::e4m3;
    case WgmmaType::e5m2:
      return emulator::Format::e5m2;
    case WgmmaType::s8:
      return emulator::Format::s8;
    case WgmmaType::u8:
      return emulator::Format::u8;
  }
  return emulator::Format::bf16;
}

FOVEA_DEVICE MatrixDescriptor computed_here(MatrixDescriptor descriptor) { return descriptor; }

template <int n>
FOVEA_DEVICE void wgmma_forget(float (&d)[n], Site site = Site::here()) {
  emulator::check_registers(d, sizeof d, {"wgmma_forget", site});
  for (float& sum : d) sum = std::numeric_limits<float>::quiet_NaN();
}

/// What ss and rs share.
template <WgmmaType a_type, WgmmaType b_type, int n, Major a_major, Major b_major, class Sum>
FOVEA_DEVICE emulator::Wgmma wgmma_form(Sum (&d)[n / 2], MatrixDescriptor b, bool is_accumulating) {
  static_assert(is_wgmma_form(a_type, b_type, n), "no such product");
  static_assert(is_16_bit(a_type) || (a_major == Major::k && b_major == Major::k),
                "operands of 8 bits are K-major");
  constexpr bool kIsInteger = a_type == WgmmaType::s8 || a_type == WgmmaType::u8;
  static_assert(sizeof(Sum) == 4 && kIsInteger == (static_cast<Sum>(0.5F) == Sum{}),
                "sums are f32, of 8-bit integers s32");
  emulator::Wgmma form{};
  form.a_format = format_of(a_type);
  form.b_format = format_of(b_type);
  form.columns = n;
  form.is_integer = kIsInteger;
  form.is_accumulating = is_accumulating;
  form.a_is_k_major = a_major == Major::k;
  form.b_is_k_major = b_major == Major::k;
  form.b = b;
  form.sums = reinterpret_cast<std::uint32_t*>(d);
  return form;
}

FOVEA_DEVICE void wgmma_fence(Site site = Site::here()) {
  emulator::wgmma_fence({"wgmma.fence", site});
}

FOVEA_DEVICE void wgmma_commit_group(Site site = Site::here()) {
  emulator::wgmma_commit({"wgmma.commit_group", site});
}

template <int N>
FOVEA_DEVICE void wgmma_wait_group(Site site = Site::here()) {
  static_assert(N >= 0 && N <= 7);
  emulator::wgmma_wait(N, {"wgmma.wait_group", site});
}

template <WgmmaType a_type, WgmmaType b_type, int n, Major a_major = Major::k,
          Major b_major = Major::k, class Sum>
FOVEA_DEVICE void wgmma_ss(Sum (&d)[n / 2], MatrixDescriptor a, MatrixDescriptor b,
                           bool is_accumulating, Site site = Site::here()) {
  auto form = wgmma_form<a_type, b_type, n, a_major, b_major>(d, b, is_accumulating);
  form.a = a;
  emulator::wgmma(form, {"wgmma.mma_async", site});
}

template <WgmmaType a_type, WgmmaType b_type, int n, Major b_major = Major::k, class Sum>
FOVEA_DEVICE void wgmma_rs(Sum (&d)[n / 2], const std::uint32_t (&a)[4], MatrixDescriptor b,
                           bool is_accumulating, Site site = Site::here()) {
  auto form = wgmma_form<a_type, b_type, n, Major::k, b_major>(d, b, is_accumulating);
  form.a_is_in_registers = true;
  form.a_registers = a;
  emulator::wgmma(form, {"wgmma.mma_async", site});
}

}  // namespace fovea::cuda::ptx
