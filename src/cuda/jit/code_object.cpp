#include "cuda/jit/code_object.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "fovea/error.hpp"

#include "cuda/jit/message_pack.hpp"

namespace fovea::cuda::jit {
namespace {

using Bytes = std::span<const std::byte>;

[[noreturn]] void refuse(std::string_view why) {
  throw CompileError(fmt::format(
      "code object: {}; expected an ELF file for AMD GPUs with a note of metadata", why));
}

/// So many bytes of it; of what lies behind its end there are none.
Bytes part(Bytes bytes, std::uint64_t begin, std::uint64_t count) {
  if (begin > bytes.size() || count > bytes.size() - begin) refuse("it is cut off");
  return bytes.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
}

/// Little-endian, as all that stands in code objects but MessagePack.
std::uint64_t number_at(Bytes bytes, std::uint64_t begin, std::size_t count) {
  std::uint64_t value = 0;
  const Bytes digits = part(bytes, begin, count);
  for (std::size_t i = count; i-- > 0;)
    value = value << 8U | std::to_integer<std::uint64_t>(digits[i]);
  return value;
}

/// Names of notes and their contents begin at multiples of 4.
std::uint64_t padded(std::uint64_t bytes) { return (bytes + 3) / 4 * 4; }

/// The metadata among the notes of a segment.
std::optional<Bytes> find_metadata(Bytes notes) {
  constexpr std::uint64_t kMetadata = 32;  // NT_AMDGPU_METADATA
  constexpr std::string_view kOwner{"AMDGPU\0", 7};
  for (std::uint64_t at = 0; at + 12 <= notes.size();) {
    const std::uint64_t name_bytes = number_at(notes, at, 4);
    const std::uint64_t content_bytes = number_at(notes, at + 4, 4);
    const Bytes name = part(notes, at + 12, name_bytes);
    const Bytes content = part(notes, at + 12 + padded(name_bytes), content_bytes);
    const std::string_view owner(reinterpret_cast<const char*>(name.data()), name.size());
    if (number_at(notes, at + 8, 4) == kMetadata && owner == kOwner) return content;
    at += 12 + padded(name_bytes) + padded(content_bytes);
  }
  return std::nullopt;
}

/// By the headers of an ELF file of 64 bits.
Bytes metadata_of(Bytes image) {
  constexpr std::array kElf{std::byte{0x7f}, std::byte{'E'}, std::byte{'L'},
                            std::byte{'F'},  std::byte{2},  // 64 bits
                            std::byte{1}};                  // little-endian
  constexpr std::uint64_t kMachine = 224, kNotes = 4;       // EM_AMDGPU, PT_NOTE
  if (image.size() < kElf.size() || !std::ranges::equal(image.first(kElf.size()), kElf))
    refuse("it does not begin as an ELF file");
  if (number_at(image, 18, 2) != kMachine) refuse("it is for another machine");
  const std::uint64_t headers = number_at(image, 32, 8);
  const std::uint64_t header_bytes = number_at(image, 54, 2);
  const std::uint64_t count = number_at(image, 56, 2);
  for (std::uint64_t i = 0; i < count; ++i) {
    const Bytes header = part(part(image, headers, header_bytes * count), i * header_bytes, 56);
    if (number_at(header, 0, 4) != kNotes) continue;
    const Bytes notes = part(image, number_at(header, 8, 8), number_at(header, 32, 8));
    if (const auto metadata = find_metadata(notes)) return *metadata;
  }
  refuse("it has no note of metadata");
}

CodeObjectKernel read_kernel(MessagePackReader& reader) {
  CodeObjectKernel kernel;
  const std::array<std::pair<std::string_view, int*>, 9> numbers{{
      {".vgpr_count", &kernel.vector_registers},
      {".agpr_count", &kernel.accumulation_registers},
      {".sgpr_count", &kernel.scalar_registers},
      {".vgpr_spill_count", &kernel.vector_spills},
      {".sgpr_spill_count", &kernel.scalar_spills},
      {".private_segment_fixed_size", &kernel.private_bytes},
      {".group_segment_fixed_size", &kernel.shared_bytes},
      {".max_flat_workgroup_size", &kernel.most_threads},
      {".wavefront_size", &kernel.wave_lanes},
  }};
  for (std::uint64_t left = reader.open_map(); left > 0 && reader.is_whole(); --left) {
    const std::string_view key = reader.text();
    const auto* const number =
        std::ranges::find(numbers, key, [](auto& each) { return each.first; });
    if (number != numbers.end()) {
      *number->second = static_cast<int>(reader.number());
    } else if (key == ".name") {
      kernel.name = reader.text();
    } else {
      reader.skip();
    }
  }
  return kernel;
}

}  // namespace

CodeObject read_code_object(Bytes image) {
  MessagePackReader reader(metadata_of(image));
  CodeObject result;
  for (std::uint64_t left = reader.open_map(); left > 0 && reader.is_whole(); --left) {
    const std::string_view key = reader.text();
    if (key == "amdhsa.target") {
      result.target = reader.text();
    } else if (key == "amdhsa.kernels") {
      for (std::uint64_t kernels = reader.open_array(); kernels > 0 && reader.is_whole(); --kernels)
        result.kernels.push_back(read_kernel(reader));
    } else {
      reader.skip();
    }
  }
  if (!reader.is_whole()) refuse("its metadata is broken");
  return result;
}

CompileReport report_of(const CodeObject& code_object, const std::string& entry) {
  const auto kernel = std::ranges::find(code_object.kernels, entry, &CodeObjectKernel::name);
  if (kernel == code_object.kernels.end())
    throw CompileError(fmt::format("code object: no kernel {} in it", entry));
  return {.registers = kernel->vector_registers,
          .spill_bytes = 4 * kernel->vector_spills,
          .local_bytes = kernel->private_bytes,
          .shared_bytes = kernel->shared_bytes,
          .log = {}};
}

}  // namespace fovea::cuda::jit
