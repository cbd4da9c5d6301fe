// The row tiles and kv tiles of a thread that computes, one after the other: what is posted, what comes through tensor
// memory, what is given back. Whose softmax it is, `Step` knows, which derives from this: softmax.cuh,
// ../fp4/softmax.cuh. It has
//
//   begin()                  of a row tile
//   step(tile, is_first)     a kv tile of it
//   end(tile)                its sums are complete, in tensor memory
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tcgen05_ld_st.cuh"
#include "ptx/warp.cuh"
#include "sm100/forward/cta.cuh"

namespace fovea::cuda::sm100 {

template <auto spec, class Step>
struct RowTiles {
  using T = Traits<spec>;

  const Cta<spec>& cta;
  const RowThread<spec> thread;
  std::uint32_t num_kv_tiles = 0;   // so far: two rings in a register, of which scores leave few
  KvTile next = KvTile::none();     // after the one of this step, of the same row tile
  std::uint32_t num_row_tiles = 0;  // so far

  FOVEA_DEVICE_MEMBER RowTiles(const Cta<spec>& of_cta, const TensorMemory<spec>& memory)
      : cta(of_cta), thread(of_cta, memory) {}

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
      self().begin(tile);
      bool is_first = true;  // one place for both kinds of step
      do {
        self().step(tile, is_first);
        is_first = false;
      } while (!next.is_none());
      finish(tile);
    }
  }

  /// The stage of the keys of this step, until take_scores().
  FOVEA_DEVICE_MEMBER auto keys() const { return ring_after<T::kStages>(num_kv_tiles); }

  /// What is posted beside the keys, as soon as they have come.
  FOVEA_DEVICE_MEMBER KvTile take_kv_tile() {
    const auto k = keys();
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.k_full, k.stage), k.parity);
    const auto posted = ptx::ld_shared<ptx::U32x2>(cta.kv_tile_at(k.stage));
    if constexpr (!T::kReadsBesideKeys) cta.release(cta.barrier(T::kAt.k_empty, k.stage));
    next = {ptx::shfl_idx(posted.y, 0)};
    return {ptx::shfl_idx(posted.x, 0)};
  }

  FOVEA_DEVICE_MEMBER void await_scores() const {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.s_full, thread.group), num_kv_tiles % 2);
    ptx::tcgen05_fence_after_thread_sync();
  }

  /// Of this thread's row, which have come.
  FOVEA_DEVICE_MEMBER void take_scores(float (&s)[spec.tile_kv]) {
    ++num_kv_tiles;
    // In parts: of 128 at once all registers would have to be neighbours.
    constexpr int kPart = 32;
    using Part = float[kPart];
#pragma unroll
    for (int i = 0; i < spec.tile_kv; i += kPart) {
      ptx::tcgen05_ld_32x32b(reinterpret_cast<Part&>(s[i]), thread.s().plus_columns(i));
    }
    ptx::tcgen05_wait_ld(reinterpret_cast<Part&>(s[0]));
#pragma unroll
    for (int i = kPart; i < spec.tile_kv; i += kPart)
      ptx::known_from_here(reinterpret_cast<Part&>(s[i]));
  }

  /// P is stored, S read, O scaled, sums of the last row tile read.
  FOVEA_DEVICE_MEMBER void give_probabilities() const {
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before_thread_sync();
    cta.release(cta.barrier(T::kAt.p_full, thread.group));
  }

  /// O of all tiles before. Between scores that have come and P that has not gone nobody else touches it.
  FOVEA_DEVICE_MEMBER void scale_sums(float factor) const {
    constexpr int kAtOnce = 32;
#pragma unroll 1
    for (int at = 0; at < spec.head_dim_v; at += kAtOnce) {
      float sums[kAtOnce];
      ptx::tcgen05_ld_32x32b(sums, thread.o().plus_columns(at));
      ptx::tcgen05_wait_ld(sums);
#pragma unroll
      for (float& x : sums) x *= factor;
      ptx::tcgen05_st_32x32b(thread.o().plus_columns(at), sums);
    }
    ptx::tcgen05_wait_st();
  }

 private:
  FOVEA_DEVICE_MEMBER Step& self() { return static_cast<Step&>(*this); }

  FOVEA_DEVICE_MEMBER void finish(const RowTile& tile) {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.o_full, thread.group), num_row_tiles % 2);
    ptx::tcgen05_fence_after_thread_sync();
    ++num_row_tiles;
    self().end(tile);
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
