// A code object put together byte by byte: what a compiler of AMD's would give, without code in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fovea::cuda::jit {

inline std::vector<std::byte> bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

inline std::string little(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i));
  return text;
}

inline std::string text_value(std::string_view text) {
  return "\xd9" + std::string(1, static_cast<char>(text.size())) + std::string(text);
}

inline std::string number_value(std::uint16_t number) {
  return {'\xcd', static_cast<char>(number >> 8U), static_cast<char>(number & 0xffU)};
}

/// A kernel of some numbers, and beside them a value of each other kind, which readers pass over.
inline std::string kernel_metadata() {
  const auto pair = [](std::string_view key, const std::string& value) {
    return text_value(key) + value;
  };
  return "\x8c" + pair(".name", text_value("fovea_kernel")) +
         pair(".vgpr_count", number_value(300)) + pair(".agpr_count", "\x08") +
         pair(".sgpr_count", "\xcc\x62") + pair(".vgpr_spill_count", "\x05") +
         pair(".sgpr_spill_count", "\x07") + pair(".private_segment_fixed_size", "\x20") +
         pair(".group_segment_fixed_size", std::string("\xce\x00\x01\x00\x00", 5)) +
         pair(".max_flat_workgroup_size", number_value(256)) + pair(".wavefront_size", "\x40") +
         pair(".args", std::string("\x93\x81\xa1x\xc3\xca\x00\x00\x00\x00\xc7\x02\x01zz", 15)) +
         pair(".more", std::string("\xdc\x00\x02\xff\xc4\x01!", 7));
}

/// An ELF file with one segment, whose notes are somebody else's and the metadata.
inline std::string code_object(std::string_view kernels = "amdhsa.kernels") {
  const std::string metadata = std::string("\x82") + text_value("amdhsa.target") +
                               text_value("amdgcn-amd-amdhsa--gfx942") + text_value(kernels) +
                               "\x91" + kernel_metadata();
  const std::string notes =
      little(4, 4) + little(2, 4) + little(32, 4) + std::string("GNU\0?!\0\0", 8) + little(7, 4) +
      little(metadata.size(), 4) + little(32, 4) + std::string("AMDGPU\0\0", 8) + metadata;
  const std::string header = std::string("\x7f") + "ELF\x02\x01\x01" + std::string(9, '\0') +
                             little(3, 2) + little(224, 2) + little(1, 4) + little(0, 8) +
                             little(64, 8) + little(0, 8) + little(0, 4) + little(64, 2) +
                             little(56, 2) + little(1, 2) + little(0, 6);
  const std::string segment = little(4, 4) + little(4, 4) + little(120, 8) + std::string(16, '\0') +
                              little(notes.size(), 8) + std::string(16, '\0');
  return header + segment + notes;
}

}  // namespace fovea::cuda::jit
