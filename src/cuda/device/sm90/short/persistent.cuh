// What a CTA does: one tile of rows, or one after the other. The last chapter of sm90/attention_forward_short.cuh.
#pragma once

#include "common/passes.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "sm90/short/compute.cuh"
#include "sm90/short/cta.cuh"
#include "sm90/short/last_rows.cuh"
#include "sm90/short/load.cuh"

namespace fovea::cuda::sm90::short_keys {

/// run(pass): the rows of this warp, and whether their sums are finite; in passes where a sum of the CTA is not.
template <Sm90ShortSpec spec, class Run>
FOVEA_DEVICE void run_passes(const Cta<spec>& cta, std::uint32_t tiles, Run&& run) {
#pragma unroll 1
  for (Pass pass = Pass::all; pass != Pass::end;
       pass = static_cast<Pass>(static_cast<std::int32_t>(pass) + 1)) {
    if (pass != Pass::all) load_again(cta, tiles, pass);
    const bool is_finite = run(pass);
    if (pass != Pass::all) continue;
    await_all(cta, tiles);
    if (are_all_finite(cta, is_finite)) return;
  }
}

/// A tile of rows by itself.
template <class Mods, Sm90ShortSpec spec>
FOVEA_DEVICE void run_tile(const Cta<spec>& cta) {
  if (cta.work.is_nothing) return;
  const std::uint32_t tiles = tiles_to_load<Mods>(cta);
  const std::uint32_t first_tiles = tiles & up_to_tile(lowest_bit(tiles) + kTilesAhead);
  start(cta, first_tiles);
  ptx::sync_threads();
  if constexpr (Traits<spec>::kHasLastRows) {
    if (cta.has_last_rows()) {
      LastRows<spec, Mods> last_rows(cta);
      return run_passes(cta, tiles, [&](Pass pass) { return last_rows.run(pass); });
    }
  }
  Compute<spec, Mods> compute(cta, tiles & ~first_tiles);
  run_passes(cta, tiles, [&](Pass pass) {
    compute.run(pass);
    compute.load_up_to(spec.stages - 1);  // what its own rows do not see, others' may
    return compute.is_finite;
  });
}

/// Every so many-th tile of the grid, one after the other. Where sums of one are not finite all of the CTA's are
/// computed again, by themselves, behind the last: a vote for each tile would cost every call.
template <Sm90ShortSpec spec, class Mods>
FOVEA_DEVICE void run_persistent(const RoleWarp& self, const Sm90ShortParams& p) {
  const auto num_heads = static_cast<std::uint32_t>(p.common.num_sequences) *
                         static_cast<std::uint32_t>(p.common.num_heads_q);
  const std::uint32_t num_tiles = num_heads * static_cast<std::uint32_t>(p.common.num_q_tiles);
  const auto num_ctas = static_cast<std::uint32_t>(ptx::grid_dim().x);
  const auto first_tile = static_cast<std::uint32_t>(ptx::block_idx().x);
  const auto cta_of = [&](std::uint32_t tile) {
    return Cta<spec>{self, p, dense_work<spec>(p.common, tile)};
  };
  start_persistent(cta_of(first_tile));
  ptx::sync_threads();
  bool is_finite = true;
  std::uint32_t parity = 0;
#pragma unroll 1
  for (std::uint32_t tile = first_tile;;) {
    const bool has_after = num_tiles - tile > num_ctas;
    const Cta<spec> cta = cta_of(tile), after = cta_of(has_after ? tile + num_ctas : tile);
    Compute<spec, Mods> compute(cta, 0U);
    compute.run_before(after, has_after, parity);
    is_finite = is_finite && compute.is_finite;
    if (!has_after) break;
    tile += num_ctas;
    parity ^= 1U;
  }
  if (are_all_finite(cta_of(first_tile), is_finite)) return;
#pragma unroll 1
  for (std::uint32_t tile = first_tile; tile < num_tiles; tile += num_ctas) {
    const Cta<spec> cta = cta_of(tile);
    end_barriers(cta);
    run_tile<Mods>(cta);
  }
}

}  // namespace fovea::cuda::sm90::short_keys
