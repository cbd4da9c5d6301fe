// Memory for the length of a call, where the caller brought none.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <span>

#include "fovea/runtime.hpp"
#include "fovea/tensor.hpp"

#include "cuda/driver/stream_memory.hpp"
#include "plan/plan.hpp"
#include "plan/runtime.hpp"

namespace fovea {

/// From the runtime's allocator; else of the host, or of a GPU, taken and given back in the order of the stream.
class CallWorkspace {
 public:
  /// Where a call's tensors live, and its stream.
  struct Place {
    Device device{};
    void* stream = nullptr;
  };

  /// Nothing is taken where `given` is not empty.
  CallWorkspace(std::span<std::byte> given, std::size_t bytes, const Place& place,
                Runtime::Impl& runtime)
      : bytes_(given), place_(place) {
    if (!given.empty() || bytes == 0) return;
    allocator_ = runtime.current_allocator(place.device);
    if (allocator_.allocate != nullptr) {
      lent_ = allocate(bytes);
      bytes_ = {static_cast<std::byte*>(lent_), bytes};
    } else if (is_cpu(place.device)) {
      host_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
      bytes_ = {host_.get(), bytes};
    } else {
      device_.emplace(place.device, bytes, place.stream);
      bytes_ = {static_cast<std::byte*>(device_->data()), bytes};
    }
  }
  ~CallWorkspace() {
    if (lent_ == nullptr) return;
    allocator_.deallocate(allocator_.context, lent_, bytes_.size(), place_.device, place_.stream);
  }
  CallWorkspace(const CallWorkspace&) = delete;
  CallWorkspace& operator=(const CallWorkspace&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  void* allocate(std::size_t bytes) const {
    const std::size_t alignment =
        is_cpu(place_.device) ? kWorkspaceAlignment : kDeviceWorkspaceAlignment;
    void* const data =
        allocator_.allocate(allocator_.context, bytes, alignment, place_.device, place_.stream);
    if (data == nullptr) throw std::bad_alloc();
    return data;
  }

  std::unique_ptr<std::byte[]> host_;
  std::optional<cuda::driver::StreamMemory> device_;
  void* lent_ = nullptr;
  std::span<std::byte> bytes_;
  Place place_;
  Allocator allocator_;
};

}  // namespace fovea
