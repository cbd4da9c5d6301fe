// NumPy's .npy files: header versions 1, 2 and 3, C or Fortran order, native byte order.
// Source: NumPy, numpy/lib/format.py, "Format Version 1.0" to "3.0".
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "array.hpp"

namespace fovea::tools {

/// What uint16 stands for: NumPy has no bf16, so it travels as uint16 and somebody has to say so.
enum class Uint16 : std::uint8_t { refused, is_bf16 };

/// The array in `file`, whose bytes it shares. `name` starts every message. Fortran order gives strides, no copy.
/// Throws Failure(kBadInput) for anything but one whole array of a dtype that Fovea has.
Array parse_npy(const std::shared_ptr<const Buffer>& file, std::string_view name, Uint16 uint16);

/// Header (version 1, padded to 64 bytes) of a row-major array; its elements follow. bf16 is written as uint16.
std::string npy_header(const TensorSpec& spec);

bool is_npy(std::span<const std::byte> bytes);

}  // namespace fovea::tools
