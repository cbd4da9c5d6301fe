// K rounded to eight bits, read once and written once: what attention multiplies in its place.
//
//   code = rint((k - μ) / scale),  scale = greatest |k - μ| of the group / 127        Zhang et al. 2024 (SageAttention)
//
// A CTA takes 128 keys of one head. What is subtracted moves all scores of a row alike, so any μ is right and a near
// one is good enough: the mean of 64 keys spread evenly, which saves another read of K. A kernel of a CTA for each head
// takes it while this one already rounds V: taken by every CTA for itself it was most of the time (150 us where the
// bytes take 60). Of Q nothing is subtracted; q · μ is what its scores lack.
//
// A thread holds 8 channels of a row, 16 bytes; a warp holds rows that share a scale (shared/quantize_k.h):
//
//   head_dim 128, warp w, step s:   rows 8 (2 s + w / 4) + 2 (w % 4) and the next
//   head_dim  64:                   those, and those 8 further on, of twice as many
//
// so that the greatest magnitude of a group is a warp's, and another warp's four further on.
//
// KeyMean::all takes that of all keys, by the same kernel, KeyMean::none zeros. Keys of each half of a tile may have
// scales of their own, or all keys of a part one. Rounding::given subtracts nothing, codes are e4m3.
//
// Rows may be rotated once their mean is taken off (hadamard.cuh): twice, for the scale and for codes, as all else is
// done to them twice.
//
// Bound: memory, 3 bytes an element.
#pragma once

#include "common/cache_tiles.cuh"
#include "common/element_pair.cuh"
#include "common/hadamard.cuh"
#include "common/head_tiles.cuh"
#include "common/passes.cuh"
#include "common/round_to_codes.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/quantize_kv.h"

namespace fovea::cuda {

/// What rows of the operands hold.
template <QuantizeKvSpec spec>
struct StoredElement {
  using Type = std::uint16_t;
};
template <QuantizeKvSpec spec>
requires(spec.takes_codes) struct StoredElement<spec> {
  static_assert(spec.rounding == Rounding::given && spec.element == Element::bf16);
  using Type = std::uint8_t;
};
template <QuantizeKvSpec spec>
using StoredOf = typename StoredElement<spec>::Type;

/// Where K, or V, lies: in a tensor, or in a cache as these codes.
template <QuantizeKvSpec spec, Codes codes, bool is_cached = spec.is_cached>
struct OperandRows {
  using Tiles = HeadTiles<spec.is_packed, StoredOf<spec>>;
  using Rows = HeadRows<StoredOf<spec>>;

  FOVEA_DEVICE Tiles tiles(const RowsToRound& p) {
    return tiles_of<spec.is_packed, StoredOf<spec>>(p);
  }
};
template <QuantizeKvSpec spec, Codes codes>
struct OperandRows<spec, codes, true> {
  static_assert(!spec.is_packed && !spec.takes_codes && !spec.reads_elements);
  using Tiles = CacheTiles<spec, codes>;
  using Rows = CacheRows<spec, codes>;

  const ForwardParams& cache;
  const ScaleParam& scales;

  FOVEA_DEVICE_MEMBER Tiles tiles(const RowsToRound& p) const {
    return {cache, p.x, scales, p.num_tiles};
  }
};

/// What numbers are multiplied by to become codes: they may be codes already.
template <QuantizeKvSpec spec>
FOVEA_DEVICE float factor_of_codes(float scale) {
  return spec.takes_codes ? 1.0F : ptx::div_rn(1.0F, scale);
}

template <QuantizeKvSpec spec>
struct QuantizeK {
  static_assert(spec.element != Element::f32, "elements have 16 bits");
  static constexpr int kHeadDim = spec.head_dim_qk;
  static_assert(kHeadDim == 64 || kHeadDim == 128, "a row is 8 or 16 lanes'");
  static constexpr int kLanes = kHeadDim / 8;  // of a row
  static constexpr int kRows = 32 / kLanes;    // of a warp at once
  static constexpr int kWarps = kQuantizeThreads / 32;
  static constexpr int kSteps = kQuantizedTile / (kWarps * kRows);
  static constexpr int kSampledKeys = 64;

  const QuantizeKParams& p;
  const OperandRows<spec, spec.k_codes> source{};
  const ptx::SharedAddress smem = ptx::dynamic_shared();
  const int thread = ptx::thread_idx().x;
  const int warp = ptx::warp_idx();
  const int lane = ptx::lane_idx();
  const int channel = lane % kLanes * 8;  // the first of this thread's

  static constexpr bool kIsGiven = spec.rounding == Rounding::given;
  static constexpr Codes kCodes = qk_codes(spec.rounding);
  static_assert(!spec.writes_numbers || spec.rounding == Rounding::rows, "numbers of int8");

  using Tiles = typename OperandRows<spec, spec.k_codes>::Tiles;
  using Rows = typename OperandRows<spec, spec.k_codes>::Rows;

  /// Of a kernel before the one that rounds, with a CTA for each sequence and head.
  FOVEA_DEVICE_MEMBER void run_mean(std::int32_t number) const {
    const std::int32_t sequence = number / p.num_heads_kv;
    write_mean(sequence, number - sequence * p.num_heads_kv);
  }

  /// The tile of this number, among those of all sequences and heads.
  FOVEA_DEVICE_MEMBER void run(std::int32_t number) const {
    const HeadTile tile = keys().tile(number);
    const Rows rows = keys().rows(tile.sequence, tile.head);
    if (tile.begin < rows.count) round(tile, rows);
  }

  // ---- rows in registers, of Q too (quantize_q.cuh) ----

  /// Of this thread's row in a step, within the tile; of any of the warp's.
  FOVEA_DEVICE_MEMBER int row_of(int step) const { return row_of(step, lane / kLanes); }
  FOVEA_DEVICE_MEMBER int row_of(int step, int r) const {
    return 8 * ((2 * step + warp / 4) * (kRows / 2) + r / 2) + 2 * (warp % 4) + r % 2;
  }

  /// Of a row, this thread's channels.
  FOVEA_DEVICE_MEMBER ptx::U32x4 load(const Rows& rows, std::int64_t row) const {
    return rows.template eight<spec.reads_elements>(row, channel, p.head_dim, p.is_aligned != 0);
  }

  using Chunks = ptx::U32x4[kSteps];
  FOVEA_DEVICE_MEMBER void load_tile(const Rows& rows, std::int32_t begin, Chunks& chunks) const {
    if constexpr (spec.is_cached) {
      rows.template eights<kSteps, kRows>(
          [&](int step, int r) { return begin + row_of(step, r); }, channel, p.head_dim,
          [&](int step, const ptx::U32x4& eight) { chunks[step] = eight; });
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        chunks[step] = load(rows, std::int64_t{begin} + row_of(step));
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

  /// Of this thread's channels, once the kernel before has written it.
  FOVEA_DEVICE_MEMBER void read_mean(std::int32_t sequence, std::int32_t kv_head,
                                     EightNumbers& mean) const {
    if constexpr (kIsGiven) {
#pragma unroll
      for (int d = 0; d < 8; ++d) mean[d] = 0.0F;
      return;
    }
    ptx::griddepcontrol_wait();
    const float* const from = mean_at(sequence, kv_head) + channel;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto four = ptx::ld_global(reinterpret_cast<const ptx::F32x4*>(from + 4 * i));
      mean[4 * i] = four.x, mean[4 * i + 1] = four.y;
      mean[4 * i + 2] = four.z, mean[4 * i + 3] = four.w;
    }
  }

  /// Of a row, this thread's channels; all lanes of the row come here.
  FOVEA_DEVICE_MEMBER void rotate_row(EightNumbers& x) const {
    if constexpr (spec.rotates) rotate<kLanes>(p.beside.rotation, channel / 8, x);
  }

  /// The numbers that a row's codes stand for, with what was subtracted before, as elements; likewise.
  FOVEA_DEVICE_MEMBER ptx::U32x4 numbers_of_row(ptx::U32x2 codes, float scale,
                                                const EightNumbers& mean) const {
    if constexpr (!spec.rotates) {
      return elements_of_codes<spec.element>(codes, scale, mean);
    } else {
      EightNumbers x;
      unpack_codes(codes, scale, x);
      rotate_back<kLanes>(p.beside.rotation, channel / 8, x);
#pragma unroll
      for (int d = 0; d < 8; ++d) x[d] = limited<spec.element>(ptx::add_rn(x[d], mean[d]));
      return elements_of<spec.element>(x);
    }
  }

 private:
  FOVEA_DEVICE_MEMBER Tiles keys() const { return source.tiles(p); }

  // ---- the mean of keys: of a sample, or of all ----

  static constexpr int kAtOnce = kWarps * kRows;

  /// Threads that hold the same channels take different keys.
  FOVEA_DEVICE_MEMBER void write_mean(std::int32_t sequence, std::int32_t head) const {
    const Rows rows = keys().rows(sequence, head);
    double sum[8] = {};
    int num_summed = rows.count;
    if constexpr (spec.key_mean == KeyMean::none) {
      num_summed = 0;
    } else if constexpr (spec.key_mean == KeyMean::sample) {
      num_summed = rows.count < kSampledKeys ? rows.count : kSampledKeys;
      add_sample(rows, num_summed, sum);
    } else {
      add_all(rows, sum);
    }
#pragma unroll
    for (int d = 0; d < 8; ++d)
      ptx::st_shared(sum_at(warp * kRows + lane / kLanes, channel + d), sum[d]);
    ptx::sync_threads();
    if (spec.keeps_greatest_scale && thread == kHeadDim)
      ptx::st_global(mean_at(sequence, head) + kHeadDim, 0.0F);
    if (thread >= kHeadDim) return;
    double all = 0;
#pragma unroll 1
    for (int part = 0; part < kAtOnce; ++part) all += ptx::ld_shared<double>(sum_at(part, thread));
    const float exact = num_summed == 0 ? 0.0F : static_cast<float>(all / num_summed);
    ptx::st_global(mean_at(sequence, head) + thread,
                   low_of<spec.element>(pair_of<spec.element>(exact, 0.0F)));
  }

  FOVEA_DEVICE_MEMBER void add_sample(const Rows& rows, int num_sampled, double (&sum)[8]) const {
#pragma unroll
    for (int first = 0; first < kSampledKeys; first += kAtOnce) {
      const int i = first + warp * kRows + lane / kLanes;
      const std::int64_t key =
          rows.count <= kSampledKeys ? i : std::int64_t{i} * rows.count / kSampledKeys;
      EightNumbers x;
      finite_row(i < num_sampled ? load(rows, key) : ptx::U32x4{}, x);
#pragma unroll
      for (int d = 0; d < 8; ++d) sum[d] += static_cast<double>(x[d]);
    }
  }

  /// Sums of eight keys are taken in f32, which holds all bits of eight elements of like exponents: GPUs without tensor
  /// cores of f64 have few units that add those.
  FOVEA_DEVICE_MEMBER void add_all(const Rows& rows, double (&sum)[8]) const {
    constexpr int kInF32 = 8;
#pragma unroll 1
    for (int first = 0; first < rows.count; first += kInF32 * kAtOnce) {
      ptx::U32x4 chunk[kInF32];
#pragma unroll
      for (int i = 0; i < kInF32; ++i)
        chunk[i] = load(rows, std::int64_t{first} + i * kAtOnce + warp * kRows + lane / kLanes);
      EightNumbers of_few{};
#pragma unroll
      for (int i = 0; i < kInF32; ++i) {
        EightNumbers x;
        finite_row(chunk[i], x);
#pragma unroll
        for (int d = 0; d < 8; ++d) of_few[d] += x[d];
      }
#pragma unroll
      for (int d = 0; d < 8; ++d) sum[d] += static_cast<double>(of_few[d]);
    }
  }

  /// Zeros in the place of a row that is not finite. All lanes of the row come here.
  FOVEA_DEVICE_MEMBER void finite_row(const ptx::U32x4& chunk, EightNumbers& x) const {
    const bool counts = !is_mine(unrounded_rows(chunk));
    unpack<spec.element>(chunk, x);
#pragma unroll
    for (int d = 0; d < 8; ++d) x[d] = counts ? x[d] : 0.0F;
  }

  FOVEA_DEVICE_MEMBER ptx::SharedAddress sum_at(int part, int of_channel) const {
    return smem + 8 * (part * kHeadDim + of_channel);
  }

  FOVEA_DEVICE_MEMBER float* mean_at(std::int32_t sequence, std::int32_t kv_head) const {
    return const_cast<float*>(p.beside.mean) +
           (std::int64_t{sequence} * p.num_heads_kv + kv_head) *
               key_mean_floats(kHeadDim, spec.keeps_greatest_scale);
  }

  // ---- codes ----

  FOVEA_DEVICE_MEMBER void round(const HeadTile& tile, const Rows& rows) const {
    Chunks chunks;
    load_tile(rows, tile.begin, chunks);
    EightNumbers mean;
    read_mean(tile.sequence, tile.head, mean);
    QuantizedKeys groups[kParts] = {};  // greatest magnitudes in the place of scales
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::uint32_t of_step = unrounded_rows(chunks[step]);
      QuantizedKeys& group = groups[part_of(step)];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int slab = ((2 * step + warp / 4) * (kRows / 2) + r / 2) % (spec.k_tile / 8);
        group.unrounded |= (of_step >> r & 1U) << (2 * slab + r % 2);
      }
      EightNumbers x;
      smooth(rows, tile, step, chunks[step], is_mine(of_step), mean, x);
      group.scale = ptx::max_ftz(group.scale, greatest_of(x));
    }
    share_scales(tile, groups);
    float reciprocals[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      reciprocals[part] = factor_of_codes<spec>(ptx::abs(groups[part].scale));
    auto* const to = rounded() + (tile.row + tile.begin) * kHeadDim + channel;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int of_tile = row_of(step), of_part = of_tile % spec.k_tile;
      const QuantizedKeys& group = groups[part_of(step)];
      const bool is_rounded = (group.unrounded >> (of_part / 8 * 2 + of_part % 2) & 1U) == 0;
      EightNumbers x;
      smooth(rows, tile, step, chunks[step], !is_rounded, mean, x);
      const bool exists = tile.begin + of_tile < rows.count;
      if constexpr (spec.writes_numbers) {
        const ptx::U32x2 codes = codes_of<kCodes>(x, reciprocals[part_of(step)]);
        const ptx::U32x4 numbers = numbers_of_row(codes, ptx::abs(group.scale), mean);
        if (exists)
          ptx::st_global(reinterpret_cast<ptx::U32x4*>(to + of_tile * kHeadDim),
                         is_rounded ? numbers : chunks[step]);
      } else if (exists) {
        ptx::st_global(reinterpret_cast<ptx::U32x2*>(to + of_tile * kHeadDim),
                       codes_of<kCodes>(x, reciprocals[part_of(step)]));
      }
    }
    if constexpr (!spec.writes_numbers) write_groups(tile, groups);
  }

  /// Of a tile: keys of one have scales that those of another have no part in.
  static constexpr int kParts = kQuantizedTile / spec.k_tile;
  static_assert(kParts * spec.k_tile == kQuantizedTile && kSteps % kParts == 0 && kParts <= 2);
  static_assert(kParts == 1 || !spec.writes_numbers);
  FOVEA_DEVICE constexpr int part_of(int step) { return step / (kSteps / kParts); }

  /// What is written: codes, or numbers in their place.
  FOVEA_DEVICE_MEMBER auto* rounded() const {
    if constexpr (spec.writes_numbers)
      return p.numbers;
    else
      return p.codes;
  }

  FOVEA_DEVICE_MEMBER void write_groups(const HeadTile& tile,
                                        const QuantizedKeys (&groups)[kParts]) const {
    if (warp >= kScalesOfTile || lane != 0) return;
    const std::int64_t pair =
        std::int64_t{spec.is_packed ? 0 : tile.sequence} * p.num_heads_kv + tile.head;
    QuantizedKeys* const to = const_cast<QuantizedKeys*>(p.beside.keys) +
                              (pair * p.num_tiles + tile.number) * kParts * kScalesOfTile;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      ptx::st_global(to + part * kScalesOfTile + warp, groups[part]);
      if constexpr (spec.keeps_greatest_scale) {
        ptx::red_max_global(
            reinterpret_cast<std::uint32_t*>(mean_at(tile.sequence, tile.head) + kHeadDim),
            ptx::bit_cast<std::uint32_t>(ptx::abs(groups[part].scale)));
      }
    }
  }

  /// Keys less their mean, rotated; zeros in the place of those that are not rounded, or that there are not.
  FOVEA_DEVICE_MEMBER void smooth(const Rows& rows, const HeadTile& tile, int step,
                                  const ptx::U32x4& chunk, bool is_unrounded,
                                  const EightNumbers& mean, EightNumbers& x) const {
    const bool is_none = is_unrounded || tile.begin + row_of(step) >= rows.count;
    unpack<spec.element>(chunk, x);
#pragma unroll
    for (int d = 0; d < 8; ++d) x[d] = is_none ? 0.0F : ptx::add_rn(x[d], -mean[d]);
    rotate_row(x);
  }

  /// Keys of a lane are two warps', all keys of a part all warps'.
  FOVEA_DEVICE_MEMBER void share_scales(const HeadTile& tile,
                                        QuantizedKeys (&groups)[kParts]) const {
    const auto at = [&](int part, int of_warp) { return smem + 8 * (part * kWarps + of_warp); };
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float& greatest = groups[part].scale;
#pragma unroll
      for (int apart = 1; apart < 32; apart *= 2)
        greatest = ptx::max_ftz(greatest, ptx::shfl_bfly(greatest, apart));
      if (lane == 0) ptx::st_shared(at(part, warp), groups[part]);
    }
    ptx::sync_threads();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const auto other = ptx::ld_shared<QuantizedKeys>(at(part, warp ^ 4));
      const std::uint32_t all = groups[part].unrounded | other.unrounded;
      float greatest = ptx::max_ftz(groups[part].scale, other.scale);
      if constexpr (!spec.has_k_lanes) {
#pragma unroll
        for (int of_warp = 0; of_warp < kWarps; ++of_warp)
          greatest = ptx::max_ftz(greatest, ptx::ld_shared<QuantizedKeys>(at(part, of_warp)).scale);
      }
      float scale = scale_of_codes(greatest);
      if constexpr (kIsGiven) scale = given_scale(p.scales, tile.sequence, tile.head);
      groups[part] = {all != 0 ? -scale : scale, all};
    }
  }
};

}  // namespace fovea::cuda
