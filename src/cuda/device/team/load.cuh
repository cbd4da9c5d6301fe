// Queries, keys and values on their way into shared memory. Chapter 2 of sm80/attention_forward.cuh; read scores.cuh
// next.
//
// Keys and values of a tile are two groups of copies. A thread copies the same chunk of every so-manieth row; what does
// not exist becomes zeros, whatever lies there. Pages are looked up for all of a thread's rows at once, so that it
// waits for memory once. On sm_75 a tile of the forward walk passes through registers: fetched, then put.
#pragma once

#include "common/copies.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"
#include "shared/quantize_k.h"
#include "team/code_scores.cuh"
#include "team/team.cuh"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::team {

/// One 16-byte chunk of a row; zeros where the row does not exist and beyond head_dim. `somewhere` can be read.
template <TeamSpec spec>
FOVEA_DEVICE void copy_chunk(SharedAddress to, const char* row, int chunk, bool exists,
                             int head_dim, const void* somewhere) {
  const bool is_data =
      exists && (!spec.has_padded_head_dim || chunk * Traits<spec>::kElement.of_chunk < head_dim);
  const void* const from = is_data ? row + chunk * kChunkBytes : somewhere;
  if constexpr (spec.instructions == Instructions::sm75) {
    copy_chunk_or_zero<spec.instructions>(to, from, is_data);
  } else {
    ptx::cp_async_16(to, from, is_data ? kChunkBytes : 0);
  }
}

/// The same by elements: any alignment, any stride.
template <TeamSpec spec>
FOVEA_DEVICE void gather_chunk(SharedAddress to, const char* row, int chunk, bool exists,
                               int head_dim, std::int64_t col_stride) {
#pragma unroll 1
  for (int i = 0; i < Traits<spec>::kElement.of_chunk; ++i) {
    const int col = chunk * Traits<spec>::kElement.of_chunk + i;
    std::uint16_t bits = 0;
    if (exists && col < head_dim)
      bits = ptx::ld_global_nc(reinterpret_cast<const std::uint16_t*>(row) + col * col_stride);
    ptx::st_shared(to + i * 2, bits);
  }
}

// ---- queries -----------------------------------------------------------------------------------

/// Where the sequence's queries begin: batch and row of the tensor at `data`.
struct QueriesAt {
  const char* data;
  std::int64_t batch, row;
};

template <TeamSpec spec>
FOVEA_DEVICE QueriesAt queries_at(const Team<spec>& team) {
  using T = Traits<spec>;
  if constexpr (T::kForgetsQueries) {
    const auto begin = ptx::ld_shared<std::uint64_t>(team.smem + T::kAt.queries_begin);
    return {ptx::bit_cast<const char*>(begin), 0, 0};
  }
  const Sequence& sequence = team.work.sequence;
  return {static_cast<const char*>(team.p.q.data), sequence.q_batch, sequence.q_row};
}

template <TeamSpec spec>
FOVEA_DEVICE RowAddresses query_rows(const Team<spec>& team) {
  using T = Traits<spec>;
  const BshdParam& q = team.p.q;
  const QueriesAt queries = queries_at(team);
  const RowView<spec> r = team.row_at(team.warp * T::kWarpRows + team.lane % T::kWarpRows);
  const std::int64_t at = queries.batch * q.batch_stride + (queries.row + r.q_idx) * q.row_stride +
                          r.q_head * q.head_stride;
  return {queries.data + at * T::kElement.bytes, r.exists};
}

template <TeamSpec spec>
FOVEA_DEVICE void load_queries(const Team<spec>& team) {
  using Tile = typename Traits<spec>::QTile;
  constexpr int kSteps = Tile::kRows * Tile::kChunks / 32;
  const ForwardParams& p = team.p;
  const RowAddresses rows = query_rows(team);
  const auto visit = [&](int step, auto&& copy) {
    const int row = (step * 32 + team.lane) / Tile::kChunks;
    const int chunk = (step * 32 + team.lane) % Tile::kChunks;
    copy(Tile{team.warp_smem()}.chunk(row, chunk), rows.at(row), chunk, rows.exists(row));
  };
  if (p.is_q_aligned != 0) {
#pragma unroll 2
    for (int step = 0; step < kSteps; ++step) {
      visit(step, [&](SharedAddress to, const char* from, int chunk, bool exists) {
        copy_chunk<spec>(to, from, chunk, exists, p.head_dim_qk, p.q.data);
      });
    }
  } else {
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      visit(step, [&](SharedAddress to, const char* from, int chunk, bool exists) {
        gather_chunk<spec>(to, from, chunk, exists, p.head_dim_qk, p.q.col_stride);
      });
    }
  }
}

// ---- keys and values ---------------------------------------------------------------------------

template <TeamSpec spec>
FOVEA_DEVICE const char* kv_row_dense(const BshdParam& t, const char* head, std::int32_t row) {
  return head + row * (t.row_stride * Traits<spec>::kElement.bytes);
}

/// Where row `row` of the sequence's keys (or values) begins.
template <TeamSpec spec>
FOVEA_DEVICE const char* kv_row(const ForwardParams& p, const Work& work, const BshdParam& t,
                                const char* head, std::int32_t row) {
  if constexpr (spec.is_paged) {
    const auto idx = static_cast<std::int32_t>(work.sequence.kv_row + row);
    const std::int32_t entry = entry_of_row(p, idx);
    const std::int64_t page = page_at(p, work.sequence.kv_batch, entry);
    return head + (page * t.batch_stride + (idx - entry * p.page_size) * t.row_stride) *
                      Traits<spec>::kElement.bytes;
  } else {
    return kv_row_dense<spec>(t, head, row);
  }
}

/// The rows of a tile that one thread copies, and where they lie in pages; nothing where there are none.
template <TeamSpec spec, class Tile>
struct Places {
  static constexpr int kRowsAtOnce = Traits<spec>::kThreads / Tile::kPanelChunks;  // how far apart
  static constexpr int kNumRows = (spec.tile_kv + kRowsAtOnce - 1) / kRowsAtOnce;
  std::uint32_t page[spec.is_paged ? kNumRows : 1];
  std::int32_t slot[spec.is_paged ? kNumRows : 1];
};

/// All look-ups at once, so that they wait for memory together. Rows behind the last key are taken for the last.
template <class Tile, TeamSpec spec>
FOVEA_DEVICE Places<spec, Tile> find_places(const Team<spec>& team, std::int32_t idx) {
  using RowPlaces = Places<spec, Tile>;
  RowPlaces places{};
  if constexpr (spec.is_paged) {
    const ForwardParams& p = team.p;
    const int first = idx * spec.tile_kv + (team.warp * 32 + team.lane) / Tile::kPanelChunks;
    std::int32_t row[RowPlaces::kNumRows];
    std::int32_t entry[RowPlaces::kNumRows];
#pragma unroll
    for (int i = 0; i < RowPlaces::kNumRows; ++i) {
      row[i] = static_cast<std::int32_t>(team.work.sequence.kv_row) +
               least(first + i * RowPlaces::kRowsAtOnce, team.work.kv_end - 1);
    }
    if (p.page_shift >= 0) {
#pragma unroll
      for (int i = 0; i < RowPlaces::kNumRows; ++i) entry[i] = row[i] >> p.page_shift;
    } else {
#pragma unroll
      for (int i = 0; i < RowPlaces::kNumRows; ++i) entry[i] = row[i] / p.page_size;
    }
    const std::int64_t table = team.work.sequence.kv_batch * p.page_table_row_stride;
    if (p.page_table.is_wide != 0) {
      const auto* pages = static_cast<const std::int64_t*>(p.page_table.data);
#pragma unroll
      for (int i = 0; i < RowPlaces::kNumRows; ++i)
        places.page[i] = static_cast<std::uint32_t>(
            ptx::ld_global_nc(pages + table + entry[i] * p.page_table.stride));
    } else {
      const auto* pages = static_cast<const std::int32_t*>(p.page_table.data);
#pragma unroll
      for (int i = 0; i < RowPlaces::kNumRows; ++i)
        places.page[i] = static_cast<std::uint32_t>(
            ptx::ld_global_nc(pages + table + entry[i] * p.page_table.stride));
    }
#pragma unroll
    for (int i = 0; i < RowPlaces::kNumRows; ++i) {
      places.page[i] = one_of(places.page[i], p.num_slots);
      places.slot[i] = row[i] - entry[i] * p.page_size;
    }
  }
  return places;
}

/// Nowhere, where there is no tile.
template <class Tile, TeamSpec spec>
FOVEA_DEVICE Places<spec, Tile> places_of(const Team<spec>& team, VisitedTile tile) {
  return tile.idx >= 0 ? find_places<Tile>(team, tile.idx) : Places<spec, Tile>{};
}

/// Are rows behind the last key left out where rows are copied, and not only where chunks are? Each sequence that lies
/// in shared memory as a whole ends in a tile that is cut; pages are looked up for all rows; what passes through
/// registers is a thread's rows.
template <TeamSpec spec>
inline constexpr bool kCutsRows =
    spec.is_paged || spec.holds_all_keys || spec.instructions == Instructions::sm75;

/// visit(i, panel, address in shared memory, row, chunk of it, whether the row exists) for every chunk that this thread
/// has of tile `idx` of aligned rows. Rows behind the last key do not exist, or there are none of them.
template <TeamSpec spec, class Tile, class Visit>
FOVEA_DEVICE void visit_chunks(const Team<spec>& team, const Tile& to, const BshdParam& t,
                               const char* head, const Places<spec, Tile>& places, std::int32_t idx,
                               Visit&& visit) {
  constexpr int kRowsAtOnce = Places<spec, Tile>::kRowsAtOnce;
  constexpr int kBytes = Traits<spec>::kElement.bytes;
  const int first = (team.warp * 32 + team.lane) / Tile::kPanelChunks;
  const int chunk = team.lane % Tile::kPanelChunks;
  const std::int32_t begin = idx * spec.tile_kv;
  const char* row = spec.is_paged ? head : kv_row_dense<spec>(t, head, begin + first);
#pragma unroll
  for (int i = 0; i < Places<spec, Tile>::kNumRows; ++i) {
    const int mine = first + i * kRowsAtOnce;
    if (spec.tile_kv % kRowsAtOnce != 0 && mine >= spec.tile_kv) break;
    const bool exists = !kCutsRows<spec> || begin + mine < team.work.kv_end;
    if constexpr (spec.is_paged)
      row = head + (places.page[i] * t.batch_stride + places.slot[i] * t.row_stride) * kBytes;
    const SharedAddress first_smem = to.chunk(mine, chunk);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      visit(i, panel, first_smem + panel * Tile::kPanelBytes, row,
            chunk + panel * Tile::kPanelChunks, exists);
    }
    if constexpr (!spec.is_paged) row += kRowsAtOnce * (t.row_stride * kBytes);
  }
}

/// Tile `idx` of aligned rows; zeros for those that do not exist, whatever lies there.
template <TeamSpec spec, class Tile>
FOVEA_DEVICE void copy_rows(const Team<spec>& team, const Tile& to, const BshdParam& t,
                            const char* head, const Places<spec, Tile>& places, std::int32_t idx,
                            int head_dim) {
  visit_chunks(team, to, t, head, places, idx,
               [&](int, int, SharedAddress at, const char* row, int chunk, bool exists) {
                 copy_chunk<spec>(at, row, chunk, exists, head_dim, t.data);
               });
}

/// The same chunk by chunk, for rows of any alignment and stride, and for the tile that the last key cuts: code is
/// short where it is seldom run.
template <TeamSpec spec, class Tile>
FOVEA_DEVICE void copy_chunks(const Team<spec>& team, const Tile& to, const BshdParam& t,
                              const char* head, std::int32_t idx, int head_dim) {
#pragma unroll 1
  for (int at = team.warp * 32 + team.lane; at < spec.tile_kv * Tile::kChunks;
       at += Traits<spec>::kThreads) {
    const int row = at / Tile::kChunks;
    const int chunk = at % Tile::kChunks;
    const std::int32_t key = idx * spec.tile_kv + row;
    const bool exists = key < team.work.kv_end;
    const char* from = kv_row<spec>(team.p, team.work, t, head, exists ? key : 0);
    if (!spec.is_paged && team.p.is_kv_aligned != 0) {
      copy_chunk<spec>(to.chunk(row, chunk), from, chunk, exists, head_dim, t.data);
    } else {
      gather_chunk<spec>(to.chunk(row, chunk), from, chunk, exists, head_dim, t.col_stride);
    }
  }
}

/// Tile `idx`, part of the group of copies to come.
template <TeamSpec spec, class Tile>
FOVEA_DEVICE void copy_tile(const Team<spec>& team, const Tile& to, const BshdParam& t, int head_at,
                            const Places<spec, Tile>& places, std::int32_t idx, int head_dim) {
  const auto head = ptx::bit_cast<const char*>(ptx::ld_shared<std::uint64_t>(team.smem + head_at));
  const bool is_whole = (idx + 1) * spec.tile_kv <= team.work.kv_end;
  const bool is_aligned = team.p.is_kv_aligned != 0;
  if (is_aligned && (kCutsRows<spec> || is_whole)) {
    copy_rows(team, to, t, head, places, idx, head_dim);
  } else {
    copy_chunks(team, to, t, head, idx, head_dim);
  }
}

/// A group of copies of its own; an empty group where there is no tile.
template <TeamSpec spec, class Tile>
FOVEA_DEVICE void load_rows(const Team<spec>& team, const Tile& to, const BshdParam& t, int head_at,
                            const Places<spec, Tile>& places, VisitedTile tile, int head_dim) {
  if (tile.idx >= 0) copy_tile(team, to, t, head_at, places, tile.idx, head_dim);
  commit_copies<spec.instructions>();
}

template <TeamSpec spec>
using KeyPlaces = Places<spec, typename Traits<spec>::KTile>;
template <TeamSpec spec>
using ValuePlaces = Places<spec, typename Traits<spec>::VTile>;

template <TeamSpec spec>
FOVEA_DEVICE void load_keys(const Team<spec>& team, const KeyPlaces<spec>& places, VisitedTile tile,
                            int stage) {
  if constexpr (spec.multiplies_codes) {
    if (tile.idx >= 0) CodeScores<spec>::copy_keys_beside(team, tile.idx, stage);
  }
  load_rows(team, team.keys_at(stage), team.p.k, Traits<spec>::kAt.key_head, places, tile,
            team.p.head_dim_qk);
}
template <TeamSpec spec>
FOVEA_DEVICE void load_keys(const Team<spec>& team, VisitedTile tile, int stage) {
  load_keys(team, places_of<typename Traits<spec>::KTile>(team, tile), tile, stage);
}

/// Codes of values: rows of channels, which all exist. Keys behind the last one have code 0.
template <TeamSpec spec>
FOVEA_DEVICE void copy_value_codes(const Team<spec>& team, std::int32_t idx, int stage) {
  using Tile = typename Traits<spec>::VTile;
  constexpr int kTilesOfCodes = kQuantizedTile / spec.tile_kv;
  constexpr int kTileBytes = spec.head_dim_v * kQuantizedTile;
  const auto first = ptx::bit_cast<const char*>(
      ptx::ld_shared<std::uint64_t>(team.smem + Traits<spec>::kAt.value_codes));
  constexpr int kRowsAtOnce = Traits<spec>::kThreads / Tile::kChunks;
  static_assert(Tile::kRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0,
                "a thread's chunks are permuted alike");
  const int thread = team.warp * 32 + team.lane;
  const int row = thread / Tile::kChunks, chunk = thread % Tile::kChunks;
  const char* const from =
      first + idx / kTilesOfCodes * std::int64_t{kTileBytes} +
      (idx % kTilesOfCodes * spec.tile_kv + row * kQuantizedTile + chunk * kChunkBytes);
  const SharedAddress to = team.values_at(stage).chunk(row, chunk);
#pragma unroll
  for (int i = 0; i < Tile::kRows; i += kRowsAtOnce)
    ptx::cp_async_16(to + i * Tile::kRowPitch, from + i * kQuantizedTile, kChunkBytes);
}

template <TeamSpec spec>
FOVEA_DEVICE void load_values(const Team<spec>& team, const ValuePlaces<spec>& places,
                              VisitedTile tile, int stage) {
  if constexpr (spec.sums_codes) {
    if (tile.idx >= 0) copy_value_codes(team, tile.idx, stage);
    ptx::cp_async_commit_group();
    return;
  }
  load_rows(team, team.values_at(stage), team.p.v, Traits<spec>::kAt.value_head, places, tile,
            team.p.head_dim_v);
}
template <TeamSpec spec>
FOVEA_DEVICE void load_values(const Team<spec>& team, VisitedTile tile, int stage) {
  load_values(team, places_of<typename Traits<spec>::VTile>(team, tile), tile, stage);
}

/// Keys, then values, found once where both are copied by the same rows.
template <TeamSpec spec>
FOVEA_DEVICE void load_tile(const Team<spec>& team, VisitedTile tile, int stage) {
  using T = Traits<spec>;
  const KeyPlaces<spec> keys = places_of<typename T::KTile>(team, tile);
  load_keys(team, keys, tile, stage);
  if constexpr (T::KTile::kPanelChunks == T::VTile::kPanelChunks) {
    load_values(team, ptx::bit_cast<ValuePlaces<spec>>(keys), tile, stage);
  } else {
    load_values(team, tile, stage);
  }
}

/// Keys of all these tiles, and the queries before them, are a group of copies; their values are the next. Tile i comes
/// into stage i.
template <TeamSpec spec>
FOVEA_DEVICE void load_all_tiles(const Team<spec>& team, const VisitedGroup& tiles) {
  using T = Traits<spec>;
  const auto copy = [&](const auto& tile_at, const BshdParam& t, int head_at, int head_dim) {
    using Tile = decltype(tile_at(0));
    VisitedGroup rest = tiles;
#pragma unroll 1
    while (rest.visible != 0) {
      const std::int32_t idx = take_tile<WalkOrder::rising>(rest).idx;
      copy_tile(team, tile_at(idx), t, head_at, Places<spec, Tile>{}, idx, head_dim);
    }
    ptx::cp_async_commit_group();
  };
  copy([&](int stage) { return team.keys_at(stage); }, team.p.k, T::kAt.key_head,
       team.p.head_dim_qk);
  copy([&](int stage) { return team.values_at(stage); }, team.p.v, T::kAt.value_head,
       team.p.head_dim_v);
}

// ---- through registers -------------------------------------------------------------------------

/// A tile of keys or of values between two moments of the walk: `fetch` asks memory for a thread's chunks of it, `put`
/// stores them. Products stand between them and hide the latency. Rows that are not aligned are read by `put`.
template <TeamSpec spec, class Tile>
class TileInRegisters {
 public:
  FOVEA_DEVICE_MEMBER TileInRegisters(const Tile& to, const BshdParam& t, int head_at, int head_dim)
      : to_(to), t_(t), head_at_(head_at), head_dim_(head_dim) {}

  FOVEA_DEVICE_MEMBER void fetch(const Team<spec>& team, VisitedTile tile) {
    if (tile.idx < 0 || team.p.is_kv_aligned == 0) return;
    const Places<spec, Tile> places = find_places<Tile>(team, tile.idx);
    visit_chunks(team, to_, t_, head(team), places, tile.idx,
                 [&](int i, int panel, SharedAddress, const char* row, int chunk, bool exists) {
                   U32x4& words = words_[i][panel];
                   words = {0, 0, 0, 0};
                   if (exists && is_data(chunk))
                     words =
                         ptx::ld_global(reinterpret_cast<const U32x4*>(row + chunk * kChunkBytes));
                 });
  }

  FOVEA_DEVICE_MEMBER void put(const Team<spec>& team, VisitedTile tile) const {
    if (team.p.is_kv_aligned == 0) {
      copy_chunks(team, to_, t_, head(team), tile.idx, head_dim_);
      return;
    }
    visit_chunks(team, to_, t_, head(team), Places<spec, Tile>{}, tile.idx,
                 [&](int i, int panel, SharedAddress at, const char*, int, bool) {
                   ptx::st_shared(at, words_[i][panel]);
                 });
  }

 private:
  FOVEA_DEVICE_MEMBER const char* head(const Team<spec>& team) const {
    return ptx::bit_cast<const char*>(ptx::ld_shared<std::uint64_t>(team.smem + head_at_));
  }
  FOVEA_DEVICE_MEMBER bool is_data(int chunk) const {
    return !spec.has_padded_head_dim || chunk * Traits<spec>::kElement.of_chunk < head_dim_;
  }

  const Tile to_;
  const BshdParam& t_;
  const int head_at_, head_dim_;
  U32x4 words_[Places<spec, Tile>::kNumRows][Tile::kPanels];
};

}  // namespace fovea::cuda::team
