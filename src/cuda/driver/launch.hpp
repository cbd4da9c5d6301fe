// The one function through which every kernel is launched.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

#include "cuda/driver/module.hpp"

namespace fovea::cuda::driver {

/// A stream that somebody names. Null is the legacy default stream, and must be said too: there is no
/// default constructor, so a launch that forgets its stream does not compile.
class Stream {
 public:
  constexpr explicit Stream(void* handle) : handle_(static_cast<StreamHandle>(handle)) {}
  constexpr explicit Stream(std::nullptr_t) {}
  constexpr StreamHandle handle() const { return handle_; }

 private:
  StreamHandle handle_ = nullptr;
};

struct Extent {
  unsigned x = 1, y = 1, z = 1;
};

struct LaunchConfig {
  Extent grid;   // CTAs; nothing is launched where any is 0
  Extent block;  // threads of a CTA
  unsigned shared_bytes = 0;
  Stream stream;
  Extent cluster = {};  // CTAs of a cluster; sm_90 and up
  bool is_pdl = false;  // may start before its predecessor has ended; the kernel waits by itself
};

/// What to say of a stream on which a call has failed: "" where it is of the context. A module and a pool of memory are
/// one context's, so streams of green contexts, of contexts that somebody made and of other devices are named.
std::string describe_foreign(const DeviceContext& context, Stream stream);

/// Enqueues and returns. The stream is of the device's primary context, as those of the CUDA runtime, PyTorch and JAX
/// are; others are refused by name. `params` is the kernel's parameters, one pointer for each. Throws DeviceError.
void launch(const LaunchConfig& config, const Function& function, void** params);

/// A kernel of one parameter, which is a plain struct.
template <class Params>
void launch(const LaunchConfig& config, const Function& function, const Params& params) {
  static_assert(std::is_trivially_copyable_v<Params>);
  void* pointers[] = {const_cast<Params*>(&params)};
  launch(config, function, pointers);
}

}  // namespace fovea::cuda::driver
