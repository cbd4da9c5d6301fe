#include "png.hpp"

#include <zlib.h>

#include <new>
#include <string_view>
#include <vector>

namespace fovea::tools {
namespace {

constexpr std::string_view kSignature = "\x89PNG\r\n\x1a\n";
constexpr char kBitDepth = 8, kColourTypeRgb = 2, kFilterNone = 0;

void append_u32(std::string& to, std::uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8)
    to += static_cast<char>(value >> static_cast<unsigned>(shift) & 0xffU);
}

void append_chunk(std::string& to, std::string_view type, std::string_view data) {
  append_u32(to, static_cast<std::uint32_t>(data.size()));
  const std::string body = std::string(type) + std::string(data);
  to += body;
  append_u32(to, static_cast<std::uint32_t>(crc32(0, reinterpret_cast<const Bytef*>(body.data()),
                                                  static_cast<uInt>(body.size()))));
}

std::string deflated(std::string_view data) {
  uLongf size = compressBound(static_cast<uLong>(data.size()));
  std::string result(size, '\0');
  const int status =
      compress(reinterpret_cast<Bytef*>(result.data()), &size,
               reinterpret_cast<const Bytef*>(data.data()), static_cast<uLong>(data.size()));
  if (status != Z_OK)
    throw std::bad_alloc();  // the buffer is large enough: only memory can be missing
  result.resize(size);
  return result;
}

}  // namespace

std::string encode_png(int width, int height, std::span<const std::uint8_t> rgb) {
  std::string header;
  append_u32(header, static_cast<std::uint32_t>(width));
  append_u32(header, static_cast<std::uint32_t>(height));
  header += {kBitDepth, kColourTypeRgb, 0, 0, 0};
  const std::size_t row_bytes = static_cast<std::size_t>(width) * 3;
  std::string rows;
  rows.reserve((row_bytes + 1) * static_cast<std::size_t>(height));
  for (std::size_t row = 0; row < static_cast<std::size_t>(height); ++row) {
    rows += kFilterNone;
    rows.append(reinterpret_cast<const char*>(rgb.data()) + row * row_bytes, row_bytes);
  }
  std::string png(kSignature);
  append_chunk(png, "IHDR", header);
  append_chunk(png, "IDAT", deflated(rows));
  append_chunk(png, "IEND", {});
  return png;
}

}  // namespace fovea::tools
