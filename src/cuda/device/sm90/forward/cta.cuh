// What all roles of Hopper's forward kernel know: what follows from the spec, where things lie in shared memory, what
// the roles post for each other. ../attention_forward.cuh has the picture; read schedule.cuh next.
#pragma once

#include "common/passes.cuh"
#include "common/ring.cuh"
#include "common/row_view.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "shared/forward_params_sm90.h"
#include "shared/forward_spec.h"
#include "sm90/role_warp.cuh"
#include "tile/matrix_descriptor.cuh"
#include "tile/shared_tile.cuh"

namespace fovea::cuda::sm90 {

/// Values as they lie in shared memory: keys one below the other; codes of a channel's keys side by side, and rows of
/// ones below them.
template <auto spec, Swizzle swizzle, bool sums_codes = spec.sums_codes>
struct ValueTile {
  using Type = SharedTile<spec.tile_kv, element_bytes(spec.element) * spec.head_dim_v, swizzle>;
};
template <auto spec, Swizzle swizzle>
struct ValueTile<spec, swizzle, true> {
  using Type = SharedTile<spec.head_dim_v + kRowsOfOnes, spec.tile_kv>;
};

/// All that follows from the spec. Blackwell's kernel has traits of its own (sm100/forward/cta.cuh) and the same roles
/// that load and schedule.
template <auto spec>
struct Traits {
  static_assert(spec.element != Element::f32, "wgmma multiplies 16-bit elements here");
  static constexpr int kPanelElements = sm90_panel_elements(spec);
  static_assert(spec.head_dim_qk % kPanelElements == 0 && spec.head_dim_v % kPanelElements == 0,
                "rows are whole panels, of 128 or of 64 bytes");
  static_assert(kPanelElements == 64 || !spec.loads_by_cp_async, "threads copy 128 bytes of a row");
  static constexpr int kGroupRows = 64;
  static constexpr int kGroups = spec.tile_q / kGroupRows;
  static_assert(kGroups <= 3, "two or three warpgroups take turns; one has nobody to wait for");
  static_assert(spec.tile_q == 64 * kGroups && spec.num_warps == sm90_num_warps(spec, kGroups),
                "a warpgroup owns 64 rows");
  static_assert(spec.tile_kv % 16 == 0, "keys are the second product's depth, in steps of 16");
  static_assert(spec.heads_per_tile == 1 || kGroups == 1, "heads share the rows of one group");
  static_assert(!spec.is_split || kFewestKeysPerSplit % spec.tile_kv == 0,
                "splits are whole tiles");
  /// Of each head that a tile packs, and of all of them: the rest of the tile's rows are zeros, and belong to nobody.
  static constexpr int kQueries = kQueriesOfTile<spec>;
  static constexpr int kBoxRows =
      spec.heads_per_tile == 1 ? kGroupRows : kQueries * spec.heads_per_tile;
  static constexpr int kQStages = spec.q_stages;
  static constexpr int kStages = spec.stages;
  /// Scores of the next row tile beside the last sums of this one: its Q arrives while this one's buffer still waits
  /// for O.
  static constexpr bool kOverlapsTiles = kQStages == 2;
  static constexpr Sm90ForwardLayout kAt = sm90_forward_layout(spec);
  static_assert(kAt.bytes <= 232448, "an SM has no more");
  static constexpr int kSlots = kAt.num_slots;
  static constexpr bool kPostsPlace = sm90_posts_place(spec);
  static constexpr int kLoaders = sm90_num_loaders(spec);
  static constexpr WalkOrder kWalkOrder = WalkOrder::falling;
  /// Tiles of keys that another kernel has rounded are numbered, those of packed sequences in one list.
  static constexpr bool kHasRoundedTiles = spec.multiplies_codes;
  /// Where values end inside a tile of keys that TMA has loaded, what lies behind them is cleared. Packed, it is a
  /// neighbour's, and may not be. Threads do not copy it, and behind codes there are zeros.
  static constexpr bool kClearsValues =
      !spec.loads_by_cp_async && !spec.sums_codes && (spec.is_cached || spec.is_split);
  static constexpr bool kHasRoundedCache = spec.has_rounded_cache();
  static constexpr bool kCopiesPages = spec.copies_pages();
  /// O goes from registers to memory, in f32; else through shared memory.
  static constexpr bool kWritesSums = spec.is_split || spec.out_element == Element::f32;
  static constexpr ElementTraits kElement = element_traits(spec.element);
  static_assert(kElement.can_be_mn_major, "rows of V are its depth in P V");
  static constexpr ptx::WgmmaType kType = wgmma_type(spec.element);  // of P V

  static constexpr Swizzle kSwizzle = widest_swizzle(kElement.bytes * kPanelElements);
  /// Of Q Kᵀ: a step of depth is 32 bytes whatever the type.
  static constexpr int kQkRowBytes = sm90_qk_bytes(spec) * spec.head_dim_qk;
  static constexpr int kQkSteps = kQkRowBytes / 32;
  static constexpr Swizzle kQkSwizzle =
      spec.multiplies_codes ? widest_swizzle(kQkRowBytes) : kSwizzle;
  using QTile = SharedTile<64, kQkRowBytes, kQkSwizzle>;  // as it is multiplied
  using GivenQTile = SharedTile<64, kElement.bytes * spec.head_dim_qk, kSwizzle>;
  using KTile = SharedTile<spec.tile_kv, kQkRowBytes, kQkSwizzle>;
  static_assert(!spec.multiplies_codes || KTile::kPanels == 1, "rows of codes are one panel");
  static_assert(!spec.multiplies_codes || spec.tile_kv == kQuantizedTile,
                "a lane's keys of a tile share a scale");
  using VTile = typename ValueTile<spec, kSwizzle>::Type;
  static_assert(!spec.sums_codes || spec.multiplies_codes,
                "P of codes is made of products of codes");
  static_assert(!spec.sums_codes || !spec.has_dropout, "sums of P are of all keys, dropped or not");
  static constexpr bool kTakesFarRows = spec.takes_far_rows();
  using OTile = SharedTile<64, 2 * spec.head_dim_v, kSwizzle>;

  // 65,536 registers: what the launch gives a thread, and what each role makes of it. A group alone on its SM has all
  // it could take.
  static constexpr bool kIsWide = spec.head_dim_qk > 128 || spec.head_dim_v > 128;
  /// Three groups of 96 columns have tiles of fewer keys.
  static constexpr bool kIsMiddle = kPanelElements < 64;
  static constexpr int kCtas = spec.ctas_per_sm;
  static_assert(kGroups == 1 || kCtas == 1, "two groups fill an SM's registers");
  static constexpr bool kTradesRegisters = kGroups > 1 || kCtas > 1;
  static constexpr int kCodeRegisters = 72;                            // of warps that load codes
  static constexpr int kLoadRegisters = spec.has_codes()         ? 24  // nor do they load
                                        : spec.loads_by_cp_async ? (kIsWide ? 72 : 88)
                                        : kGroups == 3           ? (kIsMiddle ? 56 : 32)
                                        : spec.sums_codes        ? 24
                                                                 : 40;
  static constexpr int kComputeRegisters = spec.has_codes()         ? 208
                                           : spec.loads_by_cp_async ? (kIsWide ? 216 : 208)
                                           : kGroups == 3           ? (kIsMiddle ? 152 : 160)
                                           : kCtas == 3             ? 120
                                           : kCtas == 2             ? 216
                                           : spec.sums_codes        ? 240
                                                                    : 232;
  static_assert(kGroups < 3 || !spec.loads_by_cp_async, "threads that copy want more registers");
  static_assert(!spec.has_codes() || (kGroups == 2 && !kIsWide && spec.loads_by_cp_async &&
                                      !spec.multiplies_codes && spec.tile_kv == 32 * kLoaders),
                "a lane of four warps that load codes has a row of each tile");
  /// Powers between two links of the chain in OptimisticRows::exponentiate; scores that stay codes have the shortest.
  static constexpr int kChunk = spec.multiplies_codes && !spec.is_prescaled ? 8
                                : kGroups == 2 && spec.head_dim_v == 128    ? 16
                                                                            : 0;
};

/// A tile of rows of one head, or of the first of heads_per_tile. Packed: `batch` is the sequence, `number` that of the
/// tile among those of all sequences. Split: `number` is that of the split. `slot`: where it is posted. In its place
/// may stand the end of a round: of all row tiles of the CTA, or of a pass over one that is computed again; and behind
/// those passes the end.
struct RowTile {
  std::int32_t idx, q_head, batch, number, slot;

  FOVEA_DEVICE RowTile round_end() { return {-1, 0, 0, 0, 0}; }
  FOVEA_DEVICE RowTile end() { return {-2, 0, 0, 0, 0}; }
  FOVEA_DEVICE_MEMBER bool is_any_end() const { return idx < 0; }
  FOVEA_DEVICE_MEMBER bool is_end() const { return idx == end().idx; }
};

/// Rows of Q and of K that the positions of a row tile's sequence count from, and how many there are.
struct SequencePlace {
  std::int32_t q_row, kv_row, seqlen_q, seqlen_kv;
};

/// A kv tile as K and V have it: rows first_row + idx * tile_kv and on, of which num_keys exist. `batch`: the index in
/// the last dimension of K and V; paged: what look_up has found of this tile's pages.
struct KvRows {
  std::int32_t idx, kv_head, batch, first_row, num_keys;
  std::int32_t first_tile;  // of the sequence's tiles of codes
  std::int32_t sequence;

  FOVEA_DEVICE KvRows none() { return {-1, 0, 0, 0, 0, 0, 0}; }
};

/// A kv tile that a row tile visits: its index, the pass, and whether every row sees all of it and it is the pass of
/// all values. none(): there is none any more, and that is not full either; a pass that there is not, of tile 0.
struct KvTile {
  std::uint32_t word;  // is_full, 3 bits of the pass, 28 of the index

  FOVEA_DEVICE KvTile make(std::int32_t idx, bool is_full, Pass pass) {
    return {(is_full && pass == Pass::all ? 0x80000000U : 0U) |
            (static_cast<std::uint32_t>(pass) & 7U) << 28U | static_cast<std::uint32_t>(idx)};
  }
  FOVEA_DEVICE KvTile none() { return {0x50000000U}; }
  FOVEA_DEVICE_MEMBER std::int32_t idx() const {
    return static_cast<std::int32_t>(word & 0x0fffffffU);
  }
  FOVEA_DEVICE_MEMBER bool is_full() const { return static_cast<std::int32_t>(word) < 0; }
  FOVEA_DEVICE_MEMBER Pass pass() const {
    return static_cast<Pass>(static_cast<std::int32_t>(word << 1U) >> 29);
  }
  FOVEA_DEVICE_MEMBER bool is_none() const { return word == none().word; }
};

/// What all roles know.
template <auto spec>
struct Cta : RoleWarp {
  using T = Traits<spec>;
  const Sm90ForwardParams& p;

  /// The number of this warp among those that load.
  FOVEA_DEVICE_MEMBER int loader() const {
    if constexpr (spec.has_codes()) return warp - 4 * (T::kGroups + 1);
    return warp == 0 ? 0 : 1;
  }

  FOVEA_DEVICE_MEMBER SharedAddress q_at(int stage, int group) const {
    return smem + T::kAt.q + (stage * T::kGroups + group) * T::kAt.q_bytes;
  }
  /// As they are multiplied: codes have a place of their own.
  FOVEA_DEVICE_MEMBER SharedAddress multiplied_q_at(int stage, int group) const {
    if constexpr (!spec.multiplies_codes) return q_at(stage, group);
    return smem + T::kAt.q_codes + (stage * T::kGroups + group) * T::QTile::kBytes;
  }
  FOVEA_DEVICE_MEMBER SharedAddress mean_at(int stage, int group) const {
    return smem + T::kAt.q_mean + (stage * T::kGroups + group) * sm90_mean_bytes(spec);
  }
  /// What the scores of a row of codes lack.
  FOVEA_DEVICE_MEMBER SharedAddress of_mean_at(int stage, int row) const {
    return smem + T::kAt.of_mean + 4 * (stage * 64 * T::kGroups + row);
  }
  /// How far from 0 a row is: its scale or, beside programs, its reference.
  FOVEA_DEVICE_MEMBER SharedAddress size_of_row_at(int stage, int row) const {
    return smem + T::kAt.size_of_row + 4 * (stage * 64 * T::kGroups + row);
  }
  /// Of all keys of the head.
  FOVEA_DEVICE_MEMBER SharedAddress greatest_key_scale_at(int stage, int group) const {
    return mean_at(stage, group) + 4 * spec.head_dim_qk;
  }
  /// Of a group's warp.
  FOVEA_DEVICE_MEMBER SharedAddress has_far_at(int stage, int group, int of_group) const {
    return smem + T::kAt.has_far + 4 * (4 * (stage * T::kGroups + group) + of_group);
  }
  FOVEA_DEVICE_MEMBER SharedAddress k_at(int stage) const {
    return smem + T::kAt.k + stage * T::KTile::kBytes;
  }
  FOVEA_DEVICE_MEMBER SharedAddress v_at(int stage) const {
    return smem + T::kAt.v + stage * T::VTile::kBytes;
  }
  FOVEA_DEVICE_MEMBER SharedAddress kv_tile_at(int stage) const {
    return smem + T::kAt.kv_tiles + 8 * stage;
  }

  static constexpr std::uint32_t kNoRedo = 0xffffffffU;

  /// The list of the row tiles whose number in this CTA is even, or odd. Groups are never more than one row tile apart.
  FOVEA_DEVICE_MEMBER SharedAddress redo_list_at(std::uint32_t parity) const {
    return smem + T::kAt.redo_list + 4 * parity;
  }

  /// What Schedule calls a row tile, by its number in this CTA: at most three are posted behind one that is not
  /// finished.
  FOVEA_DEVICE_MEMBER SharedAddress id_at(std::uint32_t number) const {
    return smem + T::kAt.ids + 4 * (number % 4);
  }

  /// Of the round of a row tile that has been posted, or of its end.
  FOVEA_DEVICE_MEMBER Pass pass() const {
    return static_cast<Pass>(static_cast<std::int32_t>(word_at(smem + T::kAt.pass)));
  }

  FOVEA_DEVICE_MEMBER SharedAddress slot_at(int i) const {
    return smem + T::kAt.slots + T::kAt.slot_bytes * i;
  }

  /// The next row tile, or an end, by whoever reads slots.
  FOVEA_DEVICE_MEMBER RowTile next_row_tile(Ring<T::kSlots>& slots) const {
    ptx::mbarrier_wait_parity(barrier(T::kAt.slot_full, slots.stage), slots.parity);
    const auto words = ptx::ld_shared<ptx::U32x4>(slot_at(slots.stage));
    if constexpr (!T::kPostsPlace) release(barrier(T::kAt.slot_empty, slots.stage));
    // By shuffle, so that the compiler knows them as uniform.
    const RowTile tile{static_cast<std::int32_t>(ptx::shfl_idx(words.x, 0)),
                       static_cast<std::int32_t>(ptx::shfl_idx(words.y, 0)),
                       static_cast<std::int32_t>(ptx::shfl_idx(words.z, 0)),
                       spec.is_varlen || spec.is_split ? static_cast<std::int32_t>(words.w) : 0,
                       slots.stage};
    if (tile.is_any_end()) done_with(tile);
    slots.advance();
    return tile;
  }

  /// The same row tile, read anew where that can be, until its reader is done with it: for threads that lack registers
  /// to keep more of it in than its slot.
  FOVEA_DEVICE_MEMBER RowTile posted(const RowTile& rows) const {
    if constexpr (!T::kPostsPlace) return rows;
    const auto words = ptx::ld_shared<ptx::U32x4>(slot_at(rows.slot));
    return {static_cast<std::int32_t>(words.x), static_cast<std::int32_t>(words.y),
            static_cast<std::int32_t>(words.z), static_cast<std::int32_t>(words.w), rows.slot};
  }

  /// Where it is posted: from its slot, so until its reader is done with the row tile.
  FOVEA_DEVICE_MEMBER SequencePlace place_of(const RowTile& rows) const {
    if constexpr (T::kPostsPlace) {
      return ptx::bit_cast<SequencePlace>(ptx::ld_shared<ptx::U32x4>(slot_at(rows.slot) + 16));
    }
    return {0, 0, p.common.seqlen_q, p.common.seqlen_kv};
  }

  /// The last dimension of tensor maps of queries and of O: packed tensors have one sequence.
  FOVEA_DEVICE_MEMBER static std::int32_t map_batch(const RowTile& rows) {
    return spec.is_varlen || spec.has_packed_q ? 0 : rows.batch;
  }

  /// The list of its keys among those that another kernel has rounded.
  FOVEA_DEVICE_MEMBER static std::int32_t rounded_batch(const RowTile& rows) {
    return T::kHasRoundedCache ? rows.batch : map_batch(rows);
  }

  /// The row tile as RowView has it: rows, but no keys.
  FOVEA_DEVICE_MEMBER Work work_of(const RowTile& tile) const {
    const SequencePlace place = place_of(tile);
    Work work{};
    work.sequence.idx = tile.batch;
    work.sequence.q_batch = spec.is_split ? tile.batch : map_batch(tile);  // of partial states
    work.sequence.q_row = place.q_row;
    work.sequence.seqlen_q = place.seqlen_q;
    work.sequence.seqlen_kv = place.seqlen_kv;
    // Packed: the tile behind the last sequence is that of the rows behind it.
    work.sequence.is_trailing = spec.is_varlen && tile.batch >= p.common.num_sequences;
    work.q_begin = tile.idx * kQueriesOfTile<spec>;
    work.q_head = tile.q_head;
    work.kv_head = tile.q_head / p.common.group;
    work.split = tile.number;
    return work;
  }

  /// The first of its sequence's tiles of codes, among those of a head: packed sequences have one list of them.
  FOVEA_DEVICE_MEMBER static std::int32_t first_tile_of_codes(const RowTile& rows,
                                                              const SequencePlace& place) {
    if constexpr (!T::kHasRoundedTiles || T::kHasRoundedCache || !spec.is_varlen) return 0;
    return static_cast<std::int32_t>(first_packed_tile(rows.batch, place.kv_row));
  }

  FOVEA_DEVICE_MEMBER void done_with(const RowTile& rows) const {
    if constexpr (T::kPostsPlace) release(barrier(T::kAt.slot_empty, rows.slot));
  }

  /// Behind a round, when this warp has done what it had to for it: whether another one will come. Behind the first it
  /// waits for the others to know that. (All lanes arrive, so that each speaks for what it has read; and behind a
  /// branch of one the compiler would take those of the next round for scattered.)
  FOVEA_DEVICE_MEMBER bool end_round(Pass pass) const {
    ptx::mbarrier_arrive(barrier(T::kAt.round_done, 0));
    if (pass != Pass::all) return true;
    ptx::mbarrier_wait_parity(barrier(T::kAt.round_done, 0), 0);
    return has_redo();
  }

  FOVEA_DEVICE_MEMBER bool has_redo() const {
    const auto heads = ptx::ld_shared<ptx::U32x2>(redo_list_at(0));
    return ptx::shfl_idx(heads.x & heads.y, 0) != kNoRedo;
  }
};

/// A warp that computes, and which rows are its.
template <Sm90ForwardSpec spec>
struct ComputingWarp {
  const Cta<spec>& cta;
  const int group, idx;  // of its group's four

  FOVEA_DEVICE_MEMBER explicit ComputingWarp(const Cta<spec>& of_cta)
      : cta(of_cta), group(of_cta.warp / 4 - 1), idx(of_cta.warp % 4) {}

  FOVEA_DEVICE_MEMBER Work work_of(const RowTile& tile) const { return cta.work_of(tile); }

  /// This thread's row r of two, of the tile's.
  FOVEA_DEVICE_MEMBER int row(int r) const { return 64 * group + 16 * idx + cta.lane / 4 + 8 * r; }
};

}  // namespace fovea::cuda::sm90
