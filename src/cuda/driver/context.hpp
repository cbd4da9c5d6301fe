// A device's primary context: shared with the CUDA runtime, so that tensors of PyTorch and JAX are ours to read. HIP
// has none: there the current device is set, and a handle is its number and one. Read module.hpp next.
#pragma once

#include "fovea/error.hpp"

#include "cuda/driver/driver.hpp"

namespace fovea::cuda::driver {

/// Retains the primary context of one device while it lives.
class DeviceContext {
 public:
  /// Throws Unsupported where the driver or the device is missing, DeviceError where it fails.
  DeviceContext(const Driver& driver, int index);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  const Driver& driver() const { return driver_; }
  const Api& api() const { return driver_.api(); }
  const DeviceInfo& info() const { return info_; }
  ContextHandle handle() const { return handle_; }
  DeviceHandle device() const { return device_; }

 private:
  const Driver& driver_;
  const DeviceInfo& info_;
  DeviceHandle device_ = 0;
  ContextHandle handle_ = nullptr;
};

/// The process's context of a GPU, made at the first call and kept.
DeviceContext& process_context(Device device);

/// Makes a context the calling thread's for a scope; a few nanoseconds where it already is.
class ContextScope {
 public:
  explicit ContextScope(const DeviceContext& context);
  /// For work on a stream. A green context of the device stays current: the default stream is its own then. Throws
  /// DeviceError for the default stream of a context that cuCtxCreate made for the device, since the primary one's
  /// would be in no order with it.
  ContextScope(const DeviceContext& context, StreamHandle stream);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  void push();

  const DeviceContext& context_;
  bool is_pushed_ = false;
  int previous_device_ = 0;  // of HIP
};

/// Gives something of a context back, in a destructor: nothing is done where the driver has shut down, which has freed
/// it, or in a forked child, whose it is not.
template <typename GiveBack>
void give_back_in(const DeviceContext& context, const GiveBack& give_back) {
  if (!context.driver().is_usable()) return;
  try {
    const ContextScope scope(context);
    give_back(context.api());
  } catch (const DeviceError&) {
    return;
  }
}

}  // namespace fovea::cuda::driver
