// The products, which one thread issues: scores of a kv tile as soon as its keys are there, sums as soon as a group has
// made probabilities of its scores. Read softmax.cuh next.
//
//   S0 S1 | O0 S0' O1 S1' | O0 S0" O1 S1" | ...      while one group is in its softmax, the other one's products run
//
// A row tile's last sums and the next row tile's first scores follow each other like any others. What orders them:
//
//   sums before scores          p_full of the group: its scores have been read, its P is there
//   first sums of a row tile    the same: the group arrives when it has read the sums of the row tile before
//   scores over P               issue order, or sums_done (Sm100ForwardSpec::awaits_sums)
//   scores of both groups in one place    s_read: those of the other group have been read (sm100/attention_fp4.cuh)
//   buffers given back          commits: all that was issued before is complete
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/warp.cuh"
#include "sm100/forward/cta.cuh"
#include "tile/matrix_descriptor.cuh"
#include "tile/tcgen05_descriptor.cuh"

namespace fovea::cuda::sm100 {

/// Products of 16-bit elements: Q and K from shared memory, P from tensor memory.
template <Sm100ForwardSpec spec>
struct Products {
  using T = Traits<spec>;
  static constexpr TensorType kType =
      spec.element == Element::f16 ? TensorType::f16 : TensorType::bf16;
  static constexpr ptx::InstructionDescriptor kScores = instruction_descriptor<TensorProduct{
      .a = kType, .b = kType, .m = T::kGroupRows, .n = spec.tile_kv}>();
  static constexpr ptx::InstructionDescriptor kSums =
      instruction_descriptor<TensorProduct{.a = kType,
                                           .b = kType,
                                           .m = T::kGroupRows,
                                           .n = spec.head_dim_v,
                                           .b_major = ptx::Major::mn}>();
  static constexpr bool kAwaitsSums = spec.awaits_sums && TensorMemory<spec>::kAt.is_p_over_s;

  const Cta<spec>& cta;
  const TensorMemory<spec> memory;

  /// S = Q Kᵀ of a group.
  FOVEA_DEVICE_MEMBER void multiply_keys(int q_stage, int k_stage, int group,
                                         bool /*are_new_rows*/) const {
    const auto queries =
        smem_descriptor(k_major_descriptor(typename T::QTile{cta.q_at(q_stage, group)}));
    const auto keys = smem_descriptor(k_major_descriptor(typename T::KTile{cta.k_at(k_stage)}));
#pragma unroll
    for (int i = 0; i < T::kQkSteps; ++i) {
      ptx::tcgen05_mma_ss<ptx::Tcgen05Kind::f16>(
          memory.s(group), advanced(queries, k_major_offset<typename T::QTile>(i)),
          advanced(keys, k_major_offset<typename T::KTile>(i)), kScores, i > 0);
    }
  }

  /// O += P V of a group; O = P V of the first values of its rows.
  FOVEA_DEVICE_MEMBER void multiply_values(int v_stage, int group, bool is_first) const {
    const auto values = smem_descriptor(mn_major_descriptor(typename T::VTile{cta.v_at(v_stage)}));
#pragma unroll
    for (int i = 0; i < spec.tile_kv / 16; ++i) {
      ptx::tcgen05_mma_ts<ptx::Tcgen05Kind::f16>(
          memory.o(group), memory.p(group).plus_columns(8 * i),
          advanced(values, mn_major_offset<typename T::VTile>(i)), kSums, i > 0 || !is_first);
    }
  }
};

/// When products are issued, whatever they are: `Products` has them.
template <auto spec, class Products>
struct Multiply {
  using T = Traits<spec>;
  static constexpr bool kAwaitsSums = Products::kAwaitsSums;

  const Cta<spec>& cta;
  const Products products;
  Ring<T::kQStages> q{0};
  Ring<T::kStages> k{0}, v{0};
  Ring<1> p{0};  // of p_full and sums_done: a phase for each kv tile
  Ring<T::kSlots> slots{0};
  Ring<1> scores{1};  // a phase for each that has been read, where groups share their place
  KvTile next =
      KvTile::none();  // after the kv tile whose scores were issued last, of the same row tile

  FOVEA_DEVICE_MEMBER Multiply(const Cta<spec>& of_cta, const TensorMemory<spec>& memory)
      : cta(of_cta), products{of_cta, memory} {}

  FOVEA_DEVICE_MEMBER void run() {
    RowTile rows = next_row_tile();
    while (!rows.is_end()) {
      if (rows.is_any_end()) {
        if (!cta.end_round(cta.pass())) return;
        rows = next_row_tile();
      } else {
        await_keys();
        for (int group = 0; group < T::kGroups; ++group) issue_scores(group, true);
        end_scores(true);
        rows = row_tiles();
      }
    }
  }

 private:
  FOVEA_DEVICE_MEMBER RowTile next_row_tile() {
    const RowTile rows = cta.next_row_tile(slots);
    if (!rows.is_any_end()) cta.done_with(rows);
    return rows;
  }

  /// All that follows the first scores of a row tile, up to an end: that one.
  FOVEA_DEVICE_MEMBER RowTile row_tiles() {
    bool is_first = true;  // kv tile of its row tile, the one to be summed
    for (;;) {
      const bool is_last = next.is_none();
      RowTile after{};
      ptx::mbarrier_wait_parity(cta.barrier(T::kAt.v_full, v.stage), v.parity);
      for (int group = 0; group < T::kGroups; ++group) {
        issue_sums(group, is_first, is_last);
        if (group == 0) {
          if (is_last) after = next_row_tile();
          if (!after.is_any_end()) await_keys();
        }
        if (after.is_any_end()) continue;
        if constexpr (kAwaitsSums) cta.await(cta.barrier(T::kAt.sums_done, group), p.parity);
        issue_scores(group, is_last);
      }
      end_sums();
      if (after.is_any_end()) return after;
      end_scores(is_last);
      is_first = is_last;
    }
  }

  /// And what comes after them. Known to all lanes before one of them issues what gives the buffer back.
  FOVEA_DEVICE_MEMBER void await_keys() {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.k_full, k.stage), k.parity);
    next = {cta.word_at(cta.kv_tile_at(k.stage) + 4)};
    ptx::sync_warp();
  }

  /// Scores of a group, of the keys that have come. are_new_rows: its queries may not have.
  FOVEA_DEVICE_MEMBER void issue_scores(int group, bool are_new_rows) {
    if (are_new_rows) cta.await(cta.barrier(T::kAt.q_full, group), q.parity);
    if constexpr (T::kGroupsShareScores) {
      cta.await(cta.barrier(T::kAt.s_read, 0), scores.parity);
      scores.advance();
    }
    if (!ptx::elect_one()) return;
    ptx::tcgen05_fence_after_thread_sync();
    products.multiply_keys(q.stage, k.stage, group, are_new_rows);
    ptx::tcgen05_commit(cta.barrier(T::kAt.s_full, group));
    if (next.is_none()) ptx::tcgen05_commit(cta.barrier(T::kAt.q_empty, group));
    if (group == T::kGroups - 1) ptx::tcgen05_commit(cta.barrier(T::kAt.k_empty, k.stage));
  }

  FOVEA_DEVICE_MEMBER void end_scores(bool are_new_rows) {
    if (are_new_rows) q.advance();
    k.advance();
  }

  /// Sums of a group, whose values have come.
  FOVEA_DEVICE_MEMBER void issue_sums(int group, bool is_first, bool is_last) {
    cta.await(cta.barrier(T::kAt.p_full, group), p.parity);
    if (!ptx::elect_one()) return;
    ptx::tcgen05_fence_after_thread_sync();
    products.multiply_values(v.stage, group, is_first);
    if constexpr (kAwaitsSums) ptx::tcgen05_commit(cta.barrier(T::kAt.sums_done, group));
    if (is_last) ptx::tcgen05_commit(cta.barrier(T::kAt.o_full, group));
    if (group == T::kGroups - 1) ptx::tcgen05_commit(cta.barrier(T::kAt.v_empty, v.stage));
  }

  FOVEA_DEVICE_MEMBER void end_sums() {
    p.advance();
    v.advance();
  }
};

}  // namespace fovea::cuda::sm100
