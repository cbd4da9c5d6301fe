// Attention forward in four bits by mma.sync with scales of groups: sm_120a, sm_121a.
//
//   S = Q̂ K̂ᵀ + q̄_b (K - μ)ᵀ;  P = exp(mask(program(scale S)) - m);  O = Σ P̂ V̂ / l         Zhang et al. 2025
//                                                                               (SageAttention3, arXiv 2505.11594)
//
// One CTA owns 64 or 128 queries of one head, a warp 16 of them all along, and walks tiles of 128 keys that they can
// see, from left to right. Kernels before it (sm120/round_to_fp4.cuh) have left each tile of K and of V as a record
// that lies as it is multiplied: one thread asks for it by a bulk copy, stages - 1 tiles ahead, and nobody else copies.
//
//   copies   | 0 | 1 |        | 2 |                | 3 |                     one thread, records of shared/fp4.h
//   a warp            barrier, wait 0 | S0 P0 O | barrier, wait 1 | S1 P1 O | ...
//
// One barrier for each tile: its copy is asked for behind the barrier that follows the last reader of its stage.
//
// Bound: tensor cores. A warp's tile of 16 x 128 at head dim 128 is 64 products m16n8k64, 16 clocks each if a
// sub-partition takes 1024 of their operations a clock: 1024. Beside it 72 powers for each lane, 576 clocks of the unit
// that has them, and 18.5 KB of shared memory, 592 clocks of an SM for the four warps that run at once. All that is
// predicted (docs/kernels/attention_fp4_sm120.md); the kernel has run in the emulator only.
//
// Values that are not finite have code 0 and a mark on their key: sums of a first pass are those of the finite ones. A
// CTA that has met a mark walks twice more, with indicators of +inf and -inf (both of NaN) in V's place
// (common/passes.cuh), which name the elements of O that infinity or NaN reaches.
//
// Chapters: shared/fp4.h, what lies where; fp4/scores.cuh; fp4/sums.cuh; the walk is here. team/ has the rest.
//
// Refused: caches, dropout, head dims above 128, other recipes than nvfp4 and mxfp4. Keys are not split among CTAs, nor
// do heads share a tile: few queries leave most of a GPU idle.
#pragma once

#include "common/passes.cuh"
#include "common/row_view.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/bulk.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/fp4.h"
#include "sm120/fp4/scores.cuh"
#include "sm120/fp4/sums.cuh"
#include "team/load.cuh"
#include "team/store.cuh"
#include "team/team.cuh"
#include "team/walk.cuh"

namespace fovea::cuda::sm120 {

template <Fp4ForwardSpec spec, class Mods>
struct Fp4Forward {
  static constexpr TeamSpec kTeam = fp4_team_spec(spec);
  static constexpr Fp4Layout kAt = fp4_layout(spec);
  static constexpr int kAhead = spec.stages - 1;
  using Tiles = typename WalkOf<Mods>::Type;
  static_assert(spec.tile_kv == kQuantizedTile && kQuantizedTile % spec.tile_q == 0,
                "a tile of keys is a record, rows of a tile are of one block");
  static_assert(spec.tile_q == 16 * spec.num_warps && spec.heads_per_tile == 1 && !spec.is_split,
                "a warp has 16 rows of one head, and all keys");

  const Fp4Operands& operands;
  team::Team<kTeam> team;
  Fp4Sums<spec, Mods> sums;
  const SharedAddress smem = ptx::dynamic_shared();
  const char* block_of_queries;  // their record; null: rows are nobody's
  // The stage of the next tile, and the parity of its next phase.
  int stage = 0;
  std::uint32_t parity = 0;
  bool has_marked_values = false;  // some key's that the CTA has met

  FOVEA_DEVICE_MEMBER Fp4Forward(const Fp4Params& params, const Work& work)
      : operands(params.operands),
        team{params.common, work, smem_of_team(), ptx::warp_idx(), ptx::lane_idx()} {}

  FOVEA_DEVICE SharedAddress smem_of_team() { return ptx::dynamic_shared() + kAt.team; }
  FOVEA_DEVICE_MEMBER SharedAddress full(int of_stage) const {
    return smem + kAt.full + 8 * of_stage;
  }
  FOVEA_DEVICE_MEMBER bool is_asking() const { return team.warp == 0 && team.lane == 0; }

  // ---- records ---------------------------------------------------------------------------------

  /// Of a sequence's tiles, among those of all sequences and heads.
  FOVEA_DEVICE std::int64_t first_tile(std::int64_t batch, std::int32_t head,
                                       std::int32_t num_heads, std::int32_t num_tiles,
                                       std::int32_t sequence, std::int64_t row) {
    const std::int64_t tile = (batch * num_heads + head) * num_tiles;
    return spec.is_varlen ? tile + first_packed_tile(sequence, row) : tile;
  }
  /// Packed tensors have no batches.
  FOVEA_DEVICE_MEMBER std::int64_t query_tile(const Work& work) const {
    const Sequence& s = work.sequence;
    return first_tile(spec.is_varlen ? 0 : s.q_batch, work.q_head, team.p.num_heads_q,
                      operands.query_tiles, s.idx, s.q_row) +
           work.q_begin / kQuantizedTile;
  }
  FOVEA_DEVICE_MEMBER std::int64_t key_tile(const Work& work) const {
    const Sequence& s = work.sequence;
    return first_tile(spec.is_varlen ? 0 : s.kv_batch, work.kv_head, team.p.num_heads_kv,
                      operands.key_tiles, s.idx, s.kv_row);
  }

  FOVEA_DEVICE_MEMBER void load_queries() {
    block_of_queries = nullptr;
    if (!team.work.sequence.is_trailing)
      block_of_queries =
          operands.queries + query_tile(team.work) * fp4_query_record_bytes(spec.head_dim_qk);
    sums.queries.load(block_of_queries, first_row(), team.lane);
  }
  /// Of this warp's rows, in the block of queries.
  FOVEA_DEVICE_MEMBER int first_row() const {
    return team.work.q_begin % kQuantizedTile + 16 * team.warp;
  }

  /// Of the thread that asks for tiles: the walk has no registers for it.
  FOVEA_DEVICE_MEMBER void keep_first_records(const Work& work) const {
    const auto keep = [&](int at, const void* address) {
      ptx::st_shared(smem + at, ptx::bit_cast<std::uint64_t>(address));
    };
    const std::int64_t first = key_tile(work);
    keep(kAt.first_keys, operands.keys + first * fp4_record_bytes(spec.head_dim_qk));
    keep(kAt.first_values, operands.values + first * fp4_record_bytes(spec.head_dim_v));
    keep(kAt.first_scores,
         operands.block_scores + query_tile(work) * operands.tiles_of_longest * kQuantizedTile);
  }

  /// A tile's record of keys, that of its values and the scores of the block's mean; of lengths in memory that say more
  /// than the plan was made for, those of the last tile.
  FOVEA_DEVICE_MEMBER void ask_for(VisitedTile tile, int to_stage) const {
    if (tile.idx < 0 || !is_asking()) return;
    constexpr int kScoresBytes = 4 * kQuantizedTile;
    const SharedAddress to = smem + to_stage * kAt.stage_bytes, barrier = full(to_stage);
    const auto copy = [&](int at, int first, std::int32_t idx, int pitch, int bytes) {
      const auto begin = ptx::bit_cast<const char*>(ptx::ld_shared<std::uint64_t>(smem + first));
      ptx::cp_async_bulk_load(to + at, begin + std::int64_t{idx} * pitch,
                              static_cast<std::uint32_t>(bytes), barrier,
                              ptx::CachePolicy::evict_normal);
    };
    ptx::mbarrier_arrive_expect_tx(barrier, kAt.stage_used_bytes);
    copy(0, kAt.first_keys, tile.idx, fp4_record_bytes(spec.head_dim_qk),
         fp4_used_bytes(spec.head_dim_qk));
    copy(kAt.block_scores, kAt.first_scores, least(tile.idx, operands.tiles_of_longest - 1),
         kScoresBytes, kScoresBytes);
    copy(kAt.values, kAt.first_values, tile.idx, fp4_record_bytes(spec.head_dim_v),
         fp4_used_bytes(spec.head_dim_v));
  }

  // ---- of a tile -------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void add_tile(VisitedTile tile, SharedAddress at, Pass pass) {
    Scores s;
    sums.queries.multiply_keys(s, at, at + kAt.block_scores, team.lane);
    const auto marks = ptx::ld_shared<U32x4>(at + fp4_marks_at(spec.head_dim_qk));
    sums.queries.restore_unrounded(team, s, tile, marks, block_of_queries, first_row());
    sums.queries.modify(team, s, tile);
    sums.queries.mask(team, s, tile);
    if (is_indicator(pass)) sums.shrink(s);
    sums.softmax(team, s);
    sums.multiply_values(at + kAt.values, team.lane);
  }

  FOVEA_DEVICE_MEMBER void look_for_marks(SharedAddress values) {
    const auto marks = ptx::ld_shared<U32x4>(values + fp4_marks_at(spec.head_dim_v));
    has_marked_values = has_marked_values || (marks.x | marks.y | marks.z | marks.w) != 0;
  }

  /// Indicators in the place of values that have arrived: codes of 1, scales of 1.
  FOVEA_DEVICE_MEMBER void rewrite_values(SharedAddress values, VisitedTile tile, Pass pass) const {
    constexpr int kWords = kQuantizedTile / 8;  // of a channel
    constexpr std::uint32_t kScaleOne = spec.group == 16 ? 0x38383838U : 0x7f7fU;
    const Work work = team.kept_work();
    const auto head = ptx::bit_cast<const char*>(
        ptx::ld_shared<std::uint64_t>(team.smem + team::Traits<kTeam>::kAt.value_head));
    const int thread = team.warp * 32 + team.lane;
#pragma unroll 1
    for (int at = thread; at < spec.head_dim_v * kWords; at += 32 * spec.num_warps) {
      const int channel = at / kWords, first = at % kWords * 8;
      const std::uint32_t marks =
          ptx::ld_shared<std::uint8_t>(values + fp4_marks_at(spec.head_dim_v) + first / 8);
      std::uint32_t codes = 0;
      if (marks != 0 && channel < team.p.head_dim_v) {
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
          if ((marks >> i & 1U) == 0) continue;
          const char* const row = team::kv_row<kTeam>(team.p, work, team.p.v, head,
                                                      tile.idx * kQuantizedTile + first + i);
          const std::uint32_t given = ptx::ld_global(reinterpret_cast<const std::uint16_t*>(row) +
                                                     channel * team.p.v.col_stride);
          if (value_of_pass<spec.element>(given, pass) != 0) codes |= kCodeOfOne << 4 * i;
        }
      }
      using Tile = typename Fp4Sums<spec, Mods>::Tile;
      ptx::st_shared(Tile{values}.at(channel, first / 2), codes);
    }
#pragma unroll 1
    for (int at = thread; at < fp4_scales_bytes(spec.head_dim_v) / 4; at += 32 * spec.num_warps)
      ptx::st_shared(values + fp4_codes_bytes(spec.head_dim_v) + 4 * at, kScaleOne);
    ptx::fence_proxy_async_shared_cta();  // a copy comes here next
    team.meet();
  }
  static constexpr std::uint32_t kCodeOfOne = 2;

  // ---- the walk --------------------------------------------------------------------------------

  /// Full only where all keys exist, too; idx -1: there are no more.
  FOVEA_DEVICE_MEMBER VisitedTile next_tile(Tiles& tiles) const {
    VisitedTile tile;
    if (!tiles.next(tile)) return {-1, false};
    tile.is_full = tile.is_full && (tile.idx + 1) * kQuantizedTile <= team.work.kv_end;
    return tile;
  }

  FOVEA_DEVICE_MEMBER static int after(int of_stage, int tiles) {
    const int next = of_stage + tiles;
    return next >= spec.stages ? next - spec.stages : next;
  }

  FOVEA_DEVICE_MEMBER void walk(Pass pass) {
    const TileSpan rows_span = span_of<kTeam>(team.work);
    Tiles tiles = team::start_tiles<Tiles>(team, rows_span);
    const bool has_rows = team.warp_has_rows();
    sums.start();
    VisitedTile ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      ahead[i] = next_tile(tiles);
      ask_for(ahead[i], after(stage, i));
    }
#pragma unroll 1
    while (ahead[0].idx >= 0) {
      const VisitedTile tile = ahead[0];
      const SharedAddress at = smem + stage * kAt.stage_bytes;
#pragma unroll
      for (int i = 0; i + 1 < kAhead; ++i) ahead[i] = ahead[i + 1];
      ahead[kAhead - 1] = next_tile(tiles);
      team.meet();  // everybody has left the stage of the tile before
      ask_for(ahead[kAhead - 1], after(stage, kAhead));
      ptx::mbarrier_wait_parity(full(stage), parity);
      look_for_marks(at + kAt.values);
      if (is_indicator(pass)) rewrite_values(at + kAt.values, tile, pass);
      if (has_rows) add_tile(tile, at, pass);
      stage = after(stage, 1);
      parity ^= stage == 0 ? 1U : 0U;
    }
  }

  /// O goes through shared memory where stages were.
  FOVEA_DEVICE_MEMBER void finish(Pass pass) {
    team.meet();
    sums.take_p_max_out();
    const Work kept = team.kept_work();
    team.renew_lane();
    team::finish(team::AtEnd<kTeam>{team, kept}, sums, pass);
    ptx::fence_proxy_async_shared_cta();
    team.meet();
  }

  FOVEA_DEVICE_MEMBER void run() {
    team.keep_work();
    if (is_asking()) {
      keep_first_records(team.work);
#pragma unroll
      for (int i = 0; i < spec.stages; ++i) ptx::mbarrier_init(full(i), 1);
      ptx::fence_mbarrier_init_release_cluster();
    }
    team.meet();
    if constexpr (spec.is_varlen) team.work = team.kept_work();
    load_queries();
#pragma unroll 1
    for (Pass pass = Pass::finite; pass != Pass::end;
         pass = static_cast<Pass>(static_cast<std::int32_t>(pass) + 1)) {
      walk(pass);
      finish(pass);
      if (!has_marked_values) return;
    }
  }
};

template <Fp4ForwardSpec spec, class Mods>
FOVEA_DEVICE void attention_fp4(const Fp4Params& p) {
  const Work work = find_work<fp4_team_spec(spec)>(p.common);
  if (work.is_nothing) return;
  Fp4Forward<spec, Mods>(p, work).run();
}

}  // namespace fovea::cuda::sm120
