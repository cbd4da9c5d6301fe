// Block maps against the dense mask: every score of a small problem is asked of a plain C++ predicate.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "mask/block_map.hpp"

namespace fovea::mask {

/// Where a score stands; what a predicate may read.
struct Position {
  std::int64_t batch = 0, q_head = 0, kv_head = 0, q_idx = 0, kv_idx = 0, seqlen_q = 0,
               seqlen_kv = 0;
  std::int64_t pos() const { return q_idx + seqlen_kv - seqlen_q; }
};
using Visible = std::function<bool(const Position&)>;

struct Comparison {
  std::string wrong;               // first broken claim in words; empty when all hold
  std::int64_t num_undecided = 0;  // partial tiles that are in truth empty or full
};

/// The truth of one tile of a row.
inline TileKind dense_kind(const Visible& visible, const TileRow& row, std::int64_t tile,
                           std::int64_t tile_kv) {
  bool any = false;
  bool all = true;
  Position p{.batch = row.batch,
             .kv_head = row.kv_head,
             .seqlen_q = row.seqlen_q,
             .seqlen_kv = row.seqlen_kv};
  const std::int64_t kv_end = std::min((tile + 1) * tile_kv, row.seqlen_kv);
  for (p.q_head = row.q_head_begin; p.q_head < row.q_head_end; ++p.q_head) {
    for (p.q_idx = row.q_begin; p.q_idx < row.q_end; ++p.q_idx) {
      for (p.kv_idx = tile * tile_kv; p.kv_idx < kv_end; ++p.kv_idx) {
        const bool is_visible = visible(p);
        any = any || is_visible;
        all = all && is_visible;
      }
    }
  }
  return !any ? TileKind::empty : all ? TileKind::full : TileKind::partial;
}

/// The first key of which the edges say something else than the predicate; empty when there is none.
inline std::string wrong_edge(const BandEdges& edges, const Visible& visible, const TileRow& row) {
  Position p{.batch = row.batch,
             .kv_head = row.kv_head,
             .seqlen_q = row.seqlen_q,
             .seqlen_kv = row.seqlen_kv};
  for (p.q_head = row.q_head_begin; p.q_head < row.q_head_end; ++p.q_head) {
    for (p.q_idx = row.q_begin; p.q_idx < row.q_end; ++p.q_idx) {
      const Span keys = edges.keys_of(p.q_idx);
      for (p.kv_idx = 0; p.kv_idx < row.seqlen_kv; ++p.kv_idx) {
        if (visible(p) == (keys.begin <= p.kv_idx && p.kv_idx < keys.end)) continue;
        return "edges are wrong at q_idx " + std::to_string(p.q_idx) + ", kv_idx " +
               std::to_string(p.kv_idx);
      }
    }
  }
  return "";
}

/// Are the runs sorted, apart or of different kinds, and inside the row?
inline bool is_well_formed(const std::vector<TileRun>& runs, std::int64_t num_tiles) {
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].begin >= runs[i].end || runs[i].end > num_tiles) return false;
    if (runs[i].begin < 0 || runs[i].kind == TileKind::empty) return false;
    if (i == 0) continue;
    const bool touches = runs[i].begin == runs[i - 1].end && runs[i].kind == runs[i - 1].kind;
    if (runs[i].begin < runs[i - 1].end || touches) return false;
  }
  return true;
}

inline Comparison compare_row(const BlockMapper& mapper, const Visible& visible, const TileRow& row,
                              std::int64_t tile_kv) {
  Comparison result;
  std::vector<TileRun> runs;
  const auto edges = mapper.row(row, runs);
  const std::int64_t num_tiles = (row.seqlen_kv + tile_kv - 1) / tile_kv;
  if (edges) result.wrong = wrong_edge(*edges, visible, row);
  if (!is_well_formed(runs, num_tiles)) result.wrong = "runs are not sorted, merged and in range";
  std::vector<TileKind> claimed(static_cast<std::size_t>(num_tiles), TileKind::empty);
  for (const TileRun& run : runs) {
    for (std::int64_t t = run.begin; t < run.end && t < num_tiles; ++t) {
      claimed[static_cast<std::size_t>(t)] = run.kind;
    }
  }
  for (std::int64_t t = 0; t < num_tiles; ++t) {
    const TileKind claim = claimed[static_cast<std::size_t>(t)];
    const TileKind truth = dense_kind(visible, row, t, tile_kv);
    if (claim == truth) continue;
    if (claim == TileKind::partial) {
      ++result.num_undecided;
    } else if (result.wrong.empty()) {
      result.wrong = "rows " + std::to_string(row.q_begin) + ".." + std::to_string(row.q_end) +
                     ", kv tile " + std::to_string(t) + " is called " +
                     (claim == TileKind::empty ? "empty" : "full");
    }
  }
  return result;
}

/// Sizes of a comparison; heads are mapped together, as the rows of one GQA group are.
struct Sizes {
  std::int64_t seqlen_q = 0, seqlen_kv = 0, tile_q = 1, tile_kv = 1;
  std::int64_t num_batches = 1, num_heads = 1;
};

inline Comparison compare_with_dense(const MaskMod& mask, const Visible& visible,
                                     const Sizes& sizes) {
  const BlockMapper mapper(mask, sizes.tile_kv);
  Comparison result;
  for (std::int64_t batch = 0; batch < sizes.num_batches; ++batch) {
    for (std::int64_t q = 0; q < sizes.seqlen_q; q += sizes.tile_q) {
      const TileRow row{.batch = batch,
                        .q_head_begin = 0,
                        .q_head_end = sizes.num_heads,
                        .kv_head = 0,
                        .q_begin = q,
                        .q_end = std::min(q + sizes.tile_q, sizes.seqlen_q),
                        .seqlen_q = sizes.seqlen_q,
                        .seqlen_kv = sizes.seqlen_kv};
      const Comparison one = compare_row(mapper, visible, row, sizes.tile_kv);
      if (result.wrong.empty()) result.wrong = one.wrong;
      result.num_undecided += one.num_undecided;
    }
  }
  return result;
}

}  // namespace fovea::mask
