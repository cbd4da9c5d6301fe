#include "cuda/device_traits.hpp"

namespace fovea::cuda {

DeviceTraits traits_of(const driver::DeviceInfo& info) {
  return {.major = info.compute_capability_major,
          .minor = info.compute_capability_minor,
          .num_sms = info.num_sms,
          .shared_bytes_per_cta = info.shared_bytes_per_cta,
          .shared_bytes_per_sm = info.shared_bytes_per_sm,
          .l2_bytes = info.l2_bytes};
}

DeviceTraits typical_device(int major, int minor) {
  const int capability = major * 10 + minor;
  DeviceTraits device{.major = major, .minor = minor};
  const bool is_blackwell = capability >= 100 && capability < 110;  // of data centres
  const bool is_consumer =
      capability == 86 || capability == 89 || (capability >= 110 && capability < 130);
  device.shared_bytes_per_cta = is_consumer ? 99 * 1024 : capability < 90 ? 163 * 1024 : 227 * 1024;
  device.shared_bytes_per_sm = device.shared_bytes_per_cta + kReservedSharedBytes;
  device.num_sms = is_consumer ? 84 : capability < 90 ? 108 : is_blackwell ? 148 : 132;
  const int l2_mib = is_consumer ? 6 : capability < 90 ? 40 : is_blackwell ? 126 : 50;
  device.l2_bytes = l2_mib * std::int64_t{1 << 20};
  return device;
}

}  // namespace fovea::cuda
