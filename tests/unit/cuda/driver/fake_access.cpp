#include <dlfcn.h>

#include <stdexcept>

#include "unit/cuda/driver/fake_libcuda.hpp"

namespace fovea::cuda::driver {

FakeState& fresh_fake(const char* file) {
  void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  auto* access = reinterpret_cast<FakeState* (*)()>(dlsym(library, "fake_state"));
  *access() = FakeState{};
  return *access();
}

FakeState& fresh_fake() { return fresh_fake(kFakeLibcuda); }

}  // namespace fovea::cuda::driver
