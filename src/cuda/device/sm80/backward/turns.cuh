// In which order CTAs of one walk add to dq, so that its bits are the same at every run: tiles of keys of a head one
// after the other, as on Hopper (sm90/backward/turns.cuh has the idea and its costs).
//
// No warp is to spare for it. One thread says how far the CTA has come, and waits for its turn, ahead of the barrier in
// the middle of a tile: the additions of the tile before, which its fence waits for, have had half a tile's time to
// arrive. So whoever follows does so a tile and a half behind.
#pragma once

#include "common/backward_work.cuh"
#include "common/walk_progress.cuh"
#include "ptx/memory.cuh"
#include "shared/backward_params_sm80.h"
#include "shared/staggered_walk.h"
#include "sm80/backward/owner.cuh"

namespace fovea::cuda::sm80 {

template <Sm80BackwardSpec spec>
FOVEA_DEVICE StaggeredWalk staggered_walk(const OwnedTile& owned) {
  return StaggeredWalk::of(owned.begin / spec.tile_owned,
                           ceil_div(owned.sequence.seqlen_kv, spec.tile_owned),
                           ceil_div(owned.sequence.seqlen_q, spec.tile_walked));
}

/// All tiles of queries, of one q head of the group after the other, from the CTA's own beginning.
template <Sm80BackwardSpec spec>
class StaggeredOwnerWalk {
 public:
  FOVEA_DEVICE_MEMBER StaggeredOwnerWalk(const ForwardParams& p, const OwnedTile& owned, int, int)
      : num_tiles_(ceil_div(owned.sequence.seqlen_q, spec.tile_walked)),
        last_head_((owned.head + 1) * p.group - 1),
        q_head_(owned.head * p.group),
        idx_(staggered_walk<spec>(owned).begin),
        num_left_(num_tiles_) {}

  FOVEA_DEVICE_MEMBER WalkedTile next() {
    if (num_left_ == 0) {
      if (q_head_ == last_head_ || num_tiles_ == 0) return {-1, last_head_, false};
      ++q_head_;
      num_left_ = num_tiles_;
    }
    --num_left_;
    const std::int32_t tile = idx_;
    idx_ = (idx_ == 0 ? num_tiles_ : idx_) - 1;
    return {tile, q_head_, true};
  }

 private:
  const std::int32_t num_tiles_, last_head_;
  std::int32_t q_head_, idx_, num_left_;
};

/// Of one thread. What it knows from tile to tile lies in shared memory: registers are the sums'.
template <Sm80BackwardSpec spec>
class Turns {
  using T = BackwardTraits<spec>;
  using Progress = WalkProgress<spec.is_staggered>;
  static_assert(!spec.takes_turns || spec.tile_owned == kStatisticsRows,
                "a word for each tile of keys");

 public:
  FOVEA_DEVICE Progress progress_of(const Sm80OneWalkParams& p, const OwnedTile& owned) {
    const std::int64_t at =
        tile_place<spec.is_varlen, true>(p.common.forward, owned.sequence, owned.head, owned.begin);
    StaggeredWalk staggered{};
    if constexpr (spec.is_staggered) staggered = staggered_walk<spec>(owned);
    return {p.progress + at, owned.begin / spec.tile_owned, owned.head * p.common.forward.group,
            ceil_div(owned.sequence.seqlen_q, spec.tile_walked), staggered};
  }

  /// Before the walk.
  FOVEA_DEVICE void start(const Owner<spec>& owner) {
    set(owner, kSaid, 0);
    set(owner, kDone, 0);
    set(owner, kWatched, owner.owned.begin / spec.tile_owned);
  }

  /// Until it is the tile's turn. All additions of the tile before have been issued.
  FOVEA_DEVICE void take(const Sm80OneWalkParams& p, const Owner<spec>& owner,
                         const WalkedTile& tile) {
    const Progress own = progress_of(p, owner.owned);
    say(owner, own, get(owner, kDone));
    const std::int32_t position = own.position(tile.idx, tile.q_head);
    std::int32_t num_watched = get(owner, kWatched);
    own.await_others(own.awaited(tile.idx, tile.q_head), num_watched,
                     [&] { set(owner, kWatched, num_watched); });
    // What lies before the first tile is no affair of this CTA: whoever follows need not wait for it.
    if (get(owner, kDone) == 0) say(owner, own, position);
    set(owner, kDone, position + 1);
  }

  /// Behind the last tile.
  FOVEA_DEVICE void end(const Sm80OneWalkParams& p, const Owner<spec>& owner) {
    const Progress own = progress_of(p, owner.owned);
    say(owner, own, Progress::kEnded + get(owner, kWatched));
  }

 private:
  // Words of shared memory, where other walks have votes.
  static constexpr int kSaid = 0;     // the word in memory
  static constexpr int kDone = 1;     // positions behind the CTA, its last tile's included
  static constexpr int kWatched = 2;  // tiles of lower keys that may not have ended
  static_assert(spec.num_warps > kWatched, "there are as many words as warps");

  FOVEA_DEVICE std::int32_t get(const Owner<spec>& owner, int word) {
    return ptx::ld_shared<std::int32_t>(owner.smem + T::kVotesAt + 4 * word);
  }
  FOVEA_DEVICE void set(const Owner<spec>& owner, int word, std::int32_t value) {
    ptx::st_shared(owner.smem + T::kVotesAt + 4 * word, value);
  }

  FOVEA_DEVICE void say(const Owner<spec>& owner, const Progress& own, std::int32_t position) {
    const std::int32_t said = get(owner, kSaid);
    if (position > said) ptx::red_add_release_global(own.word, position - said);
    set(owner, kSaid, position > said ? position : said);
  }
};

}  // namespace fovea::cuda::sm80
