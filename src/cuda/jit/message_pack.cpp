#include "cuda/jit/message_pack.hpp"

namespace fovea::cuda::jit {

std::span<const std::byte> MessagePackReader::take(std::uint64_t bytes) {
  if (bytes > rest_.size()) {
    is_whole_ = false;
    rest_ = {};
    return {};
  }
  const auto taken = rest_.first(static_cast<std::size_t>(bytes));
  rest_ = rest_.subspan(taken.size());
  return taken;
}

std::uint64_t MessagePackReader::big_endian(std::size_t bytes) {
  std::uint64_t value = 0;
  for (const std::byte each : take(bytes)) value = value << 8U | std::to_integer<unsigned>(each);
  return value;
}

/// By the table of formats in the specification of MessagePack.
MessagePackReader::Head MessagePackReader::head() {
  const std::uint64_t type = big_endian(1);
  if (!is_whole_) return {};
  if (type <= 0x7f) return {Kind::number, type};
  if (type <= 0x8f) return {Kind::map, type & 0xfU};
  if (type <= 0x9f) return {Kind::array, type & 0xfU};
  if (type <= 0xbf) return {Kind::text, type & 0x1fU};
  if (type >= 0xe0) return {Kind::other, 0};  // a number below 0
  const auto sized = [&](Kind kind, std::uint64_t power) {
    return Head{kind, big_endian(std::size_t{1} << power)};
  };
  switch (type) {
    case 0xc0:  // nil
    case 0xc2:  // false
    case 0xc3:  // true
      return {Kind::other, 0};
    case 0xc4:  // binary
    case 0xc5:
    case 0xc6:
      return sized(Kind::other, type - 0xc4);
    case 0xc7:  // extensions: a byte for the type
    case 0xc8:
    case 0xc9: {
      const Head extension = sized(Kind::other, type - 0xc7);
      return {Kind::other, extension.value + 1};
    }
    case 0xca:  // floats
      return {Kind::other, 4};
    case 0xcb:
      return {Kind::other, 8};
    case 0xcc:  // unsigned numbers
    case 0xcd:
    case 0xce:
    case 0xcf:
      return sized(Kind::number, type - 0xcc);
    case 0xd0:  // signed numbers
    case 0xd1:
    case 0xd2:
    case 0xd3:
      return {Kind::other, std::uint64_t{1} << (type - 0xd0)};
    case 0xd4:  // extensions of 1, 2, ... 16 bytes, and one for the type
    case 0xd5:
    case 0xd6:
    case 0xd7:
    case 0xd8:
      return {Kind::other, (std::uint64_t{1} << (type - 0xd4)) + 1};
    case 0xd9:
    case 0xda:
    case 0xdb:
      return sized(Kind::text, type - 0xd9);
    case 0xdc:
    case 0xdd:
      return sized(Kind::array, type - 0xdc + 1);
    case 0xde:
    case 0xdf:
      return sized(Kind::map, type - 0xde + 1);
    default:  // 0xc1 is never used
      return {};
  }
}

std::uint64_t MessagePackReader::value_of(Kind kind) {
  const Head found = head();
  is_whole_ = is_whole_ && found.kind == kind;
  return is_whole_ ? found.value : 0;
}

std::uint64_t MessagePackReader::open_map() { return value_of(Kind::map); }
std::uint64_t MessagePackReader::open_array() { return value_of(Kind::array); }
std::uint64_t MessagePackReader::number() { return value_of(Kind::number); }

std::string_view MessagePackReader::text() {
  const auto bytes = take(value_of(Kind::text));
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void MessagePackReader::skip() {
  // Values that are still to come; each has a byte at least, so that wrong counts end with the bytes.
  for (std::uint64_t left = 1; left > 0 && is_whole_; --left) {
    const Head found = head();
    if (found.kind == Kind::broken) is_whole_ = false;
    if (found.kind == Kind::array) left += found.value;
    if (found.kind == Kind::map) left += 2 * found.value;
    if (found.kind == Kind::text || found.kind == Kind::other) take(found.value);
  }
}

}  // namespace fovea::cuda::jit
