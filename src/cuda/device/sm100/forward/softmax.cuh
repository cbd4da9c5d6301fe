// The softmax of a group's rows, a thread each, from the scores in tensor memory to P there. Read output.cuh next.
//
// All scores of a tile are in registers before P takes their place, so a tile whose reference was too low, or too high,
// is done again from there; and between scores that have come and P that has not gone, the sums of the row are nobody
// else's: their commit says that all products before are complete. So the group scales them itself, where it must,
// which is hardly ever (common/optimistic_softmax.cuh), and no warp stands by for it.
#pragma once

#include "common/dropout.cuh"
#include "ptx/memory.cuh"
#include "ptx/tcgen05_ld_st.cuh"
#include "ptx/warp.cuh"
#include "sm100/forward/cta.cuh"
#include "sm100/forward/output.cuh"
#include "sm100/forward/row.cuh"
#include "sm100/forward/row_tiles.cuh"
#include "sm100/forward/scores.cuh"

namespace fovea::cuda::sm100 {

template <Sm100ForwardSpec spec, class Mods>
struct Softmax : RowTiles<spec, Softmax<spec, Mods>> {
  using T = Traits<spec>;
  using Tiles = RowTiles<spec, Softmax<spec, Mods>>;
  using Unit = sm90::ScoreUnit<spec, Mods>;
  using MyRow = Row<spec, Mods>;
  using Tiles::cta;
  using Tiles::thread;

  Scores<spec, Mods> scores;
  MyRow row;

  // Full tiles take their maximum first where more than one in eight of the last row tile's was done again, or would
  // have had to be: eight for each such less one for each tile is above 0. Both ways give the same bits.
  bool is_careful = false;
  std::int32_t excess = 0;  // so far, of this row tile

  FOVEA_DEVICE_MEMBER Softmax(const Cta<spec>& of_cta, const TensorMemory<spec>& memory)
      : Tiles(of_cta, memory), scores(thread) {}

  FOVEA_DEVICE_MEMBER void begin(const RowTile&) {
    row.begin();
    excess = 0;
  }

  FOVEA_DEVICE_MEMBER void step(const RowTile& tile, bool is_first) {
    scores.look_ahead(tile, this->take_kv_tile());
    const KvTile kv_tile = scores.kv_tile;
    this->await_scores();
    this->take_scores(scores.s);
    row.rebase();
    scores.modify(tile, row.base[0]);
    if (!kv_tile.is_full()) {
      scores.mask(tile);
      if (is_indicator(kv_tile.pass())) scores.shrink();
    }
    bool is_raised = is_first || is_careful || spec.wants_row_max || !kv_tile.is_full();
    if (is_raised) raise(is_first);
    float part = 0;
    for (;;) {
      part = exponentiate(tile);
      if (!ptx::vote_any(!row.stands(part))) break;
      ptx::tcgen05_wait_st();  // P may go there again
      if (!is_raised && ptx::vote_any(row.must_redo(part))) {
        is_raised = true;
        raise(false);
      } else {
        if (!ptx::vote_any(row.soften(part))) break;
        if (!is_first) this->scale_sums(row.factor[0]);
      }
    }
    const float parts[1] = {part};
    row.add(parts);
    --excess;
    this->give_probabilities();
  }

  FOVEA_DEVICE_MEMBER void end(const RowTile& tile) {
    is_careful = excess > 0;
    Output<spec, Mods>{{thread}}.finish(cta.posted(tile), row, this->num_row_tiles, cta.pass());
  }

 private:
  /// What makes scores logarithms to base 2.
  FOVEA_DEVICE_MEMBER float c() const { return Unit::log2(cta.p.common); }

  FOVEA_DEVICE_MEMBER void raise(bool is_first) {
    const bool is_low = scores.kv_tile.pass() == Pass::low;
    if (!row.raise(is_first, scores.s, c(), is_low) || is_first) return;
    if (scores.kv_tile.is_full()) excess += 8;
    this->scale_sums(row.factor[0]);
  }

  /// P of the kv tile, whose sum it returns, to its place.
  FOVEA_DEVICE_MEMBER float exponentiate(const RowTile& tile) {
    const auto store = [&](int chunk, std::uint32_t(&p)[MyRow::kChunk / 2]) {
      if constexpr (spec.has_dropout) drop(tile, chunk, p);
      ptx::tcgen05_st_32x32b(thread.p().plus_columns(chunk * MyRow::kChunk / 2), p);
    };
    return row.exponentiate(scores.s, c(), cta.p.zero, store);
  }

  /// Of P alone: l and the maximum are those of all that a row sees. Infinity reaches a row whatever is dropped.
  FOVEA_DEVICE_MEMBER void drop(const RowTile& tile, int chunk,
                                std::uint32_t (&p)[MyRow::kChunk / 2]) const {
    if (is_indicator(scores.kv_tile.pass())) return;
    const ForwardParams& common = cta.p.common;
    const Work work = cta.work_of(cta.posted(tile));
    const RowView<spec> view(common, work, thread.row());
    const DropoutKeyOf<spec> key = dropout_key<spec>(common);
    const std::int32_t first = scores.kv_tile.idx() * spec.tile_kv + chunk * MyRow::kChunk;
    DroppedBits dropped;  // the last key's in the highest bits, and nothing is exchanged
#pragma unroll 1
    for (int i = 0; i < MyRow::kChunk / 4; ++i)
      dropped.draw(common, key, work.sequence.idx, view.q_head, view.q_idx, first / 4 + i);
#pragma unroll
    for (int i = 0; i < MyRow::kChunk / 2; ++i) {
      const std::uint32_t pair =
          dropped.own >> static_cast<std::uint32_t>(32 - MyRow::kChunk + 2 * i);
      p[i] &= ((pair & 1U) != 0 ? 0U : 0xffffU) | ((pair & 2U) != 0 ? 0U : 0xffff0000U);
    }
  }
};

}  // namespace fovea::cuda::sm100
