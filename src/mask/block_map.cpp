#include "mask/block_map.hpp"

#include <algorithm>

#include "core/check.hpp"

namespace fovea::mask {

TileCount BlockMap::count() const {
  TileCount count;
  for (const std::vector<TileRun>& runs : rows) {
    std::int64_t num_visible = 0;
    for (const TileRun& run : runs) {
      const std::int64_t num_tiles = run.end - run.begin;
      (run.kind == TileKind::full ? count.full : count.partial) += num_tiles;
      num_visible += num_tiles;
    }
    count.empty += num_kv_tiles() - num_visible;
  }
  return count;
}

TileKind BlockMap::at(std::int64_t q_tile, std::int64_t kv_tile) const {
  const std::vector<TileRun>& runs = rows[static_cast<std::size_t>(q_tile)];
  const auto run = std::ranges::upper_bound(runs, kv_tile, {}, &TileRun::end);
  return run != runs.end() && run->begin <= kv_tile ? run->kind : TileKind::empty;
}

BlockMap build_block_map(const MaskMod& mask, std::int64_t seqlen_q, std::int64_t seqlen_kv,
                         std::int64_t tile_q, std::int64_t tile_kv, std::int64_t batch,
                         std::int64_t q_head, std::int64_t kv_head) {
  FOVEA_ASSERT(tile_q >= 1 && tile_kv >= 1);
  BlockMap map{.tile_q = tile_q,
               .tile_kv = tile_kv,
               .seqlen_q = seqlen_q,
               .seqlen_kv = seqlen_kv,
               .rows = {}};
  const BlockMapper mapper(mask, tile_kv);
  std::vector<TileRun> runs;
  for (std::int64_t q_begin = 0; q_begin < seqlen_q; q_begin += tile_q) {
    mapper.row({.batch = batch,
                .q_head_begin = q_head,
                .q_head_end = q_head + 1,
                .kv_head = kv_head,
                .q_begin = q_begin,
                .q_end = std::min(q_begin + tile_q, seqlen_q),
                .seqlen_q = seqlen_q,
                .seqlen_kv = seqlen_kv},
               runs);
    map.rows.push_back(runs);
  }
  return map;
}

}  // namespace fovea::mask
