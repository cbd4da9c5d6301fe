// Memory of one call, and all that engines do with tensors beside attention: parts of them, copies, sums, roundings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "fovea/parallel.hpp"
#include "fovea/tensor.hpp"

namespace fovea::parallel {

/// A tensor and its memory, which lives as long as the last copy of it.
struct OwnedTensor {
  TensorView view{};
  std::shared_ptr<std::byte> memory{};
};

/// Indices [begin, end) of a dimension.
TensorView part_of(const TensorView& tensor, int dim, std::int64_t begin, std::int64_t end);
inline TensorView tokens_of(const TensorView& tokens_first, const TokenRange& range) {
  return part_of(tokens_first, 0, range.begin, range.end);
}
inline TensorView heads_of(const TensorView& tokens_first, const HeadRange& heads) {
  return part_of(tokens_first, 2, heads.begin, heads.end);
}

std::size_t num_bytes(const TensorView& contiguous);

/// What is added to a tensor: index for index; or with places, [size of the sum's first dimension] i32, at index i what
/// stands at places[i], nothing where that is -1.
struct PlacedPart {
  TensorView tensor{};
  TensorView places{};
};

/// Of the call's device. On a GPU memory is the runtime's allocator's, or the stream's, and all is in the order of the
/// call's stream: the host waits in of_values alone.
class Memory {
 public:
  Memory(Device device, void* stream) : device_(device), stream_(stream) {}

  Device device() const { return device_; }
  /// Of the call, for exchanges.
  void* stream() const { return stream_; }

  /// Row-major; what it holds is undefined.
  OwnedTensor make(Dtype dtype, std::span<const std::int64_t> shape) const;
  OwnedTensor make_like(const TensorView& like, Dtype dtype) const;
  /// The tensor itself where it is row-major, else a copy that is.
  OwnedTensor row_major(const OwnedTensor& from) const;
  /// For longer than a call: of no stream. On a GPU the values are there when this returns.
  OwnedTensor of_values(std::span<const std::int32_t> values) const;

  /// Shapes and dtypes are equal; any strides.
  void copy(const TensorView& to, const TensorView& from) const;
  /// Sums in f32 of parts, in the order given, rounded once to the dtype of `to`; 0 of no parts. One part of that dtype
  /// alone is a copy.
  void sum(const TensorView& to, std::span<const PlacedPart> parts) const;
  void sum(const TensorView& to, std::span<const TensorView> parts) const;
  /// The largest of each element of f32 parts, of which there is one or more; NaN where one of them is.
  void largest(const TensorView& to, std::span<const TensorView> parts) const;

 private:
  Device device_;
  void* stream_;
};

// ---- What Memory does on a GPU: device_memory.cpp ----

OwnedTensor make_on_device(Dtype dtype, std::span<const std::int64_t> shape, const Memory& memory);
OwnedTensor values_on_device(std::span<const std::int32_t> values, Device device);
void sum_on_device(const TensorView& to, std::span<const PlacedPart> parts, const Memory& memory);
void largest_on_device(const TensorView& to, std::span<const TensorView> parts,
                       const Memory& memory);

}  // namespace fovea::parallel
