// The kernels of a plan, whatever its operation: texts by role, what the loader made of them, and the launches of a
// call. An operation says which roles its plans have and what each is launched with (forward/launch.hpp); loading, and
// saying why something cannot be loaded, is done here for all.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "fovea/tensor.hpp"

#include "cuda/driver/launch.hpp"
#include "cuda/jit/cubin.hpp"
#include "cuda/jit/loader.hpp"

namespace fovea::cuda {

/// What a kernel does in a call.
enum class KernelRole : std::uint8_t {
  range_tables,   // bounds of what a mask loads
  clear_counter,  // of row tiles, before they are claimed from it
  tile_sums,      // of rows, before means of them
  key_mean,       // of keys, where a recipe takes it off
  quantize,       // k and v, where a recipe rounds them
  numbers,        // of codes of a cache, where main multiplies those
  block_scores,   // of means of queries, where a recipe takes those off
  main,           // the operation itself
  deep_combine,   // joins splits: many of few rows
  wide_combine,   // or those of many rows
  lost_rows,      // rows whose scores were too large for main
  clear_rows,     // of nobody
  delta,          // of gradients: what is known of rows
  values,         // of gradients: dv, where main does not sum it
  queries,        // of gradients: dq, where main does not sum it
  sinks,          // of gradients: dsinks
  prepare,        // of gradients: zeros for sums, and rows as main reads them
  convert,        // of gradients: f32 sums to what is wanted
  redo_keys,      // of gradients: dk and dv of tiles whose sums were not finite
  redo_values,    // of gradients: dv of such tiles, where redo_keys does not sum it
  redo_queries,   // of gradients: dq of such tiles
  // Of gradients of captured data: tiles of a dense bias from dS that main has left; delta again, sums of elements,
  // tiles of a dense bias.
  sum_pairs,
  captured_deltas,
  clear_sums,
  captured_sums,
  write_sums,
  captured_tiles,
};
inline constexpr std::size_t kNumKernelRoles =
    static_cast<std::size_t>(KernelRole::captured_tiles) + 1;  // the last of them

struct PlannedKernel {
  KernelRole role;
  jit::KernelText text;
};
using PlannedKernels = std::vector<PlannedKernel>;

/// Loaded into a device.
class KernelSet {
 public:
  /// Throws as Loader::load does.
  KernelSet(jit::Loader& loader, const driver::DeviceContext& context,
            const PlannedKernels& kernels);

  /// Of a role that the plan has.
  const driver::Function& operator[](KernelRole role) const;
  const driver::DeviceContext& context() const { return *context_; }
  jit::Loader& loader() const { return *loader_; }
  /// Where the farthest of its kernels came from.
  jit::KernelSource source() const;

 private:
  std::array<std::shared_ptr<const jit::LoadedKernel>, kNumKernelRoles> kernels_;
  jit::Loader* loader_;
  const driver::DeviceContext* context_;
};

/// For an operation of one kernel that takes every problem. Throws Unsupported in the name of `where` where nothing can
/// run on this device.
std::shared_ptr<const KernelSet> load_alone(const jit::KernelText& text, Device device,
                                            std::string_view where);

/// Where the farthest of them would be loaded from, or why one of them cannot be. Compiles nothing.
jit::Availability look_for(jit::Loader& loader, jit::Architecture architecture,
                           const PlannedKernels& kernels);

/// One launch of a call. `params` is read when it is enqueued.
struct KernelLaunch {
  KernelRole role = KernelRole::main;
  driver::Extent grid{};  // CTAs; none where any is 0
  unsigned num_threads = 0;
  unsigned shared_bytes = 0;  // dynamic
  bool is_pdl = false;        // starts while the launch before it ends, and waits by itself
  const void* params = nullptr;
};

template <typename Params>
KernelLaunch kernel_launch(KernelRole role, const Params& params) {
  static_assert(std::is_trivially_copyable_v<Params>);
  return {.role = role, .params = &params};
}

/// The launches of a call in their order; no memory is taken.
class KernelLaunches {
 public:
  void add(const KernelLaunch& launch);
  const KernelLaunch* begin() const { return launches_.data(); }
  const KernelLaunch* end() const { return launches_.data() + size_; }
  std::size_t size() const { return size_; }

 private:
  std::array<KernelLaunch, kNumKernelRoles> launches_{};
  std::size_t size_ = 0;
};

/// Of a call that is one kernel.
template <typename Params>
KernelLaunches launch_alone(const Params& params, const driver::Extent& grid,
                            unsigned num_threads) {
  KernelLaunch launch = kernel_launch(KernelRole::main, params);
  launch.grid = grid;
  launch.num_threads = num_threads;
  KernelLaunches all;
  all.add(launch);
  return all;
}

/// Enqueues them and returns.
void enqueue(const KernelSet& kernels, const KernelLaunches& launches, driver::Stream stream);

}  // namespace fovea::cuda
