// Device memory for the length of a call, taken and given back in the order of a stream: what convenience calls use
// where the caller brought no workspace.
#pragma once

#include <cstddef>
#include <span>

#include "cuda/driver/context.hpp"
#include "cuda/driver/launch.hpp"

namespace fovea::cuda::driver {

class StreamMemory {
 public:
  /// On the process's context of the device; 256-byte aligned. Throws DeviceError where there is not so much.
  StreamMemory(Device device, std::size_t bytes, void* stream);
  /// Work enqueued before may still use it: the driver waits for the stream, not the host.
  ~StreamMemory();
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;

  /// In the order of the stream; the host's bytes must live until then.
  void copy_from(std::span<const std::byte> host);
  void copy_to(std::span<std::byte> host) const;

  void* data() const { return reinterpret_cast<void*>(pointer_); }

 private:
  const DeviceContext& context_;
  Stream stream_;
  DevicePointer pointer_ = 0;
};

}  // namespace fovea::cuda::driver
