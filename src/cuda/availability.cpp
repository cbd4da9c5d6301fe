#include "cuda/availability.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "fovea/error.hpp"

namespace fovea::cuda {
namespace {

/// Whether kernels are made for such a device at all; empty: they are.
std::string why_not_made_for(const driver::DeviceInfo& device) {
  const std::string name = fmt::format("{} ({})", to_string(device.device()), device.name);
  if (device.gfx != 0) {
    if (std::ranges::find(jit::amd_targets(), device.gfx, &jit::AmdTarget::gfx) !=
        jit::amd_targets().end())
      return {};
    return fmt::format("{} is gfx{:x}; expected {}", name, device.gfx, jit::amd_target_names());
  }
  const jit::Architecture architecture{.major = device.compute_capability_major,
                                       .minor = device.compute_capability_minor};
  constexpr jit::Architecture kOldest = jit::kOldestArchitecture;
  if (architecture >= kOldest) return {};
  return fmt::format("{} has compute capability {}.{}; expected {}.{} or newer", name,
                     architecture.major, architecture.minor, kOldest.major, kOldest.minor);
}

}  // namespace

std::string why_unavailable(const driver::Driver& driver, jit::Loader& loader, int device_index) {
  try {
    const driver::DeviceInfo& device = driver.device(device_index);
    if (!driver.is_usable()) return std::string(driver::kForked);
    if (std::string reason = why_not_made_for(device); !reason.empty()) return reason;
  } catch (const Unsupported& error) {
    return error.what();
  }
  jit::Compiler& compiler =
      loader.compiler(driver.is_hip() ? jit::CompilerKind::hiprtc : jit::CompilerKind::nvrtc);
  const bool has_compiler = compiler.file().has_value() || compiler.library().is_present();
  if (has_compiler || loader.pack() != nullptr) return {};
  return compiler.library().why_absent();
}

std::string why_unavailable(Device device) {
  const driver::Driver& driver = driver::process_driver(device.kind);
  if (!driver.is_present()) return driver.why_absent();
  return why_unavailable(driver, jit::process_loader(), device.index);
}

}  // namespace fovea::cuda
