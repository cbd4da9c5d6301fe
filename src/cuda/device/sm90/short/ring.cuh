// Tiles of keys that pass through few buffers: what a group reads and hands back, and who fills it again. Two such CTAs
// fit an SM where all keys of a head would leave room for one. Read persistent.cuh next.
#pragma once

#include "common/bits.cuh"
#include "common/passes.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/short/compute.cuh"
#include "sm90/short/cta.cuh"
#include "sm90/short/load.cuh"
#include "sm90/values_of_pass.cuh"

namespace fovea::cuda::sm90::short_keys {

/// A CTA of as many groups as row tiles, and the tiles [first, end) of keys that some of them see. A group multiplies
/// all from the first one to its own last, masked where it sees nothing.
template <Sm90ShortSpec spec, class Mods>
struct Ring {
  using T = Traits<spec>;
  static constexpr int kUnitBytes = 1024;
  const Cta<spec>& cta;
  Compute<spec, Mods> compute;
  int first, end;                // of the CTA
  int my_end;                    // of the group
  std::uint32_t full = 0;        // tiles that all of its rows see all of
  int keys_asked, values_asked;  // warp 0: all tiles before these

  FOVEA_DEVICE_MEMBER Ring(const Cta<spec>& of_cta, std::uint32_t tiles)
      : cta(of_cta), compute(of_cta, 0U), first(lowest_bit(tiles)), end(highest_bit(tiles) + 1) {
    compute.first_tile = first;
    my_end = first;
    keys_asked = values_asked = least(first + T::kBuffers, end);
    if (!cta.has_rows(row_tile())) return;
    const VisitedGroup mine =
        visible_tiles<Mods>(cta, span_of<row_tile_spec<spec>()>(cta.work_of(row_tile())));
    full = mine.full;
    my_end = mine.visible != 0 ? highest_bit(mine.visible) + 1 : first + 1;
  }

  FOVEA_DEVICE_MEMBER bool run(Pass pass) {
    if (pass == Pass::all)
      walk();
    else
      walk_again(pass);
    return compute.is_finite;
  }

 private:
  FOVEA_DEVICE_MEMBER int row_tile() const { return cta.group(); }
  FOVEA_DEVICE_MEMBER Step step_of(int kv_tile) const {
    return {row_tile(), kv_tile, (full >> kv_tile & 1U) != 0, kv_tile == first,
            kv_tile + 1 == my_end};
  }
  FOVEA_DEVICE_MEMBER SharedAddress keys_empty(int kv_tile) const {
    return cta.barrier(T::kAt.kv_empty, compute.buffer_of_keys(kv_tile));
  }
  FOVEA_DEVICE_MEMBER SharedAddress values_empty(int kv_tile) const {
    return cta.barrier(T::kAt.kv_empty, T::kBuffers + compute.buffer_of_keys(kv_tile));
  }

  /// Keys and values.
  FOVEA_DEVICE_MEMBER void await_tile(int kv_tile) const {
    const int buffer = compute.buffer_of_keys(kv_tile);
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.k_full, buffer), compute.turn_of(kv_tile));
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.v_full, buffer), compute.turn_of(kv_tile));
  }

  FOVEA_DEVICE_MEMBER void walk() {
    if (my_end == first) return;
    typename Compute<spec, Mods>::Probabilities p;
    compute.issue_scores(step_of(first));
    for (int kv_tile = first;;) {
      const Step step = step_of(kv_tile);
      ptx::wgmma_wait_group<0>();
      cta.release(keys_empty(kv_tile));
      if (!step.is_first) cta.release(values_empty(kv_tile - 1));
      compute.make_probabilities(step, Pass::all, p);
      compute.issue_sums(step, Pass::all, p);
      if (step.is_last) break;
      compute.issue_scores(step_of(kv_tile + 1));
      fill(kv_tile + 1, kv_tile);
      ++kv_tile;
    }
    compute.finish(row_tile(), Pass::all);
    cta.release(values_empty(my_end - 1));
    // What its rows do not see others wait for.
    for (int kv_tile = my_end; kv_tile + T::kBuffers < end; ++kv_tile) {
      fill(kv_tile, kv_tile);
      await_tile(kv_tile);
      cta.release(keys_empty(kv_tile));
      cta.release(values_empty(kv_tile));
    }
    fill(end - T::kBuffers, end - T::kBuffers);
    if (cta.warp == 0) await_last();
  }

  /// No copy may be on its way when the CTA ends, not of a tile that no row turned out to see.
  FOVEA_DEVICE_MEMBER void await_last() const {
    for (int kv_tile = end - least(end - first, T::kBuffers); kv_tile < end; ++kv_tile) {
      await_tile(kv_tile);
    }
  }

  /// Warp 0 asks for tiles in the place of keys, and of values, before these, which it has read.
  FOVEA_DEVICE_MEMBER void fill(int keys_read, int values_read) {
    if (cta.warp != 0) return;
    const auto fill_up_to = [&](int read_end, int& asked, auto&& empty, auto&& copy) {
      for (; asked < end && asked < read_end + T::kBuffers; ++asked) {
        const int read = asked - T::kBuffers;
        cta.await(empty(read), compute.turn_of(read));
        if (ptx::elect_one()) copy(asked, compute.buffer_of_keys(asked));
      }
    };
    fill_up_to(
        keys_read, keys_asked, [&](int kv_tile) { return keys_empty(kv_tile); },
        [&](int kv_tile, int buffer) { copy_keys(cta, kv_tile, buffer); });
    fill_up_to(
        values_read, values_asked, [&](int kv_tile) { return values_empty(kv_tile); },
        [&](int kv_tile, int buffer) { copy_values(cta, kv_tile, buffer); });
    ptx::sync_warp();
  }

  /// Tile by tile, all groups at a time: values are rewritten before they are multiplied.
  FOVEA_DEVICE_MEMBER void walk_again(Pass pass) {
    end_barriers(cta);
    if (cta.warp == 0 && ptx::elect_one()) {
      begin_barriers(cta);
      copy_queries(cta, 0, T::kGroups);
    }
    compute.q_parities = 0;
    typename Compute<spec, Mods>::Probabilities p;
#pragma unroll 1
    for (int kv_tile = first; kv_tile < end; ++kv_tile) {
      const int buffer = compute.buffer_of_keys(kv_tile);
      ptx::sync_threads();
      if (cta.warp == 0 && ptx::elect_one()) {
        copy_keys(cta, kv_tile, buffer);
        copy_values(cta, kv_tile, buffer);
      }
      ptx::sync_warp();
      await_tile(kv_tile);
#pragma unroll 1
      for (int at = cta.warp * kUnitBytes; at < T::VTile::kBytes; at += spec.num_warps * kUnitBytes)
        rewrite_values<spec.element, kUnitBytes>(cta.v_at(buffer) + at, cta.lane, pass);
      ptx::fence_proxy_async_shared_cta();
      ptx::sync_threads();
      if (kv_tile >= my_end) continue;
      const Step step = step_of(kv_tile);
      compute.issue_scores(step);
      ptx::wgmma_wait_group<0>();
      compute.make_probabilities(step, pass, p);
      compute.issue_sums(step, pass, p);
      ptx::wgmma_wait_group<0>();
    }
    if (my_end > first) compute.finish(row_tile(), pass);
  }
};

/// The first copies, by one thread.
template <Sm90ShortSpec spec, class Mods>
FOVEA_DEVICE void start_ring(const Ring<spec, Mods>& ring) {
  const Cta<spec>& cta = ring.cta;
  if (cta.warp != 0 || !ptx::elect_one()) return;
  begin_barriers(cta);
  copy_queries(cta, 0, Traits<spec>::kGroups);
  for (int kv_tile = ring.first; kv_tile < ring.keys_asked; ++kv_tile) {
    copy_keys(cta, kv_tile, kv_tile - ring.first);
    copy_values(cta, kv_tile, kv_tile - ring.first);
  }
}

template <class Mods, Sm90ShortSpec spec>
FOVEA_DEVICE void run_ring(const Cta<spec>& cta) {
  Ring<spec, Mods> ring(cta, tiles_to_load<Mods>(cta));
  start_ring(ring);
  ptx::sync_threads();
#pragma unroll 1
  for (Pass pass = Pass::all; pass != Pass::end;
       pass = static_cast<Pass>(static_cast<std::int32_t>(pass) + 1)) {
    const bool is_finite = ring.run(pass);
    if (pass == Pass::all && are_all_finite(cta, is_finite)) return;
  }
}

}  // namespace fovea::cuda::sm90::short_keys
