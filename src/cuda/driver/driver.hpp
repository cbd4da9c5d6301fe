// The driver of NVIDIA's GPUs or of AMD's (libcuda, libamdhip64), opened at run time: present or not, with the reason
// in words. Read context.hpp for how a thread comes to a device, module.hpp and launch.hpp for how a kernel runs.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fovea/tensor.hpp"

#include "cuda/driver/api.hpp"

namespace fovea::cuda::driver {

/// What a device is; constant while the process lives.
struct DeviceInfo {
  int index = 0;
  std::string name;                                                // "NVIDIA H200"
  int compute_capability_major = 0, compute_capability_minor = 0;  // AMD's have none
  int gfx = 0;                                                     // of an AMD GPU: 0x942 of gfx942
  int warp_lanes = 32;
  int num_sms = 0;
  int shared_bytes_per_cta = 0;  // dynamic, after opting in
  int shared_bytes_per_sm = 0;
  int registers_per_sm = 0;
  std::int64_t l2_bytes = 0;
  std::int64_t memory_bytes = 0;

  Device device() const { return gfx != 0 ? Device::rocm(index) : Device::cuda(index); }
};

/// The error, in a forked child, of everything that would call the driver.
inline constexpr std::string_view kForked =
    "this process was forked from one that had opened the GPU's driver, which serves no child; "
    "start it by spawn or exec, or fork "
    "before the first call for a GPU";

class Driver {
 public:
  static constexpr std::string_view kLibrary = "libcuda.so.1";

  /// Opens the library and asks for its devices. Throws nothing: what is missing is why_absent().
  explicit Driver(const std::string& library = std::string(kLibrary))
      : Driver(Device::Kind::cuda, {library}) {}
  /// The same of whose GPUs, cuda or rocm, by the first library that the process has already, else the first that can
  /// be opened: two of AMD's in a process would not know each other's memory.
  Driver(Device::Kind kind, const std::vector<std::string>& libraries);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  /// For GPUs of AMD.
  bool is_hip() const { return kind_ == Device::Kind::rocm; }
  bool is_present() const { return why_absent_.empty(); }
  /// One line: the library that cannot be opened, the function it lacks, or the driver's own words.
  const std::string& why_absent() const { return why_absent_; }

  /// Throws Unsupported with why_absent(), DeviceError in a forked child: its copies of contexts and modules are
  /// nobody's.
  const Api& api() const;
  /// Present, and opened by this process: not by one that it was forked from.
  bool is_usable() const;
  /// 13000 for CUDA 13.0, 6020 for HIP 6.2; 0 where absent.
  int version() const { return version_; }
  /// Of the library that was opened: a name, where the dynamic loader found it.
  /// Empty where there is none.
  const std::string& path() const { return path_; }
  const std::vector<DeviceInfo>& devices() const { return devices_; }
  /// Throws Unsupported where there is no such device.
  const DeviceInfo& device(int index) const;

  /// Throws DeviceError where result is not success: "cuModuleLoadDataEx: CUDA_ERROR_INVALID_IMAGE
  /// (device kernel image is invalid) (<about>)". `call` is CUDA's name; of HIP its own is said.
  void check(Result result, std::string_view call, std::string_view about = {}) const;

 private:
  std::string start(const std::vector<std::string>& libraries);
  DeviceInfo describe(int index) const;
  DeviceInfo describe_hip(int index) const;

  Device::Kind kind_;
  Api api_{};
  std::string why_absent_, path_;
  int num_forks_ = 0;  // between the program's first process and the one that opened the driver
  int version_ = 0;
  std::vector<DeviceInfo> devices_;
};

/// The process's driver of whose GPUs, opened at the first call and never closed: threads of the driver outlive
/// everything of ours.
const Driver& process_driver(Device::Kind kind = Device::Kind::cuda);

/// The names and places of libamdhip64, best first: FOVEA_HIP alone, or what the loader knows, then ROCM_PATH and /opt.
std::vector<std::string> hip_libraries();

}  // namespace fovea::cuda::driver
