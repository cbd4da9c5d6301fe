// Splits that a CTA takes one after the other (shared/split.h) made one state, of a group or of all of a sequence: it
// lies in shared memory from the first split to the last. Of a sequence no state is left: its rows go out.
#pragma once

#include "common/sequence.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/split.h"
#include "sm90/decode/cta.cuh"
#include "sm90/decode/fold.cuh"

namespace fovea::cuda::sm90::decoding {

template <Sm90DecodeSpec spec, class Mods>
class UnitOfSplits {
  using L = Layout<spec>;
  using Fold = RowFold<spec, Mods>;
  using Join = typename Fold::Join;
  using Row = typename Fold::Row;

 public:
  /// The CTA's next split.
  FOVEA_DEVICE_MEMBER UnitOfSplits(const Cta<spec>& cta, const Join& join, Unit unit)
      : cta_(cta), join_(join), unit_(unit) {}

  /// Of it rows warp, warp + kReaders, ..., which are this warp's in all splits.
  FOVEA_DEVICE_MEMBER void add() const {
#pragma unroll 1
    for (int row = cta_.warp; row < spec.tile_q; row += L::kReaders) {
      const Row r = join_.team.row_at(row);
      if (!r.exists) continue;
      const team::JoinedRow joined = join_.join(row);
      Part part = Fold::part_of(cta_, joined, r);
      if (unit_ == Unit::split) {
        if (joined.is_finite) join_.store(r, joined);
        continue;
      }
#pragma unroll 1
      for (int level = 0; level < kLevelsOfUnit; ++level)
        if (!fold_in(row, r, level, part)) break;
    }
  }

 private:
  static constexpr int kBesideAt = 4 * spec.head_dim_v;

  /// Onto the row's state, and out where that ends; true where it is a part of the next level's, which `part` is then.
  /// A group's state goes where its last split's would.
  FOVEA_DEVICE_MEMBER bool fold_in(int row, const Row& r, int level, Part& part) const {
    const Work& split = r.work;
    const bool is_first =
        level == 0 ? split.split % kSplitsOfGroup == 0 : split.split < kSplitsOfGroup;
    Folded whole = is_first ? Folded{} : load_state(row, level);
    whole.add(part);
    if (!(level == 0 ? ends_group(split) : ends_sequence(split))) {
      store_state(row, level, whole);
      return false;
    }
    if (level > 0) {
      Fold::store_row(r, whole);
      return false;
    }
    part = whole.finished_group();
    if (unit_ == Unit::sequence) return true;
    if (ptx::lane_idx() == 0) r.store_values(part.lse, whole.parts.sum, whole.parts.row_max);
    if (Fold::has_columns())
      ptx::st_global_cache_hint(Fold::columns_of(r), part.columns, cta_.policy_of_sums());
    return false;
  }

  // ---- states: columns are each lane's own, of what is beside them one lane's --------------------

  FOVEA_DEVICE_MEMBER SharedAddress state_at(int row, int level) const {
    return cta_.smem + L::kAt.states + (row * kLevelsOfUnit + level) * L::kAt.state_bytes;
  }

  FOVEA_DEVICE_MEMBER Folded load_state(int row, int level) const {
    const SharedAddress at = state_at(row, level);
    const auto beside = ptx::ld_shared<ptx::F32x4>(at + kBesideAt);
    Folded state{{beside.x, beside.y, beside.z}};
    if (Fold::has_columns()) state.sums = ptx::ld_shared<ptx::F32x4>(at + ptx::lane_idx() * 16);
    return state;
  }

  FOVEA_DEVICE_MEMBER void store_state(int row, int level, const Folded& state) const {
    const SharedAddress at = state_at(row, level);
    ptx::sync_warp();  // all lanes have read what is beside
    if (Fold::has_columns()) ptx::st_shared(at + ptx::lane_idx() * 16, state.sums);
    const FoldedSplits& parts = state.parts;
    if (ptx::lane_idx() == 0)
      ptx::st_shared(at + kBesideAt, ptx::F32x4{parts.top, parts.sum, parts.row_max, 0.0F});
  }

  const Cta<spec>& cta_;
  const Join& join_;
  const Unit unit_;
};

}  // namespace fovea::cuda::sm90::decoding
