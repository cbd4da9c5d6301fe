#include "cuda/device_traits.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/check.hpp"

namespace fovea::cuda {

DeviceTraits traits_of(const driver::DeviceInfo& info) {
  return {.major = info.compute_capability_major,
          .minor = info.compute_capability_minor,
          .gfx = info.gfx,
          .warp_lanes = info.warp_lanes,
          .num_sms = info.num_sms,
          .shared_bytes_per_cta = info.shared_bytes_per_cta,
          .shared_bytes_per_sm = info.shared_bytes_per_sm,
          .l2_bytes = info.l2_bytes};
}

namespace {

struct Typical {
  int shared_kb_of_cta, shared_kb_of_sm, num_sms, l2_mib;
};

Typical typical_of(int capability) {
  if (capability < 80) return {64, 64, 40, 4};  // T4
  const bool is_consumer =
      capability == 86 || capability == 89 || (capability >= 110 && capability < 130);
  if (is_consumer) return {99, 100, 84, 6};
  if (capability < 90) return {163, 164, 108, 40};
  const bool is_blackwell = capability >= 100 && capability < 110;  // of data centres
  if (is_blackwell) return {227, 228, 148, 126};
  return {227, 228, 132, 50};
}

}  // namespace

DeviceTraits typical_device(int major, int minor) {
  const Typical typical = typical_of(major * 10 + minor);
  return {.major = major,
          .minor = minor,
          .num_sms = typical.num_sms,
          .shared_bytes_per_cta = typical.shared_kb_of_cta * 1024,
          .shared_bytes_per_sm = typical.shared_kb_of_sm * 1024,
          .l2_bytes = typical.l2_mib * std::int64_t{1 << 20}};
}

DeviceTraits typical_amd_device(int gfx) {
  constexpr std::int64_t kMiB = 1 << 20;
  // CUs and shared memory (LDS) of a workgroup: AMD, "Accelerator and GPU hardware specifications". L2 of CDNA: of one
  // of its dies, which is what neighbours share.
  static constexpr std::array kDevices = {DeviceTraits{.gfx = 0x90a,
                                                       .warp_lanes = 64,
                                                       .num_sms = 104,
                                                       .shared_bytes_per_cta = 64 << 10,
                                                       .shared_bytes_per_sm = 64 << 10,
                                                       .l2_bytes = 8 * kMiB},
                                          DeviceTraits{.gfx = 0x942,
                                                       .warp_lanes = 64,
                                                       .num_sms = 304,
                                                       .shared_bytes_per_cta = 64 << 10,
                                                       .shared_bytes_per_sm = 64 << 10,
                                                       .l2_bytes = 4 * kMiB},
                                          DeviceTraits{.gfx = 0x950,
                                                       .warp_lanes = 64,
                                                       .num_sms = 256,
                                                       .shared_bytes_per_cta = 160 << 10,
                                                       .shared_bytes_per_sm = 160 << 10,
                                                       .l2_bytes = 4 * kMiB},
                                          DeviceTraits{.gfx = 0x1100,
                                                       .num_sms = 96,
                                                       .shared_bytes_per_cta = 64 << 10,
                                                       .shared_bytes_per_sm = 64 << 10,
                                                       .l2_bytes = 6 * kMiB},
                                          DeviceTraits{.gfx = 0x1201,
                                                       .num_sms = 64,
                                                       .shared_bytes_per_cta = 64 << 10,
                                                       .shared_bytes_per_sm = 64 << 10,
                                                       .l2_bytes = 8 * kMiB}};
  const auto* const found = std::ranges::find(kDevices, gfx, &DeviceTraits::gfx);
  if (found == kDevices.end()) {
    invalid("typical_amd_device",
            fmt::format("gfx{:x} is unknown; expected {}", gfx, jit::amd_target_names()));
  }
  return *found;
}

DeviceTraits typical_device(jit::Architecture architecture) {
  return architecture.is_amd() ? typical_amd_device(architecture.gfx)
                               : typical_device(architecture.major, architecture.minor);
}

}  // namespace fovea::cuda
