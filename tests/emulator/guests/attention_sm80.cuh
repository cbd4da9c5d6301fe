// A small attention kernel for sm_80, and the mistakes that people make in such a kernel. One CTA: 4 warps, 64 queries,
// head_dim 64, tiles of 32 keys in two stages. Planted::nothing is the right one; each other value changes one line.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"

namespace fovea::cuda::guest80 {

enum class Planted {
  nothing,
  wait_group_missing,
  wait_group_one_too_late,
  commit_group_missing,
  barrier_after_wait_missing,
  barrier_before_reuse_missing,
  barrier_skipped_by_a_warp,
  barrier_count_wrong,
  swizzle_differs,
  transposed_load_missing,
  tail_unmasked,
  scale_applied_twice,
  rescale_forgotten,
  tail_rows_read,
  tail_rows_not_filled,
  ldmatrix_misaligned,
  tile_beyond_shared,
  lanes_diverge,
  warp_sync_missing,
  offset_of_32_bits,
  ctas_write_one_row,
};

struct Params {
  const std::uint16_t* q;  // [64, 64] of each CTA, bf16
  const std::uint16_t* k;  // [seqlen_kv, 64]
  const std::uint16_t* v;  // [seqlen_kv, 64]
  float* out;              // [64, 64] of each CTA
  std::int64_t k_row_stride;
  std::int32_t seqlen_kv;
  float softmax_scale_log2;
};

inline constexpr int kTileQ = 64, kHeadDim = 64, kTileKv = 32, kThreads = 128;
inline constexpr int kRowBytes = 128, kChunks = 8;
inline constexpr int kStageBytes = kTileKv * kRowBytes;
inline constexpr int kQBytes = kTileQ * kRowBytes;
inline constexpr int kRowSumBytes = kTileQ * 4;
inline constexpr int kSharedBytes = kQBytes + 4 * kStageBytes + kRowSumBytes;

FOVEA_DEVICE std::uint32_t at(int row, int chunk) {
  return static_cast<std::uint32_t>(row * kRowBytes + ((chunk ^ (row & 7)) << 4));
}

template <Planted planted>
struct Kernel {
  Params p;
  ptx::SharedAddress q_smem = ptx::dynamic_shared(), k_smem = q_smem + kQBytes,
                     v_smem = k_smem + 2 * kStageBytes, sum_smem = v_smem + 2 * kStageBytes;
  int thread = ptx::thread_idx().x, lane = ptx::lane_idx(), warp = ptx::warp_idx();
  float o[kHeadDim / 8][4] = {};
  float row_max[2] = {-1e30F, -1e30F}, row_sum[2] = {0, 0};

  static constexpr bool is(Planted other) { return planted == other; }

  void copy_q() {
    const std::uint16_t* q = p.q + ptx::block_idx().x * kTileQ * kHeadDim;
    for (int i = thread; i < kTileQ * kChunks; i += kThreads) {
      ptx::cp_async_16(q_smem + at(i / kChunks, i % kChunks), q + 8 * i, 16);
    }
  }

  void copy_tile(int tile) {
    for (int i = thread; i < kTileKv * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks, key = tile * kTileKv + row;
      const bool is_there = key < p.seqlen_kv || is(Planted::tail_rows_read);
      if (is(Planted::tail_rows_not_filled) && !is_there) continue;
      const int source = is_there ? key : 0;
      std::int64_t offset = source * p.k_row_stride;
      if (is(Planted::offset_of_32_bits)) {
        offset = static_cast<std::int32_t>(static_cast<std::uint32_t>(offset));
      }
      const std::uint32_t to = (tile % 2) * kStageBytes + at(row, chunk);
      const std::uint32_t bytes = is_there ? 16 : 0;
      const std::uint32_t beyond =
          is(Planted::tile_beyond_shared) && row == kTileKv - 1 ? 4 * kStageBytes : 0;
      ptx::cp_async_16(k_smem + to, p.k + offset + 8 * chunk, bytes);
      ptx::cp_async_16(v_smem + to + beyond, p.v + source * kHeadDim + 8 * chunk, bytes);
    }
  }

  void scores(int tile, float (&s)[kTileKv / 8][4]) {
    const ptx::SharedAddress base = k_smem + (tile % 2) * kStageBytes;
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const int row = 16 * warp + lane % 16;
      const ptx::U32x4 a4 = ptx::ldmatrix_x4(q_smem + at(row, 2 * step + lane / 16));
      const std::uint32_t a[4] = {a4.x, a4.y, a4.z, a4.w};
      for (int n = 0; n < kTileKv / 16; ++n) {
        const int key = 16 * n + lane % 8 + 8 * (lane / 16), chunk = 2 * step + lane / 8 % 2;
        ptx::SharedAddress from = base + at(key, chunk);
        if (is(Planted::swizzle_differs)) from = base + key * kRowBytes + 16 * chunk;
        if (is(Planted::ldmatrix_misaligned)) from += 8;
        const ptx::U32x4 b = ptx::ldmatrix_x4(from);
        ptx::mma_m16n8k16<Element::bf16>(s[2 * n], a, b.x, b.y);
        ptx::mma_m16n8k16<Element::bf16>(s[2 * n + 1], a, b.z, b.w);
      }
    }
  }

  void softmax(int tile, float (&s)[kTileKv / 8][4]) {
    float next[2] = {row_max[0], row_max[1]};
    for (int i = 0; i < kTileKv / 2; ++i) {
      float& x = s[i / 4][i % 4];
      const int key = tile * kTileKv + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      x = x * p.softmax_scale_log2 * (is(Planted::scale_applied_twice) ? 0.125F : 1.0F);
      if (key >= p.seqlen_kv && !is(Planted::tail_unmasked)) x = -INFINITY;
      next[i / 2 % 2] = ptx::max_ftz(next[i / 2 % 2], x);
    }
    for (int r = 0; r < 2; ++r) {
      next[r] = ptx::max_ftz(next[r], ptx::shfl_bfly(next[r], 1));
      next[r] = ptx::max_ftz(next[r], ptx::shfl_bfly(next[r], 2));
      const float factor = ptx::ex2_approx_ftz(row_max[r] - next[r]);
      row_max[r] = next[r];
      row_sum[r] *= factor;
      if (is(Planted::rescale_forgotten)) continue;
      for (float(&column)[4] : o) {
        column[2 * r] *= factor;
        column[2 * r + 1] *= factor;
      }
    }
    for (int i = 0; i < kTileKv / 2; ++i) {
      float& x = s[i / 4][i % 4];
      x = ptx::ex2_approx_ftz(x - row_max[i / 2 % 2]);
      row_sum[i / 2 % 2] += x;
    }
  }

  void add_values(int tile, const float (&s)[kTileKv / 8][4]) {
    const ptx::SharedAddress base = v_smem + (tile % 2) * kStageBytes;
    for (int step = 0; step < kTileKv / 16; ++step) {
      const auto &lo = s[2 * step], &hi = s[2 * step + 1];
      const std::uint32_t a[4] = {ptx::cvt_bf16x2(lo[0], lo[1]), ptx::cvt_bf16x2(lo[2], lo[3]),
                                  ptx::cvt_bf16x2(hi[0], hi[1]), ptx::cvt_bf16x2(hi[2], hi[3])};
      for (int n = 0; n < kHeadDim / 16; ++n) {
        const ptx::SharedAddress from = base + at(16 * step + lane % 16, 2 * n + lane / 16);
        ptx::U32x4 b{};
        if (is(Planted::lanes_diverge) && lane < 16) {
          b = ptx::ldmatrix_x4_trans(from);
        } else if (is(Planted::transposed_load_missing)) {
          b = ptx::ldmatrix_x4(from);
        } else {
          b = ptx::ldmatrix_x4_trans(from);
        }
        ptx::mma_m16n8k16<Element::bf16>(o[2 * n], a, b.x, b.y);
        ptx::mma_m16n8k16<Element::bf16>(o[2 * n + 1], a, b.z, b.w);
      }
    }
  }

  // Row sums go through shared memory, so that lanes of a warp exchange something there.
  void finish() {
    for (int r = 0; r < 2; ++r) {
      row_sum[r] += ptx::shfl_bfly(row_sum[r], 1);
      row_sum[r] += ptx::shfl_bfly(row_sum[r], 2);
      const int row = 16 * warp + lane / 4 + 8 * r;
      if (lane % 4 == 0) ptx::st_shared(sum_smem + 4 * row, row_sum[r]);
    }
    if (!is(Planted::warp_sync_missing)) ptx::sync_warp();
    const int cta = is(Planted::ctas_write_one_row) ? 0 : ptx::block_idx().x;
    for (int i = 0; i < kHeadDim / 2; ++i) {
      const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2);
      const int column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      const float sum = ptx::ld_shared<float>(sum_smem + 4 * row);
      ptx::st_global(p.out + (cta * kTileQ + row) * kHeadDim + column, o[i / 4][i % 4] / sum);
    }
  }

  void wait(bool is_last) {
    if (is(Planted::wait_group_missing)) return;
    if (is_last && !is(Planted::wait_group_one_too_late)) {
      ptx::cp_async_wait_group<0>();
    } else {
      ptx::cp_async_wait_group<1>();
    }
  }

  void barrier() {
    if (is(Planted::barrier_skipped_by_a_warp) && warp == 2) return;
    if (is(Planted::barrier_count_wrong)) {
      ptx::bar_sync(1, warp == 3 ? 96 : 128);
    } else {
      ptx::sync_threads();
    }
  }

  void run() {
    const int tiles = (p.seqlen_kv + kTileKv - 1) / kTileKv;
    copy_q();
    copy_tile(0);
    ptx::cp_async_commit_group();
    for (int tile = 0; tile < tiles; ++tile) {
      const bool is_last = tile + 1 == tiles;
      if (!is_last) {
        copy_tile(tile + 1);
        if (!is(Planted::commit_group_missing)) ptx::cp_async_commit_group();
      }
      wait(is_last);
      if (!is(Planted::barrier_after_wait_missing)) barrier();
      float s[kTileKv / 8][4] = {};
      scores(tile, s);
      softmax(tile, s);
      add_values(tile, s);
      if (!is(Planted::barrier_before_reuse_missing)) barrier();
    }
    finish();
  }
};

template <Planted planted>
FOVEA_DEVICE void attention(const Params& p) {
  Kernel<planted>{p}.run();
}

}  // namespace fovea::cuda::guest80
