#include "cuda/jit/device_text.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace fovea::cuda::jit {
namespace {

/// Calls `take` with the name in each line `#include "name"`.
template <class Take>
void for_each_include(std::string_view text, const Take& take) {
  constexpr std::string_view kInclude = "#include \"";
  for (std::size_t at = text.find(kInclude); at != std::string_view::npos;
       at = text.find(kInclude, at)) {
    at += kInclude.size();
    take(text.substr(at, text.find('"', at) - at));
  }
}

}  // namespace

std::vector<std::size_t> included_files(const DeviceText& text, std::string_view unit) {
  std::unordered_map<std::string_view, std::size_t> left;  // not included so far
  left.reserve(text.files.size());
  for (std::size_t i = 0; i < text.files.size(); ++i) left.emplace(text.files[i].name, i);
  std::vector<std::size_t> included;
  const auto add = [&](std::string_view name) {
    const auto found = left.find(name);
    if (found == left.end()) return;
    included.push_back(found->second);
    left.erase(found);
  };
  for_each_include(unit, add);
  for (std::size_t i = 0; i < included.size(); ++i)
    for_each_include(text.files[included[i]].text, add);
  std::ranges::sort(included);
  return included;
}

DeviceText make_device_text(std::span<const SourceFile> files) {
  DeviceText text{.files = files};
  Sha256Hasher hasher;
  for (const SourceFile& file : files) {
    hasher.add_text(file.name);
    hasher.add_text(file.text);
    text.digests.push_back(sha256(std::as_bytes(std::span(std::string_view(file.text)))));
  }
  text.digest = hasher.finish();
  return text;
}

const DeviceText& amd_device_text() {
  static std::vector<SourceFile> files;
  static const DeviceText text = [] {
    const DeviceText& twins = embedded_amd_twins();
    const DeviceText& device = embedded_device_text();
    files.assign(twins.files.begin(), twins.files.end());
    std::vector<Sha256> digests = twins.digests;
    for (std::size_t i = 0; i < device.files.size(); ++i) {
      const std::string_view name = device.files[i].name;
      if (std::ranges::find(twins.files, name, &SourceFile::name) != twins.files.end()) continue;
      files.push_back(device.files[i]);
      digests.push_back(device.digests[i]);
    }
    Sha256Hasher hasher;
    hasher.add_digest(twins.digest);
    hasher.add_digest(device.digest);
    return DeviceText{files, std::move(digests), hasher.finish()};
  }();
  return text;
}

const DeviceText& device_text_of(Architecture architecture) {
  return architecture.is_amd() ? amd_device_text() : embedded_device_text();
}

}  // namespace fovea::cuda::jit
