// A GPU as the commands use it: tensors copied there and back, and a stream to run on. The library itself allocates
// nothing there.
#pragma once

#include <functional>
#include <string>

#include "array.hpp"
#include "attention_options.hpp"
#include "cuda/driver/resources.hpp"

namespace fovea::tools {

class Gpu {
 public:
  /// Throws Failure(kUnsupported): why nothing can run on this device.
  explicit Gpu(Device device);

  Device device() const { return device_; }
  /// "cuda:0 (NVIDIA H200)"
  std::string describe() const;

  const cuda::driver::DeviceContext& context() const { return context_; }
  cuda::driver::Stream stream() const { return stream_.get(); }
  void* stream_handle() const { return stream_.get().handle(); }

  /// The same tensor in memory of the device; an array without storage gets memory of any content.
  Array copy(const Array& host) const;
  Inputs copy(const Inputs& host) const;
  /// Waits for what the stream holds.
  void copy_back(const Array& device, const Array& host) const;

  /// Every byte of an array of the device, in the order of the stream.
  void fill(const Array& device, unsigned char value) const;

  /// How long the device takes for what `enqueue` puts on the stream.
  double milliseconds(const std::function<void()>& enqueue) const;

 private:
  Device device_;
  const cuda::driver::DeviceContext& context_;
  cuda::driver::OwnedStream stream_;
};

/// Times of calls whose tensors lie in no cache.
class FlushedClock {
 public:
  explicit FlushedClock(const Gpu& gpu);
  /// Runs `enqueue` behind a write of so much memory that the L2 cache holds nothing else. The host enqueues while that
  /// is under way, so its own time is not measured.
  double seconds(const std::function<void()>& enqueue);

 private:
  const Gpu& gpu_;
  cuda::driver::DeviceMemory flushed_;
  cuda::driver::Event begin_, end_;
};

}  // namespace fovea::tools
