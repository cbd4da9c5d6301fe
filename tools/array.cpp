#include "array.hpp"

#include <cstdlib>
#include <cstring>
#include <new>

namespace fovea::tools {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 62U;

std::size_t padded(std::size_t size) {
  if (size > kMaxBytes) throw std::bad_alloc();
  return (std::max<std::size_t>(size, 1) + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

void Buffer::Free::operator()(std::byte* data) const { std::free(data); }

Buffer Buffer::uninitialized(std::size_t size) {
  Buffer buffer;
  buffer.data_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, padded(size))));
  if (buffer.data_ == nullptr) throw std::bad_alloc();
  buffer.size_ = size;
  return buffer;
}

Buffer Buffer::zeroed(std::size_t size) {
  Buffer buffer = uninitialized(size);
  std::memset(buffer.data(), 0, size);
  return buffer;
}

CheckedBytes checked_size_bytes(Dtype dtype, std::span<const std::int64_t> shape) {
  std::uint64_t bytes = size_bytes(dtype);
  bool is_empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) return {};
    if (extent == 0) {
      is_empty = true;
      continue;
    }
    if (static_cast<std::uint64_t>(extent) > kMaxBytes / bytes) return {};
    bytes *= static_cast<std::uint64_t>(extent);
  }
  return {.fits = true, .bytes = is_empty ? 0 : static_cast<std::size_t>(bytes)};
}

Array make_array(Dtype dtype, std::span<const std::int64_t> shape) {
  const CheckedBytes size = checked_size_bytes(dtype, shape);
  if (!size.fits) throw std::bad_alloc();
  auto storage = std::make_shared<const Buffer>(Buffer::zeroed(size.bytes));
  return {.storage = storage, .data = storage->data(), .spec = make_spec(dtype, shape)};
}

std::span<const std::byte> bytes_of(const Array& array) {
  return {array.data,
          static_cast<std::size_t>(array.spec.num_elements()) * size_bytes(array.spec.dtype)};
}

Array adopt(const std::shared_ptr<const Buffer>& file, std::size_t offset, std::size_t size,
            const TensorSpec& spec) {
  const bool is_aligned = offset % size_bytes(spec.dtype) == 0;
  if (is_aligned && spec.dtype != Dtype::boolean) {
    return {.storage = file, .data = file->data() + offset, .spec = spec};
  }
  auto copy = std::make_shared<const Buffer>(Buffer::uninitialized(size));
  if (size != 0) std::memcpy(copy->data(), file->data() + offset, size);
  if (spec.dtype == Dtype::boolean) {
    for (std::byte& value : copy->bytes()) value = std::byte{value != std::byte{0}};
  }
  return {.storage = copy, .data = copy->data(), .spec = spec};
}

}  // namespace fovea::tools
