#include "cuda/driver/driver.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <charconv>
#include <filesystem>
#include <memory>
#include <type_traits>

#include "fovea/error.hpp"

#include "core/env.hpp"

namespace fovea::cuda::driver {
namespace {

/// Finds each function by its name; the first that is missing, or nothing.
const char* fill(Api& api, void* library, Device::Kind kind) {
  const auto find = [&](const char* cuda, const char* hip, auto*& function) {
    const char* const symbol = kind == Device::Kind::cuda ? cuda : hip;
    using Function = std::remove_reference_t<decltype(function)>;
    if (*symbol != '\0') function = reinterpret_cast<Function>(dlsym(library, symbol));
    return *symbol != '\0' && function == nullptr ? symbol : nullptr;
  };
#define FOVEA_DRIVER_FIND(member, cuda, hip, arguments) find(cuda, hip, api.member);
#define FOVEA_DRIVER_REQUIRE(member, cuda, hip, arguments) \
  if (const char* missing = find(cuda, hip, api.member); missing != nullptr) return missing;
  FOVEA_DRIVER_FUNCTIONS(FOVEA_DRIVER_REQUIRE)
  FOVEA_DRIVER_OPTIONAL_FUNCTIONS(FOVEA_DRIVER_FIND)
#undef FOVEA_DRIVER_REQUIRE
#undef FOVEA_DRIVER_FIND
  return nullptr;
}

/// HIP's name of what CUDA calls so, with or without the version that symbols of libcuda end in.
std::string_view hip_name_of(std::string_view call) {
  struct Row {
    std::string_view cuda, hip;
  };
#define FOVEA_DRIVER_NAMES(member, cuda, hip, arguments) Row{cuda, hip},
  static constexpr std::array kRows{FOVEA_DRIVER_FUNCTIONS(FOVEA_DRIVER_NAMES)
                                        Row{"cuLaunchKernelEx", "hipModuleLaunchKernel"}};
#undef FOVEA_DRIVER_NAMES
  for (const Row& row : kRows) {
    const bool is_it =
        row.cuda == call || (row.cuda.starts_with(call) && row.cuda.ends_with("_v2") &&
                             row.cuda.size() == call.size() + 3);
    if (is_it && !row.hip.empty()) return row.hip;
  }
  return call;
}

void* open_first(const std::vector<std::string>& libraries, std::string& path) {
  for (const int only_loaded : {RTLD_NOLOAD, 0}) {
    for (const std::string& library : libraries) {
      void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | only_loaded);
      if (handle == nullptr) continue;
      path = library;
      return handle;
    }
  }
  return nullptr;
}

/// 0x942 of "gfx942:sramecc+:xnack-"; 0 for what is none.
int gfx_of(std::string_view name) {
  constexpr std::string_view kPrefix = "gfx";
  constexpr int kHexadecimal = 16;
  if (!name.starts_with(kPrefix)) return 0;
  name = name.substr(0, name.find(':'));
  int gfx = 0;
  const char* const last = name.data() + name.size();
  const auto [end, error] = std::from_chars(name.data() + kPrefix.size(), last, gfx, kHexadecimal);
  return error == std::errc() && end == last ? gfx : 0;
}

/// HIP's number of a version, 60241133 of 6.2, as CUDA counts.
int as_cuda_counts(int hip_version) {
  return hip_version / 10'000'000 * 1000 + hip_version / 100'000 % 100 * 10;
}

/// Counted by a handler rather than asked of getpid, which is a system call at each launch.
std::atomic<int> num_forks{0};

int count_forks() {
  [[maybe_unused]] static const int result = pthread_atfork(nullptr, nullptr, [] { ++num_forks; });
  return num_forks.load(std::memory_order_relaxed);
}

}  // namespace

Driver::Driver(Device::Kind kind, const std::vector<std::string>& libraries)
    : kind_(kind), num_forks_(count_forks()) {
  try {
    why_absent_ = start(libraries);
  } catch (const DeviceError& error) {
    why_absent_ = error.what();
  }
}

std::string Driver::start(const std::vector<std::string>& libraries) {
  void* handle = open_first(libraries, path_);
  if (handle == nullptr) {
    return fmt::format(
        "no {} driver: {} cannot be opened; expected it where the dynamic loader looks{}",
        is_hip() ? "AMD" : "NVIDIA", libraries.front(),
        libraries.size() > 1 ? ", or in ROCM_PATH/lib" : "");
  }
  if (const char* missing = fill(api_, handle, kind_); missing != nullptr) {
    return fmt::format("{} lacks {}; expected a driver of {} or newer", path_, missing,
                       is_hip() ? "ROCm 6" : "CUDA 12");
  }
  check(api_.init(0), "cuInit");
  check(api_.driver_version(&version_), "cuDriverGetVersion");
  if (is_hip()) version_ = as_cuda_counts(version_);
  int count = 0;
  check(api_.device_count(&count), "cuDeviceGetCount");
  if (count == 0) {
    return fmt::format("the driver sees no device ({}_VISIBLE_DEVICES may hide them)",
                       is_hip() ? "HIP" : "CUDA");
  }
  for (int index = 0; index < count; ++index)
    devices_.push_back(is_hip() ? describe_hip(index) : describe(index));
  return {};
}

DeviceInfo Driver::describe_hip(int index) const {
  const auto properties = std::make_unique<HipProperties>();  // zeros
  check(api_.properties(properties.get(), index), "hipGetDeviceProperties");
  const int gfx = gfx_of(properties->architecture);
  if (gfx == 0) {
    throw DeviceError(
        fmt::format("hipGetDeviceProperties: the architecture of rocm:{} is '{}'; expected "
                    "gfx and a number",
                    index, properties->architecture));
  }
  return {.index = index,
          .name = properties->name,
          .gfx = gfx,
          .warp_lanes = properties->warp_lanes,
          .num_sms = properties->num_sms,
          .shared_bytes_per_cta = static_cast<int>(properties->shared_bytes_per_cta),
          .shared_bytes_per_sm = static_cast<int>(properties->shared_bytes_per_sm),
          .registers_per_sm = properties->registers_per_sm,
          .l2_bytes = properties->l2_bytes,
          .memory_bytes = static_cast<std::int64_t>(properties->memory_bytes)};
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
    throw Unsupported(fmt::format("there is no {}; the driver sees {} device{}, counted from {}",
                                  to_string(Device{kind_, index}), devices_.size(),
                                  devices_.size() == 1 ? "" : "s", to_string(Device{kind_, 0})));
  }
  return devices_[static_cast<std::size_t>(index)];
}

void Driver::check(Result result, std::string_view call, std::string_view about) const {
  if (result == kSuccess) return;
  const char* name = nullptr;
  const char* words = nullptr;
  if (api_.error_name(result, &name) != kSuccess || name == nullptr) name = "an unknown error";
  if (api_.error_string(result, &words) != kSuccess || words == nullptr) words = "no words for it";
  throw DeviceError(fmt::format("{}: {} ({}, {}){}{}", is_hip() ? hip_name_of(call) : call, name,
                                result, words, about.empty() ? "" : "; ", about));
}

const Driver& process_driver(Device::Kind kind) {
  // Never destroyed: contexts and modules of other statics may be released after this one's turn.
  if (kind == Device::Kind::rocm) {
    static const Driver* const hip = new Driver(Device::Kind::rocm, hip_libraries());
    return *hip;
  }
  static const Driver* const cuda = new Driver();
  return *cuda;
}

std::vector<std::string> hip_libraries() {
  // ROCm 6 is the oldest that has what we call. The interface is kept from then on, so those to come are tried; wheels
  // of PyTorch bring one without a version in its name.
  constexpr int kOldestMajor = 6, kNewestMajor = 15;
  const Environment environment = read_environment();
  if (environment.hip) return {*environment.hip};
  std::vector<std::string> prefixes{""};
  if (environment.rocm_path) prefixes.push_back(*environment.rocm_path + "/lib/");
  prefixes.push_back(std::filesystem::path("/opt") / "rocm" / "lib" / "");
  std::vector<std::string> libraries;
  for (const std::string& prefix : prefixes) {
    for (int major = kNewestMajor; major >= kOldestMajor; --major)
      libraries.push_back(fmt::format("{}libamdhip64.so.{}", prefix, major));
    libraries.push_back(prefix + "libamdhip64.so");
  }
  return libraries;
}

}  // namespace fovea::cuda::driver
