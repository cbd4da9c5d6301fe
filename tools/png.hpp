// PNG, 8-bit RGB, written. Source: W3C, Portable Network Graphics (third edition), sections 5 and 11; deflate is
// zlib's.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace fovea::tools {

/// `rgb` holds 3 * width * height bytes, row by row.
std::string encode_png(int width, int height, std::span<const std::uint8_t> rgb);

}  // namespace fovea::tools
