#include "cuda/availability.hpp"

#include <fmt/format.h>

#include "fovea/error.hpp"

namespace fovea::cuda {
std::string why_unavailable(const driver::Driver& driver, jit::Loader& loader, int device_index) {
  try {
    const driver::DeviceInfo& device = driver.device(device_index);
    if (!driver.is_usable()) return std::string(driver::kForked);
    const jit::Architecture architecture{device.compute_capability_major,
                                         device.compute_capability_minor};
    constexpr jit::Architecture kOldest = jit::kOldestArchitecture;
    if (architecture < kOldest) {
      return fmt::format("cuda:{} ({}) has compute capability {}.{}; expected {}.{} or newer",
                         device_index, device.name, architecture.major, architecture.minor,
                         kOldest.major, kOldest.minor);
    }
  } catch (const Unsupported& error) {
    return error.what();
  }
  const bool has_compiler =
      loader.compiler().file().has_value() || loader.compiler().nvrtc().is_present();
  if (has_compiler || loader.pack() != nullptr) return {};
  return loader.compiler().nvrtc().why_absent();
}

std::string why_unavailable(int device_index) {
  if (!driver::process_driver().is_present()) return driver::process_driver().why_absent();
  return why_unavailable(driver::process_driver(), jit::process_loader(), device_index);
}

}  // namespace fovea::cuda
