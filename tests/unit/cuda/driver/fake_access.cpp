#include <dlfcn.h>

#include <stdexcept>

#include "unit/cuda/driver/fake_libcuda.hpp"

namespace fovea::cuda::driver {

FakeState& fresh_fake() {
  void* library = dlopen(FOVEA_FAKE_LIBCUDA, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  auto* access = reinterpret_cast<FakeState* (*)()>(dlsym(library, "fake_state"));
  *access() = FakeState{};
  return *access();
}

}  // namespace fovea::cuda::driver
