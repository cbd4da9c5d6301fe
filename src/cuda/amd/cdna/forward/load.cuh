// Queries, keys and values on their way in. Chapter 3 of cdna/attention_forward.cuh; read compute.cuh next.
//
// Queries stay in registers: a lane loads of its row what it brings to products. Keys are copied to LDS without
// registers between; where a lane's bytes land is not its choice, so it fetches those that belong there. Products need
// the keys of a value's column side by side. gfx950 reads them so from rows that were copied like keys. For gfx942 no
// copy serves: values are loaded to registers a tile ahead, transposed by byte permutations and stored when their place
// is free.
#pragma once

#include "cdna/forward/tiles.cuh"
#include "cdna/forward/wave.cuh"
#include "common/passes.cuh"
#include "common/sequence.cuh"
#include "ptx/barrier.cuh"
#include "ptx/buffer.cuh"
#include "ptx/copy_to_shared.cuh"
#include "ptx/memory.cuh"
#include "shared/forward_params.h"

namespace fovea::cuda::cdna {

/// All that the products of a row take of it.
template <CdnaForwardSpec spec>
using Queries = U32x4[Traits<spec>::kQkSteps];

template <CdnaForwardSpec spec>
FOVEA_DEVICE void load_queries(const Wave<spec>& wave, Queries<spec>& queries) {
  const BshdParam& q = wave.p.q;
  const RowView<spec> row = wave.row();
  const Sequence& sequence = wave.work.sequence;
  const std::int64_t at = sequence.q_batch * q.batch_stride +
                          (sequence.q_row + row.q_idx) * q.row_stride + row.q_head * q.head_stride;
  const auto* const chunks =
      reinterpret_cast<const U32x4*>(static_cast<const char*>(q.data) + at * Traits<spec>::kBytes);
#pragma unroll
  for (int step = 0; step < Traits<spec>::kQkSteps; ++step) {
    const int chunk = 2 * step + wave.half();
    const bool is_there = !spec.has_padded_head_dim || chunk * kChunkBytes < wave.key_bytes();
    queries[step] = row.exists && is_there ? ptx::ld_global_nc(chunks + chunk) : U32x4{};
  }
}

/// Rows of a tile of the sequence's keys, or values, `bytes` of each. Those behind the last key are zeros, or the last
/// key's: no row sees them, whatever they hold. What the tile has behind a row's bytes is zeros.
///
/// In a tensor a lane's bytes lie as far from where the tile begins as in any other tile: one buffer is the tile, and
/// offsets wait in registers. In pages each row lies somewhere.
template <CdnaForwardSpec spec>
class KvRows {
 public:
  FOVEA_DEVICE_MEMBER KvRows(const Wave<spec>& wave, const BshdParam& t, std::int32_t bytes,
                             std::int32_t idx)
      : wave_(wave),
        t_(t),
        begin_(idx * spec.tile_kv),
        row_bytes_(static_cast<std::uint32_t>(t.row_stride * kBytes)),
        bytes_(static_cast<std::uint32_t>(bytes)) {
    static_assert(!spec.is_paged || !spec.has_padded_head_dim, "rows of pages are copied whole");
    if constexpr (!spec.is_paged) {
      const auto rows = static_cast<std::uint32_t>(least(wave.work.kv_end - begin_, spec.tile_kv));
      buffer_ = ptx::make_buffer(place_of(begin_), (rows - 1) * row_bytes_ + bytes_);
    }
  }

  /// A word of row first + of_lane, of which `first` is the same for all lanes.
  FOVEA_DEVICE_MEMBER std::uint32_t load(int first, int of_lane, std::uint32_t byte) const {
    if constexpr (spec.is_paged) {
      return ptx::ld_global_nc(
          reinterpret_cast<const std::uint32_t*>(place_of(key_at(first + of_lane)) + byte));
    } else {
      return ptx::ld_buffer(buffer_, in_tile(first, of_lane, byte));
    }
  }

  template <int bytes>
  FOVEA_DEVICE_MEMBER void copy(SharedAddress to, int first, int of_lane,
                                std::uint32_t byte) const {
    if constexpr (spec.is_paged) {
      ptx::copy_to_shared<bytes>(to, place_of(key_at(first + of_lane)) + byte);
    } else {
      ptx::copy_buffer_to_shared<bytes>(to, buffer_, in_tile(first, of_lane, byte));
    }
  }

 private:
  static constexpr int kBytes = Traits<spec>::kBytes;

  FOVEA_DEVICE_MEMBER const char* place_of(std::int32_t key) const {
    const KvPlace place = place_of_key<spec>(wave_.p, wave_.work.sequence, key);
    return static_cast<const char*>(t_.data) + place.in(t_, wave_.work.kv_head) * kBytes;
  }
  FOVEA_DEVICE_MEMBER std::int32_t key_at(int row) const {
    return least(begin_ + row, wave_.work.kv_end - 1);
  }
  /// In 32 bits: a tile of longer strides is refused (CdnaForward::reads).
  FOVEA_DEVICE_MEMBER std::uint32_t in_tile(int first, int of_lane, std::uint32_t byte) const {
    constexpr std::uint32_t kBehindAll = 0x80000000U;
    const auto row = [&](int i) { return static_cast<std::uint32_t>(i) * row_bytes_; };
    const bool is_there = !spec.has_padded_head_dim || byte < bytes_;
    return row(first) + (is_there ? row(of_lane) + byte : kBehindAll);
  }

  const Wave<spec>& wave_;
  const BshdParam& t_;
  const std::int32_t begin_;
  const std::uint32_t row_bytes_, bytes_;
  ptx::Buffer buffer_;
};

/// This wave's part of the rows of a tile of keys, or values.
template <CdnaForwardSpec spec, class Tile>
FOVEA_DEVICE void copy_rows(const Wave<spec>& wave, const KvRows<spec>& rows, Tile to) {
  constexpr int kLaneBytes = Traits<spec>::kCdna.copy_bytes;
  constexpr int kCopyBytes = ptx::kWarpLanes * kLaneBytes;
  constexpr int kCopies = Tile::kBytes / kCopyBytes / spec.num_warps;
  static_assert(kCopies * kCopyBytes * spec.num_warps == Tile::kBytes, "waves copy alike");
  const int of_lane = wave.lane * kLaneBytes / Tile::kRowBytes;
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    // Whole rows, or a part of one.
    const int begin = (i * spec.num_warps + wave.warp) * kCopyBytes;
    const int first = begin / Tile::kRowBytes;
    const auto byte =
        static_cast<std::uint32_t>((begin + wave.lane * kLaneBytes) % Tile::kRowBytes);
    rows.template copy<kLaneBytes>(to.base + begin, first, of_lane,
                                   byte ^ Tile::permutation(first + of_lane));
  }
}

/// Values that were copied become what this pass wants. All of the workgroup come, and all copies have landed.
template <CdnaForwardSpec spec>
FOVEA_DEVICE void turn_values(const Wave<spec>& wave, int stage, Pass pass) {
  using T = Traits<spec>;
  const int thread = wave.warp * ptx::kWarpLanes + wave.lane;
#pragma unroll 1
  for (int at = 4 * thread; at < T::Values::kBytes; at += 4 * T::kThreads) {
    const SharedAddress pair = wave.values(stage).base + at;
    ptx::st_shared(pair, values_of_pass<spec.element>(ptx::ld_shared<std::uint32_t>(pair), pass));
  }
  ptx::sync_threads();
}

/// Values on their way through registers: of each unit of keys that this lane brings, two columns of each of its eight
/// rows.
template <CdnaForwardSpec spec, bool are_copied>
struct ArrivingValues {
  using T = Traits<spec>;
  using Tile = typename T::Values;
  static constexpr int kRowLanes = spec.head_dim_v / 2;
  static constexpr int kUnitsAtOnce = ptx::kWarpLanes / kRowLanes;
  static constexpr int kUnits = Tile::kUnits / kUnitsAtOnce / spec.num_warps;
  static_assert(kUnits * kUnitsAtOnce * spec.num_warps == Tile::kUnits, "waves load alike");
  static_assert(kUnitsAtOnce == 1 || kUnitsAtOnce == 2, "units of a product lie in one wave");

  std::uint32_t pair[kUnits][kUnitKeys];

  /// The first of the wave's.
  FOVEA_DEVICE_MEMBER static int unit_of(const Wave<spec>& wave, int i) {
    return (i * spec.num_warps + wave.warp) * kUnitsAtOnce;
  }

  FOVEA_DEVICE_MEMBER void load(const Wave<spec>& wave, std::int32_t idx) {
    const KvRows<spec> rows(wave, wave.p.v, wave.value_bytes(), idx);
    const int of_lane = first_key_of_unit(wave.lane / kRowLanes);
    const auto byte = static_cast<std::uint32_t>(wave.lane % kRowLanes * 4);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
#pragma unroll
      for (int key = 0; key < kUnitKeys; ++key) {
        const int first = first_key_of_unit(unit_of(wave, i)) + key_in_unit(key);
        pair[i][key] = rows.load(first, of_lane, byte);
      }
    }
  }

  /// As this pass wants them.
  FOVEA_DEVICE_MEMBER void store(const Wave<spec>& wave, Pass pass) {
    const int column = wave.lane % kRowLanes * 2;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      auto& x = pair[i];
      if (pass != Pass::all) {
#pragma unroll
        for (int key = 0; key < kUnitKeys; ++key)
          x[key] = values_of_pass<spec.element>(x[key], pass);
      }
      const auto lo = [&](int at) { return lower_halves(x[at], x[at + 1]); };
      const auto hi = [&](int at) { return upper_halves(x[at], x[at + 1]); };
      const int unit = unit_of(wave, i) + wave.lane / kRowLanes;
      ptx::st_shared(wave.values(0).chunk(unit, column), U32x4{lo(0), lo(2), lo(4), lo(6)});
      ptx::st_shared(wave.values(0).chunk(unit, column + 1), U32x4{hi(0), hi(2), hi(4), hi(6)});
    }
  }
};

/// Copies take none.
template <CdnaForwardSpec spec>
struct ArrivingValues<spec, true> {};

}  // namespace fovea::cuda::cdna
