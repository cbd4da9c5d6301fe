#include "cuda/jit/entry.hpp"

#include <utility>

#include "cuda/jit/bytes.hpp"

namespace fovea::cuda::jit {
namespace {

constexpr std::string_view kMark = "fovea cubin";
constexpr std::uint64_t kFormat = 2;

std::vector<std::byte> content_of(const CacheEntry& entry) {
  const CompileReport& report = entry.cubin.report;
  ByteWriter writer;
  writer.put_text(entry.label);
  writer.put_text(entry.architecture);
  writer.put_text(entry.compiler);
  for (const int number : {report.registers, report.spill_bytes, report.local_bytes,
                           report.shared_bytes, report.num_wgmma_notes, report.compile_ms}) {
    writer.put_number(static_cast<std::uint64_t>(number));
  }
  writer.put_text(report.log);
  writer.put_number(entry.cubin.image.size());
  writer.put_bytes(entry.cubin.image);
  return writer.take();
}

/// False where bytes are missing or left over.
bool read_content(std::span<const std::byte> bytes, CacheEntry& entry) {
  ByteReader reader(bytes);
  CompileReport& report = entry.cubin.report;
  entry.label = reader.get_text();
  entry.architecture = reader.get_text();
  entry.compiler = reader.get_text();
  report.registers = reader.get_int();
  report.spill_bytes = reader.get_int();
  report.local_bytes = reader.get_int();
  report.shared_bytes = reader.get_int();
  report.num_wgmma_notes = reader.get_int();
  report.compile_ms = reader.get_int();
  report.log = reader.get_text();
  const auto image = reader.get_bytes(reader.get_number());
  entry.cubin.image.assign(image.begin(), image.end());
  return reader.is_whole() && reader.rest().empty() && !image.empty();
}

}  // namespace

std::vector<std::byte> entry_to_bytes(const Sha256& key, const CacheEntry& entry) {
  const std::vector<std::byte> content = content_of(entry);
  ByteWriter writer;
  writer.put_text(kMark);
  writer.put_number(kFormat);
  writer.put_digest(key);
  writer.put_digest(sha256(content));
  writer.put_bytes(content);
  return writer.take();
}

ParsedEntry entry_from_bytes(std::span<const std::byte> bytes, const Sha256& key) {
  const auto bad = [](std::string why) {
    return ParsedEntry{.entry = {}, .why_bad = std::move(why)};
  };
  ByteReader reader(bytes);
  if (reader.get_text() != kMark) return bad("is no cubin of ours");
  if (const std::uint64_t format = reader.get_number(); format != kFormat)
    return bad("has format " + std::to_string(format) + "; expected " + std::to_string(kFormat));
  const Sha256 found = reader.get_digest();
  const Sha256 checksum = reader.get_digest();
  if (found != key) return bad("holds the kernel of another name");
  if (sha256(reader.rest()) != checksum) return bad("does not pass its checksum");
  ParsedEntry parsed;
  if (!read_content(reader.rest(), parsed.entry)) return bad("is not whole");
  return parsed;
}

}  // namespace fovea::cuda::jit
