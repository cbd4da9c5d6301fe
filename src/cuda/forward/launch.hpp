// From arguments to launches: the parameters and grids of a forward call. Where they run, on a device or in the
// emulator, is not known here. Read attention_forward.hpp first.
#pragma once

#include <cstdint>

#include "cuda/combine/combine.hpp"
#include "cuda/device/shared/clear_rows.h"
#include "cuda/device/shared/forward_params.h"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/kernel_set.hpp"
#include "cuda/params/tensor_maps.hpp"

namespace fovea::cuda {

/// The tensors of a call; k and v may be those of a cache.
struct Operands {
  const TensorView &q, &k, &v, &out;

  Operands(const AttentionForward& args, const GrownCache* cache)
      : q(args.q),
        k(cache != nullptr ? static_cast<const TensorView&>(cache->cache.k) : args.k),
        v(cache != nullptr ? static_cast<const TensorView&>(cache->cache.v) : args.v),
        out(args.out) {}

  /// TMA knows no tensor without rows. Where there are no keys it gets the queries: nothing that it loads of them is
  /// seen.
  const TensorView& keys_or_queries(const TensorView& keys) const {
    return keys.size(keys.rank() - 3) > 0 && keys.size(0) > 0 ? keys : q;
  }
};

struct Grid {
  std::uint32_t x = 0, y = 1;  // CTAs
};

inline constexpr std::uint32_t kClearingThreads = 128;

struct ForwardLaunch {
  ForwardParams params;
  Grid grid;
  std::uint32_t num_threads = 0;

  CombineParams combine_params;  // where the spec is split
  ClearRowsParams clear_params;  // where grids count sequences of packed rows
  bool clears_rows = false;

  RangeTableLaunch range_tables;  // empty where the mask needs none

  /// Of the kernels of device/sm80: range tables, the kernel, what joins splits, rows of nobody.
  KernelLaunches launches(const ForwardPlan& plan) const;

  // The pieces of it, which others put together with their own.
  void add_tables(KernelLaunches& all) const;
  /// And rows of nobody, which are add_clear's.
  void add_combine(const ForwardPlan& plan, KernelLaunches& all) const;
  void add_clear(KernelLaunches& all) const;
  /// With the CTAs of `grid`, which kernels that stay on their SMs replace.
  template <typename Params>
  KernelLaunch main_launch(const ForwardPlan& plan, const Params& main_params) const {
    KernelLaunch launch = kernel_launch(KernelRole::main, main_params);
    launch.grid = {.x = grid.x, .y = grid.y};
    launch.num_threads = num_threads;
    launch.shared_bytes = static_cast<unsigned>(plan.shared_bytes);
    return launch;
  }
};

/// Does a call of this plan clear rows of nobody by a kernel of its own?
bool clears_rows(const ForwardSpec& spec, const ForwardProblem& problem);

/// Tiles of rows of all heads; packed: a bound, whatever the lengths of the sequences.
std::int64_t num_row_tiles(const ForwardSpec& spec, const ForwardProblem& problem,
                           std::int64_t seqlen_q, std::int64_t total_q);

/// Divides the rows among CTAs, so many, as find_work of common/sequence.cuh takes them; `params` are filled with what
/// it reads beside the arguments of a call.
std::uint32_t fill_row_tiles(const ForwardSpec& spec, const ForwardProblem& problem,
                             const DeviceTraits& device, ForwardParams& params);

/// What the arguments of a call say, whatever kernel runs: tensors, lengths, scalars. Grids, splits and captures are
/// not filled.
ForwardParams call_params(const ForwardProblem& problem, const AttentionForward& args,
                          const GrownCache* cache);

/// `workspace` holds plan.workspace_bytes. Range tables have no place yet.
ForwardLaunch forward_launch(const ForwardProblem& problem, const ForwardPlan& plan,
                             const AttentionForward& args, void* workspace,
                             const GrownCache* cache);

/// Lays the range tables of a mask out in the workspace; the captures' addresses are final.
void place_range_tables(const ForwardPlan& plan, void* workspace, ForwardLaunch& launch);

/// All of a call of a kernel that takes ForwardParams and nothing else.
ForwardLaunch prepare_plain(const ForwardProblem& problem, const ForwardPlan& plan,
                            const AttentionForward& args, const GrownCache* cache, void* workspace,
                            const TensorMapEncoder& encode);

}  // namespace fovea::cuda
