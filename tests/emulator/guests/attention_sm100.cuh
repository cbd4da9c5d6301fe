// A small attention kernel for the tensor core of sm_100, and the mistakes that people make in such a kernel. One CTA;
// head_dim 64, tiles of 128 queries and 32 keys, key tiles numbered through all query tiles by i:
//
//   softmax   warps 0-3   S(i) -> P(i) over the same columns; the factor that O must be multiplied with
//   correct   warps 4-7   Q to shared memory; O *= factor before PV(i); at the end O / row_sum to out
//   issue     warp 8      QK(i), then PV(i-1): one thread
//   load      warp 9      K, V by TMA, two stages
//
// Tensor memory: S and P of even i, of odd i, O. QK(i) writes over P(i-2), so it waits until PV(i-2) is complete.
// Planted::nothing is the right one; each other value changes one line.
#pragma once

#include "common/role.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tcgen05_ld_st.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "tile/shared_tile.cuh"
#include "tile/tcgen05_descriptor.cuh"

namespace fovea::cuda::guest100 {

enum class Planted {
  nothing,
  // allocation
  address_read_before_barrier,
  address_taken_for_zero,
  dealloc_missing,
  dealloc_twice,
  dealloc_of_half,
  dealloc_before_the_last_load,
  alloc_after_relinquish,
  alloc_grows,
  // loads and stores
  load_used_before_wait,
  load_not_named,
  load_not_waited_at_exit,
  store_not_waited,
  load_of_another_quarter,
  store_to_another_quarter,
  addresses_differ_in_a_warp,
  // issue and commit
  issued_by_all_lanes,
  committed_by_another_lane,
  scores_not_awaited,
  stage_released_by_arrive,
  commit_missing,
  columns_beyond_the_allocation,
  cta_group_mixed,
  // order
  p_arrives_before_its_load,
  p_of_one_warp,
  p_count_too_low,
  p_arrives_without_sync_warp,
  scores_over_p_in_flight,
  out_scaled_in_flight,
  out_read_in_flight,
  next_tile_before_out_is_read,
  fence_before_missing,
  fence_after_missing,
  proxy_fence_missing,
  parity_never_flips,
  correct_skips_an_arrival,
  // descriptors
  descriptor_of_wgmma,
  base_offset_given,
  reserved_bit_set,
  rows_of_no_shape,
  // only the numbers tell
  first_product_accumulates,
  first_product_accumulates_later_tiles,
  later_product_starts_anew,
  depth_step_wrong,
  offsets_swapped,
  transposition_missing,
  columns_of_the_other_product,
  p_over_unread_scores,
};

struct Params {
  const std::uint16_t* q;  // [num_tiles 128, 64] bf16
  float* out;              // the same, f32
  ptx::TensorMap k, v;     // boxes of [32, 64]
  std::int32_t seqlen_kv, num_tiles;
  float softmax_scale_log2;
};

inline constexpr int kHeadDim = 64, kTileQ = 128, kTileKv = 32, kThreads = 320, kStages = 2;
inline constexpr int kSoftmaxWarps = 4, kCorrectWarp = 4, kIssueWarp = 8, kLoadWarp = 9;

using QTile = SharedTile<kTileQ, 2 * kHeadDim, Swizzle::bytes128>;
using KvTile = SharedTile<kTileKv, 2 * kHeadDim, Swizzle::bytes128>;

// Offsets into shared memory.
inline constexpr int kQ = 0, kK = kQ + QTile::kBytes, kV = kK + kStages * KvTile::kBytes,
                     kFactors = kV + kStages * KvTile::kBytes, kBarriers = kFactors + 4 * kTileQ;
inline constexpr int kQFull = kBarriers, kQEmpty = kQFull + 8, kKFull = kQEmpty + 8,
                     kKEmpty = kKFull + 16, kVFull = kKEmpty + 16, kVEmpty = kVFull + 16,
                     kSFull = kVEmpty + 16, kPFull = kSFull + 16, kPvDone = kPFull + 16,
                     kFactorFull = kPvDone + 8, kFactorEmpty = kFactorFull + 8,
                     kOutScaled = kFactorEmpty + 8, kTmem = kOutScaled + 8;
inline constexpr int kSharedBytes = kTmem + 16;

// Columns of tensor memory.
inline constexpr int kColumns = 128, kScores = 0, kOut = 2 * kTileKv;

inline constexpr TensorProduct kScoresProduct{.m = kTileQ, .n = kTileKv};
inline constexpr TensorProduct kOutProduct{.m = kTileQ, .n = kHeadDim, .b_major = ptx::Major::mn};

/// Use number i of a barrier, or of one of two: its parity when it is complete.
FOVEA_DEVICE constexpr std::uint32_t parity(int use) { return static_cast<std::uint32_t>(use & 1); }

template <Planted planted>
struct Kernel {
  const Params& p;
  ptx::SharedAddress smem = ptx::dynamic_shared();
  int warp = ptx::warp_idx(), lane = ptx::lane_idx();
  ptx::TmemAddress tmem{};

  static constexpr bool is(Planted other) { return planted == other; }

  ptx::SharedAddress at(int offset, int index = 0) const { return smem + offset + 8 * index; }
  QTile q_tile() const { return {smem + kQ}; }
  KvTile k_tile(int stage) const { return {smem + kK + stage * KvTile::kBytes}; }
  KvTile v_tile(int stage) const { return {smem + kV + stage * KvTile::kBytes}; }
  int num_kv_tiles() const { return (p.seqlen_kv + kTileKv - 1) / kTileKv; }
  int num_steps() const { return p.num_tiles * num_kv_tiles(); }
  ptx::TmemAddress scores(int i) const { return tmem.plus_columns(kScores + i % 2 * kTileKv); }
  ptx::TmemAddress out() const { return tmem.plus_columns(kOut); }
  /// The same cell in the lanes of this warp.
  ptx::TmemAddress own(ptx::TmemAddress address) const {
    return address.plus_lanes(32 * (warp % 4));
  }

  void fence_before() const {
    if (!is(Planted::fence_before_missing)) ptx::tcgen05_fence_before_thread_sync();
  }
  void fence_after() const {
    if (!is(Planted::fence_after_missing)) ptx::tcgen05_fence_after_thread_sync();
  }

  // ---- set up, tear down ----

  void make_barriers() const {
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(at(kKFull, i), 1);
      ptx::mbarrier_init(at(kKEmpty, i), 1);
      ptx::mbarrier_init(at(kVFull, i), 1);
      ptx::mbarrier_init(at(kVEmpty, i), 1);
      ptx::mbarrier_init(at(kSFull, i), 1);
      const bool is_short = is(Planted::p_of_one_warp);
      ptx::mbarrier_init(at(kPFull, i), is_short ? 1 : is(Planted::p_count_too_low) ? 3 : 4);
    }
    ptx::mbarrier_init(at(kQFull), 4);
    ptx::mbarrier_init(at(kQEmpty), 1);
    ptx::mbarrier_init(at(kPvDone), 1);
    ptx::mbarrier_init(at(kFactorFull), 4);
    ptx::mbarrier_init(at(kFactorEmpty), 4);
    ptx::mbarrier_init(at(kOutScaled), 4);
    ptx::fence_mbarrier_init_release_cluster();
  }

  void set_up() {
    if (warp == kIssueWarp) {
      if (ptx::elect_one()) make_barriers();
      ptx::sync_warp();
      if (is(Planted::alloc_after_relinquish)) ptx::tcgen05_relinquish_alloc_permit();
      if (is(Planted::alloc_grows)) {
        ptx::tcgen05_alloc<32>(at(kTmem) + 4);
      }
      ptx::tcgen05_alloc<kColumns>(at(kTmem));
      if (!is(Planted::alloc_after_relinquish)) ptx::tcgen05_relinquish_alloc_permit();
    }
    if (is(Planted::address_read_before_barrier))
      tmem.bits = ptx::ld_shared<std::uint32_t>(at(kTmem));
    ptx::sync_threads();
    if (!is(Planted::address_read_before_barrier))
      tmem.bits = ptx::ld_shared<std::uint32_t>(at(kTmem));
    if (is(Planted::address_taken_for_zero)) tmem.bits = 0;
    if (is(Planted::columns_beyond_the_allocation)) tmem = tmem.plus_columns(32);
  }

  void tear_down() const {
    if (!is(Planted::dealloc_before_the_last_load)) {
      fence_before();
      ptx::sync_threads();
      fence_after();
    }
    if (warp != kIssueWarp || is(Planted::dealloc_missing)) return;
    if (is(Planted::dealloc_of_half)) return ptx::tcgen05_dealloc<kColumns / 2>(tmem);
    ptx::tcgen05_dealloc<kColumns>(tmem);
    if (is(Planted::dealloc_twice)) ptx::tcgen05_dealloc<kColumns>(tmem);
  }

  // ---- load ----

  void load_stage(const ptx::TensorMap& map, ptx::SharedAddress to, ptx::SharedAddress full,
                  ptx::SharedAddress empty, int i) const {
    ptx::mbarrier_wait_parity(empty, parity(i / kStages) ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, KvTile::kBytes);
    const std::int32_t coordinates[2] = {0, i % num_kv_tiles() * kTileKv};
    ptx::cp_async_bulk_tensor_load(to, &map, coordinates, full, ptx::CachePolicy::evict_last);
  }

  void load() const {
    set_role("load");
    for (int i = 0; i < num_steps(); ++i) {
      const int s = i % kStages;
      load_stage(p.k, k_tile(s).base, at(kKFull, s), at(kKEmpty, s), i);
      load_stage(p.v, v_tile(s).base, at(kVFull, s), at(kVEmpty, s), i);
    }
  }

  // ---- issue ----

  ptx::SmemDescriptor operand(ptx::MatrixDescriptor descriptor) const {
    if (is(Planted::base_offset_given)) descriptor |= std::uint64_t{1} << 49;
    if (is(Planted::descriptor_of_wgmma)) return {descriptor};
    return smem_descriptor(descriptor);
  }

  void issue_scores(int i) const {
    const int stage = i % kStages;
    constexpr ptx::InstructionDescriptor kRight = instruction_descriptor<kScoresProduct>();
    ptx::InstructionDescriptor instruction = kRight;
    if (is(Planted::reserved_bit_set)) instruction.bits |= 1U << 23;
    if (is(Planted::rows_of_no_shape)) instruction.bits ^= (8U ^ 6U) << 24;
    const auto a = operand(k_major_descriptor(q_tile())),
               b = operand(k_major_descriptor(k_tile(stage)));
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const int wrong = is(Planted::depth_step_wrong) ? 16 * step : 0;
      ptx::tcgen05_mma_ss<ptx::Tcgen05Kind::f16>(
          scores(i), advanced(a, k_major_offset<QTile>(step)),
          advanced(b, k_major_offset<KvTile>(step) - wrong), instruction,
          step > 0 || (is(Planted::first_product_accumulates) && i == 0));
    }
  }

  void issue_out(int i) const {
    const int n = i % num_kv_tiles();
    ptx::InstructionDescriptor instruction = instruction_descriptor<kOutProduct>();
    if (is(Planted::transposition_missing)) instruction.bits ^= 1U << 16;
    if (is(Planted::columns_of_the_other_product))
      instruction = instruction_descriptor<TensorProduct{
          .m = kTileQ, .n = kTileKv, .b_major = ptx::Major::mn}>();
    ptx::MatrixDescriptor plain = mn_major_descriptor(v_tile(i % kStages));
    if (is(Planted::offsets_swapped)) {
      const std::uint64_t leading = plain >> 16 & 0x3FFF, stride = plain >> 32 & 0x3FFF;
      plain ^= (leading ^ stride) << 16 | (leading ^ stride) << 32;
    }
    const auto b = operand(plain);
    for (int step = 0; step < kTileKv / 16; ++step) {
      bool is_accumulating = n > 0 || step > 0;
      if (is(Planted::first_product_accumulates_later_tiles)) is_accumulating |= i > 0;
      if (is(Planted::later_product_starts_anew)) is_accumulating = step > 0;
      ptx::tcgen05_mma_ts<ptx::Tcgen05Kind::f16>(out(), scores(i).plus_columns(8 * step),
                                                 advanced(b, mn_major_offset<KvTile>(step)),
                                                 instruction, is_accumulating);
    }
  }

  void step_scores(int i) const {
    const int stage = i % kStages, n = i % num_kv_tiles();
    if (n == 0) ptx::mbarrier_wait_parity(at(kQFull), parity(i / num_kv_tiles()));
    const bool is_early = is(Planted::scores_over_p_in_flight);
    if (i >= 2 && !is_early) ptx::mbarrier_wait_parity(at(kPvDone), parity(i - 2));
    ptx::mbarrier_wait_parity(at(kKFull, stage), parity(i / kStages));
    fence_after();
    issue_scores(i);
    if (is(Planted::commit_missing)) return;
    ptx::tcgen05_commit(at(kSFull, i % 2));
    if (is(Planted::stage_released_by_arrive)) {
      ptx::mbarrier_arrive(at(kKEmpty, stage));
    } else {
      ptx::tcgen05_commit(at(kKEmpty, stage));
    }
    if (n == num_kv_tiles() - 1) ptx::tcgen05_commit(at(kQEmpty));
  }

  void step_out(int i) const {
    const int stage = i % kStages;
    ptx::mbarrier_wait_parity(at(kVFull, stage), parity(i / kStages));
    ptx::mbarrier_wait_parity(at(kPFull, i % 2),
                              is(Planted::parity_never_flips) ? 0 : parity(i / 2));
    ptx::mbarrier_wait_parity(at(kOutScaled), parity(i));
    fence_after();
    issue_out(i);
    if (is(Planted::cta_group_mixed)) {
      ptx::tcgen05_commit<2>(at(kPvDone));
    } else {
      ptx::tcgen05_commit(at(kPvDone));
    }
    ptx::tcgen05_commit(at(kVEmpty, stage));
  }

  void issue() const {
    set_role("issue");
    for (int i = 0; i <= num_steps(); ++i) {
      if (i < num_steps()) step_scores(i);
      if (i > 0) step_out(i - 1);
    }
  }

  /// The first product, by every lane; or its commit by another one than issued it.
  void issue_wrongly() const {
    set_role("issue");
    ptx::mbarrier_wait_parity(at(kQFull), 0);
    ptx::mbarrier_wait_parity(at(kKFull), 0);
    fence_after();
    if (is(Planted::issued_by_all_lanes)) return issue_scores(0);
    if (lane == 0) issue_scores(0);
    ptx::sync_warp();
    if (lane == 1) ptx::tcgen05_commit(at(kSFull));
  }

  // ---- softmax ----

  void load_scores(float (&s)[kTileKv], int i) const {
    const bool is_elsewhere = is(Planted::load_of_another_quarter);
    ptx::TmemAddress from = own(scores(i));
    if (is_elsewhere) from = scores(i).plus_lanes(32 * ((warp + 1) % 4));
    if (is(Planted::addresses_differ_in_a_warp))
      from = scores(i).plus_lanes(32 * (warp % 4) + lane);
    ptx::tcgen05_ld_32x32b(s, from);
    if (is(Planted::load_used_before_wait)) {
      for (float& x : s) x = ptx::mul_rn(x, 1.0F);
    }
    if (is(Planted::load_not_named)) {
      float other[1];
      ptx::tcgen05_ld_32x32b(other, from);
      ptx::tcgen05_wait_ld(other);
    } else {
      ptx::tcgen05_wait_ld(s);
    }
  }

  void store_p(const float (&s)[kTileKv], int i) const {
    std::uint32_t pairs[kTileKv / 2];
    for (int j = 0; j < kTileKv / 2; ++j) pairs[j] = ptx::cvt_bf16x2(s[2 * j], s[2 * j + 1]);
    ptx::TmemAddress to = own(scores(i));
    if (is(Planted::store_to_another_quarter)) to = scores(i).plus_lanes(32 * ((warp + 1) % 4));
    ptx::tcgen05_st_32x32b(to, pairs);
    if (!is(Planted::store_not_waited)) ptx::tcgen05_wait_st();
  }

  void arrive_p(int i) const {
    fence_before();
    if (!is(Planted::p_arrives_without_sync_warp)) ptx::sync_warp();
    const bool is_silent = is(Planted::p_of_one_warp) && warp != 0;
    if (lane == 0 && !is_silent) ptx::mbarrier_arrive(at(kPFull, i % 2));
  }

  void give_factor(float factor, int use) const {
    ptx::mbarrier_wait_parity(at(kFactorEmpty), parity(use) ^ 1);
    ptx::st_shared(smem + kFactors + 4 * (32 * warp + lane), factor);
    ptx::sync_warp();
    if (lane == 0) ptx::mbarrier_arrive(at(kFactorFull));
  }

  void softmax() const {
    set_role("softmax");
    int i = 0, uses = 0;
    for (int tile = 0; tile < p.num_tiles; ++tile) {
      float row_max = -1e30F, row_sum = 0;
      for (int n = 0; n < num_kv_tiles(); ++n, ++i) {
        if (!is(Planted::scores_not_awaited)) {
          ptx::mbarrier_wait_parity(at(kSFull, i % 2), parity(i / 2));
        }
        fence_after();
        float s[kTileKv];
        if (is(Planted::p_arrives_before_its_load)) arrive_p(i);
        load_scores(s, i);
        if (is(Planted::p_over_unread_scores)) reload_second_half(s, i);
        const float before = row_max;
        for (int j = 0; j < kTileKv; ++j) {
          s[j] = ptx::mul_rn(s[j], p.softmax_scale_log2);
          if (n * kTileKv + j >= p.seqlen_kv) s[j] = -INFINITY;
          row_max = ptx::max_ftz(row_max, s[j]);
        }
        const float factor = ptx::ex2_approx_ftz(before - row_max);
        row_sum *= factor;
        for (float& x : s) {
          x = ptx::ex2_approx_ftz(x - row_max);
          row_sum += x;
        }
        give_factor(factor, uses++);
        store_p(s, i);
        if (!is(Planted::p_arrives_before_its_load)) arrive_p(i);
      }
      give_factor(ptx::rcp_approx_ftz(row_sum), uses++);
    }
  }

  /// What a schedule does that packs the first half of P before it has loaded the second half of S.
  void reload_second_half(float (&s)[kTileKv], int i) const {
    std::uint32_t pairs[8];
    for (int j = 0; j < 8; ++j) pairs[j] = ptx::cvt_bf16x2(s[2 * j], s[2 * j + 1]);
    ptx::tcgen05_st_32x32b(own(scores(i)).plus_columns(kTileKv / 2), pairs);
    ptx::tcgen05_wait_st();
    float half[kTileKv / 2];
    ptx::tcgen05_ld_32x32b(half, own(scores(i)).plus_columns(kTileKv / 2));
    ptx::tcgen05_wait_ld(half);
    for (int j = 0; j < kTileKv / 2; ++j) s[kTileKv / 2 + j] = half[j];
  }

  // ---- correct ----

  int row() const { return 32 * (warp % 4) + lane; }

  void copy_q(int tile) const {
    ptx::mbarrier_wait_parity(at(kQEmpty), parity(tile) ^ 1);
    const auto* from =
        reinterpret_cast<const ptx::U32x4*>(p.q + (tile * kTileQ + row()) * kHeadDim);
    for (int c = 0; c < QTile::kChunks; ++c)
      ptx::st_shared(q_tile().chunk(row(), c), ptx::ld_global(from + c));
    if (!is(Planted::proxy_fence_missing)) ptx::fence_proxy_async_shared_cta();
    ptx::sync_warp();
    if (lane == 0) ptx::mbarrier_arrive(at(kQFull));
  }

  float take_factor(int use) const {
    ptx::mbarrier_wait_parity(at(kFactorFull), parity(use));
    const float factor = ptx::ld_shared<float>(smem + kFactors + 4 * row());
    ptx::sync_warp();
    if (lane == 0) ptx::mbarrier_arrive(at(kFactorEmpty));
    return factor;
  }

  void arrive_scaled() const {
    fence_before();
    ptx::sync_warp();
    if (lane == 0) ptx::mbarrier_arrive(at(kOutScaled));
  }

  void scale_out(float factor, int i) const {
    ptx::mbarrier_wait_parity(at(kPvDone), parity(i - 1));
    fence_after();
    if (is(Planted::out_scaled_in_flight)) arrive_scaled();
    float o[kHeadDim];
    ptx::tcgen05_ld_32x32b(o, own(out()));
    ptx::tcgen05_wait_ld(o);
    for (float& x : o) x *= factor;
    ptx::tcgen05_st_32x32b(own(out()), o);
    ptx::tcgen05_wait_st();
  }

  void write_out(float factor, int tile, int last) const {
    const bool has_waited = is(Planted::next_tile_before_out_is_read) && tile + 1 < p.num_tiles;
    if (!is(Planted::out_read_in_flight) && !has_waited)
      ptx::mbarrier_wait_parity(at(kPvDone), parity(last));
    fence_after();
    float o[kHeadDim];
    ptx::tcgen05_ld_32x32b(o, own(out()));
    const bool is_last = tile == p.num_tiles - 1;
    if (is(Planted::load_not_waited_at_exit) && is_last) return;
    ptx::tcgen05_wait_ld(o);
    for (int j = 0; j < kHeadDim; ++j)
      ptx::st_global(p.out + (tile * kTileQ + row()) * kHeadDim + j, ptx::mul_rn(o[j], factor));
  }

  void correct() const {
    set_role("correct");
    int i = 0, uses = 0;
    copy_q(0);
    for (int tile = 0; tile < p.num_tiles; ++tile) {
      for (int n = 0; n < num_kv_tiles(); ++n, ++i) {
        const float factor = take_factor(uses++);
        if (n > 0) scale_out(factor, i);
        const bool has_come = is(Planted::next_tile_before_out_is_read) && n == 0 && tile > 0;
        const bool is_skipped = is(Planted::correct_skips_an_arrival) && n == 1 && warp == 5;
        const bool is_early = is(Planted::out_scaled_in_flight) && n > 0;
        if (!has_come && !is_skipped && !is_early) arrive_scaled();
      }
      // Before the end of this tile: QK of the next one is issued before the last PV of this one.
      if (tile + 1 < p.num_tiles) copy_q(tile + 1);
      if (is(Planted::next_tile_before_out_is_read) && tile + 1 < p.num_tiles) {
        ptx::mbarrier_wait_parity(at(kPvDone), parity(i - 1));
        arrive_scaled();
      }
      write_out(take_factor(uses++), tile, i - 1);
    }
  }

  void run() {
    set_up();
    if (warp < kSoftmaxWarps) {
      softmax();
    } else if (warp < kIssueWarp) {
      correct();
    } else if (warp == kLoadWarp) {
      if (ptx::elect_one()) load();
    } else if (is(Planted::issued_by_all_lanes) || is(Planted::committed_by_another_lane)) {
      issue_wrongly();
    } else if (ptx::elect_one()) {
      issue();
    }
    tear_down();
  }
};

template <Planted planted>
FOVEA_DEVICE void attention(const Params& p) {
  Kernel<planted>{p}.run();
}

}  // namespace fovea::cuda::guest100
