// A small warp-specialised attention kernel for sm_90a, and the mistakes that people make in such a kernel. Warpgroup
// 0: warp 0 loads Q, K, V by TMA, warp 1 stores finished tiles; warpgroups 1 and 2 own 64 queries each. head_dim 128,
// tiles of 32 keys in two stages.
//
//   consumer, key tile n:   S(n) = Q Kᵀ | O += P(n-1) V | wait S | softmax | wait O | rescale O, P(n)
//
// Planted::nothing is the right one; each other value changes one line.
#pragma once

#include "common/role.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/generated/wgmma_bf16.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "tile/fragment.cuh"
#include "tile/matrix_descriptor.cuh"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::guest90 {

enum class Planted {
  nothing,
  empty_wait_missing,
  empty_arrive_missing,
  empty_count_too_low,
  empty_count_too_high,
  one_arrival_for_a_warpgroup,
  release_before_wgmma_wait,
  expected_bytes_too_few,
  expected_bytes_too_many,
  expect_missing,
  producer_parity_wrong,
  consumer_parity_wrong,
  parity_never_flips,
  mbarrier_fence_missing,
  barrier_after_init_missing,
  proxy_fence_missing,
  proxy_fence_by_the_reader,
  wgmma_fence_missing,
  wgmma_fence_before_p,
  wgmma_commit_missing,
  accumulator_read_before_wait,
  p_overwritten_in_flight,
  out_scaled_in_flight,
  last_wait_missing,
  warp_skips_a_product,
  stride_offset_wrong,
  leading_offset_wrong,
  swizzle_of_descriptor_wrong,
  depth_step_wrong,
  tail_unmasked,
  coordinates_swapped,
  stage_overlaps_barriers,
  store_read_not_waited,
  store_not_waited_at_exit,
  registers_beyond_the_pool,
  registers_of_one_warp,
  turn_count_wrong,
};

struct Params {
  // [head_dim / 64, rows, 64]: panels of 64 elements, innermost first in the map
  ptx::TensorMap q, k, v, out;
  std::int32_t seqlen_kv, num_tiles;
  float softmax_scale_log2;
};

inline constexpr int kHeadDim = 128, kTileQ = 128, kTileKv = 32, kThreads = 384, kStages = 2;
inline constexpr int kConsumers = 2, kConsumerWarps = 8;

using QTile = SharedTile<64, 2 * kHeadDim, Swizzle::bytes128>;
using KvTile = SharedTile<kTileKv, 2 * kHeadDim, Swizzle::bytes128>;

// Offsets into shared memory; O takes the place of its Q.
inline constexpr int kQ = 0, kK = kQ + kConsumers * QTile::kBytes,
                     kV = kK + kStages * KvTile::kBytes, kBarriers = kV + kStages * KvTile::kBytes;
inline constexpr int kQFull = kBarriers, kQEmpty = kQFull + 16, kKFull = kQEmpty + 16,
                     kKEmpty = kKFull + 16, kVFull = kKEmpty + 16, kVEmpty = kVFull + 16,
                     kOutFull = kVEmpty + 16;
inline constexpr int kSharedBytes = kOutFull + 16;

/// Which stage comes next, and the parity that its barrier is waited for with.
struct Ring {
  int stage = 0;
  std::uint32_t parity = 0;

  FOVEA_DEVICE_MEMBER void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <Planted planted>
struct Kernel {
  const Params& p;
  ptx::SharedAddress smem = ptx::dynamic_shared();
  int warp = ptx::warp_idx(), lane = ptx::lane_idx();

  static constexpr bool is(Planted other) { return planted == other; }

  ptx::SharedAddress at(int offset, int index = 0) const { return smem + offset + 8 * index; }
  QTile q_tile(int consumer) const { return {smem + kQ + consumer * QTile::kBytes}; }
  KvTile k_tile(int stage) const { return {smem + kK + stage * KvTile::kBytes}; }
  KvTile v_tile(int stage) const { return {smem + kV + stage * KvTile::kBytes}; }
  int num_kv_tiles() const { return (p.seqlen_kv + kTileKv - 1) / kTileKv; }

  void set_up() const {
    if (warp == 0 && ptx::elect_one()) {
      std::uint32_t releases = is(Planted::one_arrival_for_a_warpgroup) ? 2 : kConsumerWarps;
      if (is(Planted::empty_count_too_low)) releases -= 1;
      if (is(Planted::empty_count_too_high)) releases += 1;
      for (int i = 0; i < 2; ++i) {
        ptx::mbarrier_init(at(kQFull, i), 1);
        ptx::mbarrier_init(at(kQEmpty, i), 1);
        ptx::mbarrier_init(at(kKFull, i), 1);
        ptx::mbarrier_init(at(kKEmpty, i), releases);
        ptx::mbarrier_init(at(kVFull, i), 1);
        ptx::mbarrier_init(at(kVEmpty, i), kConsumerWarps);
        ptx::mbarrier_init(at(kOutFull, i), 4);
      }
      if (!is(Planted::mbarrier_fence_missing)) ptx::fence_mbarrier_init_release_cluster();
    }
    if (!is(Planted::barrier_after_init_missing)) ptx::sync_threads();
  }

  // ---- load ----

  void load_kv(const ptx::TensorMap& map, ptx::SharedAddress to, ptx::SharedAddress full,
               ptx::SharedAddress empty, const Ring& ring, int tile) const {
    const std::uint32_t start = is(Planted::producer_parity_wrong) ? 0 : 1;
    if (!is(Planted::empty_wait_missing)) ptx::mbarrier_wait_parity(empty, ring.parity ^ start);
    std::uint32_t bytes = KvTile::kBytes;
    if (is(Planted::expected_bytes_too_few)) bytes -= 128;
    if (is(Planted::expected_bytes_too_many)) bytes += 128;
    if (is(Planted::expect_missing)) {
      ptx::mbarrier_arrive(full);
    } else {
      ptx::mbarrier_arrive_expect_tx(full, bytes);
    }
    const bool is_swapped = is(Planted::coordinates_swapped);
    const std::int32_t row = tile * kTileKv;
    const std::int32_t coordinates[3] = {is_swapped ? row : 0, is_swapped ? 0 : row, 0};
    ptx::cp_async_bulk_tensor_load(to, &map, coordinates, full, ptx::CachePolicy::evict_last);
  }

  void load() const {
    set_role("load");
    Ring kv;
    for (int tile = 0; tile < p.num_tiles; ++tile) {
      for (int c = 0; c < kConsumers; ++c) {
        ptx::mbarrier_wait_parity(at(kQEmpty, c), (tile & 1) ^ 1);
        ptx::mbarrier_arrive_expect_tx(at(kQFull, c), QTile::kBytes);
        const std::int32_t coordinates[3] = {0, tile * kTileQ + 64 * c, 0};
        ptx::cp_async_bulk_tensor_load(q_tile(c).base, &p.q, coordinates, at(kQFull, c),
                                       ptx::CachePolicy::evict_first);
      }
      for (int n = 0; n < num_kv_tiles(); ++n, kv.next()) {
        const int s = kv.stage;
        load_kv(p.k, k_tile(s).base, at(kKFull, s), at(kKEmpty, s), kv, n);
        const int beyond = is(Planted::stage_overlaps_barriers) && s == 1 ? 128 : 0;
        load_kv(p.v, v_tile(s).base + beyond, at(kVFull, s), at(kVEmpty, s), kv, n);
      }
    }
  }

  // ---- store ----

  void store() const {
    set_role("store");
    for (int tile = 0; tile < p.num_tiles; ++tile) {
      for (int c = 0; c < kConsumers; ++c) {
        ptx::mbarrier_wait_parity(at(kOutFull, c), tile & 1);
        if (is(Planted::proxy_fence_by_the_reader)) ptx::fence_proxy_async_shared_cta();
        const std::int32_t coordinates[3] = {0, tile * kTileQ + 64 * c, 0};
        ptx::cp_async_bulk_tensor_store(&p.out, coordinates, q_tile(c).base);
        ptx::cp_async_bulk_commit_group();
        if (!is(Planted::store_read_not_waited) && !is(Planted::store_not_waited_at_exit)) {
          ptx::cp_async_bulk_wait_group_read<0>();
        }
        ptx::mbarrier_arrive(at(kQEmpty, c));
      }
    }
    if (!is(Planted::store_not_waited_at_exit)) ptx::cp_async_bulk_wait_group<0>();
  }

  // ---- compute ----

  struct State {
    int consumer, row_warp;
    Ring kv, v;
    float s[kTileKv / 2], o[kHeadDim / 2];
    std::uint32_t p[kTileKv / 16][4];
    float row_max[2], row_sum[2], factor[2];
  };

  void release(ptx::SharedAddress empty, const State& state) const {
    if (is(Planted::empty_arrive_missing)) return;
    ptx::sync_warp();
    if (lane == 0) {
      if (is(Planted::one_arrival_for_a_warpgroup) && state.row_warp != 0 && empty < at(kVFull)) {
        return;
      }
      ptx::mbarrier_arrive(empty);
    }
  }

  void issue_scores(State& state) const {
    if (is(Planted::warp_skips_a_product) && state.row_warp == 3) return;
    const QTile q = q_tile(state.consumer);
    const KvTile k = k_tile(state.kv.stage);
    ptx::MatrixDescriptor a = k_major_descriptor(q), b = k_major_descriptor(k);
    if (is(Planted::stride_offset_wrong)) b ^= std::uint64_t{(1024 ^ 512) >> 4} << 32;
    if (is(Planted::swizzle_of_descriptor_wrong)) b ^= std::uint64_t{3} << 62;
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const int wrong = is(Planted::depth_step_wrong) ? 16 * step : 0;
      ptx::wgmma_ss<ptx::WgmmaType::bf16, ptx::WgmmaType::bf16, kTileKv>(
          state.s, advanced(a, k_major_offset<QTile>(step)),
          advanced(b, k_major_offset<KvTile>(step) - wrong), step > 0);
    }
  }

  void issue_values(State& state, bool is_first) const {
    const KvTile v = v_tile(state.v.stage);
    ptx::MatrixDescriptor b = mn_major_descriptor(v);
    if (is(Planted::leading_offset_wrong)) b ^= std::uint64_t{1024 >> 4} << 16;
    for (int step = 0; step < kTileKv / 16; ++step) {
      ptx::wgmma_rs<ptx::WgmmaType::bf16, ptx::WgmmaType::bf16, kHeadDim, ptx::Major::mn>(
          state.o, state.p[step], advanced(b, mn_major_offset<KvTile>(step)),
          step > 0 || !is_first);
    }
  }

  void softmax(State& state, int n) const {
    float next[2] = {state.row_max[0], state.row_max[1]};
    for (int i = 0; i < kTileKv / 2; ++i) {
      const int key = n * kTileKv + accumulator_coordinate(lane, i).column;
      state.s[i] = ptx::mul_rn(state.s[i], p.softmax_scale_log2);
      if (key >= p.seqlen_kv && !is(Planted::tail_unmasked)) state.s[i] = -INFINITY;
      next[i / 2 % 2] = ptx::max_ftz(next[i / 2 % 2], state.s[i]);
    }
    for (int r = 0; r < 2; ++r) {
      next[r] = ptx::max_ftz(next[r], ptx::shfl_bfly(next[r], 1));
      next[r] = ptx::max_ftz(next[r], ptx::shfl_bfly(next[r], 2));
      state.factor[r] = ptx::ex2_approx_ftz(state.row_max[r] - next[r]);
      state.row_max[r] = next[r];
      state.row_sum[r] *= state.factor[r];
    }
    for (int i = 0; i < kTileKv / 2; ++i) {
      state.s[i] = ptx::ex2_approx_ftz(state.s[i] - state.row_max[i / 2 % 2]);
      state.row_sum[i / 2 % 2] += state.s[i];
    }
  }

  void convert(State& state) const {
    for (int i = 0; i < kTileKv / 4; ++i) {
      state.p[i / 4][i % 4] = ptx::cvt_bf16x2(state.s[2 * i], state.s[2 * i + 1]);
    }
  }

  void rescale(State& state) const {
    for (int i = 0; i < kHeadDim / 2; ++i) state.o[i] *= state.factor[i / 2 % 2];
  }

  void fence() const {
    if (!is(Planted::wgmma_fence_missing)) ptx::wgmma_fence();
  }

  // The warpgroups issue their products in turn.
  void take_turn(const State& state) const {
    const bool is_wrong = is(Planted::turn_count_wrong) && state.consumer == 1;
    ptx::bar_sync(1 + state.consumer, is_wrong ? 128 : 256);
  }
  void pass_turn(const State& state) const { ptx::bar_arrive(2 - state.consumer, 256); }

  void first_scores(State& state) const {
    const std::uint32_t start = is(Planted::consumer_parity_wrong) ? 1 : 0;
    const Ring& kv = state.kv;
    const std::uint32_t parity = is(Planted::parity_never_flips) ? 0 : kv.parity;
    ptx::mbarrier_wait_parity(at(kKFull, kv.stage), parity ^ start);
    take_turn(state);
    fence();
    issue_scores(state);
    if (is(Planted::release_before_wgmma_wait)) release(at(kKEmpty, kv.stage), state);
    ptx::wgmma_commit_group();
    pass_turn(state);
    if (!is(Planted::accumulator_read_before_wait)) ptx::wgmma_wait_group<0>();
    if (!is(Planted::release_before_wgmma_wait)) release(at(kKEmpty, kv.stage), state);
    state.kv.next();
  }

  void step(State& state, int n) const {
    const int k_stage = state.kv.stage, v_stage = state.v.stage;
    ptx::mbarrier_wait_parity(at(kKFull, k_stage), state.kv.parity);
    take_turn(state);
    fence();
    issue_scores(state);
    ptx::wgmma_commit_group();
    // P again, the same but for its sign bit: what a schedule that converts after the fence does.
    if (is(Planted::wgmma_fence_before_p)) state.p[0][0] ^= 0x8000;
    ptx::mbarrier_wait_parity(at(kVFull, v_stage), state.v.parity);
    issue_values(state, n == 1);
    if (!is(Planted::wgmma_commit_missing)) ptx::wgmma_commit_group();
    pass_turn(state);
    ptx::wgmma_wait_group<1>();
    release(at(kKEmpty, k_stage), state);
    state.kv.next();
    softmax(state, n);
    if (is(Planted::p_overwritten_in_flight)) convert(state);
    if (is(Planted::out_scaled_in_flight)) rescale(state);
    ptx::wgmma_wait_group<0>();
    release(at(kVEmpty, v_stage), state);
    state.v.next();
    if (!is(Planted::out_scaled_in_flight)) rescale(state);
    convert(state);
  }

  void last_values(State& state, bool is_first) const {
    const int stage = state.v.stage;
    ptx::mbarrier_wait_parity(at(kVFull, stage), state.v.parity);
    fence();
    issue_values(state, is_first);
    ptx::wgmma_commit_group();
    if (!is(Planted::last_wait_missing)) ptx::wgmma_wait_group<0>();
    release(at(kVEmpty, stage), state);
    state.v.next();
  }

  // O as bf16 where Q was: each warp writes the 16 rows that only it read.
  void write_out(State& state) const {
    const QTile tile = q_tile(state.consumer);
    float inverse[2];
    for (int r = 0; r < 2; ++r) {
      float sum = state.row_sum[r];
      sum += ptx::shfl_bfly(sum, 1);
      sum += ptx::shfl_bfly(sum, 2);
      inverse[r] = ptx::rcp_approx_ftz(sum);
    }
    const int matrix = lane / 8, row = 16 * state.row_warp + lane % 8 + 8 * (matrix % 2);
    for (int j = 0; j < kHeadDim / 16; ++j) {
      std::uint32_t pairs[4];
      for (int i = 0; i < 4; ++i) {
        const float factor = inverse[i % 2];
        pairs[i] =
            ptx::cvt_bf16x2(state.o[8 * j + 2 * i] * factor, state.o[8 * j + 2 * i + 1] * factor);
      }
      ptx::stmatrix_x4(tile.chunk(row, 2 * j + matrix / 2),
                       {pairs[0], pairs[1], pairs[2], pairs[3]});
    }
    const bool is_fenced =
        !is(Planted::proxy_fence_missing) && !is(Planted::proxy_fence_by_the_reader);
    if (is_fenced) ptx::fence_proxy_async_shared_cta();
    ptx::sync_warp();
    if (lane == 0) ptx::mbarrier_arrive(at(kOutFull, state.consumer));
  }

  void compute() const {
    set_role("compute");
    State state{};
    state.consumer = warp / 4 - 1;
    state.row_warp = warp % 4;
    if (state.consumer == 1) ptx::bar_arrive(1, 256);  // consumer 0 goes first
    for (int tile = 0; tile < p.num_tiles; ++tile) {
      for (int r = 0; r < 2; ++r) {
        state.row_max[r] = -1e30F;
        state.row_sum[r] = 0;
      }
      ptx::mbarrier_wait_parity(at(kQFull, state.consumer), tile & 1);
      first_scores(state);
      softmax(state, 0);
      convert(state);
      for (int n = 1; n < num_kv_tiles(); ++n) step(state, n);
      last_values(state, num_kv_tiles() == 1);
      write_out(state);
    }
    if (state.consumer == 0) ptx::bar_sync(1, 256);  // the turn that nobody takes
  }

  void run() const {
    set_up();
    // 384 threads start with 168 registers: 3 x 168 = 24 + 2 x 240.
    if (warp < 4) {
      if (is(Planted::registers_of_one_warp) && warp != 0) {
        // One warp alone gives back what all four should.
      } else if (is(Planted::registers_beyond_the_pool)) {
        ptx::setmaxnreg_dec<40>();
      } else {
        ptx::setmaxnreg_dec<24>();
      }
      if (warp == 0 && ptx::elect_one()) load();
      if (warp == 1 && ptx::elect_one()) store();
    } else {
      if (!is(Planted::registers_of_one_warp)) ptx::setmaxnreg_inc<240>();
      compute();
    }
  }
};

template <Planted planted>
FOVEA_DEVICE void attention(const Params& p) {
  Kernel<planted>{p}.run();
}

}  // namespace fovea::cuda::guest90
