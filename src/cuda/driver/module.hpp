// A cubin loaded into a device's context, and the function in it. Read launch.hpp next.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <string>

#include "fovea/error.hpp"

#include "cuda/driver/context.hpp"

namespace fovea::cuda::driver {

/// A kernel that can be launched; lives as long as its module.
struct Function {
  const DeviceContext* context = nullptr;
  FunctionHandle handle = nullptr;
  std::atomic<bool>* is_captured = nullptr;  // of its module
  int num_registers = 0;
  int local_bytes = 0;
  int static_shared_bytes = 0;
  int max_threads_per_cta = 0;
};

/// The driver took an image for no kernel of this device: another image may do, where a failure of the device would
/// come again.
class ImageRefused : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

class Module {
 public:
  /// Loads into the context, which must outlive the module; streams may be captured meanwhile, by any thread. `label`
  /// is for messages. Throws ImageRefused, or DeviceError where the device fails.
  Module(const DeviceContext& context, std::span<const std::byte> image, const std::string& label);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  /// May use all the dynamic shared memory that the device has: the attribute is set here, once, and
  /// not at each launch. Throws as the constructor.
  Function function(const std::string& name) const;

  /// Whether a graph may launch a function of this module: then it must stay loaded for good.
  bool is_captured() const { return is_captured_.load(std::memory_order_relaxed); }

 private:
  const DeviceContext& context_;
  std::string label_;
  ModuleHandle handle_ = nullptr;
  mutable std::atomic<bool> is_captured_{false};
};

/// CTAs of this function that fit on one SM at once.
int max_ctas_per_sm(const Function& function, int num_threads, int dynamic_shared_bytes);

}  // namespace fovea::cuda::driver
