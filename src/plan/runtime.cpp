#include "plan/runtime.hpp"

#include <string_view>

#include "core/check.hpp"

namespace fovea {

Runtime::Runtime(int num_threads) : impl_(std::make_unique<Impl>()) {
  impl_->num_threads = num_threads;
}

Runtime::~Runtime() = default;

Executor& Runtime::executor() {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->executor == nullptr) impl_->executor = make_thread_pool(impl_->num_threads);
  return *impl_->executor;
}

void Runtime::set_allocator(Device::Kind kind, const Allocator& allocator) {
  const bool has_one = allocator.allocate != nullptr || allocator.deallocate != nullptr;
  if (has_one && (allocator.allocate == nullptr || allocator.deallocate == nullptr)) {
    invalid("Runtime::set_allocator",
            "allocate or deallocate is missing; expected both functions, or neither");
  }
  const std::lock_guard lock(impl_->mutex);
  impl_->allocator_of(kind) = allocator;
}

void Runtime::set_allocator(const Allocator& allocator) {
  for (const auto kind : {Device::Kind::cpu, Device::Kind::cuda, Device::Kind::rocm})
    set_allocator(kind, allocator);
}

Runtime& Runtime::process_default() {
  static Runtime runtime;
  return runtime;
}

#define FOVEA_TEXT_OF(number) #number
#define FOVEA_VERSION_TEXT(major, minor, patch) \
  FOVEA_TEXT_OF(major) "." FOVEA_TEXT_OF(minor) "." FOVEA_TEXT_OF(patch)

std::string_view version() {
  return FOVEA_VERSION_TEXT(FOVEA_VERSION_MAJOR, FOVEA_VERSION_MINOR, FOVEA_VERSION_PATCH);
}

}  // namespace fovea
