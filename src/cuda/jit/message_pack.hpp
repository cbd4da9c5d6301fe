// Reads MessagePack, the form of the metadata in AMD's code objects: value by value, in the order of the bytes. Read
// code_object.hpp next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace fovea::cuda::jit {

/// Bytes that end too early, or a value of another kind than is asked for, make is_whole() false; then every value is
/// nothing: a loop over a map asks is_whole() each time.
class MessagePackReader {
 public:
  explicit MessagePackReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  std::uint64_t open_map();    // how many pairs follow
  std::uint64_t open_array();  // how many values follow
  std::uint64_t number();      // none below 0
  std::string_view text();
  /// The next value, with all that is in it.
  void skip();

  bool is_whole() const { return is_whole_; }

 private:
  enum class Kind : std::uint8_t { broken, number, text, array, map, other };
  struct Head {
    Kind kind = Kind::broken;
    std::uint64_t value = 0;  // the number; else how many bytes, values or pairs follow
  };
  Head head();
  std::uint64_t value_of(Kind kind);
  std::uint64_t big_endian(std::size_t bytes);
  std::span<const std::byte> take(std::uint64_t bytes);

  std::span<const std::byte> rest_;
  bool is_whole_ = true;
};

}  // namespace fovea::cuda::jit
