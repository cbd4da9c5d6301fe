// Runs kernel text on the CPU as a strict GPU would: one fiber per thread, asynchronous work landing when the seed
// says, every access checked. A guest includes the kernel's .cuh with src/cuda/emulator/device before src/cuda/device
// on its include path:
//
//   emulator::Device device;
//   auto* out = device.buffer<float>("out", 128);
//   Report report = device.launch({.grid = {1, 1, 1}, .block = {128, 1, 1}, .shared_bytes = 4096}, {.seed = 7}, [&] {
//   kernel(params); });
//
// What is modelled and how to read a report: docs/design/emulator.md. Read machine.hpp next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/emulator/report.hpp"

namespace fovea::cuda::emulator {

struct Dim3 {
  std::int32_t x = 1, y = 1, z = 1;
};

struct LaunchConfig {
  Dim3 grid{}, block{}, cluster{};
  std::uint32_t shared_bytes = 0;          // dynamic
  std::uint32_t warp_lanes = 32;           // 64: as on AMD's CDNA
  std::uint32_t registers_per_thread = 0;  // at the launch; 0: 64 K shared by the block's threads
  int clusters_at_once = 1;  // that run together; more for kernels whose CTAs wait for each other
  int ctas_per_sm = 1;       // of those that run together, so many share the tensor memory of an SM
  /// Starts while the grid before it still runs (programmatic dependent launch): what that one did is over behind
  /// griddepcontrol.wait.
  bool is_dependent = false;
  int compute_capability = 0;  // of the GPU, 89 for 8.9; 0: it has all that is modelled
  int gfx = 0;                 // of AMD's, 0x942 for gfx942; 0: likewise
};

/// What keeps instructions of the tensor core of sm_100 in order.
enum class TensorOrder : std::uint8_t {
  text,  // what the ISA promises: chains into one accumulator, commits, waits, tcgen05 fences
  pipe,  // what kernels in use rely on: products and copies of a CTA, or pair, in order of issue; no tcgen05 fences
};

struct Options {
  std::uint64_t seed = 0;
  Landing landing = Landing::seeded;
  int max_findings = 16;  // distinct ones; then the launch ends
  // of fibers: a launch that takes more is a livelock; 0: any number
  std::uint64_t max_switches = 0;
  TensorOrder tensor_order = TensorOrder::text;
};

/// Global memory, and fibers to run threads on. One launch at a time.
class Device {
 public:
  explicit Device(std::size_t stack_bytes = 256 * 1024);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  /// A buffer that starts undefined, all bits set (NaN in every float type). Kernels may touch it; nothing around it.
  template <class T>
  T* buffer(std::string name, std::size_t count) {
    return static_cast<T*>(allocate(std::move(name), count * sizeof(T)));
  }
  template <class T>
  T* buffer(std::string name, const std::vector<T>& values) {
    T* data = buffer<T>(std::move(name), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) data[i] = values[i];
    define(data, values.size() * sizeof(T));
    return data;
  }
  /// Address space without memory behind it until touched: for offsets past 2^31. Starts zero and undefined.
  void* sparse_buffer(std::string name, std::uint64_t bytes);
  /// Memory of the caller's, defined.
  void register_buffer(std::string name, void* data, std::uint64_t bytes);
  /// Says that the host wrote these bytes of a buffer.
  void define(const void* data, std::uint64_t bytes);

  /// Throws InvalidArgument for a configuration that no GPU takes.
  Report launch(const LaunchConfig& config, const Options& options,
                const std::function<void()>& kernel);

  struct State;

 private:
  void* allocate(std::string name, std::size_t bytes);
  std::unique_ptr<State> state_;
};

/// Runs `launch` with early, late and `seeds` seeded landings until one of them finds something; that report, or a
/// clean one. `launch` sets up its buffers anew each time.
Report sweep(int seeds, const std::function<Report(const Options&)>& launch);

}  // namespace fovea::cuda::emulator
