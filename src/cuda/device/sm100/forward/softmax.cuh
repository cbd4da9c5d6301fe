// The softmax of a group's rows, a thread each, from the scores in tensor memory to P there. Read output.cuh next.
//
// All scores of a tile are in registers before P takes their place, so a tile whose reference was too low, or too high,
// is done again from there; and between scores that have come and P that has not gone, the sums of the row are nobody
// else's: their commit says that all products before are complete. So the group scales them itself, where it must,
// which is hardly ever (common/optimistic_softmax.cuh), and no warp stands by for it.
#pragma once

#include "common/dropout.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tcgen05_ld_st.cuh"
#include "ptx/warp.cuh"
#include "sm100/forward/cta.cuh"
#include "sm100/forward/output.cuh"
#include "sm100/forward/row.cuh"
#include "sm100/forward/scores.cuh"

namespace fovea::cuda::sm100 {

template <Sm100ForwardSpec spec, class Mods>
struct Softmax {
  using T = Traits<spec>;
  using Unit = sm90::ScoreUnit<spec, Mods>;
  using MyRow = Row<spec, Mods>;

  const Cta<spec>& cta;
  const RowThread<spec> thread;
  std::uint32_t num_kv_tiles = 0;  // so far: two rings in a register, of which scores leave few

  Scores<spec, Mods> scores;
  MyRow row;
  KvTile next = KvTile::none();  // after scores.kv_tile, of the same row tile

  // Full tiles take their maximum first where more than one in eight of the last row tile's was done again, or would
  // have had to be: eight for each such less one for each tile is above 0. Both ways give the same bits.
  bool is_careful = false;
  std::int32_t excess = 0;          // so far, of this row tile
  std::uint32_t num_row_tiles = 0;  // so far

  FOVEA_DEVICE_MEMBER Softmax(const Cta<spec>& of_cta, const TensorMemory<spec>& memory)
      : cta(of_cta), thread(of_cta, memory), scores(thread) {}

  FOVEA_DEVICE_MEMBER void run() {
    for (;;) {
      auto slots = ring_after<T::kSlots>(cta.word_at(slots_read()));
      const RowTile tile = cta.next_row_tile(slots);
      if (tile.is_end()) return;
      if (tile.is_any_end()) {
        count_slot();
        if (!cta.end_round(cta.pass())) return;
        continue;
      }
      row.begin();
      excess = 0;
      bool is_first = true;  // one place for both kinds of step
      do {
        step(tile, is_first);
        is_first = false;
      } while (!next.is_none());
      finish(tile);
    }
  }

 private:
  /// What makes scores logarithms to base 2.
  FOVEA_DEVICE_MEMBER float c() const { return Unit::log2(cta.p.common); }

  FOVEA_DEVICE_MEMBER void step(const RowTile& tile, bool is_first) {
    scores.look_ahead(tile, take_kv_tile());
    const KvTile kv_tile = scores.kv_tile;
    take_scores();
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
        if (!is_first) scale_sums();
      }
    }
    const float parts[1] = {part};
    row.add(parts);
    --excess;
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before_thread_sync();
    cta.release(cta.barrier(T::kAt.p_full, thread.group));
  }

  /// What is posted beside the keys, as soon as they have come.
  FOVEA_DEVICE_MEMBER KvTile take_kv_tile() {
    const auto k = ring_after<T::kStages>(num_kv_tiles);
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.k_full, k.stage), k.parity);
    const auto posted = ptx::ld_shared<ptx::U32x2>(cta.kv_tile_at(k.stage));
    cta.release(cta.barrier(T::kAt.k_empty, k.stage));
    next = {ptx::shfl_idx(posted.y, 0)};
    return {ptx::shfl_idx(posted.x, 0)};
  }

  FOVEA_DEVICE_MEMBER void take_scores() {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.s_full, thread.group), num_kv_tiles % 2);
    ++num_kv_tiles;
    ptx::tcgen05_fence_after_thread_sync();
    // In parts: of 128 at once all registers would have to be neighbours.
    constexpr int kPart = 32;
    using Part = float[kPart];
#pragma unroll
    for (int i = 0; i < spec.tile_kv; i += kPart) {
      ptx::tcgen05_ld_32x32b(reinterpret_cast<Part&>(scores.s[i]), thread.s().plus_columns(i));
    }
    ptx::tcgen05_wait_ld(reinterpret_cast<Part&>(scores.s[0]));
#pragma unroll
    for (int i = kPart; i < spec.tile_kv; i += kPart)
      ptx::known_from_here(reinterpret_cast<Part&>(scores.s[i]));
  }

  FOVEA_DEVICE_MEMBER void raise(bool is_first) {
    const bool is_low = scores.kv_tile.pass() == Pass::low;
    if (!row.raise(is_first, scores.s, c(), is_low) || is_first) return;
    if (scores.kv_tile.is_full()) excess += 8;
    scale_sums();
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
    DroppedBits dropped;  // in the order of keys: nothing is exchanged
#pragma unroll 1
    for (int i = 0; i < MyRow::kChunk / 4; ++i)
      dropped.draw(common, key, work.sequence.idx, view.q_head, view.q_idx, first / 4 + i);
#pragma unroll
    for (int i = 0; i < MyRow::kChunk / 2; ++i) {
      const std::uint32_t pair = dropped.own >> static_cast<std::uint32_t>(2 * i);
      p[i] &= ((pair & 1U) != 0 ? 0U : 0xffffU) | ((pair & 2U) != 0 ? 0U : 0xffff0000U);
    }
  }

  /// O of all tiles before, by what the last step of the reference asks for.
  FOVEA_DEVICE_MEMBER void scale_sums() {
    constexpr int kAtOnce = 32;
#pragma unroll 1
    for (int at = 0; at < spec.head_dim_v; at += kAtOnce) {
      float sums[kAtOnce];
      ptx::tcgen05_ld_32x32b(sums, thread.o().plus_columns(at));
      ptx::tcgen05_wait_ld(sums);
#pragma unroll
      for (float& x : sums) x *= row.factor[0];
      ptx::tcgen05_st_32x32b(thread.o().plus_columns(at), sums);
    }
    ptx::tcgen05_wait_st();
  }

  FOVEA_DEVICE_MEMBER void finish(const RowTile& tile) {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.o_full, thread.group), num_row_tiles % 2);
    ptx::tcgen05_fence_after_thread_sync();
    is_careful = excess > 0;
    ++num_row_tiles;
    Output<spec, Mods>{thread}.finish(cta.posted(tile), row, num_row_tiles, cta.pass());
    ptx::tcgen05_fence_before_thread_sync();
    RowTile done{};
    done.slot = ring_after<T::kSlots>(cta.word_at(slots_read())).stage;
    cta.done_with(done);
    count_slot();
  }

  /// The count of slots that this warp has read: in shared memory, for a register that lives from row tile to row tile
  /// is one too many.
  FOVEA_DEVICE_MEMBER SharedAddress slots_read() const {
    return cta.smem + T::kAt.slots_read + 4 * (cta.warp - 4);
  }
  FOVEA_DEVICE_MEMBER void count_slot() const {
    const std::uint32_t count = cta.word_at(slots_read()) + 1;
    ptx::sync_warp();  // all have read it
    if (cta.lane == 0) ptx::st_shared(slots_read(), count);
    ptx::sync_warp();
  }
};

}  // namespace fovea::cuda::sm100
