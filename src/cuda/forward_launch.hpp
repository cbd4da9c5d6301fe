// From arguments to launches: the parameters and grids of a forward call. Where they run, on a device or in the
// emulator, is not known here. Read attention_forward.hpp first.
#pragma once

#include <cstdint>

#include "cuda/attention_forward.hpp"
#include "cuda/device/shared/forward_params.h"

namespace fovea::cuda {

/// The tensors of a call; k and v may be those of a cache.
struct Operands {
  const TensorView &q, &k, &v, &out;

  Operands(const AttentionForward& args, const GrownCache* cache)
      : q(args.q),
        k(cache != nullptr ? cache->cache.k : args.k),
        v(cache != nullptr ? cache->cache.v : args.v),
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

/// How common/combine is compiled and launched; the bits are the same.
struct CombineForm {
  int splits_at_once, num_warps;  // of a CTA: a row each
  int ctas_per_sm;                // that registers are left for; nothing spills
};
/// Many splits of few rows, and many rows.
inline constexpr CombineForm kDeepCombine{16, 1, 16}, kWideCombine{8, 4, 6};

struct ForwardLaunch {
  ForwardParams params;
  Grid grid;
  std::uint32_t num_threads = 0;

  CombineParams combine_params;  // where the spec is split
  Grid combine_grid;
  bool is_combined_deep = false;  // by kDeepCombine, not kWideCombine
  const CombineForm& combine_form() const { return is_combined_deep ? kDeepCombine : kWideCombine; }

  RangeTableLaunch range_tables;  // empty where the mask needs none
};

/// Tiles of rows of all heads; packed: a bound, whatever the lengths of the sequences.
std::int64_t num_row_tiles(const ForwardSpec& spec, const ForwardProblem& problem,
                           std::int64_t seqlen_q, std::int64_t total_q);

/// `workspace` holds plan.workspace_bytes. Range tables have no place yet.
ForwardLaunch forward_launch(const ForwardProblem& problem, const ForwardPlan& plan,
                             const AttentionForward& args, void* workspace,
                             const GrownCache* cache);

/// Lays the range tables of a mask out in the workspace; the captures' addresses are final.
void place_range_tables(const ForwardPlan& plan, void* workspace, ForwardLaunch& launch);

/// Enqueues the building of range tables, where the call has any.
void launch_tables(const ForwardPlan& plan, const ForwardLaunch& call, void* stream);

/// Candidate::launch of the kernels of device/sm80.
void launch_sm80(const ForwardProblem& problem, const ForwardPlan& plan,
                 const AttentionForward& args, void* workspace, void* stream,
                 const GrownCache* cache);

/// Enqueues the kernels of `call`.
void launch_forward(const ForwardPlan& plan, const ForwardLaunch& call, void* stream);

/// Enqueues what joins the splits of `call`, alone.
void launch_combine(const ForwardPlan& plan, const ForwardLaunch& call, void* stream);

}  // namespace fovea::cuda
