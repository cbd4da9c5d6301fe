// V rounded to eight bits, read once and written once, transposed: what attention multiplies in its place.
//
//   code = e4m3(v / scale),  scale = greatest |v| of a tile of 128 keys / v_max    Zhang et al. 2024 (SageAttention2)
//
// Rounding::lanes: of a channel of all keys of the sequence, whose scales a kernel of a CTA for each sequence and head
// writes before, as it does the mean of K. Rounding::given: the scale of the call, written beside each tile.
//
// Where V is smoothed that kernel takes its mean too. No element is read twice for both: the greatest |v - μ| of a
// channel is that of its greatest or of its least v, since a rounded difference keeps their order. Sums of a thread's
// few keys are f32, those of them f64, as sums of keys are (quantize_k.cuh). Attention gets codes of v - μ; or, where P
// and V stay in 16 bits, v - μ as elements, rows as they came.
//
// A CTA takes a tile of one head. A thread holds 4 keys x 8 channels, whose codes are 8 words of the transposed tile:
// those keys are neighbours there (shared/quantize_v.h). The tile is put together in shared memory, for 4 bytes a row
// are no access to memory, and goes out by rows of 128. Numbers in the place of codes go out as rows came in.
//
// Arithmetic is f32, each operation rounded to nearest even, as src/reference/quantized.cpp has it: codes and scales
// have defined bits. Keys behind the end have code 0. NaN and infinities do not count for the scale and have kNanCode.
//
// Bound: memory, 3 bytes an element.
#pragma once

#include "common/codes.cuh"
#include "common/element_pair.cuh"
#include "common/float_constants.cuh"
#include "common/head_tiles.cuh"
#include "common/passes.cuh"
#include "common/quantize_k.cuh"
#include "common/round_to_codes.cuh"
#include "common/warp_reduce.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/quantize_kv.h"

namespace fovea::cuda {

template <QuantizeKvSpec spec>
struct QuantizeV {
  static_assert(spec.element != Element::f32, "elements have 16 bits");
  static constexpr int kHeadDim = spec.head_dim_v;
  static_assert(kHeadDim == 64 || kHeadDim == 128, "a row is 8 or 16 threads'");
  static constexpr int kOctets = kHeadDim / 8;  // of channels
  static constexpr int kWarps = kQuantizeThreads / 32;
  static constexpr int kKeys = 4;  // of a thread at once
  static constexpr int kQuads = kQuantizedTile / kKeys;
  static constexpr int kSteps = kQuads * kOctets / kQuantizeThreads;

  const QuantizeVParams& p;
  const OperandRows<spec, spec.v_codes> source{};
  const ptx::SharedAddress smem = ptx::dynamic_shared();
  const int thread = ptx::thread_idx().x;
  const int warp = ptx::warp_idx();
  const int octet = thread % kOctets;

  using Block = ptx::U32x4[kKeys];  // four keys of eight channels
  using Rows = typename OperandRows<spec, spec.v_codes>::Rows;
  static constexpr bool kHasChannelScales = has_channel_scales(spec);

  /// Of a kernel before the one that rounds, with a CTA for each sequence and head.
  FOVEA_DEVICE_MEMBER void run_look(std::int32_t number) const {
    const std::int32_t sequence = number / p.num_heads_kv,
                       head = number - sequence * p.num_heads_kv;
    const Rows rows = source.tiles(p).rows(sequence, head);
    if constexpr (spec.smooths_v) {
      look_for_mean(rows, sequence, head);
    } else {
      look_for_scales(rows, sequence, head);
    }
  }

  /// The tile of this number, among those of all sequences and heads.
  FOVEA_DEVICE_MEMBER void run(std::int32_t number) const {
    const auto tiles = source.tiles(p);
    const HeadTile tile = tiles.tile(number);
    const Rows rows = tiles.rows(tile.sequence, tile.head);
    if (tile.begin < rows.count) round(tile, rows, number);
  }

 private:
  FOVEA_DEVICE_MEMBER int quad_of(int step) const {
    return thread / kOctets + step * (kQuantizeThreads / kOctets);
  }

  // ---- of all keys ----

  static constexpr int kThreadsOfChannel = kQuantizeThreads / kOctets;

  FOVEA_DEVICE_MEMBER void look_for_scales(const Rows& rows, std::int32_t sequence,
                                           std::int32_t head) const {
    std::uint32_t greatest[8] = {};
#pragma unroll 1
    for (std::int32_t begin = 0; begin < rows.count; begin += kQuantizedTile) {
      Block blocks[kSteps];
      load(rows, begin, blocks);
#pragma unroll
      for (const Block& block : blocks)
#pragma unroll
        for (int c = 0; c < 8; ++c) greatest[c] = greatest_bits_of_channel(block, c, greatest[c]);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c)
      ptx::st_shared(part_at(thread / kOctets, 8 * octet + c), greatest[c]);
    ptx::sync_threads();
    if (thread >= kHeadDim) return;
    std::uint32_t all = 0;
#pragma unroll 1
    for (int part = 0; part < kThreadsOfChannel; ++part) {
      const auto bits = ptx::ld_shared<std::uint32_t>(part_at(part, thread));
      all = bits > all ? bits : all;
    }
    ptx::st_global(channel_scales(sequence, head) + thread,
                   scale_of_magnitude(high_of<spec.element>(all)));
  }

  struct Extremes {
    float greatest, least;  // of what is finite: -inf and inf where nothing is
  };

  /// A thread's part of a channel.
  struct Channel {
    double sum = 0;
    Extremes extremes{-infinity(), infinity()};
  };

  /// Means of channels; and their scales, where they have such.
  FOVEA_DEVICE_MEMBER void look_for_mean(const Rows& rows, std::int32_t sequence,
                                         std::int32_t head) const {
    Channel mine[8];
#pragma unroll 1
    for (std::int32_t begin = 0; begin < rows.count; begin += kQuantizedTile)
      add_tile(rows, begin, mine);
#pragma unroll
    for (int c = 0; c < 8; ++c)
      ptx::st_shared(sum_at(thread / kOctets, 8 * octet + c), mine[c].sum);
    ptx::sync_threads();
    float mean = 0.0F;
    if (thread < kHeadDim) {
      double all = 0;
#pragma unroll 1
      for (int part = 0; part < kThreadsOfChannel; ++part)
        all += ptx::ld_shared<double>(sum_at(part, thread));
      if (rows.count > 0) mean = static_cast<float>(all / rows.count);
      ptx::st_global(mean_of(sequence, head) + thread, mean);
    }
    if constexpr (!kHasChannelScales) return;
    ptx::sync_threads();
#pragma unroll
    for (int c = 0; c < 8; ++c)
      ptx::st_shared(sum_at(thread / kOctets, 8 * octet + c), mine[c].extremes);
    ptx::sync_threads();
    if (thread >= kHeadDim) return;
    Extremes all = Channel{}.extremes;
#pragma unroll 1
    for (int part = 0; part < kThreadsOfChannel; ++part) {
      const auto of_part = ptx::ld_shared<Extremes>(sum_at(part, thread));
      all = {ptx::max_ftz(all.greatest, of_part.greatest), ptx::min_ftz(all.least, of_part.least)};
    }
    float greatest = 0.0F;
    if (all.least <= all.greatest)
      greatest = ptx::max_ftz(ptx::abs(ptx::add_rn(all.greatest, -mean)),
                              ptx::abs(ptx::add_rn(all.least, -mean)));
    ptx::st_global(channel_scales(sequence, head) + thread, scale_of_magnitude(greatest));
  }

  FOVEA_DEVICE_MEMBER void add_tile(const Rows& rows, std::int32_t begin,
                                    Channel (&channels)[8]) const {
    Block blocks[kSteps];
    load(rows, begin, blocks);
    float sum[8] = {};  // f32 holds all bits of eight elements of like exponents
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const bool exists = begin + key_of_byte(kKeys * quad_of(step) + i) < rows.count;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const float x = channel(blocks[step][i], c);
          if (!exists || !(x - x == 0.0F)) continue;
          Extremes& of = channels[c].extremes;
          sum[c] += x;
          of = {ptx::max_ftz(of.greatest, x), ptx::min_ftz(of.least, x)};
        }
      }
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) channels[c].sum += static_cast<double>(sum[c]);
  }

  FOVEA_DEVICE_MEMBER ptx::SharedAddress sum_at(int part, int of_channel) const {
    return smem + 8 * (part * kHeadDim + of_channel);
  }
  static_assert(8 * kThreadsOfChannel * kHeadDim <= kMeanSharedBytes);

  FOVEA_DEVICE_MEMBER float* mean_of(std::int32_t sequence, std::int32_t head) const {
    return const_cast<float*>(p.beside.mean) +
           (std::int64_t{sequence} * p.num_heads_kv + head) * kHeadDim;
  }

  // ---- a tile ----

  /// What is taken from this thread's channels, of so many keys from the tile's first on: there are no more.
  template <bool smooths_v>
  struct TakenOff {};
  template <bool smooths_v>
  requires smooths_v struct TakenOff<smooths_v> {
    EightNumbers mean;
    std::int32_t num_keys;
  };
  using Taken = TakenOff<spec.smooths_v>;

  FOVEA_DEVICE_MEMBER Taken taken_from(const HeadTile& tile, const Rows& rows) const {
    Taken taken{};
    if constexpr (spec.smooths_v) {
      ptx::griddepcontrol_wait();
      const float* const mean = mean_of(tile.sequence, tile.head) + 8 * octet;
#pragma unroll
      for (int c = 0; c < 8; ++c) taken.mean[c] = ptx::ld_global(mean + c);
      taken.num_keys = rows.count - tile.begin;
    }
    return taken;
  }

  /// What is rounded of a key of the tile: channel c of `chunk`, less its mean; nothing behind the last key.
  FOVEA_DEVICE float left_of(const ptx::U32x4& chunk, int c, int key, const Taken& taken) {
    const float x = channel(chunk, c);
    if constexpr (!spec.smooths_v)
      return x;
    else
      return key < taken.num_keys ? ptx::add_rn(x, -taken.mean[c]) : 0.0F;
  }

  FOVEA_DEVICE_MEMBER void round(const HeadTile& tile, const Rows& rows,
                                 std::int32_t number) const {
    Block blocks[kSteps];
    load(rows, tile.begin, blocks);
    if constexpr (spec.keeps_v) return keep(tile, rows.count, blocks);
    const Taken taken = taken_from(tile, rows);
    if constexpr (spec.centers_v) return write_centered(tile, blocks, taken);
    if constexpr (spec.rounding != Rounding::rows)
      return round_by_known(tile, blocks, taken, number);
    const float scale = scale_of(greatest_of_blocks(blocks, taken));
    const float reciprocal = ptx::div_rn(1.0F, scale);
    if constexpr (spec.writes_numbers) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        write_numbers(tile, rows.count, quad_of(step), blocks[step], {scale, reciprocal}, taken);
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        put(
            blocks[step], [&](int) { return reciprocal; }, quad_of(step), taken);
      ptx::sync_threads();
      write(number);
      if (thread == 0) ptx::st_global(const_cast<float*>(p.beside.scales) + number, scale);
    }
  }

  /// By scales that are there before.
  FOVEA_DEVICE_MEMBER void round_by_known(const HeadTile& tile, const Block (&blocks)[kSteps],
                                          const Taken& taken, std::int32_t number) const {
    EightNumbers reciprocals;
    if constexpr (kHasChannelScales) {
      ptx::griddepcontrol_wait();
      const float* const scales = channel_scales(tile.sequence, tile.head) + 8 * octet;
#pragma unroll
      for (int c = 0; c < 8; ++c) reciprocals[c] = ptx::div_rn(1.0F, ptx::ld_global(scales + c));
    } else {
      const float scale = given_scale(p.scales, tile.sequence, tile.head);
#pragma unroll
      for (int c = 0; c < 8; ++c) reciprocals[c] = factor_of_codes<spec>(scale);
      if (thread == 0) ptx::st_global(const_cast<float*>(p.beside.scales) + number, scale);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      put(
          blocks[step], [&](int c) { return reciprocals[c]; }, quad_of(step), taken);
    ptx::sync_threads();
    write(number);
  }

  FOVEA_DEVICE_MEMBER float* channel_scales(std::int32_t sequence, std::int32_t head) const {
    return const_cast<float*>(p.beside.scales) +
           (std::int64_t{sequence} * p.num_heads_kv + head) * kHeadDim;
  }
  FOVEA_DEVICE_MEMBER ptx::SharedAddress part_at(int part, int of_channel) const {
    return smem + 4 * (part * kHeadDim + of_channel);
  }

  /// Of the tile that begins there.
  FOVEA_DEVICE_MEMBER void load(const Rows& rows, std::int32_t begin,
                                Block (&blocks)[kSteps]) const {
    if constexpr (spec.is_cached) {
      constexpr int kQuadsOfWarp = 32 / kOctets;
      rows.template eights<kSteps * kKeys, kQuadsOfWarp>(
          [&](int i, int of_warp) {
            const int quad =
                kQuadsOfWarp * warp + of_warp + i / kKeys * (kQuantizeThreads / kOctets);
            return begin + key_of_byte(kKeys * quad + i % kKeys);
          },
          8 * octet, p.head_dim,
          [&](int i, const ptx::U32x4& eight) { blocks[i / kKeys][i % kKeys] = eight; });
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < kKeys; ++i)
          blocks[step][i] = rows.template eight<spec.reads_elements>(
              std::int64_t{begin} + key_of_byte(kKeys * quad_of(step) + i), 8 * octet, p.head_dim,
              p.is_aligned != 0);
    }
  }

  /// Channel c of eight.
  FOVEA_DEVICE float channel(const ptx::U32x4& chunk, int c) {
    const std::uint32_t pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    return c % 2 == 0 ? low_of<spec.element>(pairs[c / 2]) : high_of<spec.element>(pairs[c / 2]);
  }

  /// What is not finite does not count.
  FOVEA_DEVICE_MEMBER float greatest_of_blocks(const Block (&blocks)[kSteps],
                                               const Taken& taken) const {
    if constexpr (!spec.smooths_v) {
      std::uint32_t greatest = 0;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) greatest = greatest_bits(blocks[step], greatest);
      return high_of<spec.element>(greatest);
    } else {
      float greatest = 0.0F;
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < kKeys; ++i)
#pragma unroll
          for (int c = 0; c < 8; ++c) {
            const int key = key_of_byte(kKeys * quad_of(step) + i);
            const float x = left_of(blocks[step][i], c, key, taken);
            greatest = ptx::max_ftz(greatest, x - x == 0.0F ? ptx::abs(x) : 0.0F);
          }
      return greatest;
    }
  }

  /// The bits of the greatest magnitude: such are in the order of their numbers. What is not finite does not count.
  FOVEA_DEVICE std::uint32_t greatest_bits(const Block& block, std::uint32_t greatest) {
#pragma unroll
    for (const ptx::U32x4& chunk : block) {
      const bool is_finite = !has_nonfinite<spec.element>(chunk);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        std::uint32_t bits = magnitude_bits(chunk, c);
        if (!is_finite && bits >= kInfinityBits<spec.element> << 16U) bits = 0;
        greatest = bits > greatest ? bits : greatest;
      }
    }
    return greatest;
  }
  FOVEA_DEVICE std::uint32_t greatest_bits_of_channel(const Block& block, int c,
                                                      std::uint32_t greatest) {
#pragma unroll
    for (const ptx::U32x4& chunk : block) {
      std::uint32_t bits = magnitude_bits(chunk, c);
      if (bits >= kInfinityBits<spec.element> << 16U) bits = 0;
      greatest = bits > greatest ? bits : greatest;
    }
    return greatest;
  }
  FOVEA_DEVICE std::uint32_t magnitude_bits(const ptx::U32x4& chunk, int c) {
    const std::uint32_t pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    return (c % 2 == 0 ? pairs[c / 2] << 16U : pairs[c / 2]) & 0x7fff0000U;
  }

  /// Of the tile.
  FOVEA_DEVICE_MEMBER float scale_of(float greatest) const {
    const ptx::SharedAddress of_warps = smem + kHeadDim * kQuantizedTile;
    greatest = warp_max(greatest);
    if (ptx::lane_idx() == 0) ptx::st_shared(of_warps + 4 * warp, greatest);
    ptx::sync_threads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i)
      greatest = ptx::max_ftz(greatest, ptx::ld_shared<float>(of_warps + 4 * i));
    return scale_of_magnitude(greatest);
  }
  FOVEA_DEVICE_MEMBER float scale_of_magnitude(float greatest) const {
    constexpr float kLeast = 0x1p-126F;  // its reciprocal is finite: zeros are no case of their own
    const float scale = ptx::div_rn(greatest, p.v_max);
    return scale > kLeast ? scale : kLeast;
  }

  /// Word `quad` of a channel's row of 32. Lanes hold all octets and neighbouring quads: moved so, they meet 32 banks.
  FOVEA_DEVICE_MEMBER ptx::SharedAddress word_at(int of_channel, int quad) const {
    const int moved = quad ^ of_channel / 8 * (32 / kOctets);
    return smem + of_channel * kQuantizedTile + 4 * moved;
  }

  /// reciprocal_of(channel of eight).
  template <class ReciprocalOf>
  FOVEA_DEVICE_MEMBER void put(const Block& block, const ReciprocalOf& reciprocal_of, int quad,
                               const Taken& taken) const {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      float scaled[kKeys];
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const float left = left_of(block[i], c, key_of_byte(kKeys * quad + i), taken);
        const float x = ptx::mul_rn(left, reciprocal_of(c));
        scaled[i] = x - x == 0.0F ? x : x - x;  // infinities are NaN
      }
      const std::uint32_t codes =
          ptx::cvt_e4m3x2(scaled[0], scaled[1]) | ptx::cvt_e4m3x2(scaled[2], scaled[3]) << 16U;
      ptx::st_shared(word_at(8 * octet + c, quad), codes);
    }
  }

  struct Scale {
    float value, reciprocal;
  };

  /// Keys of `block` as the numbers that their codes stand for.
  FOVEA_DEVICE_MEMBER void write_numbers(const HeadTile& tile, std::int32_t num_rows, int quad,
                                         const Block& block, const Scale& scale,
                                         const Taken& taken) const {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = key_of_byte(kKeys * quad + i);
      if (tile.begin + key >= num_rows) continue;
      EightNumbers x;
#pragma unroll
      for (int c = 0; c < 8; ++c) x[c] = left_of(block[i], c, key, taken);
      round_four<0>(x, scale, taken);
      round_four<4>(x, scale, taken);
      store(tile, key, x);
    }
  }

  /// Of the tile's keys.
  FOVEA_DEVICE_MEMBER void store(const HeadTile& tile, int key, const EightNumbers& x) const {
    store(tile, key, elements_of<spec.element>(x));
  }
  FOVEA_DEVICE_MEMBER void store(const HeadTile& tile, int key, const ptx::U32x4& elements) const {
    const std::int64_t row = tile.row + tile.begin + key;
    ptx::st_global(reinterpret_cast<ptx::U32x4*>(p.numbers + row * kHeadDim + 8 * octet), elements);
  }

  /// What is not finite stays as it is; others are codes times the scale, and what was taken off.
  template <int first>
  FOVEA_DEVICE void round_four(EightNumbers& x, const Scale& scale, const Taken& taken) {
    std::uint32_t codes = 0;
#pragma unroll
    for (int d = 0; d < 4; ++d)
      codes |= e4m3_of(ptx::mul_rn(x[first + d], scale.reciprocal)) << (8 * d);
    const FourNumbers numbers = numbers_of_e4m3(codes, scale.value);
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      float& number = x[first + d];
      if (!(number - number == 0.0F)) continue;
      number = numbers.x[d];
      if constexpr (spec.smooths_v) number = ptx::add_rn(number, taken.mean[first + d]);
      number = limited<spec.element>(number);
    }
  }

  /// V as elements, as it came.
  FOVEA_DEVICE_MEMBER void keep(const HeadTile& tile, std::int32_t num_rows,
                                const Block (&blocks)[kSteps]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const int key = key_of_byte(kKeys * quad_of(step) + i);
        if (tile.begin + key < num_rows) store(tile, key, blocks[step][i]);
      }
    }
  }

  /// What is left of V as elements; what is not finite is so still.
  FOVEA_DEVICE_MEMBER void write_centered(const HeadTile& tile, const Block (&blocks)[kSteps],
                                          const Taken& taken) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const int key = key_of_byte(kKeys * quad_of(step) + i);
        if (key >= taken.num_keys) continue;
        EightNumbers x;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          x[c] = left_of(blocks[step][i], c, key, taken);
          if (x[c] - x[c] == 0.0F) x[c] = limited<spec.element>(x[c]);
        }
        store(tile, key, x);
      }
    }
  }

  /// Two words stay neighbours wherever they are moved.
  FOVEA_DEVICE_MEMBER void write(std::int32_t number) const {
    constexpr int kPairs = kQuads / 2;  // of words of a row
    std::uint8_t* const to = p.codes + std::int64_t{number} * kHeadDim * kQuantizedTile;
#pragma unroll
    for (int i = thread; i < kHeadDim * kPairs; i += kQuantizeThreads) {
      const auto words = ptx::ld_shared<ptx::U32x2>(word_at(i / kPairs, i % kPairs * 2));
      ptx::st_global(reinterpret_cast<ptx::U32x2*>(to + i * 8), words);
    }
  }
};

}  // namespace fovea::cuda
