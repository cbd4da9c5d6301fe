// The Highway targets that a test file was compiled for and that this processor can run. A test
// includes it once, after hwy/foreach_target.h, and names its per-target function.
#pragma once

#include <hwy/highway.h>

#include <string>
#include <vector>

namespace fovea::cpu {

template <typename Function>
struct CompiledTarget {
  std::string name;
  Function* function = nullptr;
};

inline bool runs_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

inline bool runs_avx3() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
#else
  return false;
#endif
}

}  // namespace fovea::cpu

#if HWY_TARGETS & HWY_AVX2
#define FOVEA_TEST_AVX2(table, function) \
  if (runs_avx2()) table.push_back({"avx2", &N_AVX2::function})
#else
#define FOVEA_TEST_AVX2(table, function)
#endif
#if HWY_TARGETS & HWY_AVX3
#define FOVEA_TEST_AVX3(table, function) \
  if (runs_avx3()) table.push_back({"avx3", &N_AVX3::function})
#else
#define FOVEA_TEST_AVX3(table, function)
#endif

/// Fills `table` with `function` of every target that runs here; the static one always does.
#define FOVEA_COMPILED_TARGETS(table, function)                \
  table.push_back({"static", &HWY_STATIC_DISPATCH(function)}); \
  FOVEA_TEST_AVX2(table, function);                            \
  FOVEA_TEST_AVX3(table, function)
