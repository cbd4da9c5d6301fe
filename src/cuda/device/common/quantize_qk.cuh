// Q and K rounded to eight bits, each read once and written once: what attention multiplies in their place.
//
//   code = rint((x - μ) / scale),  scale = greatest |x - μ| of the group / 127        Zhang et al. 2024 (SageAttention)
//
// A CTA takes 128 rows of one head, of Q or of K. What is subtracted moves all scores of a row alike, so any μ is right
// and a near one is good enough: the mean of 64 keys spread evenly, which saves another read of K. A kernel of a CTA
// for each head takes it while this one already loads its rows: taken by every CTA for itself it was most of the time
// (150 us where the bytes take 60). Of Q nothing is subtracted; q · μ is what its scores lack.
//
// All arithmetic that decides a code is f32 (the mean's sum double), each operation rounded to nearest even, as
// src/reference/quantized.cpp has it: codes and scales have defined bits.
//
// A thread holds 8 channels of a row, 16 bytes; a warp holds rows that share a scale (shared/quantize_qk.h):
//
//   head_dim 128, warp w, step s:   rows 8 (2 s + w / 4) + 2 (w % 4) and the next
//   head_dim  64:                   those, and those 8 further on, of twice as many
//
// so that the greatest magnitude of a group is a warp's, and another warp's four further on.
//
// Bound: memory, 3 bytes an element.
#pragma once

#include "common/element_pair.cuh"
#include "common/float_constants.cuh"
#include "common/head_tiles.cuh"
#include "common/passes.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/quantize_qk.h"

namespace fovea::cuda {

/// The nearest of -127..127, as the low byte of a float whose unit is in its last place.
FOVEA_DEVICE std::uint32_t nearest_code(float scaled) {
  return ptx::bit_cast<std::uint32_t>(
             ptx::add_rn(ptx::min_ftz(ptx::max_ftz(scaled, -127.0F), 127.0F), kIntegerOrigin)) &
         0xffU;
}

template <QuantizeQkSpec spec>
struct QuantizeQk {
  static_assert(spec.element != Element::f32, "elements have 16 bits");
  static_assert(spec.head_dim == 64 || spec.head_dim == 128, "a row is 8 or 16 lanes'");
  static constexpr int kLanes = spec.head_dim / 8;  // of a row
  static constexpr int kRows = 32 / kLanes;         // of a warp at once
  static constexpr int kWarps = kQuantizeThreads / 32;
  static constexpr int kSteps = kQuantizedTile / (kWarps * kRows);
  static constexpr int kSampledKeys = 64;

  const QuantizeQkParams& p;
  const ptx::SharedAddress smem = ptx::dynamic_shared();
  const int thread = ptx::thread_idx().x;
  const int warp = ptx::warp_idx();
  const int lane = ptx::lane_idx();
  const int channel = lane % kLanes * 8;  // the first of this thread's

  using Tiles = HeadTiles<spec.is_packed>;

  /// The first of two kernels: a CTA for each sequence and head of K.
  FOVEA_DEVICE_MEMBER void run_mean() const {
    ptx::griddepcontrol_launch_dependents();  // they wait for the mean
    const std::int32_t sequence = ptx::block_idx().x / p.num_heads_kv;
    write_mean(sequence, ptx::block_idx().x - sequence * p.num_heads_kv);
  }

  /// The second.
  FOVEA_DEVICE_MEMBER void run() const {
    const std::int32_t number = ptx::block_idx().x;
    if (number < p.num_tiles_of_q) {
      const HeadTile tile = queries().tile(number);
      if (tile.begin < queries().length(tile.sequence)) round_queries(tile);
    } else {
      const HeadTile tile = keys().tile(number - p.num_tiles_of_q);
      if (tile.begin < keys().length(tile.sequence)) round_keys(tile);
    }
  }

 private:
  FOVEA_DEVICE_MEMBER Tiles queries() const {
    return {p.q,        p.cu_seqlens_q, p.total_q,    p.num_sequences,
            p.seqlen_q, p.num_heads_q,  p.num_q_tiles};
  }
  FOVEA_DEVICE_MEMBER Tiles keys() const {
    return {p.k,         p.cu_seqlens_kv, p.total_kv,    p.num_sequences,
            p.seqlen_kv, p.num_heads_kv,  p.num_kv_tiles};
  }

  // ---- rows in registers ----

  /// Of this thread's row in a step, within the tile.
  FOVEA_DEVICE_MEMBER int row_of(int step) const {
    const int r = lane / kLanes;
    return 8 * ((2 * step + warp / 4) * (kRows / 2) + r / 2) + 2 * (warp % 4) + r % 2;
  }

  /// Zeros where there is no such row, and behind the problem's head_dim.
  FOVEA_DEVICE_MEMBER ptx::U32x4 load(const HeadRows& rows, std::int64_t row) const {
    if (row >= rows.count || channel >= p.head_dim) return {};
    return ptx::ld_global_nc(
        reinterpret_cast<const ptx::U32x4*>(rows.data + row * rows.row_stride + channel));
  }

  using Chunks = ptx::U32x4[kSteps];
  FOVEA_DEVICE_MEMBER void load_tile(const HeadRows& rows, std::int32_t begin,
                                     Chunks& chunks) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      chunks[step] = load(rows, std::int64_t{begin} + row_of(step));
  }

  using Channels = float[8];
  FOVEA_DEVICE void unpack(const ptx::U32x4& chunk, Channels& x) {
    const std::uint32_t pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = low_of<spec.element>(pairs[i]);
      x[2 * i + 1] = high_of<spec.element>(pairs[i]);
    }
  }

  /// Bit r: row r of those that the warp holds is not finite. The lanes that hold a row are neighbours.
  FOVEA_DEVICE std::uint32_t unrounded_rows(const ptx::U32x4& chunk) {
    const std::uint32_t lanes = ptx::ballot(has_nonfinite<spec.element>(chunk));
    std::uint32_t rows = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      constexpr std::uint32_t kRow = (1U << kLanes) - 1;
      if ((lanes >> (r * kLanes) & kRow) != 0) rows |= 1U << r;
    }
    return rows;
  }

  FOVEA_DEVICE_MEMBER bool is_mine(std::uint32_t rows) const {
    return (rows >> (lane / kLanes) & 1U) != 0;
  }

  // ---- the mean of a sample of keys ----

  /// Threads that hold the same channels take different keys of the sample.
  FOVEA_DEVICE_MEMBER void write_mean(std::int32_t sequence, std::int32_t head) const {
    constexpr int kAtOnce = kWarps * kRows;
    const HeadRows rows = keys().rows(sequence, head);
    const int num_sampled = rows.count < kSampledKeys ? rows.count : kSampledKeys;
    double sum[8] = {};
#pragma unroll
    for (int first = 0; first < kSampledKeys; first += kAtOnce) {
      const int i = first + warp * kRows + lane / kLanes;
      const std::int64_t key =
          rows.count <= kSampledKeys ? i : std::int64_t{i} * rows.count / kSampledKeys;
      const ptx::U32x4 chunk = i < num_sampled ? load(rows, key) : ptx::U32x4{};
      const bool counts = !is_mine(unrounded_rows(chunk));
      Channels x;
      unpack(chunk, x);
#pragma unroll
      for (int d = 0; d < 8; ++d) sum[d] += counts ? static_cast<double>(x[d]) : 0.0;
    }
#pragma unroll
    for (int d = 0; d < 8; ++d)
      ptx::st_shared(sum_at(warp * kRows + lane / kLanes, channel + d), sum[d]);
    ptx::sync_threads();
    if (thread >= spec.head_dim) return;
    double all = 0;
#pragma unroll 1
    for (int part = 0; part < kAtOnce; ++part) all += ptx::ld_shared<double>(sum_at(part, thread));
    const float exact = num_sampled == 0 ? 0.0F : static_cast<float>(all / num_sampled);
    ptx::st_global(mean_at(sequence, head) + thread,
                   low_of<spec.element>(pair_of<spec.element>(exact, 0.0F)));
  }

  FOVEA_DEVICE_MEMBER ptx::SharedAddress sum_at(int part, int of_channel) const {
    return smem + 8 * (part * spec.head_dim + of_channel);
  }

  FOVEA_DEVICE_MEMBER float* mean_at(std::int32_t sequence, std::int32_t kv_head) const {
    return p.mean + (std::int64_t{sequence} * p.num_heads_kv + kv_head) * spec.head_dim;
  }

  /// Of this thread's channels, once the kernel before has written it.
  FOVEA_DEVICE_MEMBER void read_mean(std::int32_t sequence, std::int32_t kv_head,
                                     Channels& mean) const {
    ptx::griddepcontrol_wait();
    const float* const from = mean_at(sequence, kv_head) + channel;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto four = ptx::ld_global(reinterpret_cast<const ptx::F32x4*>(from + 4 * i));
      mean[4 * i] = four.x, mean[4 * i + 1] = four.y;
      mean[4 * i + 2] = four.z, mean[4 * i + 3] = four.w;
    }
  }

  // ---- codes ----

  FOVEA_DEVICE float scale_of(float greatest) {
    constexpr float kLeast = 0x1p-126F;  // its reciprocal is finite: zeros are no case of their own
    const float scale = ptx::div_rn(greatest, 127.0F);
    return scale > kLeast ? scale : kLeast;
  }

  FOVEA_DEVICE ptx::U32x2 codes_of(const Channels& x, float reciprocal) {
    std::uint32_t bytes[8];
#pragma unroll
    for (int d = 0; d < 8; ++d) bytes[d] = nearest_code(ptx::mul_rn(x[d], reciprocal));
    return {bytes[0] | bytes[1] << 8U | bytes[2] << 16U | bytes[3] << 24U,
            bytes[4] | bytes[5] << 8U | bytes[6] << 16U | bytes[7] << 24U};
  }

  /// `row`: of those of all sequences and heads.
  FOVEA_DEVICE_MEMBER void store(std::int8_t* codes, std::int64_t row, ptx::U32x2 bytes) const {
    ptx::st_global(reinterpret_cast<ptx::U32x2*>(codes + row * spec.head_dim + channel), bytes);
  }

  FOVEA_DEVICE float greatest_of(const Channels& x) {
    float greatest = 0;
#pragma unroll
    for (int d = 0; d < 8; ++d) greatest = ptx::max_ftz(greatest, ptx::abs(x[d]));
    return greatest;
  }

  FOVEA_DEVICE_MEMBER void round_queries(const HeadTile& tile) const {
    const HeadRows rows = queries().rows(tile.sequence, tile.head);
    Chunks chunks;
    load_tile(rows, tile.begin, chunks);
    Channels mean;
    read_mean(tile.sequence, tile.head / p.group, mean);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const bool is_rounded = !is_mine(unrounded_rows(chunks[step]));
      Channels x;
      unpack(is_rounded ? chunks[step] : ptx::U32x4{}, x);
      float of_mean = 0;
#pragma unroll
      for (int d = 0; d < 8; ++d) of_mean = ptx::fma_rn(x[d], mean[d], of_mean);
      float greatest = greatest_of(x);
#pragma unroll
      for (int apart = 1; apart < kLanes; apart *= 2) {
        of_mean += ptx::shfl_bfly(of_mean, apart);
        greatest = ptx::max_ftz(greatest, ptx::shfl_bfly(greatest, apart));
      }
      const float scale = scale_of(greatest);
      const std::int32_t row = tile.begin + row_of(step);
      const ptx::U32x2 codes = codes_of(x, ptx::div_rn(1.0F, scale));
      if (row < rows.count) {
        store(p.q_codes, tile.row + row, codes);
        QuantizedRow* const to = const_cast<QuantizedRow*>(p.beside.rows) + tile.row + row;
        if (lane % kLanes == 0)
          ptx::st_global(to, QuantizedRow{is_rounded ? scale : 0.0F, of_mean});
      }
    }
  }

  FOVEA_DEVICE_MEMBER void round_keys(const HeadTile& tile) const {
    const HeadRows rows = keys().rows(tile.sequence, tile.head);
    Chunks chunks;
    load_tile(rows, tile.begin, chunks);
    Channels mean;
    read_mean(tile.sequence, tile.head, mean);
    float greatest = 0;
    std::uint32_t unrounded = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::uint32_t of_step = unrounded_rows(chunks[step]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int slab = (2 * step + warp / 4) * (kRows / 2) + r / 2;
        unrounded |= (of_step >> r & 1U) << (2 * slab + r % 2);
      }
      Channels x;
      smooth(rows, tile, step, chunks[step], is_mine(of_step), mean, x);
      greatest = ptx::max_ftz(greatest, greatest_of(x));
    }
    const QuantizedKeys group = of_group(greatest, unrounded);
    const float reciprocal = ptx::div_rn(1.0F, ptx::abs(group.scale));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int of_tile = row_of(step);
      const bool is_rounded = (group.unrounded >> (of_tile / 8 * 2 + of_tile % 2) & 1U) == 0;
      Channels x;
      smooth(rows, tile, step, chunks[step], !is_rounded, mean, x);
      const std::int32_t row = tile.begin + of_tile;
      if (row < rows.count) store(p.k_codes, tile.row + row, codes_of(x, reciprocal));
    }
    if (warp < kScalesOfTile && lane == 0) {
      QuantizedKeys* const to = const_cast<QuantizedKeys*>(p.beside.keys);
      const std::int64_t pair =
          std::int64_t{spec.is_packed ? 0 : tile.sequence} * p.num_heads_kv + tile.head;
      ptx::st_global(to + (pair * p.num_kv_tiles + tile.number) * kScalesOfTile + warp, group);
    }
  }

  /// Keys less their mean; zeros in the place of those that are not rounded, or that there are not.
  FOVEA_DEVICE_MEMBER void smooth(const HeadRows& rows, const HeadTile& tile, int step,
                                  const ptx::U32x4& chunk, bool is_unrounded, const Channels& mean,
                                  Channels& x) const {
    const bool is_none = is_unrounded || tile.begin + row_of(step) >= rows.count;
    unpack(chunk, x);
#pragma unroll
    for (int d = 0; d < 8; ++d) x[d] = is_none ? 0.0F : ptx::add_rn(x[d], -mean[d]);
  }

  /// Of the keys that share a scale, which two warps hold.
  FOVEA_DEVICE_MEMBER QuantizedKeys of_group(float greatest, std::uint32_t unrounded) const {
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2)
      greatest = ptx::max_ftz(greatest, ptx::shfl_bfly(greatest, apart));
    const auto at = [&](int of_warp) { return smem + 8 * of_warp; };
    if (lane == 0) ptx::st_shared(at(warp), QuantizedKeys{greatest, unrounded});
    ptx::sync_threads();
    const auto other = ptx::ld_shared<QuantizedKeys>(at(warp ^ 4));
    const std::uint32_t all = unrounded | other.unrounded;
    const float scale = scale_of(ptx::max_ftz(greatest, other.scale));
    return {all != 0 ? -scale : scale, all};
  }
};

template <QuantizeQkSpec spec>
FOVEA_DEVICE void mean_of_keys(const QuantizeQkParams& p) {
  QuantizeQk<spec>{p}.run_mean();
}

template <QuantizeQkSpec spec>
FOVEA_DEVICE void quantize_qk(const QuantizeQkParams& p) {
  QuantizeQk<spec>{p}.run();
}

}  // namespace fovea::cuda
