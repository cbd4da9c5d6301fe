#include "cuda/driver/driver.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <pthread.h>

#include <array>
#include <atomic>

#include "fovea/error.hpp"

namespace fovea::cuda::driver {
namespace {

/// Finds each function by its name; the first that is missing, or nothing.
const char* fill(Api& api, void* library) {
#define FOVEA_DRIVER_FIND(member, symbol, arguments) \
  api.member = reinterpret_cast<decltype(api.member)>(dlsym(library, symbol));
#define FOVEA_DRIVER_REQUIRE(member, symbol, arguments) \
  FOVEA_DRIVER_FIND(member, symbol, arguments)          \
  if (api.member == nullptr) return symbol;
  FOVEA_DRIVER_FUNCTIONS(FOVEA_DRIVER_REQUIRE)
  FOVEA_DRIVER_OPTIONAL_FUNCTIONS(FOVEA_DRIVER_FIND)
#undef FOVEA_DRIVER_REQUIRE
#undef FOVEA_DRIVER_FIND
  return nullptr;
}

/// Counted by a handler rather than asked of getpid, which is a system call at each launch.
std::atomic<int> num_forks{0};

int count_forks() {
  [[maybe_unused]] static const int result = pthread_atfork(nullptr, nullptr, [] { ++num_forks; });
  return num_forks.load(std::memory_order_relaxed);
}

}  // namespace

Driver::Driver(const std::string& library) : num_forks_(count_forks()) {
  try {
    why_absent_ = start(library);
  } catch (const DeviceError& error) {
    why_absent_ = error.what();
  }
}

std::string Driver::start(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return fmt::format(
        "no NVIDIA driver: {} cannot be opened; expected it where the dynamic loader looks",
        library);
  }
  if (const char* missing = fill(api_, handle); missing != nullptr)
    return fmt::format("{} lacks {}; expected a driver of CUDA 12 or newer", library, missing);
  check(api_.init(0), "cuInit");
  check(api_.driver_version(&version_), "cuDriverGetVersion");
  int count = 0;
  check(api_.device_count(&count), "cuDeviceGetCount");
  if (count == 0) return "the driver sees no device (CUDA_VISIBLE_DEVICES may hide them)";
  for (int index = 0; index < count; ++index) devices_.push_back(describe(index));
  return {};
}

DeviceInfo Driver::describe(int index) const {
  DeviceHandle device = 0;
  check(api_.device_get(&device, index), "cuDeviceGet");
  std::array<char, 256> name{};
  check(api_.device_name(name.data(), static_cast<int>(name.size()), device), "cuDeviceGetName");
  std::size_t memory_bytes = 0;
  check(api_.device_memory(&memory_bytes, device), "cuDeviceTotalMem");
  const auto attribute = [&](DeviceAttribute which) {
    int value = 0;
    check(api_.device_attribute(&value, which, device), "cuDeviceGetAttribute");
    return value;
  };
  return {.index = index,
          .name = name.data(),
          .compute_capability_major = attribute(DeviceAttribute::compute_capability_major),
          .compute_capability_minor = attribute(DeviceAttribute::compute_capability_minor),
          .num_sms = attribute(DeviceAttribute::num_sms),
          .shared_bytes_per_cta = attribute(DeviceAttribute::shared_bytes_per_cta_opt_in),
          .shared_bytes_per_sm = attribute(DeviceAttribute::shared_bytes_per_sm),
          .registers_per_sm = attribute(DeviceAttribute::registers_per_sm),
          .l2_bytes = attribute(DeviceAttribute::l2_bytes),
          .memory_bytes = static_cast<std::int64_t>(memory_bytes)};
}

bool Driver::is_usable() const {
  return is_present() && num_forks.load(std::memory_order_relaxed) == num_forks_;
}

const Api& Driver::api() const {
  if (!is_present()) throw Unsupported(why_absent_);
  if (!is_usable()) throw DeviceError(std::string(kForked));
  return api_;
}

const DeviceInfo& Driver::device(int index) const {
  if (!is_present()) throw Unsupported(why_absent_);
  if (index < 0 || index >= static_cast<int>(devices_.size())) {
    throw Unsupported(
        fmt::format("there is no cuda:{}; the driver sees {} device{}, counted from cuda:0", index,
                    devices_.size(), devices_.size() == 1 ? "" : "s"));
  }
  return devices_[static_cast<std::size_t>(index)];
}

void Driver::check(Result result, std::string_view call, std::string_view about) const {
  if (result == kSuccess) return;
  const char* name = nullptr;
  const char* words = nullptr;
  if (api_.error_name(result, &name) != kSuccess || name == nullptr) name = "an unknown error";
  if (api_.error_string(result, &words) != kSuccess || words == nullptr) words = "no words for it";
  throw DeviceError(fmt::format("{}: {} ({}, {}){}{}", call, name, result, words,
                                about.empty() ? "" : "; ", about));
}

const Driver& process_driver() {
  // Never destroyed: contexts and modules of other statics may be released after this one's turn.
  static const Driver* const driver = new Driver();
  return *driver;
}

}  // namespace fovea::cuda::driver
