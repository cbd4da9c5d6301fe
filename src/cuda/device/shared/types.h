// Fixed-width names for text that is compiled at run time, without any system header; the host compiler takes its own.
// Read forward_spec.h and forward_params.h next.
#pragma once

#if defined(__CUDACC_RTC__) || defined(__AMDGCN__)
namespace std {
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using size_t = unsigned long;
}  // namespace std
#else
#include <cstddef>
#include <cstdint>
#endif
