// Decoding over a cache of codes: few rows against many keys, whose codes go from memory into the operands of mma.sync,
// through no shared memory. What counts is how fast they come.
//
//   S = scale_k (Q Kᵀ),  O += (P scale_v) V              K and V codes, exact in bf16; a scale for each key
//
// A CTA takes one split of the keys, and its warps a slice of 16 keys each of one tile after the other, with all rows
// and sums of their own. Where an element of a product stands among those that are summed is free, so lanes load what
// lies side by side:
//
//   K   lane l has a quarter of the rows of keys l / 4 and 8 + l / 4; the same columns of Q, in the same order
//   V   lane l has an eighth of the rows of the four keys whose probabilities it has: block j of O are the columns
//       j, j + w, j + 2 w, ... with w = head_dim_v / 8
//
// Codes become pairs of bf16 in registers, two instructions a code (common/codes.cuh); the scale of a key multiplies
// its scores and, behind the softmax, its probabilities, so that nothing is rounded that a cache of 16 bits would not
// round.
//
// Registers hold one slice: keys of the next are asked for as soon as these are multiplied, values likewise, so that
// half of a slice is always under way and twelve warps fit an SM.
//
//   a warp   S | ask for keys | softmax  O | ask for values | S | ...
//
// Bound: memory, 19 bytes a clock of each SM of an H200; not reached: instructions of a slice are what counts
// (docs/kernels/attention_coded_sm80.md).
//
// NaN: of a scale it makes sums that are not finite, of a code of e4m3 a bit says so; either way the rows of the split
// are computed again, key by key (common/careful_row.cuh).
//
// Refused (sm80_decode_coded.cpp has the words): queries other than bf16, more than 16 rows, head dims other than 64
// and 128, rows that do not lie at multiples of 16 bytes, no more keys than one split has.
#pragma once

#include "common/careful_row.cuh"
#include "common/codes.cuh"
#include "common/codes_of_row.cuh"
#include "common/online_softmax.cuh"
#include "common/row_view.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/warp.cuh"
#include "shared/decode_coded.h"
#include "shared/split.h"
#include "team/compute.cuh"
#include "team/join.cuh"
#include "team/scores.cuh"
#include "team/team.cuh"
#include "team/walk.cuh"

namespace fovea::cuda::sm80 {

using namespace team;

/// Words of four codes, as many as a load of 16 or 8 bytes brings.
template <int num_words>
struct CodeWords {
  static_assert(num_words == 2 || num_words % 4 == 0, "a lane's part of a row is whole loads");
  std::uint32_t word[num_words];

  FOVEA_DEVICE_MEMBER void load(const char* from) {
    if constexpr (num_words == 2) {
      const auto two = ptx::ld_global_nc(reinterpret_cast<const ptx::U32x2*>(from));
      word[0] = two.x, word[1] = two.y;
    } else {
#pragma unroll
      for (int i = 0; i < num_words; i += 4) {
        const auto four = ptx::ld_global_nc(reinterpret_cast<const U32x4*>(from) + i / 4);
        word[i] = four.x, word[i + 1] = four.y, word[i + 2] = four.z, word[i + 3] = four.w;
      }
    }
  }
};

/// A warp, and what it has of the slices that are under way.
template <CodedDecodeSpec spec, class Mods>
struct CodedReader {
  static constexpr TeamSpec kWarp = spec_of_coded_warp(spec);
  using T = Traits<kWarp>;
  using Tiles = typename WalkOf<Mods>::Type;
  using WarpParts = Parts<spec.num_warps, spec.tile_q, spec.head_dim_v>;
  static constexpr int kQkBytes = spec.head_dim_qk / 4;  // of a row of K, a lane's
  static constexpr int kVBytes = spec.head_dim_v / 8;    // of a row of V
  static_assert(spec.tile_q == 16 && spec.tile_kv == 16 && spec.is_split);
  static_assert(spec.element == Element::bf16,
                "codes are exact in it, and its range is that of scales");
  static_assert(WarpParts::kBytes == decode_coded_bytes(spec),
                "host and device count the same bytes");

  /// Of a tile of the walk each warp has a slice.
  static constexpr int kTileKeys = spec.num_warps * spec.tile_kv;
  static_assert(kFewestKeysPerSplit % kTileKeys == 0, "splits are cut between tiles");

  /// What a warp multiplies next, and where it lies: its first key where `is_plain`, all keys of one page then; else in
  /// lane l the page of key l % 16.
  struct Slice {
    std::int32_t idx;  // -1: there are no more
    bool is_full, is_plain;
    std::int32_t page;
  };

  const CodedParams& p;
  const Team<kWarp> team;
  const int warp;
  Sums<kWarp, Mods> sums;
  CodeWords<kQkBytes / 4> keys[2];
  CodeWords<kVBytes / 4> values[4];
  std::uint32_t nan_seen = 0;
  const float* scales_at;  // of key 0 of slot or page 0, as this lane has them

  FOVEA_DEVICE_MEMBER CodedReader(const CodedParams& params, const Work& work)
      : p(params),
        team{params.common, work, ptx::dynamic_shared(), 0, ptx::lane_idx()},
        warp(ptx::warp_idx()) {}

  FOVEA_DEVICE_MEMBER void run() {
    read_queries();
    sums.start();
    scales_at = scale_at(team.lane < 16 ? p.k_scale : p.v_scale, team.work.sequence.idx, 0, 0,
                         team.work.kv_head);
    const TileSpan rows = span_of<kWarp>(team.work);
    Tiles tiles(
        rows,
        TileRange{team.work.kv_begin / kTileKeys, ceil_div(team.work.kv_end, kTileKeys), kTileKeys},
        p.common.captures);
    Slice slice = next_slice(tiles);
    float scale = 0;
    if (slice.idx >= 0) {
      load_keys(slice);
      scale = load_scale(slice);
      load_values(slice);
    }
#pragma unroll 1
    while (slice.idx >= 0) {
      const VisitedTile now{slice.idx, slice.is_full};
      slice = next_slice(tiles);
      const bool has_next = slice.idx >= 0;
      ScoreFragments<kWarp> s;
      multiply_keys(s);
      if (has_next) load_keys(slice);
      make_weights(s, scale, now);
      if (has_next) scale = load_scale(slice);
      multiply_values(s);
      if (has_next) load_values(slice);
    }
    const WarpParts parts{team.smem};
    put_rows(parts);
    ptx::sync_threads();
    const Join<kWarp, Mods, WarpParts> rows_of_cta{team, parts};
    rows_of_cta.run(warp, spec.num_warps, [this](const RowView<kWarp>& row) {
      using Rows = CodesOfRow<spec.k_codes, spec.v_codes>;
      CarefulRow<kWarp, Mods, Rows>(row, Rows{p.common, p.k_scale, p.v_scale, team.work}).run();
    });
  }

 private:
  // ---- on their way in ---------------------------------------------------------------------------

  /// A operands of Q Kᵀ. Rows that do not exist are the first one: nobody asks for what becomes of them.
  FOVEA_DEVICE_MEMBER void read_queries() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int mine = team.my_row(0, half);
      const RowView<kWarp> row = team.row_at(team.row_at(mine).exists ? mine : 0);
      const char* const from = static_cast<const char*>(p.common.q.data) +
                               (row.query_at() + team.lane % 4 * kQkBytes) * T::kElement.bytes;
#pragma unroll
      for (int step = 0; step < T::kQkSteps; ++step) {
        const auto four = ptx::ld_global_nc(reinterpret_cast<const ptx::U32x2*>(from + step * 8));
        sums.scores.queries[step][0][half] = four.x;
        sums.scores.queries[step][0][half + 2] = four.y;
      }
    }
  }

  FOVEA_DEVICE_MEMBER Slice next_slice(Tiles& tiles) const {
    VisitedTile tile;
    if (!tiles.next(tile)) return {-1, false, false, 0};
    const std::int32_t idx = tile.idx * spec.num_warps + warp;
    if (idx * spec.tile_kv >= team.work.kv_end)
      return {-1, false, false, 0};  // behind the last key
    const bool is_whole = (idx + 1) * spec.tile_kv <= team.work.kv_end;
    Slice slice{idx, tile.is_full && is_whole, is_whole, 0};
    if constexpr (spec.is_paged) {
      const bool lies_in_one =
          p.common.page_size % spec.tile_kv == 0 && team.work.sequence.kv_row % spec.tile_kv == 0;
      slice.is_plain = is_whole && lies_in_one;
      const std::int32_t key =
          slice.is_plain ? idx * spec.tile_kv : key_of(slice, team.lane % spec.tile_kv);
      slice.page = static_cast<std::int32_t>(
          page_at(p.common, team.work.sequence.kv_batch, entry_of_row(p.common, row_of(key))));
    }
    return slice;
  }

  /// Behind the last key it is that: what is loaded twice is hidden.
  FOVEA_DEVICE_MEMBER std::int32_t key_of(const Slice& slice, int i) const {
    return least(slice.idx * spec.tile_kv + i, team.work.kv_end - 1);
  }
  FOVEA_DEVICE_MEMBER std::int32_t row_of(std::int32_t key) const {
    return static_cast<std::int32_t>(team.work.sequence.kv_row) + key;
  }

  /// Slot or page, and row in it, of key i of a slice.
  FOVEA_DEVICE_MEMBER KvPlace place_of(const Slice& slice, int i) const {
    const std::int32_t row = row_of(key_of(slice, i));
    if constexpr (!spec.is_paged) return {team.work.sequence.kv_batch, row};
    return {ptx::shfl_idx(slice.page, i), row - entry_of_row(p.common, row) * p.common.page_size};
  }
  /// Of key 0 of a plain one, without asking other lanes.
  FOVEA_DEVICE_MEMBER KvPlace first_place(const Slice& slice) const {
    const std::int32_t row = row_of(slice.idx * spec.tile_kv);
    if constexpr (!spec.is_paged) return {team.work.sequence.kv_batch, row};
    return {slice.page, row - entry_of_row(p.common, row) * p.common.page_size};
  }

  FOVEA_DEVICE_MEMBER const char* row_at(const BshdParam& t, const KvPlace& place) const {
    return static_cast<const char*>(t.data) + place.in(t, team.work.kv_head);
  }

  FOVEA_DEVICE_MEMBER void load_keys(const Slice& slice) {
    const BshdParam& k = p.common.k;
    const int mine = team.lane / 4;
    const char* from[2];
    if (slice.is_plain) {
      from[0] = row_at(k, first_place(slice)) + mine * k.row_stride;
      from[1] = from[0] + 8 * k.row_stride;
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) from[i] = row_at(k, place_of(slice, 8 * i + mine));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) keys[i].load(from[i] + team.lane % 4 * kQkBytes);
  }

  FOVEA_DEVICE_MEMBER void load_values(const Slice& slice) {
    const BshdParam& v = p.common.v;
    const int mine = team.lane % 4 * 2;
    const char* from[4];
    if (slice.is_plain) {
      from[0] = row_at(v, first_place(slice)) + mine * v.row_stride;
      from[1] = from[0] + v.row_stride;
      from[2] = from[0] + 8 * v.row_stride;
      from[3] = from[1] + 8 * v.row_stride;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) from[i] = row_at(v, place_of(slice, i / 2 * 8 + mine + i % 2));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i].load(from[i] + team.lane / 4 * kVBytes);
  }

  /// Lanes 0 to 15 get those of keys, the others those of values.
  FOVEA_DEVICE_MEMBER float load_scale(const Slice& slice) const {
    const int mine = team.lane % spec.tile_kv;
    KvPlace at{};
    if (slice.is_plain) {
      at = first_place(slice);
      at.row += mine;
    } else {
      at = place_of(slice, mine);
    }
    const bool is_key = team.lane < 16;
    const std::int64_t slot_stride = is_key ? p.k_scale.slot_stride : p.v_scale.slot_stride;
    const std::int64_t row_stride = is_key ? p.k_scale.row_stride : p.v_scale.row_stride;
    return ptx::ld_global_nc(scales_at + at.batch * slot_stride + at.row * row_stride);
  }

  // ---- products ----------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void multiply_keys(ScoreFragments<kWarp>& s) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][i][e] = 0;
#pragma unroll
      for (int step = 0; step < T::kQkSteps; ++step) {
        const std::uint32_t word = keys[i].word[step];
        nan_seen |= nan_bits<spec.k_codes>(word);
        ptx::mma_m16n8k16<spec.element>(s[0][i], sums.scores.queries[step][0],
                                        bf16_pair<spec.k_codes>(word, word, 0, 1),
                                        bf16_pair<spec.k_codes>(word, word, 2, 3));
      }
    }
  }

  /// Products become scores, probabilities, and what values' codes are multiplied by.
  FOVEA_DEVICE_MEMBER void make_weights(ScoreFragments<kWarp>& s, float scale, VisitedTile slice) {
    multiply_columns(s, scale, 0);
    sums.scores.modify(team, s, slice);
    sums.scores.mask(team, s, slice);
    sums.softmax(team, s);
    multiply_columns(s, scale, 16);
  }

  /// By the scales of their keys, of which lane `first` has the first.
  FOVEA_DEVICE_MEMBER void multiply_columns(ScoreFragments<kWarp>& s, float scale,
                                            int first) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float mine = ptx::shfl_idx(scale, first + 8 * i + team.lane % 4 * 2 + e);
        s[0][i][e] *= mine;
        s[0][i][2 + e] *= mine;
      }
    }
  }

  FOVEA_DEVICE_MEMBER void multiply_values(const ScoreFragments<kWarp>& s) {
    std::uint32_t probabilities[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* pair = &s[0][e / 2][e % 2 * 2];
      probabilities[e] = pack<spec.element>(pair[0], pair[1]);
    }
#pragma unroll
    for (int j = 0; j < T::kColBlocks; ++j) {
      std::uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        word[i] = values[i].word[j / 4];
        if (j % 4 == 0) nan_seen |= nan_bits<spec.v_codes>(word[i]);
      }
      ptx::mma_m16n8k16<spec.element>(sums.out[0][j], probabilities,
                                      bf16_pair<spec.v_codes>(word[0], word[1], j % 4, j % 4),
                                      bf16_pair<spec.v_codes>(word[2], word[3], j % 4, j % 4));
    }
  }

  // ---- on their way out --------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void put_rows(const WarpParts& parts) {
    // Whoever joins computes the row again.
    const float spoil = ptx::vote_any(nan_seen != 0) ? quiet_nan() : 0.0F;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int mine = team.my_row(0, half);
      RowState row = sums.rows[0][half];
      row.sum += ptx::shfl_bfly(row.sum, 1);
      row.sum += ptx::shfl_bfly(row.sum, 2);
      if (team.lane % 4 == 0)
        parts.put_state(warp, mine, row, spec.wants_row_max ? sums.row_max[0][half] : 0.0F);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const SharedAddress to = parts.at(warp, mine) + (team.lane % 4 * 2 + e) * kVBytes * 4;
#pragma unroll
        for (int j = 0; j < T::kColBlocks; j += 4) {
          const auto at = [&](int i) { return sums.out[0][j + i][half * 2 + e] + spoil; };
          ptx::st_shared(to + j * 4, ptx::F32x4{at(0), at(1), at(2), at(3)});
        }
      }
    }
  }
};

template <CodedDecodeSpec spec, class Mods>
FOVEA_DEVICE void decode_coded(const CodedParams& p) {
  const Work work = find_work<spec>(p.common);
  if (work.is_nothing) return;
  CodedReader<spec, Mods>(p, work).run();
}

}  // namespace fovea::cuda::sm80
