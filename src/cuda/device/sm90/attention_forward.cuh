// Attention forward by wgmma and TMA: Hopper.
//
//   S = Q Kᵀ;  P = exp(mask(program(scale S)) - m);  O = Σ P V / l      Dao 2023 (FlashAttention-2), Shah et al. 2024 (-3)
//
// A CTA stays on its SM and works off tiles of rows. One warp loads Q, K, V by TMA, one stores finished tiles, and two or three
// warpgroups of 64 rows each compute. They take turns at the tensor cores ("ping-pong"), and each runs one software pipeline over all
// kv tiles of all its row tiles: a step issues the scores of the next kv tile and the sums of the last one, and does the softmax of
// the next while the sums run. The first kv tile of the next row tile is just another step, so short sequences have no gaps.
//
//   load     | Q0 K0 |  K1  V0 |  K2  V1 |  Q1 K0' V2 | ...
//   wgmma A  | S0 |      S1 O0 |           S2 O1 |           S0' O2 |
//   softmax A      | P0 |    ....  P1 |    ......    P2 |   store O |
//   wgmma B       | S0 |           S1 O0 |           S2 O1 | ...                      while A is in its softmax
//
// kv tiles are visited from the right, so that those with a mask come first; the softmax of the others needs no maximum
// (common/optimistic_softmax.cuh). A third warp claims row tiles and finds the kv tiles that each visits (common/tile_walk.cuh) while
// the tiles before are still computed; the loading warp tells the others beside each K tile what it is.
//
// Bound: tensor cores, 4096 flops a clock and SM; at head_dim 64 the exponentials, 9.4 softmax elements a clock beside a busy tensor
// core. Measured: 95 % of the first at head_dim 128 (docs/kernels/attention_forward_sm90.md).
//
// Who waits for whom: q_full, k_full, v_full (bytes of TMA), k_empty, v_empty (each consumer warp has read it), o_full (the warps of a
// group have put O where its Q lay), q_empty (that O is on its way), slot_full, slot_empty (which row tile comes next), group_full,
// group_empty (which kv tiles it visits, 32 at a time), claim (loading is near the end of a row tile: the next may be claimed).
//
// NaN and infinity: scores that a row does not see are replaced, so Q and K are harmless. In V they are not (0 * NaN): a group whose
// sums are not finite says so (is_suspect), and its rows are computed again by sm80/attention_forward, which can tell.
//
// Packed sequences: tensors are one long sequence to TMA, and a row tile brings where its own sequence lies (SequencePlace, beside it in
// the slot). Keys behind the sequence's end are a neighbour's, masked as those behind the last key are. Rows that a sequence's end cuts
// off are a neighbour's too: the storing warp writes such a tile row by row.
//
// row_max asks for the maximum of every tile: all are careful. Dropout takes its probabilities out of P, rounded already.
//
// Refused (candidates.cpp has the words): f32, paged layouts, splits, strides that TMA cannot have.
#pragma once

#include "common/dropout.cuh"
#include "common/optimistic_softmax.cuh"
#include "common/position.cuh"
#include "common/program_parts.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "shared/forward_params_sm90.h"
#include "shared/forward_spec.h"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::sm90 {

using ptx::SharedAddress;

/// All that follows from the spec.
template <ForwardSpec spec>
struct Traits {
  static_assert(spec.element != Element::f32, "wgmma multiplies 16-bit elements here");
  static_assert(spec.head_dim_qk % 64 == 0 && spec.head_dim_v % 64 == 0,
                "rows are whole panels of 128 bytes");
  static constexpr int kGroups = spec.num_warps / 4 - 1;  // of 64 rows
  static_assert(kGroups == 2 || kGroups == 3, "two or three warpgroups take turns");
  static_assert(spec.tile_q == 64 * kGroups, "a warpgroup owns 64 rows");
  static_assert(spec.tile_kv % 16 == 0, "keys are the second product's depth, in steps of 16");
  static constexpr int kQStages = spec.q_stages;
  static constexpr int kStages = spec.stages;
  /// Scores of the next row tile beside the last sums of this one: its Q arrives while this one's buffer still waits for O.
  static constexpr bool kCrossesTiles = kQStages == 2;
  /// Row tiles that are told. Packed: one that computes, one that follows it, one to come; else the first is known by then.
  static constexpr int kSlots = sm90_num_slots(spec);
  static constexpr ptx::WgmmaType kType =
      spec.element == Element::bf16 ? ptx::WgmmaType::bf16 : ptx::WgmmaType::f16;

  using QTile = SharedTile<64, 2 * spec.head_dim_qk, Swizzle::bytes128>;
  using KTile = SharedTile<spec.tile_kv, 2 * spec.head_dim_qk, Swizzle::bytes128>;
  using VTile = SharedTile<spec.tile_kv, 2 * spec.head_dim_v, Swizzle::bytes128>;
  using OTile = SharedTile<64, 2 * spec.head_dim_v, Swizzle::bytes128>;

  // 65,536 registers: what the launch gives a thread, and what each role makes of it.
  static constexpr int kLoadRegisters = kGroups == 3 ? 32 : spec.head_dim_v > 128 ? 24 : 40;
  static constexpr int kComputeRegisters = kGroups == 3 ? 160 : spec.head_dim_v > 128 ? 240 : 232;
  /// Powers between two links of the chain in OptimisticRows::exponentiate.
  static constexpr int kChunk = kGroups == 2 && spec.head_dim_v == 128 ? 16 : 0;
};

/// Shared memory: bytes of each member, from the start of the CTA's. O of a group takes the place of its Q.
template <ForwardSpec spec>
struct Layout {
  using T = Traits<spec>;
  static constexpr int kQBytes =
      T::QTile::kBytes > T::OTile::kBytes ? T::QTile::kBytes : T::OTile::kBytes;
  static constexpr int kQ = 0;                                        // [q stage][group]
  static constexpr int kK = kQ + T::kQStages * T::kGroups * kQBytes;  // [stage]
  static constexpr int kV = kK + T::kStages * T::KTile::kBytes;
  static constexpr int kBarriers = kV + T::kStages * T::VTile::kBytes;
  static constexpr int kQFull = kBarriers;  // [q stage][group], 8 bytes each, as all barriers
  static constexpr int kQEmpty = kQFull + 8 * T::kQStages * T::kGroups;
  static constexpr int kOFull = kQEmpty + 8 * T::kQStages * T::kGroups;
  static constexpr int kKFull = kOFull + 8 * T::kQStages * T::kGroups;  // [stage]
  static constexpr int kKEmpty = kKFull + 8 * T::kStages;
  static constexpr int kVFull = kKEmpty + 8 * T::kStages;
  static constexpr int kVEmpty = kVFull + 8 * T::kStages;
  static constexpr int kSlotFull = kVEmpty + 8 * T::kStages;  // [slot]
  static constexpr int kSlotEmpty = kSlotFull + 8 * T::kSlots;
  static constexpr int kGroupFull = kSlotEmpty + 8 * T::kSlots;  // [2]
  static constexpr int kGroupEmpty = kGroupFull + 16;
  static constexpr int kClaim = kGroupEmpty + 16;
  static constexpr int kSlotBytes = spec.is_varlen ? 32 : 16;  // RowTile; packed: SequencePlace
  static constexpr int kSlots = (kClaim + 8 + 15) / 16 * 16;
  static constexpr int kGroupsOfTiles = kSlots + kSlotBytes * T::kSlots;  // [2] VisitedGroup
  static constexpr int kMisses = kGroupsOfTiles + 32;         // [group][2] a word for each warp
  static constexpr int kKvTiles = kMisses + 32 * T::kGroups;  // [stage] KvTile, 4 bytes each
  static constexpr int kBytes = kKvTiles + 4 * T::kStages;
  static_assert(kBytes == sm90_forward_shared_bytes(spec), "host and device count the same bytes");
  static_assert(kBytes <= 232448, "an SM has no more");
};

/// Stage and parity of a ring of n buffers. Whoever fills starts with parity 1: a fresh barrier lets that wait pass.
template <int n>
struct Ring {
  int stage = 0;
  std::uint32_t parity = 0;

  FOVEA_DEVICE_MEMBER explicit Ring(std::uint32_t first_parity) : parity(first_parity) {}
  FOVEA_DEVICE_MEMBER void advance() {
    if (++stage == n) {
      stage = 0;
      parity ^= 1U;
    }
  }
};

/// A tile of rows of one head; idx < 0: there is none any more. Packed: `batch` is the sequence, `number` that of the tile among those
/// of all sequences, `slot` where it is told.
struct RowTile {
  std::int32_t idx, q_head, batch, number, slot;
};

/// Rows of Q and of K that the positions of a row tile's sequence count from, and how many there are.
struct SequencePlace {
  std::int32_t q_row, kv_row, seqlen_q, seqlen_kv;
};

/// What is told of a kv tile: its index, whether every row sees all of it, the same of the one after it, and whether it is the row
/// tile's last.
struct KvTile {
  std::uint32_t word;

  FOVEA_DEVICE KvTile make(std::int32_t idx, bool is_full, bool is_next_full, bool is_last) {
    return {static_cast<std::uint32_t>(idx) << 3U | (is_next_full ? 4U : 0U) | (is_full ? 2U : 0U) |
            (is_last ? 1U : 0U)};
  }
  FOVEA_DEVICE_MEMBER std::int32_t idx() const { return static_cast<std::int32_t>(word >> 3U); }
  FOVEA_DEVICE_MEMBER bool is_next_full() const { return (word & 4U) != 0; }
  FOVEA_DEVICE_MEMBER bool is_full() const { return (word & 2U) != 0; }
  FOVEA_DEVICE_MEMBER bool is_last() const { return (word & 1U) != 0; }
};

/// Row tile number `id` of a dense launch. With a dynamic schedule heads come in sections, the row tiles of a section
/// descend, heads side by side. The last section is as large as fits the L2 cache, so that a causal mask ends with many short rows. Those
/// before are small: while CTAs are in different ones, some load keys from memory and others have them in the cache.
template <ForwardSpec spec>
FOVEA_DEVICE RowTile dense_row_tile(const Sm90ForwardParams& p, std::int32_t id) {
  const ForwardParams& c = p.common;
  if (id >= p.num_tiles) return {-1, 0, 0, 0, 0};
  std::int32_t pair = id / c.num_q_tiles;
  std::int32_t idx = id - pair * c.num_q_tiles;
  if constexpr (spec.is_dynamic) {
    std::int32_t first = id / (c.num_q_tiles * p.heads_per_section) * p.heads_per_section;
    std::int32_t size = p.heads_per_section;
    if (first >= p.last_section) {
      first = p.last_section;
      size = c.num_heads_q * c.num_sequences - first;
    }
    const std::int32_t rest = id - first * c.num_q_tiles;
    idx = c.num_q_tiles - 1 - rest / size;
    pair = first + rest % size;
  }
  const std::int32_t batch = pair / c.num_heads_q;
  return {idx, pair - batch * c.num_heads_q, batch, 0, 0};
}

FOVEA_DEVICE const ptx::TensorMap* tensor_map(const TensorMapParam& map) {
  return reinterpret_cast<const ptx::TensorMap*>(&map);
}

/// What all roles know.
template <ForwardSpec spec>
struct Cta {
  using L = Layout<spec>;
  using T = Traits<spec>;
  const Sm90ForwardParams& p;
  SharedAddress smem;
  int warp, lane;

  FOVEA_DEVICE_MEMBER SharedAddress q_at(int stage, int group) const {
    return smem + L::kQ + (stage * T::kGroups + group) * L::kQBytes;
  }
  FOVEA_DEVICE_MEMBER SharedAddress k_at(int stage) const {
    return smem + L::kK + stage * T::KTile::kBytes;
  }
  FOVEA_DEVICE_MEMBER SharedAddress v_at(int stage) const {
    return smem + L::kV + stage * T::VTile::kBytes;
  }
  FOVEA_DEVICE_MEMBER SharedAddress barrier(int kind, int i) const { return smem + kind + 8 * i; }
  FOVEA_DEVICE_MEMBER SharedAddress kv_tile_at(int stage) const {
    return smem + L::kKvTiles + 4 * stage;
  }

  FOVEA_DEVICE_MEMBER SharedAddress slot_at(int i) const {
    return smem + L::kSlots + L::kSlotBytes * i;
  }

  /// The next row tile, by whoever reads slots.
  FOVEA_DEVICE_MEMBER RowTile next_row_tile(Ring<T::kSlots>& slots) const {
    ptx::mbarrier_wait_parity(barrier(L::kSlotFull, slots.stage), slots.parity);
    const auto words = ptx::ld_shared<ptx::U32x4>(slot_at(slots.stage));
    if constexpr (!spec.is_varlen) release(barrier(L::kSlotEmpty, slots.stage));
    const int slot = slots.stage;
    slots.advance();
    // By shuffle, so that the compiler knows them as uniform.
    return {static_cast<std::int32_t>(ptx::shfl_idx(words.x, 0)),
            static_cast<std::int32_t>(ptx::shfl_idx(words.y, 0)),
            static_cast<std::int32_t>(ptx::shfl_idx(words.z, 0)),
            spec.is_varlen ? static_cast<std::int32_t>(words.w) : 0, slot};
  }

  /// Packed: from its slot, so until its reader is done with the row tile.
  FOVEA_DEVICE_MEMBER SequencePlace place_of(const RowTile& rows) const {
    if constexpr (spec.is_varlen) {
      return ptx::bit_cast<SequencePlace>(ptx::ld_shared<ptx::U32x4>(slot_at(rows.slot) + 16));
    }
    return {0, 0, p.common.seqlen_q, p.common.seqlen_kv};
  }

  /// The last dimension of tensor maps: packed tensors have one sequence.
  FOVEA_DEVICE_MEMBER static std::int32_t map_batch(const RowTile& rows) {
    return spec.is_varlen ? 0 : rows.batch;
  }

  FOVEA_DEVICE_MEMBER void done_with(const RowTile& rows) const {
    if constexpr (spec.is_varlen) release(barrier(L::kSlotEmpty, rows.slot));
  }

  /// For a warp whose leader goes on alone: none of its lanes may still wait when the leader opens the next phase.
  FOVEA_DEVICE_MEMBER void await(SharedAddress barrier, std::uint32_t parity) const {
    ptx::mbarrier_wait_parity(barrier, parity);
    ptx::sync_warp();
  }

  /// This warp has read what the barrier guards.
  FOVEA_DEVICE_MEMBER void release(SharedAddress empty) const {
    ptx::sync_warp();
    if (lane == 0) ptx::mbarrier_arrive(empty);
  }
};

// ---- schedule -----------------------------------------------------------------------------------

/// Claims row tiles, and finds the kv tiles of each, one row tile ahead of the loading warp.
template <ForwardSpec spec, class Mods>
struct Schedule {
  using L = Layout<spec>;
  const Cta<spec>& cta;
  Ring<Traits<spec>::kSlots> slots{1};
  Ring<2> groups{1};
  Ring<1> claims{0};
  PackedCursor cursor{};

  /// The leftmost tile of a group, in the order of the walk.
  static constexpr std::uint32_t kFirstTile = 0x80000000U;

  FOVEA_DEVICE_MEMBER explicit Schedule(const Cta<spec>& of_cta) : cta(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() {
    std::int32_t id = ptx::block_idx().x;
    for (;;) {
      SequencePlace place{0, 0, cta.p.common.seqlen_q, cta.p.common.seqlen_kv};
      const RowTile rows = row_tile_at(id, place);
      publish(rows, place);
      if (rows.idx < 0) break;
      find_kv_tiles(rows, place);
      // As late as can be: the order of claims is what balances the load.
      cta.await(cta.barrier(L::kClaim, 0), claims.parity);
      claims.advance();
      id = claim(id);
    }
  }

 private:
  FOVEA_DEVICE_MEMBER RowTile row_tile_at(std::int32_t id, SequencePlace& place) {
    if constexpr (!spec.is_varlen) return dense_row_tile<spec>(cta.p, id);
    // Heads side by side: they share keys, or at least the sequence.
    const std::int32_t number = id / cta.p.common.num_heads_q;
    const Work work = packed_work(cta.p.common, number, spec.tile_q, cursor);
    if (work.is_nothing) {
      // Each number is claimed once, so one CTA gets the first behind the last tile.
      if (cta.lane == 0 && id == cursor.tiles * cta.p.common.num_heads_q)
        ptx::st_global(cta.p.num_packed_tiles, cursor.tiles);
      return {-1, 0, 0, 0, 0};
    }
    const Sequence& s = work.sequence;
    place = {static_cast<std::int32_t>(s.q_row), static_cast<std::int32_t>(s.kv_row), s.seqlen_q,
             s.seqlen_kv};
    return {work.q_begin / spec.tile_q, id - number * cta.p.common.num_heads_q, s.idx, number, 0};
  }

  FOVEA_DEVICE_MEMBER TileSpan span_of(const RowTile& rows, const SequencePlace& place) const {
    const ForwardParams& c = cta.p.common;
    TileSpan span{};
    span.batch = rows.batch;
    span.q_head_begin = rows.q_head;
    span.q_head_end = rows.q_head + 1;
    span.kv_head = rows.q_head / c.group;
    span.q_begin = rows.idx * spec.tile_q;
    span.q_end = least(span.q_begin + spec.tile_q, place.seqlen_q);
    span.seqlen_q = place.seqlen_q;
    span.seqlen_kv = place.seqlen_kv;
    return span;
  }

  FOVEA_DEVICE_MEMBER void find_kv_tiles(const RowTile& rows, const SequencePlace& place) {
    const TileSpan span = span_of(rows, place);
    TileWalk<Mods, WalkOrder::falling> walk(
        span, {0, ceil_div(place.seqlen_kv, spec.tile_kv), spec.tile_kv}, cta.p.common.captures);
    VisitedGroup group{}, next{};
    // Rows that see nothing visit one tile, masked as a whole: their output is written like any other.
    if (!walk.next_group(group)) group = {0, kFirstTile, 0};
    for (;;) {
      const bool has_next = walk.next_group(next);
      push(group, !has_next, place.seqlen_kv);
      if (!has_next) break;
      group = next;
    }
  }

  /// The tile that the end of the keys cuts needs its mask.
  FOVEA_DEVICE_MEMBER void push(VisitedGroup group, bool is_last, std::int32_t seqlen_kv) {
    const std::int32_t cut = seqlen_kv / spec.tile_kv - group.begin;
    if (cut >= 0 && cut < 32) group.full &= ~(kFirstTile >> cut);
    cta.await(cta.barrier(L::kGroupEmpty, groups.stage), groups.parity);
    if (cta.lane == 0) {
      ptx::st_shared(cta.smem + L::kGroupsOfTiles + 16 * groups.stage,
                     ptx::U32x4{static_cast<std::uint32_t>(group.begin), group.visible, group.full,
                                is_last ? 1U : 0U});
      ptx::mbarrier_arrive(cta.barrier(L::kGroupFull, groups.stage));
    }
    groups.advance();
  }

  FOVEA_DEVICE_MEMBER std::int32_t claim(std::int32_t id) const {
    const std::int32_t num_ctas = ptx::grid_dim().x;
    if constexpr (!spec.is_dynamic) return id + num_ctas;
    std::int32_t next = 0;
    if (cta.lane == 0) next = ptx::atom_add_global(cta.p.next_tile, 1) + num_ctas;
    return ptx::shfl_idx(next, 0);
  }

  FOVEA_DEVICE_MEMBER void publish(const RowTile& rows, const SequencePlace& place) {
    cta.await(cta.barrier(L::kSlotEmpty, slots.stage), slots.parity);
    if (cta.lane == 0) {
      const SharedAddress slot = cta.slot_at(slots.stage);
      ptx::st_shared(slot, ptx::U32x4{static_cast<std::uint32_t>(rows.idx),
                                      static_cast<std::uint32_t>(rows.q_head),
                                      static_cast<std::uint32_t>(rows.batch),
                                      static_cast<std::uint32_t>(rows.number)});
      if constexpr (spec.is_varlen) ptx::st_shared(slot + 16, ptx::bit_cast<ptx::U32x4>(place));
      ptx::mbarrier_arrive(cta.barrier(L::kSlotFull, slots.stage));
    }
    slots.advance();
  }
};

// ---- load ---------------------------------------------------------------------------------------

template <ForwardSpec spec>
struct Load {
  using L = Layout<spec>;
  using T = Traits<spec>;
  const Cta<spec>& cta;
  Ring<T::kQStages> q{1};
  Ring<T::kStages> k{1}, v{1};
  Ring<T::kSlots> slots{0};
  Ring<2> groups{0};

  /// What is left of the kv tiles of this row tile.
  VisitedGroup group{0, 0, 0};
  bool is_last_group = false;
  bool has_claimed = false;  // the next row tile may be claimed, and Schedule knows

  /// A kv tile whose values are still to be loaded: they follow the keys of the tile after it.
  struct Pending {
    std::int32_t idx, kv_head, batch, kv_row;
  };

  FOVEA_DEVICE_MEMBER explicit Load(const Cta<spec>& of_cta) : cta(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() {
    Pending pending{-1, 0, 0, 0};
    for (;;) {
      const RowTile rows = cta.next_row_tile(slots);
      if (rows.idx < 0) break;
      const SequencePlace place = cta.place_of(rows);
      cta.done_with(rows);
      is_last_group = has_claimed = false;
      VisitedTile tile{}, next{};
      visit(tile);
      for (bool is_first = true;; is_first = false) {
        const bool has_next = visit(next);
        load_tile(rows, place, tile, has_next && next.is_full, !has_next, is_first, pending);
        if (!has_next) break;
        tile = next;
      }
      if (!T::kCrossesTiles) load_values(pending);
    }
    if (T::kCrossesTiles) load_values(pending);
  }

 private:
  /// The next kv tile, from the right; false behind the last. There is at least one.
  FOVEA_DEVICE_MEMBER bool visit(VisitedTile& tile) {
    if (group.visible == 0) {
      if (is_last_group) return false;
      open_group();
    }
    tile = take_tile<WalkOrder::falling>(group);
    // One tile is left, or none: what is in flight by now covers the time that a claim takes.
    if (is_last_group && !has_claimed && (group.visible & (group.visible - 1)) == 0) {
      if (cta.lane == 0) ptx::mbarrier_arrive(cta.barrier(L::kClaim, 0));
      has_claimed = true;
    }
    return true;
  }

  FOVEA_DEVICE_MEMBER void open_group() {
    cta.await(cta.barrier(L::kGroupFull, groups.stage), groups.parity);
    const auto words = ptx::ld_shared<ptx::U32x4>(cta.smem + L::kGroupsOfTiles + 16 * groups.stage);
    cta.release(cta.barrier(L::kGroupEmpty, groups.stage));
    groups.advance();
    group = {static_cast<std::int32_t>(ptx::shfl_idx(words.x, 0)), ptx::shfl_idx(words.y, 0),
             ptx::shfl_idx(words.z, 0)};
    is_last_group = ptx::shfl_idx(words.w, 0) != 0;
  }

  /// Keys of this tile, values of the one before; with the first, the rows' queries, the first group's before anything else.
  FOVEA_DEVICE_MEMBER void load_tile(const RowTile& rows, const SequencePlace& place,
                                     VisitedTile tile, bool is_next_full, bool is_last,
                                     bool is_first, Pending& pending) {
    const std::int32_t kv_head = rows.q_head / cta.p.common.group;
    if (is_first) load_queries(rows, place, 0);
    cta.await(cta.barrier(L::kKEmpty, k.stage), k.parity);
    if (ptx::elect_one()) {
      const KvTile told = KvTile::make(tile.idx, tile.is_full, is_next_full, is_last);
      ptx::st_shared(cta.kv_tile_at(k.stage), told.word);
      copy<typename T::KTile>(
          cta.k_at(k.stage), cta.p.k, cta.barrier(L::kKFull, k.stage),
          {0, place.kv_row + tile.idx * spec.tile_kv, kv_head, cta.map_batch(rows)},
          ptx::CachePolicy::evict_last);
    }
    k.advance();
    if (is_first) {
      for (int group = 1; group < T::kGroups; ++group) load_queries(rows, place, group);
      q.advance();
    }
    if (pending.idx >= 0) load_values(pending);
    pending = {tile.idx, kv_head, cta.map_batch(rows), place.kv_row};
  }

  FOVEA_DEVICE_MEMBER void load_queries(const RowTile& rows, const SequencePlace& place,
                                        int group) {
    const int i = q.stage * T::kGroups + group;
    cta.await(cta.barrier(L::kQEmpty, i), q.parity);
    if (!ptx::elect_one()) return;
    copy<typename T::QTile>(
        cta.q_at(q.stage, group), cta.p.q, cta.barrier(L::kQFull, i),
        {0, place.q_row + rows.idx * spec.tile_q + 64 * group, rows.q_head, cta.map_batch(rows)},
        ptx::CachePolicy::evict_first);
  }

  FOVEA_DEVICE_MEMBER void load_values(Pending& pending) {
    if (pending.idx < 0) return;
    cta.await(cta.barrier(L::kVEmpty, v.stage), v.parity);
    if (ptx::elect_one()) {
      copy<typename T::VTile>(
          cta.v_at(v.stage), cta.p.v, cta.barrier(L::kVFull, v.stage),
          {0, pending.kv_row + pending.idx * spec.tile_kv, pending.kv_head, pending.batch},
          ptx::CachePolicy::evict_last);
    }
    v.advance();
    pending.idx = -1;
  }

  /// A box for each panel of 64 elements; what lies outside the tensor arrives as zeros.
  template <class Tile>
  FOVEA_DEVICE_MEMBER void copy(SharedAddress to, const TensorMapParam& map, SharedAddress full,
                                const std::int32_t (&at)[4], ptx::CachePolicy policy) const {
    ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const std::int32_t coordinates[4] = {64 * panel, at[1], at[2], at[3]};
      ptx::cp_async_bulk_tensor_load<4>(to + panel * Tile::kPanelBytes, tensor_map(map),
                                        coordinates, full, policy);
    }
  }
};

// ---- store --------------------------------------------------------------------------------------

/// Sends finished tiles from where their Q lay, then gives the buffer back.
template <ForwardSpec spec>
struct Store {
  using L = Layout<spec>;
  using T = Traits<spec>;
  const Cta<spec>& cta;
  Ring<T::kQStages> q{0};
  Ring<T::kSlots> slots{0};

  FOVEA_DEVICE_MEMBER explicit Store(const Cta<spec>& of_cta) : cta(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() {
    for (;;) {
      const RowTile rows = cta.next_row_tile(slots);
      if (rows.idx < 0) break;
      const SequencePlace place = cta.place_of(rows);
      cta.done_with(rows);
      for (int group = 0; group < T::kGroups; ++group) {
        const int i = q.stage * T::kGroups + group;
        cta.await(cta.barrier(L::kOFull, i), q.parity);
        if constexpr (spec.is_varlen) {
          const std::int32_t left = place.seqlen_q - rows.idx * spec.tile_q - 64 * group;
          if (left < 64) {
            store_rows(rows, place, group, left);
            cta.release(cta.barrier(L::kQEmpty, i));
            continue;
          }
        }
        if (ptx::elect_one()) store(rows, place, group, i);
      }
      q.advance();
    }
    if (ptx::elect_one()) ptx::cp_async_bulk_wait_group<0>();
  }

 private:
  FOVEA_DEVICE_MEMBER void store(const RowTile& rows, const SequencePlace& place, int group,
                                 int i) const {
    const typename T::OTile out{cta.q_at(q.stage, group)};
#pragma unroll
    for (int panel = 0; panel < T::OTile::kPanels; ++panel) {
      const std::int32_t at[4] = {64 * panel, place.q_row + rows.idx * spec.tile_q + 64 * group,
                                  rows.q_head, cta.map_batch(rows)};
      ptx::cp_async_bulk_tensor_store<4>(tensor_map(cta.p.out), at, out.panel(panel));
    }
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<0>();
    ptx::mbarrier_arrive(cta.barrier(L::kQEmpty, i));
  }

  /// Only the first `left` rows of a group: those behind them are another sequence's.
  FOVEA_DEVICE_MEMBER void store_rows(const RowTile& rows, const SequencePlace& place, int group,
                                      std::int32_t left) const {
    constexpr int kChunks = spec.head_dim_v / 8;
    const ForwardParams& c = cta.p.common;
    const typename T::OTile out{cta.q_at(q.stage, group)};
    const std::int64_t first = place.q_row + rows.idx * spec.tile_q + 64 * group;
    char* to = static_cast<char*>(const_cast<void*>(c.out.data)) +
               2 * (first * c.out.row_stride + rows.q_head * c.out.head_stride);
#pragma unroll 1
    for (int at = cta.lane; at < left * kChunks; at += 32) {
      const int row = at / kChunks;
      const int chunk = at % kChunks;
      if (8 * chunk >= c.head_dim_v) continue;
      ptx::st_global(reinterpret_cast<ptx::U32x4*>(to + 2 * (row * c.out.row_stride + 8 * chunk)),
                     ptx::ld_shared<ptx::U32x4>(out.chunk(row, chunk)));
    }
  }
};

// ---- compute ------------------------------------------------------------------------------------

template <ForwardSpec spec, class Mods>
struct Compute {
  using L = Layout<spec>;
  using T = Traits<spec>;
  using Rows = OptimisticRows<spec.element, spec.tile_kv, spec.head_dim_v, spec.wants_row_max>;
  using Score = ScoreInParts<Mods>;
  using Mask = MaskInParts<Mods>;

  const Cta<spec>& cta;
  const int group, warp_in_group;  // of this thread's warp
  Ring<T::kQStages> q{0};
  Ring<T::kStages> k{0}, v{0};
  Ring<T::kSlots> slots{0};

  typename Rows::Scores s;
  typename Rows::Probabilities p;
  typename Rows::Sums o;
  Rows rows;
  bool has_sums = false;  // o holds something: the next product adds to it

  // Full tiles are careful where many of the last row tile's would have had to be redone. Both ways give the same bits, so what one
  // row tile teaches the next shows in the time only.
  bool is_careful = false;
  std::uint32_t num_steps = 0;   // of this row tile
  std::uint32_t num_misses = 0;  // full tiles of it that this warp redid, or would have had to
  std::uint32_t lesson = 0;      // row tiles so far, modulo 2

  KvTile kv_tile{0};  // whose scores were computed last

  // What programs need for it, from look_ahead.
  TileParts<Score, spec.tile_kv> score_parts;
  TileParts<Mask, spec.tile_kv> mask_parts;
  float line_base[2], line_slope[2];  // what a row's scores get added from key to key, log2

  FOVEA_DEVICE_MEMBER explicit Compute(const Cta<spec>& of_cta)
      : cta(of_cta), group(of_cta.warp / 4 - 1), warp_in_group(of_cta.warp % 4) {}

  FOVEA_DEVICE_MEMBER void run() {
    // The first group goes first.
    if (group == T::kGroups - 1) ptx::bar_arrive(1, 256);
    if constexpr (T::kCrossesTiles) {
      run_across();
    } else {
      run_one_by_one();
    }
  }

 private:
  /// What makes scores logarithms to base 2.
  FOVEA_DEVICE_MEMBER float c() const {
    if constexpr (Mods::has_score_slope) return 1.0F;
    return spec.is_prescaled ? kLog2E : cta.p.common.softmax_scale_log2;
  }

  /// Of a score as the softmax gets it.
  FOVEA_DEVICE_MEMBER float natural_unit() const {
    if constexpr (Mods::has_score_slope) return kLn2;
    return spec.is_prescaled ? 1.0F : cta.p.common.softmax_scale;
  }

  FOVEA_DEVICE_MEMBER void run_across() {
    RowTile tile = cta.next_row_tile(slots);
    if (tile.idx < 0) return;
    begin(tile);
    for (;;) {
      rest_of_tile(tile);
      const RowTile next = cta.next_row_tile(slots);
      if (next.idx < 0) break;
      cross(tile, next);
      tile = next;
    }
    last_sums();
    finish(tile, q_stage_of_last(), rows);
  }

  FOVEA_DEVICE_MEMBER void run_one_by_one() {
    for (;;) {
      const RowTile tile = cta.next_row_tile(slots);
      if (tile.idx < 0) return;
      begin(tile);
      rest_of_tile(tile);
      last_sums();
      finish(tile, 0, rows);
    }
  }

  /// kv tiles from the second on. Both kinds of step give the same bits.
  FOVEA_DEVICE_MEMBER void rest_of_tile(const RowTile& tile) {
    while (!kv_tile.is_last()) {
      while (!kv_tile.is_last() && must_be_careful()) {
        step<true>(tile);
        ++num_steps;
      }
      while (!kv_tile.is_last() && !must_be_careful()) {
        step<false>(tile);
        ++num_steps;
      }
    }
  }

  FOVEA_DEVICE_MEMBER bool must_be_careful() const {
    return spec.wants_row_max || is_careful || (Mods::has_mask && !kv_tile.is_next_full());
  }

  // The groups take turns to issue products: named barriers 1 to kGroups, one for each group.
  FOVEA_DEVICE_MEMBER void await_turn() const { ptx::bar_sync(1 + group, 256); }
  FOVEA_DEVICE_MEMBER void pass_turn() const { ptx::bar_arrive(1 + (group + 1) % T::kGroups, 256); }

  FOVEA_DEVICE_MEMBER SharedAddress misses_at() const {
    return cta.smem + L::kMisses + 16 * (2 * group + static_cast<int>(lesson));
  }

  /// Before the turn that ends a row tile: the barrier of the turn lets the group's other warps see it.
  FOVEA_DEVICE_MEMBER void tell_misses() const {
    if (cta.lane == 0) ptx::st_shared(misses_at() + 4 * warp_in_group, num_misses);
  }

  /// After it. All warps of a group go the same way, as their products ask. More than one miss in eight: careful tiles cost less.
  FOVEA_DEVICE_MEMBER void learn() {
    const auto misses = ptx::ld_shared<ptx::U32x4>(misses_at());
    const std::uint32_t sum = misses.x + misses.y + misses.z + misses.w;
    is_careful = ptx::shfl_idx(sum, 0) * 2 > num_steps;
    num_steps = num_misses = 0;
    lesson ^= 1U;
  }

  FOVEA_DEVICE_MEMBER int q_stage_of_last() const {
    return (q.stage + T::kQStages - 1) % T::kQStages;
  }

  FOVEA_DEVICE_MEMBER void await_queries() {
    ptx::mbarrier_wait_parity(cta.barrier(L::kQFull, q.stage * T::kGroups + group), q.parity);
  }

  FOVEA_DEVICE_MEMBER void await_keys() {
    ptx::mbarrier_wait_parity(cta.barrier(L::kKFull, k.stage), k.parity);
    kv_tile.word = ptx::shfl_idx(ptx::ld_shared<std::uint32_t>(cta.kv_tile_at(k.stage)), 0);
  }

  /// S = Q Kᵀ.
  FOVEA_DEVICE_MEMBER void issue_scores(int q_stage) {
    using QTile = typename T::QTile;
    using KTile = typename T::KTile;
    const auto a = k_major_descriptor(QTile{cta.q_at(q_stage, group)});
    const auto b = k_major_descriptor(KTile{cta.k_at(k.stage)});
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < spec.head_dim_qk / 16; ++i) {
      ptx::wgmma_ss<T::kType, T::kType, spec.tile_kv>(s, advanced(a, k_major_offset<QTile>(i)),
                                                      advanced(b, k_major_offset<KTile>(i)), i > 0);
    }
    ptx::wgmma_commit_group();
  }

  /// O += P V.
  FOVEA_DEVICE_MEMBER void issue_sums() {
    using VTile = typename T::VTile;
    ptx::mbarrier_wait_parity(cta.barrier(L::kVFull, v.stage), v.parity);
    const auto b = mn_major_descriptor(VTile{cta.v_at(v.stage)});
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < spec.tile_kv / 16; ++i) {
      ptx::wgmma_rs<T::kType, T::kType, spec.head_dim_v, ptx::Major::mn>(
          o, p[i], advanced(b, mn_major_offset<VTile>(i)), i > 0 || has_sums);
    }
    ptx::wgmma_commit_group();
    has_sums = true;
  }

  FOVEA_DEVICE_MEMBER void release_keys() {
    cta.release(cta.barrier(L::kKEmpty, k.stage));
    k.advance();
  }

  FOVEA_DEVICE_MEMBER void release_values() {
    cta.release(cta.barrier(L::kVEmpty, v.stage));
    v.advance();
  }

  /// A row tile's first scores, with nothing to overlap them.
  FOVEA_DEVICE_MEMBER void begin(const RowTile& tile) {
    await_queries();
    await_keys();
    look_ahead(tile);
    await_turn();
    issue_scores(q.stage);
    pass_turn();
    ptx::wgmma_wait_group<0>();
    q.advance();
    release_keys();
    begin_rows(tile);
    first_probabilities(tile);
  }

  /// Scores of the next kv tile beside the sums of the last one.
  template <bool is_careful>
  FOVEA_DEVICE_MEMBER void step(const RowTile& tile) {
    await_keys();
    look_ahead(tile);
    await_turn();
    issue_scores(q_stage_of_last());
    issue_sums();
    pass_turn();
    ptx::wgmma_wait_group<1>();
    release_keys();
    score(tile);
    bool is_raised = false;
    if constexpr (is_careful) {
      if (!kv_tile.is_full()) mask(tile);
      is_raised = rows.template raise<false>(s, c());
      if (is_raised && kv_tile.is_full()) ++num_misses;
    }
    ptx::wgmma_wait_group<0>();
    release_values();
    float part[2];
    if constexpr (is_careful) {
      if (is_raised) rows.scale(o);
      if (!rows.template exponentiate<true, T::kChunk>(s, p, part, c(), cta.p.zero))
        rows.soften(p, o, part);
    } else if (!rows.template exponentiate<false, T::kChunk>(s, p, part, c(), cta.p.zero)) {
      if (rows.must_redo(part)) {
        if (rows.template raise<false>(s, c())) rows.scale(o);
        rows.template exponentiate<true, T::kChunk>(s, p, part, c(), cta.p.zero);
        ++num_misses;
      }
      rows.soften(p, o, part);
    }
    rows.add(part);
    if constexpr (spec.has_dropout) drop(tile);
  }

  /// The same across a boundary: first scores of `next` beside the last sums of `tile`, which is then finished.
  FOVEA_DEVICE_MEMBER void cross(const RowTile& tile, const RowTile& next) {
    const int q_stage = q_stage_of_last();
    await_queries();
    await_keys();
    look_ahead(next);
    tell_misses();
    await_turn();
    issue_scores(q.stage);
    issue_sums();
    pass_turn();
    learn();
    ptx::wgmma_wait_group<1>();
    q.advance();
    release_keys();
    const Rows done = rows;
    begin_rows(next);
    ptx::wgmma_wait_group<0>();
    release_values();
    finish(tile, q_stage, done);
    first_probabilities(next);
  }

  FOVEA_DEVICE_MEMBER void last_sums() {
    tell_misses();
    await_turn();
    issue_sums();
    pass_turn();
    learn();
    ptx::wgmma_wait_group<0>();
    release_values();
  }

  FOVEA_DEVICE_MEMBER void begin_rows(const RowTile& tile) {
    rows.begin();
    score(tile);
    if (!kv_tile.is_full()) mask(tile);
    rows.template raise<true>(s, c());
  }

  FOVEA_DEVICE_MEMBER void first_probabilities(const RowTile& tile) {
    float part[2];
    rows.template exponentiate<true, T::kChunk>(s, p, part, c(), cta.p.zero);
    rows.add(part);
    if constexpr (spec.has_dropout) drop(tile);
    has_sums = false;
  }

  /// Of P alone: l and the maximum are those of all that a row sees.
  FOVEA_DEVICE_MEMBER void drop(const RowTile& tile) {
    const ForwardParams& common = cta.p.common;
    const std::int32_t q_idx = first_row(tile) + cta.lane % 2 * 8;
#pragma unroll
    for (int block = 0; block < spec.tile_kv / 8; ++block) {
      const ptx::U32x4 words = fragment_words(common, tile.batch, tile.q_head, q_idx,
                                              kv_tile.idx() * spec.tile_kv + block * 8);
      p[block / 2][block % 2 * 2] &= kept(words.x, words.y);
      p[block / 2][block % 2 * 2 + 1] &= kept(words.z, words.w);
    }
  }

  /// Bits of a pair of probabilities that stay.
  FOVEA_DEVICE_MEMBER std::uint32_t kept(std::uint32_t lo, std::uint32_t hi) const {
    return (is_dropped(cta.p.common, lo) ? 0U : 0xffffU) |
           (is_dropped(cta.p.common, hi) ? 0U : 0xffff0000U);
  }

  // ---- programs ----

  /// Of this thread's first row, key 0.
  FOVEA_DEVICE_MEMBER Position position_of(const RowTile& tile) const {
    Position at{};
    at.batch = tile.batch;
    at.q_head = tile.q_head;
    at.kv_head = tile.q_head / cta.p.common.group;
    at.q_idx = first_row(tile);
    at.seqlen_q = cta.place_of(tile).seqlen_q;
    at.seqlen_kv = cta.place_of(tile).seqlen_kv;
    return at;
  }

  /// Before the scores are there: loads that the product hides.
  FOVEA_DEVICE_MEMBER void look_ahead(const RowTile& tile) {
    const Captures& captures = cta.p.common.captures;
    Position at = position_of(tile);
    at.kv_idx = kv_tile.idx() * spec.tile_kv;
    if constexpr (Mods::has_score_parts) score_parts.load(at, captures);
    if constexpr (Mods::has_mask_parts) {
      if (!kv_tile.is_full()) mask_parts.load(at, captures);
    }
    if constexpr (Mods::has_score_slope) {
      at.kv_idx = first_column();
#pragma unroll
      for (int r = 0; r < 2; ++r, at.q_idx += 8) {
        line_base[r] = kLog2E * Mods::score(0.0F, at, captures);
        line_slope[r] = kLog2E * Mods::score_slope(at, captures);
      }
    }
  }

  /// Of this thread in this kv tile.
  FOVEA_DEVICE_MEMBER std::int32_t first_column() const {
    return kv_tile.idx() * spec.tile_kv + 2 * (cta.lane % 4);
  }

  /// visit(score, position, part of its key, part of its row) for every score of this thread.
  template <class Parts, class Visit>
  FOVEA_DEVICE_MEMBER void for_each_score(const RowTile& tile, const Parts& parts, Visit&& visit) {
    Position at = position_of(tile);
    const std::int32_t row = at.q_idx;
    const std::int32_t column = first_column();
#pragma unroll
    for (int n = 0; n < Rows::kScores / 2; ++n) {
      const int offset = 8 * (n / 2) + n % 2;
      const auto key = parts.key(offset);
      at.kv_idx = column + offset;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        at.q_idx = row + 8 * r;
        visit(s[4 * (n / 2) + 2 * r + n % 2], at, key, parts.rows[r]);
      }
    }
  }

  FOVEA_DEVICE_MEMBER void score(const RowTile& tile) {
    const ForwardParams& common = cta.p.common;
    if constexpr (Mods::has_score_slope) {
#pragma unroll
      for (int i = 0; i < Rows::kScores; ++i) {
        const int r = i / 2 % 2;
        const auto offset = static_cast<float>(8 * (i / 4) + i % 2);
        s[i] = ptx::fma_rn(s[i], common.softmax_scale_log2,
                           ptx::fma_rn(line_slope[r], offset, line_base[r]));
      }
    } else if constexpr (spec.is_prescaled) {
      for_each_score(tile, score_parts,
                     [&](float& x, const Position& at, const auto& key, const auto& row) {
                       x *= common.softmax_scale;
                       if constexpr (Mods::has_score)
                         x = Score::value(x, at, key, row, common.captures);
                     });
    }
  }

  /// What a row does not see becomes -inf, whatever it was.
  FOVEA_DEVICE_MEMBER void mask(const RowTile& tile) {
    if constexpr (Mods::has_kv_limits || !Mods::has_mask) {
      mask_by_limits(tile);
    } else {
      const ForwardParams& common = cta.p.common;
      const std::int32_t seqlen_kv = cta.place_of(tile).seqlen_kv;
      for_each_score(tile, mask_parts,
                     [&](float& x, const Position& at, const auto& key, const auto& row) {
                       const bool is_visible =
                           at.kv_idx < seqlen_kv && Mask::value(at, key, row, common.captures);
                       if (!is_visible) x = -infinity();
                     });
    }
  }

  /// Two comparisons with constants for each score.
  FOVEA_DEVICE_MEMBER void mask_by_limits(const RowTile& tile) {
    const std::int32_t column = first_column();
    std::int32_t first[2] = {0, 0};
    std::int32_t last[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      last[r] = cta.place_of(tile).seqlen_kv - 1;
      if constexpr (Mods::has_kv_limits) {
        Position at = position_of(tile);
        at.q_idx += 8 * r;
        const std::int32_t of_mask = Mods::kv_last(at, cta.p.common.captures).value;
        last[r] = of_mask < last[r] ? of_mask : last[r];
        first[r] = Mods::kv_first(at, cta.p.common.captures).value;
      }
      // Relative to this thread's first column, in the range of ints: positions are below 2^28.
      last[r] = (last[r] < -1 ? -1 : last[r]) - column;
      first[r] = first[r] > column ? first[r] - column : 0;
    }
#pragma unroll
    for (int i = 0; i < Rows::kScores; ++i) {
      const std::int32_t offset = 8 * (i / 4) + i % 2;
      if (offset > last[i / 2 % 2] || offset < first[i / 2 % 2]) s[i] = -infinity();
    }
  }

  // ---- store ----

  /// Of this thread's two rows.
  FOVEA_DEVICE_MEMBER std::int32_t first_row(const RowTile& tile) const {
    return tile.idx * spec.tile_q + 64 * group + 16 * warp_in_group + cta.lane / 4;
  }

  /// O / l goes where Q lay, lse to its place. Each warp writes the 16 rows of Q that only it has read.
  FOVEA_DEVICE_MEMBER void finish(const RowTile& tile, int q_stage, const Rows& done) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = finish_row(tile, r, done);
    report_suspects(tile);
    write_out(typename T::OTile{cta.q_at(q_stage, group)}, factor);
    ptx::fence_proxy_async_shared_cta();
    cta.release(cta.barrier(L::kOFull, q_stage * T::kGroups + group));
    cta.done_with(tile);
  }

  /// What O is scaled by; writes lse and row_max.
  FOVEA_DEVICE_MEMBER float finish_row(const RowTile& tile, int r, const Rows& done) const {
    const ForwardParams& common = cta.p.common;
    const SequencePlace place = cta.place_of(tile);
    float sum = done.sum[r];
    sum += ptx::shfl_bfly(sum, 1);
    sum += ptx::shfl_bfly(sum, 2);
    float factor = sum == 0.0F ? 0.0F : ptx::rcp_approx_ftz(sum);
    float lse = done.log2_total(r, sum);
    // Rows behind the last packed sequence have no sink either.
    if (common.sinks != nullptr && (!spec.is_varlen || tile.batch < common.num_sequences)) {
      const float sink = kLog2E * ptx::ld_global(common.sinks + tile.q_head * common.sinks_stride);
      const float top = ptx::max_ftz(lse, sink);
      if (top != -infinity()) {
        const float own = ptx::ex2_approx_ftz(lse - top);
        const float total = own + ptx::ex2_approx_ftz(sink - top);
        factor *= own == 0.0F ? 0.0F : ptx::rcp_approx_ftz(total) * own;
        lse = top + ptx::lg2_approx_ftz(total);
      }
    }
    const std::int32_t row = first_row(tile) + 8 * r;
    if (common.lse != nullptr && cta.lane % 4 == 0 && row < place.seqlen_q) {
      ptx::st_global(common.lse + cta.map_batch(tile) * common.lse_batch_stride +
                         tile.q_head * common.lse_head_stride +
                         (place.q_row + row) * common.lse_row_stride,
                     kLn2 * lse);
    }
    if constexpr (spec.wants_row_max) {
      if (cta.lane % 4 == 0 && row < place.seqlen_q) {
        ptx::st_global(common.row_max + cta.map_batch(tile) * common.row_max_batch_stride +
                           tile.q_head * common.row_max_head_stride +
                           (place.q_row + row) * common.row_max_row_stride,
                       finish_row_max(done.greatest[r], sum, natural_unit()));
      }
    }
    if constexpr (spec.has_dropout) factor *= common.dropout_keep_scale;
    return factor;
  }

  /// A NaN or infinity in any sum of the warp's rows: finite minus itself is 0.
  FOVEA_DEVICE_MEMBER void report_suspects(const RowTile& tile) const {
    float all[4] = {};
#pragma unroll
    for (int i = 0; i < Rows::kSums; ++i) all[i % 4] += o[i];
    const float any = (all[0] + all[1]) + (all[2] + all[3]);
    const bool is_suspect = ptx::vote_any(!(any - any == 0.0F));
    if (cta.lane == 0) {
      ptx::st_global(cta.p.is_suspect + unit_of(tile) * 4 + warp_in_group,
                     static_cast<std::uint8_t>(is_suspect ? 1 : 0));
    }
  }

  /// The word that tells of this group's rows: sm80's work_of_unit finds the rows of a word.
  FOVEA_DEVICE_MEMBER std::int64_t unit_of(const RowTile& tile) const {
    const ForwardParams& common = cta.p.common;
    const std::int64_t tiles =
        spec.is_varlen
            ? static_cast<std::int64_t>(tile.number) * common.num_heads_q + tile.q_head
            : (static_cast<std::int64_t>(tile.batch) * common.num_heads_q + tile.q_head) *
                      common.num_q_tiles +
                  tile.idx;
    return tiles * T::kGroups + group;
  }

  FOVEA_DEVICE_MEMBER void write_out(const typename T::OTile& tile,
                                     const float (&factor)[2]) const {
    const SharedAddress mine = tile.chunk(16 * warp_in_group + cta.lane % 16, cta.lane / 16);
#pragma unroll
    for (int j = 0; j < spec.head_dim_v / 16; ++j) {
      const float* d = o + 8 * j;
      ptx::stmatrix_x4(
          tile.chunk_ahead(mine, 2 * j),
          {pack(d[0] * factor[0], d[1] * factor[0]), pack(d[2] * factor[1], d[3] * factor[1]),
           pack(d[4] * factor[0], d[5] * factor[0]), pack(d[6] * factor[1], d[7] * factor[1])});
    }
  }

  FOVEA_DEVICE std::uint32_t pack(float lo, float hi) {
    if constexpr (spec.out_element == Element::bf16) return ptx::cvt_bf16x2(lo, hi);
    return ptx::cvt_f16x2(lo, hi);
  }
};

// ---- entry --------------------------------------------------------------------------------------

template <ForwardSpec spec>
FOVEA_DEVICE void start_barriers(const Cta<spec>& cta) {
  using L = Layout<spec>;
  using T = Traits<spec>;
  constexpr int kReaders = 4 * T::kGroups;  // warps that compute
  if (cta.warp != 0 || !ptx::elect_one()) return;
  for (const TensorMapParam* map : {&cta.p.q, &cta.p.k, &cta.p.v, &cta.p.out})
    ptx::prefetch_tensormap(tensor_map(*map));
  for (int i = 0; i < T::kQStages * T::kGroups; ++i) {
    ptx::mbarrier_init(cta.barrier(L::kQFull, i), 1);
    ptx::mbarrier_init(cta.barrier(L::kQEmpty, i), 1);
    ptx::mbarrier_init(cta.barrier(L::kOFull, i), 4);
  }
  for (int i = 0; i < T::kStages; ++i) {
    ptx::mbarrier_init(cta.barrier(L::kKFull, i), 1);
    ptx::mbarrier_init(cta.barrier(L::kKEmpty, i), kReaders);
    ptx::mbarrier_init(cta.barrier(L::kVFull, i), 1);
    ptx::mbarrier_init(cta.barrier(L::kVEmpty, i), kReaders);
  }
  for (int i = 0; i < T::kSlots; ++i) {
    ptx::mbarrier_init(cta.barrier(L::kSlotFull, i), 1);
    ptx::mbarrier_init(cta.barrier(L::kSlotEmpty, i),
                       kReaders + 2);  // and loading and storing warps
  }
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(cta.barrier(L::kGroupFull, i), 1);
    ptx::mbarrier_init(cta.barrier(L::kGroupEmpty, i), 1);
  }
  ptx::mbarrier_init(cta.barrier(L::kClaim, 0), 1);
  ptx::fence_mbarrier_init_release_cluster();
}

/// num_warps * 32 threads, one CTA on an SM: as many CTAs as there are SMs, or fewer.
template <ForwardSpec spec, class Mods>
FOVEA_DEVICE void attention_forward(const Sm90ForwardParams& p) {
  using T = Traits<spec>;
  const Cta<spec> cta{p, ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()};
  start_barriers<spec>(cta);
  ptx::griddepcontrol_wait();  // for whoever clears the counter and builds range tables
  ptx::
      griddepcontrol_launch_dependents();  // the redo: there is no room for it beside this, but behind
  ptx::sync_threads();
  if (cta.warp < 4) {
    ptx::setmaxnreg_dec<T::kLoadRegisters>();
    if (cta.warp == 0) Load<spec>(cta).run();
    if (cta.warp == 1) Store<spec>(cta).run();
    if (cta.warp == 2) Schedule<spec, Mods>(cta).run();
  } else {
    ptx::setmaxnreg_inc<T::kComputeRegisters>();
    Compute<spec, Mods>(cta).run();
  }
}

}  // namespace fovea::cuda::sm90
