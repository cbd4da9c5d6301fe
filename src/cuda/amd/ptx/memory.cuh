// The AMD twin of src/cuda/device/ptx/memory.cuh: loads and stores by address space, so that the compiler takes global_
// and ds_ instructions and none of flat memory.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

struct alignas(8) U32x2 {
  std::uint32_t x, y;
};
struct alignas(16) U32x4 {
  std::uint32_t x, y, z, w;
};
struct alignas(8) F32x2 {
  float x, y;
};
struct alignas(16) F32x4 {
  float x, y, z, w;
};

/// What an access of so many bytes moves. It may alias what kernels call the same bytes.
template <int bytes>
struct Word;
template <>
struct Word<1> {
  using Type = std::uint8_t __attribute__((may_alias));
};
template <>
struct Word<2> {
  using Type = std::uint16_t __attribute__((may_alias));
};
template <>
struct Word<4> {
  using Type = std::uint32_t __attribute__((may_alias));
};
template <>
struct Word<8> {
  using Type = std::uint32_t __attribute__((vector_size(8), may_alias));
};
template <>
struct Word<16> {
  using Type = std::uint32_t __attribute__((vector_size(16), may_alias));
};

template <class T>
using Global = __attribute__((address_space(1))) typename Word<sizeof(T)>::Type;
template <class T>
using Local = __attribute__((address_space(3))) typename Word<sizeof(T)>::Type;

template <class T>
FOVEA_DEVICE T ld_global(const T* from) {
  const typename Word<sizeof(T)>::Type word = *(const Global<T>*)from;
  return bit_cast<T>(word);
}

/// Nothing on AMD caches apart what nobody writes.
template <class T>
FOVEA_DEVICE T ld_global_nc(const T* from) {
  return ld_global(from);
}

template <class T>
FOVEA_DEVICE void st_global(T* to, const T& value) {
  *(Global<T>*)to = bit_cast<typename Word<sizeof(T)>::Type>(value);
}

template <class T>
FOVEA_DEVICE T ld_shared(SharedAddress from) {
  const typename Word<sizeof(T)>::Type word = *(const Local<T>*)from;
  return bit_cast<T>(word);
}

template <class T>
FOVEA_DEVICE void st_shared(SharedAddress to, const T& value) {
  *(Local<T>*)to = bit_cast<typename Word<sizeof(T)>::Type>(value);
}

}  // namespace fovea::cuda::ptx
