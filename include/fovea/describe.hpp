// What this machine and this library offer, as data: processor, targets, GPUs, where kernels come from, what each
// operation takes, limits. `fovea doctor` prints it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fovea/problem.hpp"
#include "fovea/tensor.hpp"

namespace fovea {

/// Texts are empty where there is nothing to say; `reason` says in words why something is missing.
struct FOVEA_EXPORT Description {
  std::string version{};    // of the library, "0.1.0"
  std::string compiler{};   // that built it
  std::string processor{};  // as it names itself

  /// CPU instruction sets.
  struct Target {
    CpuTarget target = CpuTarget::scalar;
    bool runs_here = false;
    std::string reason{};
  };
  std::vector<Target> targets{};
  CpuTarget best_f32_target = CpuTarget::scalar;
  std::optional<CpuTarget> best_bf16_target{};  // absent: f32 products are faster

  struct Threads {
    int automatic = 0;           // of the default pool; 0: see reason
    int affinity = 0;            // processors that this process may run on
    std::string cgroup_quota{};  // "4.00 cores", "none"
    std::string reason{};
  };
  Threads threads{};

  /// Something that running on a GPU needs.
  struct Piece {
    bool is_present = false;
    std::string reason{};
    std::string version{}, path{};
    std::int64_t num_kernels = 0;
    std::int64_t num_bytes = 0, max_bytes = 0;
  };
  struct TunedDevice {
    int compute_capability_major = 0, compute_capability_minor = 0, num_sms = 0;
    std::int64_t num_choices = 0;
  };
  struct Gpu {
    Device device{};
    std::string model{}, architecture{};  // "NVIDIA H200", "sm_90a"
    int compute_capability_major = 0, compute_capability_minor = 0;
    int num_sms = 0, shared_bytes_per_cta = 0;
    std::int64_t l2_bytes = 0, memory_bytes = 0;
    bool runs_here = false;
    std::string reason{};
  };
  struct Cuda {
    // A variable of the environment that could not be read: nothing below is known.
    std::string problem{};
    Piece driver{};  // version: of CUDA
    std::vector<Gpu> gpus{};
    Piece compiler{};                          // NVRTC
    std::vector<std::string> architectures{};  // that it compiles for
    Piece pack{};                              // the kernel pack
    std::string kernel_text{};                 // digest of the text that kernels are compiled from
    Piece tuning{};
    std::vector<TunedDevice> tuned_devices{};
    Piece cache{};  // path: its folder
  };
  Cuda cuda{};

  /// The same of AMD's GPUs, on which nothing has been measured. Pack and cache are those above.
  struct Rocm {
    std::string problem{};  // as above
    Piece driver{};         // version: of HIP
    std::vector<Gpu> gpus{};
    Piece compiler{};                          // hipRTC; version: of its clang
    std::vector<std::string> architectures{};  // that it compiles for
  };
  Rocm rocm{};

  /// What an operation takes, wherever it runs at all; explain says of one problem.
  struct Operation {
    std::string name{};                   // as the C++ function
    std::vector<Dtype> dtypes{};          // of q, k and v
    std::vector<std::string> devices{};   // "cpu", "cuda"
    std::vector<std::string> features{};  // "packed", "paged", "dropout" ...
  };
  std::vector<Operation> operations{};

  /// Numbers beyond which something is refused or forgotten, by name.
  std::vector<std::pair<std::string, std::int64_t>> limits{};
  /// Variables that Fovea reads, as set; "not set".
  std::vector<std::pair<std::string, std::string>> environment{};
  std::string environment_problem{};  // what could not be read, in words

  /// One object, as `fovea doctor --json` prints it.
  [[nodiscard]] std::string json() const;
};

/// Opens what a GPU needs (driver, compiler) where it has not been opened yet; compiles nothing, throws nothing for
/// what is missing.
[[nodiscard]] FOVEA_EXPORT Description describe();

}  // namespace fovea
