#include "cuda/driver/context.hpp"

#include <memory>
#include <mutex>
#include <unordered_map>

namespace fovea::cuda::driver {

DeviceContext::DeviceContext(const Driver& driver, int index)
    : driver_(driver), info_(driver.device(index)) {
  driver_.check(api().device_get(&device_, index), "cuDeviceGet");
  driver_.check(api().primary_context_retain(&handle_, device_), "cuDevicePrimaryCtxRetain",
                info_.name);
}

DeviceContext::~DeviceContext() {
  if (driver_.is_usable()) api().primary_context_release(device_);
}

DeviceContext& process_context(int index) {
  static std::mutex mutex;
  // Never destroyed, as the process's driver is not.
  static auto* const contexts = new std::unordered_map<int, std::unique_ptr<DeviceContext>>();
  const std::lock_guard lock(mutex);
  auto& context = (*contexts)[index];
  if (context == nullptr) context = std::make_unique<DeviceContext>(process_driver(), index);
  return *context;
}

ContextScope::ContextScope(const DeviceContext& context) : context_(context) {
  ContextHandle current = nullptr;
  context.driver().check(context.api().context_get_current(&current), "cuCtxGetCurrent");
  if (current == context.handle()) return;
  context.driver().check(context.api().context_push(context.handle()), "cuCtxPushCurrent");
  is_pushed_ = true;
}

ContextScope::~ContextScope() {
  ContextHandle popped = nullptr;
  if (is_pushed_ && context_.driver().is_usable()) context_.api().context_pop(&popped);
}

}  // namespace fovea::cuda::driver
