// A tensor that owns its memory: what the file readers give and the commands compute on.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fovea/tensor.hpp"

namespace fovea::tools {

/// Bytes on a 64-byte boundary.
class Buffer {
 public:
  Buffer() = default;
  static Buffer uninitialized(std::size_t size);
  static Buffer zeroed(std::size_t size);

  std::byte* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t size_ = 0;
};

/// Shares its storage with the other tensors of its file; memory of this process, or of a GPU (gpu.hpp).
struct Array {
  std::shared_ptr<const void> storage;
  const std::byte* data = nullptr;  // inside storage, aligned to the element
  TensorSpec spec{};
  std::string source{};  // where it was read, as messages say it: "--q: q.npy"

  TensorView view() const { return {static_cast<const void*>(data), spec}; }
  /// For arrays that this process made.
  TensorView mutable_view() const {
    return {const_cast<void*>(static_cast<const void*>(data)), spec};
  }
  explicit operator bool() const { return spec.rank != 0; }
};

/// The bytes of an array, whose elements lie side by side in some order.
std::span<const std::byte> bytes_of(const Array& array);

/// Row-major zeros.
Array make_array(Dtype dtype, std::span<const std::int64_t> shape);

/// The tensor whose `size` bytes begin at `offset` of a file. Copies only where the element would be misaligned. Bools
/// become 0 or 1: a file may hold any byte.
Array adopt(const std::shared_ptr<const Buffer>& file, std::size_t offset, std::size_t size,
            const TensorSpec& spec);

/// num_elements * size_bytes of a shape, or nothing where that leaves 62 bits (extents of 0 do not hide an overflow).
struct CheckedBytes {
  bool fits = false;
  std::size_t bytes = 0;
};
CheckedBytes checked_size_bytes(Dtype dtype, std::span<const std::int64_t> shape);

}  // namespace fovea::tools
