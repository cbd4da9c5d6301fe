// Rows whose sums were not finite, computed again by the group that found them. After the last row tile, when shared memory is free:
// the last chapter.
#pragma once

#include "common/sequence.cuh"
#include "ptx/memory.cuh"
#include "sm80/attention_forward.cuh"
#include "sm90/forward/cta.cuh"

namespace fovea::cuda::sm90 {

/// A group as a team of sm_80's kernel, which can tell which rows see a NaN or an infinity in V.
template <ForwardSpec spec, class Mods>
struct Redo {
  using T = Traits<spec>;
  static constexpr ForwardSpec kTeamSpec = spec_of_redo(spec);
  static constexpr int kTeamBytes = sm90_redo_team_bytes(kTeamSpec);
  static_assert(T::kGroups * kTeamBytes <= Layout<spec>::kBarriers && kTeamSpec.tile_kv >= 16,
                "teams have the place of tiles");

  const Cta<spec>& cta;
  const ComputingWarp<spec> warp;

  FOVEA_DEVICE_MEMBER explicit Redo(const Cta<spec>& of_cta) : cta(of_cta), warp(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() const {
    auto unit = ptx::ld_shared<std::int32_t>(cta.suspects_at(warp.group));
#pragma unroll 1
    for (; unit >= 0; unit = ptx::ld_global(cta.p.next_suspect + unit)) {
      const Work work = work_of(unit);
      if (work.is_nothing) continue;
      sm80::Forward<kTeamSpec, Mods>(cta.p.common, work, cta.smem + warp.group * kTeamBytes,
                                     warp.idx)
          .run();
      sm80::Team<kTeamSpec>::meet();
    }
  }

 private:
  /// The rows of Output::unit_of.
  FOVEA_DEVICE_MEMBER Work work_of(std::int32_t unit) const {
    if constexpr (spec.is_split) return work_of_split(unit);
    const ForwardParams& c = cta.p.common;
    const std::int32_t tile = unit / T::kGroups;
    Work work{};
    if constexpr (spec.is_varlen) {
      PackedCursor cursor;
      work = packed_work(c, tile / c.num_heads_q, spec.tile_q, cursor);
      work.q_head = tile % c.num_heads_q;
    } else {
      const std::int32_t pair = tile / c.num_q_tiles;
      work.sequence = dense_sequence(c, pair / c.num_heads_q);
      work.q_begin = (tile - pair * c.num_q_tiles) * spec.tile_q;
      work.q_head = pair % c.num_heads_q;
    }
    work.q_begin += unit % T::kGroups * 64;
    work.is_nothing = work.is_nothing || work.q_begin >= work.sequence.seqlen_q;
    work.kv_head = work.q_head / c.group;
    work.kv_end = work.sequence.seqlen_kv;
    return work;
  }

  /// Of heads that share a tile, in one split of their keys.
  FOVEA_DEVICE_MEMBER Work work_of_split(std::int32_t unit) const {
    const ForwardParams& c = cta.p.common;
    const std::int32_t tile = unit / c.max_splits;
    const std::int32_t pair = tile / c.num_q_tiles;
    const std::int32_t head_units = c.num_heads_q / spec.heads_per_tile;
    Work work{};
    work.sequence = dense_sequence(c, pair / head_units);
    work.q_begin = (tile - pair * c.num_q_tiles) * T::kQueries;
    work.q_head = pair % head_units * spec.heads_per_tile;
    work.kv_head = work.q_head / c.group;
    take_split<spec>(work, unit - tile * c.max_splits);
    return work;
  }
};

/// Called, not inlined: beside it ptxas would deal the registers of the loop otherwise.
template <ForwardSpec spec, class Mods>
FOVEA_DEVICE_ASIDE void redo_suspects(const Sm90ForwardParams& p) {
  const Cta<spec> cta{{ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()}, p};
  Redo<spec, Mods>(cta).run();
}

}  // namespace fovea::cuda::sm90
