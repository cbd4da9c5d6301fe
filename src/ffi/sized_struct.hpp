// Structs that older and newer callers share: read by size, what is missing is zero, what is unknown must be zero.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>

#include "fovea/fovea.h"

#include "core/check.hpp"

namespace fovea::ffi {

/// Larger than any header's structs: a size beyond is no size, and what lies there is not looked at.
inline constexpr std::size_t kLargestStruct = 4096;

/// A copy of *source as this library knows it. `least_size` ends the first fields that every caller has. Throws
/// InvalidArgument, naming `what`, for a size or version that no header had.
template <typename Struct>
Struct read_struct(const Struct* source, std::size_t least_size, const std::string& what) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  static_assert(offsetof(Struct, struct_size) == 0);
  if (source == nullptr) invalid(what, "the struct is NULL; expected its address");
  const std::size_t size = source->struct_size;
  // No field is larger than the alignment, so a multiple of it cuts none in two; sizeof is always one.
  if (size < least_size || size > kLargestStruct || size % alignof(Struct) != 0) {
    invalid(what, "struct_size is " + std::to_string(size) + "; expected " +
                      std::to_string(sizeof(Struct)) + ", start the struct with FOVEA_STRUCT");
  }
  if (source->version != FOVEA_ABI_VERSION) {
    invalid(what, "version is " + std::to_string(source->version) + "; expected " +
                      std::to_string(FOVEA_ABI_VERSION) +
                      ", start the struct with FOVEA_STRUCT or use a library of that version");
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(source);
  for (std::size_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] != 0) {
      invalid(what, "struct_size is " + std::to_string(size) + " and a field beyond byte " +
                        std::to_string(sizeof(Struct)) +
                        " is set; this library does not know it, use a newer one");
    }
  }
  Struct result{};
  std::memcpy(&result, source, std::min(size, sizeof(Struct)));
  return result;
}

}  // namespace fovea::ffi
