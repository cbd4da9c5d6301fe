// Tile products of the AMX panels, cut so small that vector work fits between them.
//
//   Sᵀ[32 keys][48 lanes]  = K[32 keys][head_dim] · Qᵀ pairs[head_dim / 2][48 lanes]
//   Oᵀ[32 d][48 lanes]    += Vᵀ[32 d][keys] · P pairs[keys / 2][48 lanes]
// Either is a TileJob: six sums (tiles 0 to 5), one tile of each operand (6 and 7). A tile instruction takes one issue
// slot and 16 cycles of the tile unit, so a core that is handed a tile row, then some 50 vector instructions, then the
// next tile row does both at once; handed all of one and then all of the other it does not, its window is some 500
// instructions long. Operands in several parts (an f16 is the sum of two bf16) are multiplied part by part into the
// same sums. Read panel_amx_softmax.hpp for the vector work, panel_amx_bf16.cpp for the order of it all.
#pragma once

#if defined(__x86_64__)

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/amx.hpp"
#include "cpu/kernels/panel_bf16.hpp"

namespace fovea::cpu::amx {

inline constexpr std::int64_t kLanes = bf16::kLanes;
inline constexpr std::int64_t kLaneBytes = kLanes * 4;
inline constexpr std::int64_t kJobRows = 2 * kTileRows;

struct TileJob {
  const std::byte* rows;  // of the first operand, kJobRows of them
  std::int64_t row_bytes;
  std::int64_t row_part_bytes;  // from one part to the next
  const std::byte* pairs;       // of the second, [depth / 2][kLanes]
  std::int64_t pair_part_bytes;
  std::int64_t depth;  // summed elements, a multiple of kTileDepth
  int pair_parts;      // 1, of rows in one part; 2 or 3, of rows in two
  float* sums;         // [kJobRows][kLanes]
  bool adds;           // to what sums hold

  /// Calls that run_job makes to its work.
  std::int64_t num_gaps() const {
    const std::int64_t products = pair_parts == 1 ? 1 : pair_parts == 2 ? 4 : 5;
    return 2 * depth / kTileDepth * products;
  }
};

/// Sums kFirst, kFirst + 1, kFirst + 2 += 16 rows x 48 lanes, over kTileDepth elements.
///
/// Note: rows are loaded with the hint that they will not be needed soon: measured 1.2 to 1.4 times faster than plain
/// loads with a prefetch of the next rows (which takes the load ports), because sums, queries and scores stay in the
/// first-level cache.
#define FOVEA_MULTIPLY_ROWS(sum0, sum1, sum2, rows_at, pairs_at, row_bytes) \
  _tile_stream_loadd(6, rows_at, row_bytes);                                \
  _tile_loadd(7, pairs_at, kLaneBytes);                                     \
  _tile_dpbf16ps(sum0, 6, 7);                                               \
  _tile_loadd(7, (pairs_at) + 64, kLaneBytes);                              \
  _tile_dpbf16ps(sum1, 6, 7);                                               \
  _tile_loadd(7, (pairs_at) + 128, kLaneBytes);                             \
  _tile_dpbf16ps(sum2, 6, 7)

/// Tiles 0 to 5.
FOVEA_AMX_INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
}

FOVEA_AMX_INLINE void start_sums(const TileJob& job) {
  if (!job.adds) {
    zero_sums();
    return;
  }
  const float* second = job.sums + kTileRows * kLanes;
  _tile_loadd(0, job.sums, kLaneBytes);
  _tile_loadd(1, job.sums + 16, kLaneBytes);
  _tile_loadd(2, job.sums + 32, kLaneBytes);
  _tile_loadd(3, second, kLaneBytes);
  _tile_loadd(4, second + 16, kLaneBytes);
  _tile_loadd(5, second + 32, kLaneBytes);
}

FOVEA_AMX_INLINE void store_sums(float* sums) {
  float* second = sums + kTileRows * kLanes;
  _tile_stored(0, sums, kLaneBytes);
  _tile_stored(1, sums + 16, kLaneBytes);
  _tile_stored(2, sums + 32, kLaneBytes);
  _tile_stored(3, second, kLaneBytes);
  _tile_stored(4, second + 16, kLaneBytes);
  _tile_stored(5, second + 32, kLaneBytes);
}

template <class Work>
FOVEA_AMX_INLINE void run_whole_job(const TileJob& job, Work& work) {
  start_sums(job);
  const std::byte* rows = job.rows;
  const std::byte* pairs = job.pairs;
  for (std::int64_t d = 0; d < job.depth; d += kTileDepth) {
    FOVEA_MULTIPLY_ROWS(0, 1, 2, rows, pairs, job.row_bytes);
    work.fill_gap();
    FOVEA_MULTIPLY_ROWS(3, 4, 5, rows + kTileRows * job.row_bytes, pairs, job.row_bytes);
    work.fill_gap();
    rows += 2 * kTileDepth;
    pairs += kTileDepth / 2 * kLaneBytes;
  }
  store_sums(job.sums);
}

#undef FOVEA_MULTIPLY_ROWS

/// Three sums, both parts of the rows (tiles 3 and 4) and one part of the pairs (5 to 7), so that each is loaded once.
/// Of three parts of pairs the smallest meets only the larger one of the rows: the rest is below 2^-25 of the result.
template <class Work>
FOVEA_AMX_INLINE void run_split_rows(const TileJob& job, const std::byte* rows, float* sums,
                                     Work& work) {
  if (job.adds) {
    _tile_loadd(0, sums, kLaneBytes);
    _tile_loadd(1, sums + 16, kLaneBytes);
    _tile_loadd(2, sums + 32, kLaneBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
  }
  const std::byte* pairs = job.pairs;
  for (std::int64_t d = 0; d < job.depth; d += kTileDepth) {
    _tile_stream_loadd(3, rows, job.row_bytes);
    _tile_stream_loadd(4, rows + job.row_part_bytes, job.row_bytes);
    for (int part = job.pair_parts - 1; part >= 0; --part) {
      const std::byte* at = pairs + part * job.pair_part_bytes;
      _tile_loadd(5, at, kLaneBytes);
      _tile_loadd(6, at + 64, kLaneBytes);
      _tile_loadd(7, at + 128, kLaneBytes);
      if (part < 2) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(2, 4, 7);
        work.fill_gap();
      }
      _tile_dpbf16ps(0, 3, 5);
      _tile_dpbf16ps(1, 3, 6);
      _tile_dpbf16ps(2, 3, 7);
      work.fill_gap();
    }
    rows += 2 * kTileDepth;
    pairs += kTileDepth / 2 * kLaneBytes;
  }
  _tile_stored(0, sums, kLaneBytes);
  _tile_stored(1, sums + 16, kLaneBytes);
  _tile_stored(2, sums + 32, kLaneBytes);
}

/// Calls work.fill_gap() after every three products. Rows come in kRowParts parts.
template <int kRowParts, class Work>
FOVEA_AMX_INLINE void run_job(const TileJob& job, Work& work) {
  if constexpr (kRowParts == 1) {
    run_whole_job(job, work);
  } else {
    for (std::int64_t row = 0; row < kJobRows; row += kTileRows)
      run_split_rows(job, job.rows + row * job.row_bytes, job.sums + row * kLanes, work);
  }
}

/// Tile products alone.
struct NoWork {
  FOVEA_AMX_INLINE void fill_gap() {}
};

}  // namespace fovea::cpu::amx

#endif
