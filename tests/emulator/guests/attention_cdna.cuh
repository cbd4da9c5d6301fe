// A small attention kernel for AMD's CDNA, and the mistakes that people make in such a kernel. One workgroup: 2 waves,
// 64 queries, head_dim 64, tiles of 32 keys in two stages that are copied straight to LDS. Planted::nothing is the
// right one; each other value changes one line.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/copy_to_shared.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mfma.cuh"
#include "ptx/warp.cuh"

namespace fovea::cuda::guest_cdna {

enum class Planted {
  nothing,
  wait_missing,
  wait_one_copy_short,
  barrier_before_reuse_missing,
  fence_before_barrier_missing,
  fence_after_barrier_missing,
  destination_by_lane,  // a swizzle where it cannot be
  swizzle_differs,
  lane_halves_swapped,
  keys_of_halves_swapped,
  row_exchanged_within_half,
};

struct Params {
  const std::uint16_t* q;  // [64, 64], bf16
  const std::uint16_t* k;  // [seqlen_kv, 64]
  const std::uint16_t* v;  // [seqlen_kv, 64]
  float* out;              // [64, 64]
  std::int32_t seqlen_kv;  // whole tiles
  float softmax_scale_log2;
};

inline constexpr int kTileQ = 64, kHeadDim = 64, kTileKv = 32, kWaves = 2, kThreads = 128;
inline constexpr int kRowBytes = 128, kCopyBytes = 4 * 64, kRowsOfCopy = kCopyBytes / kRowBytes;
inline constexpr int kTileBytes = kTileKv * kRowBytes;
inline constexpr int kSharedBytes = 4 * kTileBytes;
/// Of a wave, of keys and values.
inline constexpr int kCopiesOfTile = 2 * kTileBytes / kCopyBytes / kWaves;

template <Planted planted>
struct Kernel {
  Params p;
  ptx::SharedAddress smem = ptx::dynamic_shared();
  int lane = ptx::lane_idx(), warp = ptx::warp_idx();
  int column = lane % 32, half = lane / 32;
  float o[kHeadDim / 32][16] = {};
  float row_max = -1e30F, row_sum = 0;

  static constexpr bool is(Planted other) { return planted == other; }

  ptx::SharedAddress keys_at(int tile) const { return smem + tile % 2 * 2 * kTileBytes; }
  ptx::SharedAddress values_at(int tile) const { return keys_at(tile) + kTileBytes; }

  /// 16 bytes of row `row`, as the copies left them.
  static ptx::SharedAddress chunk(ptx::SharedAddress tile, int row, int i) {
    const int permuted = is(Planted::swizzle_differs) ? i : i ^ row % 8;
    return tile + row * kRowBytes + 16 * permuted;
  }

  /// Lane l brings 4 bytes to a place that is not its choice: what it chooses is which bytes.
  void copy_rows(ptx::SharedAddress to, const std::uint16_t* from, int copy) const {
    const int row = copy * kRowsOfCopy + lane / 32, i = lane % 32 / 4 ^ row % 8;
    ptx::SharedAddress at = to + copy * kCopyBytes;
    if (is(Planted::destination_by_lane)) at += 16 * static_cast<std::uint32_t>(row % 8);
    ptx::copy_to_shared<4>(at, from + row * kHeadDim + 8 * i + 2 * (lane % 4));
  }

  void copy_tile(int tile) const {
    for (int i = 0; i < kCopiesOfTile / 2; ++i) {
      copy_rows(keys_at(tile), p.k + tile * kTileKv * kHeadDim, i * kWaves + warp);
      copy_rows(values_at(tile), p.v + tile * kTileKv * kHeadDim, i * kWaves + warp);
    }
  }

  /// Sᵀ = K Qᵀ: this lane has 16 keys of query `column`.
  void scores(int tile, float (&s)[16]) const {
    const std::uint16_t* const query = p.q + (32 * warp + column) * kHeadDim;
    const int depth_half = is(Planted::lane_halves_swapped) ? 1 - half : half;
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const auto k =
          ptx::ld_shared<ptx::U32x4>(chunk(keys_at(tile), column, 2 * step + depth_half));
      const auto q =
          ptx::ld_global(reinterpret_cast<const ptx::U32x4*>(query + 8 * (2 * step + half)));
      ptx::mfma_32x32x8<Element::bf16>(s, {k.x, k.y}, {q.x, q.y});
      ptx::mfma_32x32x8<Element::bf16>(s, {k.z, k.w}, {q.z, q.w});
    }
  }

  void softmax(float (&s)[16]) {
    float next = row_max;
    for (float& x : s) next = ptx::max_ftz(next, x *= p.softmax_scale_log2);
    next =
        ptx::max_ftz(next, ptx::shfl_bfly(next, is(Planted::row_exchanged_within_half) ? 16 : 32));
    const float factor = ptx::ex2_approx_ftz(row_max - next);
    row_max = next;
    row_sum *= factor;
    for (float(&block)[16] : o)
      for (float& sum : block) sum *= factor;
    for (float& x : s) row_sum += x = ptx::ex2_approx_ftz(x - row_max);
  }

  std::uint32_t value(int tile, int key, int column_of_values) const {
    return ptx::ld_shared<std::uint16_t>(chunk(values_at(tile), key, column_of_values / 8) +
                                         2 * (column_of_values % 8));
  }

  /// Oᵀ += Vᵀ Pᵀ: four sums of Sᵀ, rounded, are Pᵀ as the product takes it.
  void add_values(int tile, const float (&s)[16]) {
    const int key_half = is(Planted::keys_of_halves_swapped) ? 1 - half : half;
    for (int step = 0; step < kTileKv / 8; ++step) {
      const float* const x = s + 4 * step;
      const ptx::U32x2 b{ptx::cvt_bf16x2(x[0], x[1]), ptx::cvt_bf16x2(x[2], x[3])};
      const int key = 8 * step + 4 * key_half;
      for (int block = 0; block < kHeadDim / 32; ++block) {
        const int mine = 32 * block + column;
        const ptx::U32x2 a{value(tile, key, mine) | value(tile, key + 1, mine) << 16,
                           value(tile, key + 2, mine) | value(tile, key + 3, mine) << 16};
        ptx::mfma_32x32x8<Element::bf16>(o[block], a, b);
      }
    }
  }

  void finish() {
    row_sum += ptx::shfl_bfly(row_sum, 32);
    float* const row = p.out + (32 * warp + column) * kHeadDim;
    for (int block = 0; block < kHeadDim / 32; ++block)
      for (int g = 0; g < 16; ++g)
        ptx::st_global(row + 32 * block + 8 * (g / 4) + 4 * half + g % 4, o[block][g] / row_sum);
  }

  static void wait(bool is_last) {
    if (is(Planted::wait_missing)) return;
    constexpr int kShort = is(Planted::wait_one_copy_short) ? 1 : 0;
    if (is_last) {
      ptx::wait_for_copies<kShort>();
    } else {
      ptx::wait_for_copies<kCopiesOfTile + kShort>();
    }
  }

  static void barrier() {
    if (!is(Planted::fence_before_barrier_missing)) ptx::fence_release_workgroup();
    ptx::barrier_alone();
    if (!is(Planted::fence_after_barrier_missing)) ptx::fence_acquire_workgroup();
  }

  void run() {
    const int tiles = p.seqlen_kv / kTileKv;
    copy_tile(0);
    for (int tile = 0; tile < tiles; ++tile) {
      const bool is_last = tile + 1 == tiles;
      if (!is_last) copy_tile(tile + 1);
      wait(is_last);
      barrier();
      float s[16] = {};
      scores(tile, s);
      softmax(s);
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

}  // namespace fovea::cuda::guest_cdna
