// Q, K and V rounded to four bits before attention: four kernels, a CTA of 256 threads for each tile of 128 rows of one
// head. shared/fp4.h says what they leave.
//
//   sum_tiles      Σ k of each tile, in f64; q̄ of each block of queries
//   mean_of_keys   μ of each sequence and head, from those sums
//   round_to_fp4   records of queries, values and keys: codes, scales, marks
//   block_scores   q̄_b · (k_j - μ) for every block of queries and key: what smoothing of Q takes out of their product,
//                  which attention starts its sums of products from; fp4/block_scores.cuh
//
// A thread rounds 64 channels of a row of Q or K, a step of a product's depth; of V two channels of 32 keys, out of a
// tile in shared memory, since groups of V lie along its columns.
//
// Bound: memory for the first three, 6.6 bytes an element of K, which is read three times, 4.6 of Q, 2.6 of V.
// block_scores takes head_dim fmas for each key and block on f32 units: a 256th of attention's operations at a
// sixteenth of the rate of products of four bits, so a sixteenth of its time at most (predicted, not measured).
#pragma once

#include "common/element_pair.cuh"
#include "common/four_bit_groups.cuh"
#include "common/passes.cuh"
#include "common/round_to_codes.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/fp4.h"
#include "sm120/fp4/block_scores.cuh"
#include "sm120/fp4/operands.cuh"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::sm120 {

template <Fp4RoundingSpec spec>
struct Rounding {
  static_assert(spec.group == 16 || spec.group == 32, "numbers that share a scale");
  static constexpr int kHeadDim = spec.head_dim_qk;
  static constexpr int kSteps = kHeadDim / kFp4Depth;  // of a row of Q or K
  static_assert(kHeadDim % kFp4Depth == 0 && spec.head_dim_v % 32 == 0,
                "rows of Q and K are whole steps, channels of V whole blocks of 32");

  using Tiles = HeadTiles<spec.is_packed>;
  using KeyCodes = JoinedTile<kQuantizedTile, kHeadDim / 2>;
  using ValueCodes = JoinedTile<spec.head_dim_v, kQuantizedTile / 2>;

  const Fp4RoundingParams& p;
  const Operands<spec> operands{p};
  const SharedAddress smem = ptx::dynamic_shared();
  const int thread = ptx::thread_idx().x;
  const int warp = ptx::warp_idx();
  const int lane = ptx::lane_idx();

  // ---- sums and means --------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void run_sums() const {
    const std::int32_t number = ptx::block_idx().x;
    const bool is_key = number < p.num_key_tiles;
    const Tiles tiles = is_key ? operands.keys() : operands.queries();
    const RowsToRound& of = is_key ? p.k : p.q;
    const std::int32_t of_operand = is_key ? number : number - p.num_key_tiles;
    const HeadTile tile = tiles.tile(of_operand);
    const HeadRows<> rows = tiles.rows(tile.sequence, tile.head);
    if (tile.begin >= rows.count) return;
    const double sum = sum_of_channel(rows, of, tile.begin);
    if (thread >= kHeadDim) return;
    const std::int64_t at = std::int64_t{of_operand} * kHeadDim + thread;
    if (is_key) return ptx::st_global(p.key_sums + at, sum);
    const int count = least(kQuantizedTile, rows.count - tile.begin);
    ptx::st_global(p.block_means + at, static_cast<float>(sum / count));
  }

  FOVEA_DEVICE_MEMBER void run_mean() const {
    const std::int32_t sequence = ptx::block_idx().x / p.k.num_heads_kv;
    const std::int32_t head = ptx::block_idx().x - sequence * p.k.num_heads_kv;
    const std::int32_t count = operands.keys().length(sequence);
    const double* from = p.key_sums + operands.first_key_tile(sequence, head) * kHeadDim + thread;
    double sum = 0;
#pragma unroll 8
    for (int tile = 0; tile < ceil_div(count, kQuantizedTile); ++tile)
      sum += ptx::ld_global(from + std::int64_t{tile} * kHeadDim);
    const float exact = count == 0 ? 0.0F : static_cast<float>(sum / count);
    ptx::st_global(operands.mean_of(sequence, head) + thread,
                   low_of<spec.element>(pair_of<spec.element>(exact, 0.0F)));
  }

  // ---- records ---------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void run_round() const {
    std::int32_t number = ptx::block_idx().x;
    if (number < p.num_query_tiles) return round_queries(number);
    number -= p.num_query_tiles;
    if (number < p.num_key_tiles) return round_values(number);
    round_keys(number - p.num_key_tiles);
  }

 private:
  // ---- a tile's sum ----

  /// Of channel `thread`: rows that are not finite count as zeros. Threads that hold the same channels take different
  /// rows.
  FOVEA_DEVICE_MEMBER double sum_of_channel(const HeadRows<>& rows, const RowsToRound& of,
                                            std::int32_t begin) const {
    constexpr int kLanes = kHeadDim / 8, kAtOnce = kFp4Threads / kLanes;
    const int channel = thread % kLanes * 8;
    double sum[8] = {};
#pragma unroll
    for (int first = 0; first < kQuantizedTile; first += kAtOnce) {
      const U32x4 chunk = operands.eight(rows, of, begin + first + thread / kLanes, channel);
      const bool counts =
          !operands.template is_row_marked<kLanes>(has_nonfinite<spec.element>(chunk));
      EightNumbers x;
      unpack<spec.element>(chunk, x);
#pragma unroll
      for (int d = 0; d < 8; ++d) sum[d] += counts ? static_cast<double>(x[d]) : 0.0;
    }
#pragma unroll
    for (int d = 0; d < 8; ++d)
      ptx::st_shared(smem + 8 * (thread / kLanes * kHeadDim + channel + d), sum[d]);
    ptx::sync_threads();
    double all = 0;
    if (thread < kHeadDim) {
#pragma unroll 1
      for (int part = 0; part < kAtOnce; ++part)
        all += ptx::ld_shared<double>(smem + 8 * (part * kHeadDim + thread));
    }
    return all;
  }

  // ---- rows of Q and K ----

  /// A row's channels of a step, as codes: 32 bytes and the word of their scales.
  struct RoundedStep {
    std::uint32_t codes[kFp4Depth / 8];
    std::uint32_t scales;
  };

  /// Less their mean. `is_none`: zeros in their place.
  FOVEA_DEVICE RoundedStep rounded_step(const U32x4 (&chunks)[kFp4Depth / 8], const float* mean,
                                        bool is_none) {
    RoundedStep rounded{};
#pragma unroll
    for (int g = 0; g < kFp4Depth / spec.group; ++g) {
      float x[spec.group];
      float greatest = 0;
#pragma unroll
      for (int i = 0; i < spec.group / 8; ++i) {
        const int first = g * spec.group + 8 * i;
        EightNumbers given;
        unpack<spec.element>(chunks[first / 8], given);
#pragma unroll
        for (int d = 0; d < 8; ++d) {
          const float smooth = ptx::add_rn(given[d], -ptx::ld_global(mean + first + d));
          x[8 * i + d] = is_none ? 0.0F : smooth;
          greatest = ptx::max_ftz(greatest, ptx::abs(x[8 * i + d]));
        }
      }
      const GroupScale scale = scale_of_group<spec.group>(greatest);
      rounded.scales |= scale.bits << 8 * g;
#pragma unroll
      for (int i = 0; i < spec.group / 8; ++i)
        rounded.codes[g * spec.group / 8 + i] = codes_of_eight(x + 8 * i, scale.reciprocal);
    }
    return rounded;
  }

  /// This thread's step of a row: neighbours hold its others.
  struct MyStep {
    int row, step;
    U32x4 chunks[kFp4Depth / 8];
    bool is_marked;  // the row holds NaN or infinity
  };
  static constexpr int kRowThreads = kQuantizedTile * kSteps;  // others have no row
  static_assert(kRowThreads <= kFp4Threads, "a thread has a step at most");

  FOVEA_DEVICE_MEMBER MyStep load_step(const HeadRows<>& rows, const RowsToRound& of,
                                       std::int32_t begin) const {
    MyStep mine{thread / kSteps, thread % kSteps, {}, false};
    bool is_marked = false;
#pragma unroll
    for (int i = 0; i < kFp4Depth / 8; ++i) {
      mine.chunks[i] =
          operands.eight(rows, of, std::int64_t{begin} + mine.row, mine.step * kFp4Depth + 8 * i);
      is_marked = is_marked || has_nonfinite<spec.element>(mine.chunks[i]);
    }
    mine.is_marked = operands.template is_row_marked<kSteps>(is_marked);
    return mine;
  }

  FOVEA_DEVICE U32x4 half_of(const RoundedStep& step, int half) {
    return {step.codes[4 * half], step.codes[4 * half + 1], step.codes[4 * half + 2],
            step.codes[4 * half + 3]};
  }

  /// Of a record of keys or values, with so many rows of so many steps.
  template <int rows, int steps>
  FOVEA_DEVICE int scale_word(int row, int step) {
    if constexpr (spec.is_for_tensor_memory) return fp4_copied_scale_word(row, step, rows);
    return fp4_scale_word(row, step, steps);
  }

  FOVEA_DEVICE_MEMBER void round_keys(std::int32_t number) const {
    const Tiles tiles = operands.keys();
    const HeadTile tile = tiles.tile(number);
    const HeadRows<> rows = tiles.rows(tile.sequence, tile.head);
    if (tile.begin >= rows.count) return;
    char* const to = record(p.results.keys, number, fp4_record_bytes(kHeadDim));
    if (thread < kRowThreads) {
      const MyStep mine = load_step(rows, p.k, tile.begin);
      const bool is_none = mine.is_marked || tile.begin + mine.row >= rows.count;
      const float* const mean = operands.mean_of(tile.sequence, tile.head) + mine.step * kFp4Depth;
      const RoundedStep rounded = rounded_step(mine.chunks, mean, is_none);
      const int row = fp4_row_of_key(mine.row, spec.is_for_tensor_memory);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ptx::st_global(reinterpret_cast<U32x4*>(to + KeyCodes{0}.chunk(row, 2 * mine.step + half)),
                       half_of(rounded, half));
      ptx::st_global(reinterpret_cast<std::uint32_t*>(to + fp4_codes_bytes(kHeadDim)) +
                         scale_word<kQuantizedTile, kSteps>(row, mine.step),
                     rounded.scales);
      if (mine.step == 0) mark(mine.row, mine.is_marked);
    }
    write_marks(to + fp4_marks_at(kHeadDim));
  }

  FOVEA_DEVICE_MEMBER void round_queries(std::int32_t number) const {
    const Tiles tiles = operands.queries();
    const HeadTile tile = tiles.tile(number);
    const HeadRows<> rows = tiles.rows(tile.sequence, tile.head);
    if (tile.begin >= rows.count || thread >= kRowThreads) return;
    char* const to = record(p.results.queries, number, fp4_query_record_bytes(kHeadDim));
    const MyStep mine = load_step(rows, p.q, tile.begin);
    const bool is_none = mine.is_marked || tile.begin + mine.row >= rows.count;
    const std::int64_t mean_at = std::int64_t{number} * kHeadDim + mine.step * kFp4Depth;
    const RoundedStep rounded = rounded_step(mine.chunks, p.block_means + mean_at, is_none);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = spec.is_for_tensor_memory
                         ? static_cast<int>(KeyCodes{0}.chunk(mine.row, 2 * mine.step + half))
                         : mine.row * (kHeadDim / 2) + mine.step * kFp4StepBytes + 16 * half;
      ptx::st_global(reinterpret_cast<U32x4*>(to + at), half_of(rounded, half));
    }
    ptx::st_global(
        reinterpret_cast<std::uint32_t*>(to + fp4_codes_bytes(kHeadDim)) +
            (spec.is_for_tensor_memory ? fp4_copied_scale_word(mine.row, mine.step, kQuantizedTile)
                                       : mine.row * kSteps + mine.step),
        rounded.scales);
    const float* const key_mean =
        operands.mean_of(tile.sequence, tile.head / p.group) + mine.step * kFp4Depth;
    const float of_mean = of_row(product_with(mine.chunks, key_mean));
    if (mine.step == 0) {
      ptx::st_global(reinterpret_cast<QuantizedRow*>(to + fp4_rows_at(kHeadDim)) + mine.row,
                     QuantizedRow{mine.is_marked ? 0.0F : 1.0F, is_none ? 0.0F : of_mean});
    }
  }

  FOVEA_DEVICE float product_with(const U32x4 (&chunks)[kFp4Depth / 8], const float* mean) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kFp4Depth / 8; ++i) {
      EightNumbers x;
      unpack<spec.element>(chunks[i], x);
#pragma unroll
      for (int d = 0; d < 8; ++d) sum = ptx::fma_rn(x[d], ptx::ld_global(mean + 8 * i + d), sum);
    }
    return sum;
  }

  /// Of the lanes that hold a row.
  FOVEA_DEVICE float of_row(float mine) {
#pragma unroll
    for (int apart = 1; apart < kSteps; apart *= 2) mine += ptx::shfl_bfly(mine, apart);
    return mine;
  }

  // ---- marks ----

  FOVEA_DEVICE_MEMBER SharedAddress mark_at(int row) const {
    return smem + (spec.head_dim_v * kQuantizedTile * 2 + row);
  }
  FOVEA_DEVICE_MEMBER void mark(int row, bool is_marked) const {
    ptx::st_shared(mark_at(row), static_cast<std::uint8_t>(is_marked));
  }
  /// By the CTA, each row of which has been marked or not.
  FOVEA_DEVICE_MEMBER void write_marks(char* to) const {
    ptx::sync_threads();
    if (warp >= kQuantizedTile / 32) return;
    const std::uint32_t bits = ptx::ballot(ptx::ld_shared<std::uint8_t>(mark_at(thread)) != 0);
    if (lane == 0) ptx::st_global(reinterpret_cast<std::uint32_t*>(to) + warp, bits);
  }

  FOVEA_DEVICE char* record(const char* first, std::int64_t number, int bytes) {
    return const_cast<char*>(first) + number * bytes;
  }

  // ---- V ----

  /// Of a key and a pair of channels.
  FOVEA_DEVICE_MEMBER SharedAddress value_at(int key, int channel) const {
    return smem + 2 * (key * spec.head_dim_v + channel);
  }

  /// Keys whose values are not finite, which become zeros.
  FOVEA_DEVICE_MEMBER void put_values(const HeadRows<>& rows, std::int32_t begin) const {
    constexpr int kLanes = spec.head_dim_v / 8;
    static_assert((kLanes & (kLanes - 1)) == 0, "a row is a power of two of lanes");
#pragma unroll 4
    for (int at = thread; at < kQuantizedTile * kLanes; at += kFp4Threads) {
      const int key = at / kLanes, channel = at % kLanes * 8;
      const U32x4 chunk = operands.eight(rows, p.v, std::int64_t{begin} + key, channel);
      const bool is_marked =
          operands.template is_row_marked<kLanes>(has_nonfinite<spec.element>(chunk));
      if (channel == 0) mark(key, is_marked);
      ptx::st_shared(value_at(key, channel), is_marked ? U32x4{finite(chunk.x), finite(chunk.y),
                                                               finite(chunk.z), finite(chunk.w)}
                                                       : chunk);
    }
  }
  FOVEA_DEVICE std::uint32_t finite(std::uint32_t pair) {
    return values_of_pass<spec.element>(pair, Pass::finite);
  }

  FOVEA_DEVICE_MEMBER void round_values(std::int32_t number) const {
    const Tiles tiles = operands.values();
    const HeadTile tile = tiles.tile(number);
    const HeadRows<> rows = tiles.rows(tile.sequence, tile.head);
    if (tile.begin >= rows.count) return;
    put_values(rows, tile.begin);
    char* const to = record(p.results.values, number, fp4_record_bytes(spec.head_dim_v));
    write_marks(to + fp4_marks_at(spec.head_dim_v));
#pragma unroll 1
    for (int at = thread; at < spec.head_dim_v / 2 * (kQuantizedTile / 32); at += kFp4Threads) {
      const int channel = at % (spec.head_dim_v / 2) * 2, part = at / (spec.head_dim_v / 2);
      std::uint32_t pairs[32];
#pragma unroll
      for (int i = 0; i < 32; ++i)
        pairs[i] = ptx::ld_shared<std::uint32_t>(value_at(32 * part + i, channel));
      round_column(
          pairs, [](std::uint32_t pair) { return low_of<spec.element>(pair); }, to, channel, part);
      round_column(
          pairs, [](std::uint32_t pair) { return high_of<spec.element>(pair); }, to, channel + 1,
          part);
    }
  }

  /// 32 keys of a channel: 16 bytes of codes, a byte of scales for each group.
  template <class Of>
  FOVEA_DEVICE void round_column(const std::uint32_t (&pairs)[32], const Of& of, char* to,
                                 int channel, int part) {
    std::uint32_t codes[4];
    std::uint32_t scales = 0;
#pragma unroll
    for (int g = 0; g < 32 / spec.group; ++g) {
      float x[spec.group];
      float greatest = 0;
#pragma unroll
      for (int i = 0; i < spec.group; ++i) {
        x[i] = of(pairs[g * spec.group + i]);
        greatest = ptx::max_ftz(greatest, ptx::abs(x[i]));
      }
      const GroupScale scale = scale_of_group<spec.group>(greatest);
      scales |= scale.bits << 8 * g;
#pragma unroll
      for (int i = 0; i < spec.group / 8; ++i)
        codes[g * spec.group / 8 + i] = codes_of_eight(x + 8 * i, scale.reciprocal);
    }
    ptx::st_global(reinterpret_cast<U32x4*>(to + ValueCodes{0}.chunk(channel, part)),
                   U32x4{codes[0], codes[1], codes[2], codes[3]});
    char* const word =
        to + fp4_codes_bytes(spec.head_dim_v) +
        4 * scale_word<spec.head_dim_v, kQuantizedTile / kFp4Depth>(channel, part / 2);
    if constexpr (spec.group == 16) {
      ptx::st_global(reinterpret_cast<std::uint16_t*>(word) + part % 2,
                     static_cast<std::uint16_t>(scales));
    } else {  // the other half of the word has no groups
      ptx::st_global(reinterpret_cast<std::uint8_t*>(word) + part % 2,
                     static_cast<std::uint8_t>(scales));
      ptx::st_global(reinterpret_cast<std::uint8_t*>(word) + 2 + part % 2, std::uint8_t{0});
    }
  }
};

template <Fp4RoundingSpec spec>
FOVEA_DEVICE void sum_tiles(const Fp4RoundingParams& p) {
  Rounding<spec>{p}.run_sums();
}
template <Fp4RoundingSpec spec>
FOVEA_DEVICE void mean_of_keys(const Fp4RoundingParams& p) {
  Rounding<spec>{p}.run_mean();
}
template <Fp4RoundingSpec spec>
FOVEA_DEVICE void round_to_fp4(const Fp4RoundingParams& p) {
  Rounding<spec>{p}.run_round();
}

}  // namespace fovea::cuda::sm120
