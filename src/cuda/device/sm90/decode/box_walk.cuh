// Which boxes of keys the rows of a split see, and which slices of each. Read load.cuh next.
#pragma once

#include "common/bits.cuh"
#include "common/tile_walk.cuh"
#include "shared/split.h"
#include "sm90/decode/cta.cuh"
#include "team/team.cuh"
#include "team/walk.cuh"

namespace fovea::cuda::sm90::decoding {

/// Neighbouring slices, the first of which is `first`: those that some row sees, a bit each, and those that all rows
/// see whole.
struct VisitedBox {
  std::int32_t first;
  std::uint32_t visible, full;

  FOVEA_DEVICE_MEMBER bool sees(int slice) const { return (visible >> slice & 1U) != 0; }
  FOVEA_DEVICE_MEMBER bool is_full(int slice) const { return (full >> slice & 1U) != 0; }
};

/// All warps of a CTA that walk get the same boxes.
template <Sm90DecodeSpec spec, class Mods>
class BoxWalk {
  using L = Layout<spec>;
  using Tiles = typename WalkOf<Mods>::Type;
  static_assert(kFewestKeysPerSplit / spec.tile_kv % L::kSlices == 0, "splits begin with a box");

 public:
  static constexpr std::uint32_t kAll = (1U << L::kSlices) - 1;

  /// `rows` outlives the walk.
  FOVEA_DEVICE_MEMBER BoxWalk(const Cta<spec>& cta, const Work& work, const TileSpan& rows)
      : slices_(team::start_tiles<Tiles>(
            team::Team<L::kWarpSpec>{cta.p.common, work, cta.smem, 0, cta.lane}, rows)) {}

  /// The next box of which a slice is visible; false behind the last one.
  FOVEA_DEVICE_MEMBER bool next(VisitedBox& box) {
    if constexpr (!Mods::has_mask) {
      VisitedGroup few{};
      const bool has_next = slices_.next_few(few, L::kSlices);
      box = {few.begin, few.visible, few.full};
      return has_next;
    } else {
      if (group_.visible == 0 && !slices_.next_group(group_)) return false;
      const int at = lowest_bit(group_.visible) / L::kSlices * L::kSlices;
      box = {group_.begin + at, group_.visible >> at & kAll, group_.full >> at & kAll};
      group_.visible &= ~(kAll << at);
      return true;
    }
  }

 private:
  Tiles slices_;
  VisitedGroup group_{};  // beside a mask: what is left of 32 slices
};

}  // namespace fovea::cuda::sm90::decoding
