// Memory for the length of a call, where the caller brought none.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>

#include "fovea/tensor.hpp"

#include "cuda/driver/stream_memory.hpp"

namespace fovea {

/// Of the host; or of a GPU, taken and given back in the order of the stream.
class CallWorkspace {
 public:
  /// Where a call's tensors live, and its stream.
  struct Place {
    Device device{};
    void* stream = nullptr;
  };

  /// Nothing is taken where `given` is not empty.
  CallWorkspace(std::span<std::byte> given, std::size_t bytes, const Place& place) : bytes_(given) {
    if (!given.empty() || bytes == 0) return;
    if (place.device.kind == Device::Kind::cpu) {
      host_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
      bytes_ = {host_.get(), bytes};
      return;
    }
    device_.emplace(place.device.index, bytes, place.stream);
    bytes_ = {static_cast<std::byte*>(device_->data()), bytes};
  }

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::unique_ptr<std::byte[]> host_;
  std::optional<cuda::driver::StreamMemory> device_;
  std::span<std::byte> bytes_;
};

}  // namespace fovea
