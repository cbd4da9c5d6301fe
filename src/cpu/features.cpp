#include "cpu/features.hpp"

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fovea::cpu {

#if defined(__x86_64__)
namespace {

struct Features {
  bool has_avx2 = false, has_avx512 = false, has_avx512_bf16 = false, has_amx_bf16 = false;
  bool has_avx_vnni = false, has_avx512_vnni = false, has_amx_int8 = false;
  bool is_amd = false;
};

constexpr bool bit(std::uint32_t word, int index) { return ((word >> index) & 1U) != 0; }

/// Register state that the system saves (Intel SDM vol. 1, 13.3); the instruction needs the XSAVE feature.
__attribute__((target("xsave"))) std::uint64_t saved_state() { return _xgetbv(0); }

Features detect() {
  Features f;
  std::uint32_t a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d) == 0) return f;
  f.is_amd = b == 0x68747541U;  // "Auth"
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return f;
  const bool has_xsave = bit(c, 27);
  const bool has_fma = bit(c, 12) && bit(c, 28) && bit(c, 29);  // FMA, AVX, F16C
  if (!has_xsave || !has_fma) return f;
  const std::uint64_t state = saved_state();
  constexpr std::uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
  std::uint32_t ext_b = 0, ext_c = 0, ext_d = 0, sub_a = 0;
  if (__get_cpuid_count(7, 0, &a, &ext_b, &ext_c, &ext_d) == 0) return f;
  if (a >= 1) __get_cpuid_count(7, 1, &sub_a, &b, &c, &d);
  // AVX2, BMI1, BMI2
  f.has_avx2 = (state & kYmm) == kYmm && bit(ext_b, 5) && bit(ext_b, 3) && bit(ext_b, 8);
  // AVX-512 F, DQ, CD, BW, VL: the set of every server core since 2017
  f.has_avx512 = f.has_avx2 && (state & kZmm) == kZmm && bit(ext_b, 16) && bit(ext_b, 17) &&
                 bit(ext_b, 28) && bit(ext_b, 30) && bit(ext_b, 31);
  f.has_avx512_bf16 = f.has_avx512 && bit(sub_a, 5);
  f.has_avx_vnni = f.has_avx2 && bit(sub_a, 4);
  f.has_avx512_vnni = f.has_avx512 && bit(ext_c, 11);
  f.has_amx_bf16 =
      f.has_avx512_bf16 && (state & kTiles) == kTiles && bit(ext_d, 22) && bit(ext_d, 24);
  f.has_amx_int8 = f.has_amx_bf16 && f.has_avx512_vnni && bit(ext_d, 25);
  return f;
}

const Features& features() {
  static const Features detected = detect();
  return detected;
}

}  // namespace

bool request_amx() {
  constexpr long kRequestPermission = 0x1023,
                 kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_granted =
      features().has_amx_bf16 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_granted;
}

std::string_view missing_for(CpuTarget target) {
  const Features& f = features();
  switch (target) {
    case CpuTarget::automatic:
    case CpuTarget::scalar:
      return "";
    case CpuTarget::avx2:
      return f.has_avx2 ? "" : "the processor lacks AVX2 with FMA and F16C";
    case CpuTarget::avx512:
      return f.has_avx512 ? "" : "the processor lacks AVX-512 (F, CD, BW, DQ, VL)";
    case CpuTarget::avx512_bf16:
      return f.has_avx512_bf16 ? "" : "the processor lacks AVX512-BF16";
    case CpuTarget::amx_bf16:
      if (!f.has_amx_bf16) return "the processor lacks AMX-BF16";
      return request_amx() ? "" : "the system refuses the use of AMX tiles";
    case CpuTarget::neon:
      return "the processor is not an Arm";
    case CpuTarget::avx512_vnni:
      return f.has_avx512_vnni ? "" : "the processor lacks AVX512-VNNI";
    case CpuTarget::avx_vnni:
      return f.has_avx_vnni ? "" : "the processor lacks AVX-VNNI";
  }
  return "unknown target";
}

std::string_view missing_for_codes(CpuTarget target) {
  if (const std::string_view missing = missing_for(target); !missing.empty()) return missing;
  if (target == CpuTarget::avx512_bf16) return missing_for(CpuTarget::avx512_vnni);
  return target == CpuTarget::amx_bf16 && !features().has_amx_int8 ? "the processor lacks AMX-INT8"
                                                                   : "";
}

CpuTarget best_f32_target() {
  if (features().has_avx512) return CpuTarget::avx512;
  return features().has_avx2 ? CpuTarget::avx2 : CpuTarget::scalar;
}

CpuTarget best_bf16_target() {
  if (missing_for(CpuTarget::amx_bf16).empty()) return CpuTarget::amx_bf16;
  if (features().has_avx512_bf16 && features().is_amd) return CpuTarget::avx512_bf16;
  return CpuTarget::automatic;
}

std::string processor_name() {
  std::array<std::uint32_t, 12> words{};
  for (std::uint32_t leaf = 0; leaf < 3; ++leaf) {
    std::uint32_t* w = &words[leaf * 4];
    if (__get_cpuid(0x80000002U + leaf, w, w + 1, w + 2, w + 3) == 0) return "x86-64";
  }
  char text[sizeof(words) + 1] = {};
  std::memcpy(text, words.data(), sizeof(words));
  const std::string name(text);
  const auto begin = name.find_first_not_of(' ');
  return begin == std::string::npos ? "x86-64" : name.substr(begin);
}

#else

bool request_amx() { return false; }

std::string_view missing_for(CpuTarget target) {
#if defined(__aarch64__)
  if (target == CpuTarget::automatic || target == CpuTarget::neon) return "";
  if (target == CpuTarget::scalar) return "NEON is part of every 64-bit Arm; use neon";
#else
  if (target == CpuTarget::automatic || target == CpuTarget::scalar) return "";
#endif
  return "the processor is not an x86-64";
}

std::string_view missing_for_codes(CpuTarget target) { return missing_for(target); }

CpuTarget best_f32_target() {
#if defined(__aarch64__)
  return CpuTarget::neon;
#else
  return CpuTarget::scalar;
#endif
}

CpuTarget best_bf16_target() { return CpuTarget::automatic; }

std::string processor_name() {
#if defined(__aarch64__)
  return "64-bit Arm";
#else
  return "unknown processor";
#endif
}

#endif

}  // namespace fovea::cpu
