// In which order CTAs add to dq, so that its bits are the same at every run: one warp takes turns, and loads; another
// passes them on. Read key_gradients.cuh for the products.
//
// Tiles of keys of one head add to a tile of queries in rising order. All walk over queries the same way, and those of
// lower keys are launched first, so a CTA follows behind the one before it. Where a CTA has come to is one number in
// memory, how many positions of its walk are over: by its own sums, and by those of all tiles of keys before its own.
// Positions count tiles of queries that it visits and others alike, so that masks of any form keep the order. A CTA
// that has ended is passed over: its last word says how many tiles of keys before its own might not have, and whoever
// follows goes on from there. (Passed over one by one they take 0.4 us each. CTAs of a causal mask end at about the
// same time, so that every eighth of 128 tiles looked at all before it, and those behind it waited as long.)
//
// Where every tile of queries is visited, walks are staggered (StaggeredWalk): positions count from the CTA's own
// beginning, and it follows the CTA of the keys before its own alone.
//
// Between the sums of a tile and the word that they are there stands a fence, which waits for all additions of the SM:
// some 1,500 clocks. The warp that does it does nothing else. A CTA waits only for CTAs that were launched before it.
#pragma once

#include "common/walk_progress.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm90/backward/cta.cuh"
#include "sm90/backward/load.cuh"

namespace fovea::cuda::sm90 {

/// Of the CTA's walk.
template <auto spec>
FOVEA_DEVICE WalkProgress<spec.is_staggered> progress_of(const BackwardCta<spec>& cta,
                                                         const OwnedKeys& keys) {
  const ForwardParams& f = cta.p.common.forward;
  const std::int64_t at = tile_place<spec.is_varlen, true>(f, BackwardCta<spec>::sequence_of(keys),
                                                           keys.kv_head, keys.kv_begin);
  StaggeredWalk staggered{};
  if constexpr (spec.is_staggered) staggered = cta.staggered_walk(keys);
  return {cta.p.rows.progress + at, keys.kv_begin / kSm90BackwardKeys, keys.kv_head * f.group,
          ceil_div(keys.seqlen_q, spec.tile_q), staggered};
}

/// Loads, and lets sums begin when it is the CTA's turn: two tiles behind what it loads, which is ahead of the sums.
template <auto spec>
struct TakeTurns {
  using T = BackwardTraits<spec>;
  const BackwardCta<spec>& cta;
  const WalkProgress<spec.is_staggered> own;
  Ring<kSm90BackwardTurns> turns{1};
  std::int32_t num_watched;  // tiles of lower keys: all but these have ended
  std::int32_t skipped = 0;  // positions before the first tile

  FOVEA_DEVICE_MEMBER TakeTurns(const BackwardCta<spec>& of_cta, const OwnedKeys& keys)
      : cta(of_cta), own(progress_of(of_cta, keys)), num_watched(own.num_before) {}

  template <class Load>
  FOVEA_DEVICE_MEMBER void run(Load& load) {
    const WalkedTile first = load.begin();
    if (first.idx < 0) {
      if (cta.lane == 0) ptx::red_add_release_global(own.word, own.kEnded + num_watched);
      return;
    }
    skipped = own.position(first.idx, first.q_head);
    if (cta.lane == 0) share_num_watched();
    constexpr std::int32_t kNone = -2;
    std::int32_t before_last = kNone;
    std::int32_t last = own.awaited(first.idx, first.q_head);
    while (load.has_next()) {
      const WalkedTile tile = load.load_next();
      if (before_last != kNone) await_turn(before_last);
      before_last = last;
      last = own.awaited(tile.idx, tile.q_head);
    }
    if (before_last != kNone) await_turn(before_last);
    await_turn(last);
  }

 private:
  FOVEA_DEVICE_MEMBER void await_turn(std::int32_t position) {
    cta.await(cta.barrier(T::kAt.passed, turns.stage), turns.parity);
    if (cta.lane == 0) {
      own.await_others(position, num_watched, [this] { share_num_watched(); });
      // What lies before the first tile is no affair of this CTA: whoever follows need not wait for it.
      if (skipped > 0) ptx::red_add_release_global(own.word, skipped);
      ptx::mbarrier_arrive(cta.barrier(T::kAt.turn, turns.stage));
    }
    ptx::sync_warp();
    skipped = 0;
    turns.advance();
  }

  /// With who says at the end how far down to look.
  FOVEA_DEVICE_MEMBER void share_num_watched() const {
    ptx::st_shared(cta.smem + T::kAt.num_watched, static_cast<std::uint32_t>(num_watched));
  }
};

/// Says what has been summed.
template <auto spec>
struct PassTurns {
  using T = BackwardTraits<spec>;
  const BackwardCta<spec>& cta;
  Ring<kSm90BackwardTurns> turns{0};

  FOVEA_DEVICE_MEMBER explicit PassTurns(const BackwardCta<spec>& of_cta) : cta(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() {
    cta.await(cta.barrier(T::kAt.k_full, 0), 0);
    if (ptx::vote_any(cta.posted(0).is_none())) return;
    const auto own = progress_of(cta, cta.owned());
    std::int32_t said = -1;  // the word
    for (int i = 0;; ++i) {
      cta.await(cta.barrier(T::kAt.added, turns.stage), turns.parity);
      const PostedTile tile = cta.posted(i);
      cta.release(cta.barrier(T::kAt.passed, turns.stage));
      turns.advance();
      const std::int32_t position = own.position(tile.idx(), tile.q_head);
      const bool is_last = ptx::vote_any(tile.is_last());
      if (said < 0) said = position;  // what lies before its first tile
      const std::int32_t next = is_last ? own.kEnded + num_watched() : position + 1;
      if (cta.lane == 0) ptx::red_add_release_global(own.word, next - said);
      said = next;
      if (is_last) return;
    }
  }

 private:
  /// As the last turn was taken.
  FOVEA_DEVICE_MEMBER std::int32_t num_watched() const {
    return static_cast<std::int32_t>(ptx::ld_shared<std::uint32_t>(cta.smem + T::kAt.num_watched));
  }
};

}  // namespace fovea::cuda::sm90
