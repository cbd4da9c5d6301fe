// Safetensors files: named tensors behind one JSON header. The reader trusts nothing: every name, shape and range is
// checked before a byte of data is looked at. Source: the format section of the safetensors README.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "array.hpp"

namespace fovea::tools {

class Safetensors {
 public:
  /// `name` starts every message. Throws Failure(kBadInput) for a malformed file: duplicate or unknown keys, ranges
  /// that overlap, leave holes or miss the end, sizes that do not fit shapes.
  Safetensors(std::shared_ptr<const Buffer> file, std::string_view name);

  /// Throws Failure(kBadInput) where there is no such tensor or its dtype is none of Fovea's.
  Array tensor(std::string_view tensor_name) const;
  bool contains(std::string_view tensor_name) const;

  struct Entry {
    std::string name;
    std::string dtype;
    std::vector<std::int64_t> shape;
    std::uint64_t begin = 0, end = 0;  // bytes behind the header
  };
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::shared_ptr<const Buffer> file_;
  std::string name_;
  std::size_t payload_ = 0;
  std::vector<Entry> entries_;
};

/// Header of a file that holds these tensors in this order, row-major and back to back.
std::string safetensors_header(const std::vector<std::pair<std::string, TensorSpec>>& tensors);

}  // namespace fovea::tools
