#include "cuda/driver/context.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "fovea/error.hpp"

namespace fovea::cuda::driver {
namespace {

/// Of HIP. None is null, which is said of a thread without a context.
ContextHandle handle_of(DeviceHandle device) {
  return reinterpret_cast<ContextHandle>(static_cast<std::uintptr_t>(device) + 1);
}

}  // namespace

DeviceContext::DeviceContext(const Driver& driver, int index)
    : driver_(driver), info_(driver.device(index)) {
  driver_.check(api().device_get(&device_, index), "cuDeviceGet");
  if (driver_.is_hip()) {
    handle_ = handle_of(device_);
    return;
  }
  driver_.check(api().primary_context_retain(&handle_, device_), "cuDevicePrimaryCtxRetain",
                info_.name);
}

DeviceContext::~DeviceContext() {
  if (!driver_.is_hip() && driver_.is_usable()) api().primary_context_release(device_);
}

DeviceContext& process_context(Device device) {
  static std::mutex mutex;
  // Never destroyed, as the process's driver is not.
  static auto* const contexts =
      new std::map<std::pair<Device::Kind, int>, std::unique_ptr<DeviceContext>>();
  const std::lock_guard lock(mutex);
  auto& context = (*contexts)[{device.kind, device.index}];
  if (context == nullptr)
    context = std::make_unique<DeviceContext>(process_driver(device.kind), device.index);
  return *context;
}

namespace {

int current_device(const DeviceContext& context) {
  int index = 0;
  context.driver().check(context.api().current_device(&index), "hipGetDevice");
  return index;
}

ContextHandle current_context(const DeviceContext& context) {
  if (context.driver().is_hip()) return handle_of(current_device(context));
  ContextHandle current = nullptr;
  context.driver().check(context.api().context_get_current(&current), "cuCtxGetCurrent");
  return current;
}

/// Is the calling thread's context one of part of the device's resources? Its streams belong to the primary context as
/// well.
bool is_in_green_context(const DeviceContext& context) {
  const Api& api = context.api();
  ContextHandle primary = nullptr;
  GreenContextHandle green = nullptr;
  return api.stream_contexts != nullptr &&
         api.stream_contexts(nullptr, &primary, &green) == kSuccess && green != nullptr &&
         primary == context.handle();
}

bool is_in_context_of(const DeviceContext& context) {
  DeviceHandle device = 0;
  return context.api().context_device(&device) == kSuccess && device == context.device();
}

/// NULL, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD: of whatever context is current.
bool is_default(StreamHandle stream) { return reinterpret_cast<std::uintptr_t>(stream) <= 2; }

}  // namespace

ContextScope::ContextScope(const DeviceContext& context) : context_(context) {
  if (current_context(context) != context.handle()) push();
}

ContextScope::ContextScope(const DeviceContext& context, StreamHandle stream) : context_(context) {
  const ContextHandle current = current_context(context);
  if (current == context.handle()) return;
  if (current != nullptr && !context.driver().is_hip()) {
    if (is_in_green_context(context)) return;
    if (is_default(stream) && is_in_context_of(context)) {
      throw DeviceError(fmt::format(
          "the default stream is of another context than the primary one of {}, which kernels run "
          "in; name a stream of that, or make it current",
          context.info().name));
    }
  }
  push();
}

void ContextScope::push() {
  const Driver& driver = context_.driver();
  if (driver.is_hip()) {
    previous_device_ = current_device(context_);
    driver.check(context_.api().set_device(context_.device()), "hipSetDevice");
  } else {
    driver.check(context_.api().context_push(context_.handle()), "cuCtxPushCurrent");
  }
  is_pushed_ = true;
}

ContextScope::~ContextScope() {
  if (!is_pushed_ || !context_.driver().is_usable()) return;
  ContextHandle popped = nullptr;
  if (context_.driver().is_hip()) {
    context_.api().set_device(previous_device_);
  } else {
    context_.api().context_pop(&popped);
  }
}

}  // namespace fovea::cuda::driver
