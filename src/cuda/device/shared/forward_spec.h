// What shapes the code of a forward kernel: its template argument, its key in memory and a constant of the generated
// unit. Each kernel has a spec of its own, which says what ForwardSpec does and more. Read forward_params.h next.
#pragma once

#include "shared/element.h"
#include "shared/split.h"
#include "shared/types.h"

namespace fovea::cuda {

/// What every forward kernel is compiled for. Lengths, contents, addresses, strides, scalars, sinks and where lse goes
/// are parameters (forward_params.h): none of them compiles anything.
struct ForwardSpec {
  Element element = Element::bf16;      // of q, k, v
  Element out_element = Element::bf16;  // of out
  std::int32_t head_dim_qk = 128;       // as the tile holds it: the problem's, padded
  std::int32_t head_dim_v = 128;
  std::int32_t tile_q = 128;  // rows, of all heads that a tile packs
  std::int32_t tile_kv = 64;
  std::int32_t num_warps = 4;
  std::int32_t stages = 2;          // kv tiles in shared memory
  std::int32_t ctas_per_sm = 2;     // that registers are left for
  std::int32_t heads_per_tile = 1;  // q heads of one kv head that share a tile (GQA packing)
  bool is_varlen = false;
  // Queries are packed and keys lie in a cache. Beside is_varlen tiles of rows are counted over all sequences; else
  // each sequence has as many tiles as the one with most queries.
  bool has_packed_q = false;
  bool is_paged = false;
  bool is_split = false;             // writes f32 partial states for the combine kernel
  bool has_padded_head_dim = false;  // the problem's head dims are below the tile's
  bool is_prescaled = false;         // scores are scaled one by one: for programs, and where the
                                     // scale cannot be folded into the exponent (negative, tiny)
  bool has_dropout = false;
  bool reads_dropout_seed = false;  // has_dropout, and its key is mixed from memory of the device
  bool wants_row_max = false;
  std::int32_t most_splits = kMostSplits;  // of a sequence, where is_split

  bool operator==(const ForwardSpec&) const = default;
};

/// sm80/attention_forward, and what team/ is compiled for elsewhere.
struct TeamSpec : ForwardSpec {
  bool keeps_queries = false;  // Q in registers, for warps of 16 rows
  bool has_panels = false;     // K and V lie in shared memory as TMA writes them

  bool operator==(const TeamSpec&) const = default;
};

/// sm80/attention_forward_f32.
struct PlainSpec : ForwardSpec {
  bool operator==(const PlainSpec&) const = default;
};

/// sm90/decode.
struct Sm90DecodeSpec : ForwardSpec {
  bool operator==(const Sm90DecodeSpec&) const = default;
};

/// sm90/decode_latent.
struct Sm90LatentSpec : ForwardSpec {
  bool operator==(const Sm90LatentSpec&) const = default;
};

/// sm90/attention_forward.
struct Sm90ForwardSpec : ForwardSpec {
  std::int32_t q_stages = 1;  // buffers of Q, later O; with two, row tiles overlap
  bool is_dynamic = false;    // row tiles are claimed from a counter, longest first
  bool is_cached = false;     // keys lie in slots of a cache, or in its pages
  // Q, K and V are copied by threads, whatever their alignment, strides and pages; else by TMA
  bool loads_by_cp_async = false;

  bool operator==(const Sm90ForwardSpec&) const = default;
};

/// Room for what a CTA of sm80/attention_forward works on.
inline constexpr std::int32_t kSm80WorkBytes = 112;

/// A word of each warp; what comes behind starts at a multiple of 8.
constexpr std::int32_t sm80_vote_bytes(const TeamSpec& spec) {
  return (spec.num_warps + 1) / 2 * 8;
}

/// Dynamic shared memory of sm80/attention_forward: Q, later O (each warp its own rows), stages of K and V, a word for
/// each warp.
constexpr std::int32_t sm80_forward_shared_bytes(const TeamSpec& spec) {
  const std::int32_t width_q =
      spec.head_dim_qk > spec.head_dim_v ? spec.head_dim_qk : spec.head_dim_v;
  return 2 * (spec.tile_q * width_q +
              spec.stages * spec.tile_kv * (spec.head_dim_qk + spec.head_dim_v)) +
         sm80_vote_bytes(spec) + kSm80WorkBytes;
}

/// What one computing warp of sm90/decode has: the rows of the CTA, and slices of tile_kv keys.
constexpr TeamSpec spec_of_decoding_warp(const Sm90DecodeSpec& decode) {
  TeamSpec spec{decode};
  spec.num_warps = 1;
  spec.stages = 1;
  spec.keeps_queries = true;
  spec.has_panels = true;
  return spec;
}

/// Warps of a CTA of sm90/decode that load; the others compute.
inline constexpr std::int32_t kDecodeLoaders = 2;
constexpr std::int32_t sm90_decode_readers(const Sm90DecodeSpec& spec) {
  return spec.num_warps - kDecodeLoaders;
}

/// Does sm90/decode load each panel of 64 elements in a box of its own? All of them lie in one box, one behind the
/// other, only where that has all rows of a slice, and the last panel is not cut.
constexpr bool sm90_decode_loads_panels(const Sm90DecodeSpec& spec, std::int32_t rows_per_box) {
  return spec.has_padded_head_dim || (spec.is_paged && rows_per_box < spec.tile_kv);
}

/// A slice of keys and values of sm90/decode.
constexpr std::int32_t sm90_decode_slice_bytes(const Sm90DecodeSpec& spec) {
  return 2 * spec.tile_kv * (spec.head_dim_qk + spec.head_dim_v);
}

/// What a computing warp of sm90/decode leaves for the others: for each row O, then origin, sum and maximum. Rows are 8
/// banks apart, so that the pairs which lanes hold go to different ones.
constexpr std::int32_t sm90_decode_part_row_bytes(const Sm90DecodeSpec& spec) {
  return 4 * spec.head_dim_v + 32;
}

/// Splits that the loading warp of sm90/decode posts ahead, and the bytes of each.
inline constexpr std::int32_t kDecodeRecords = 3;
inline constexpr std::int32_t kDecodeRecordBytes = 96;

/// Dynamic shared memory of sm90/decode: slices, what warps leave for each other, posted splits, barriers.
constexpr std::int32_t sm90_decode_shared_bytes(const Sm90DecodeSpec& spec) {
  return spec.stages * sm90_decode_slice_bytes(spec) +
         sm90_decode_readers(spec) * spec.tile_q * sm90_decode_part_row_bytes(spec) +
         kDecodeRecords * kDecodeRecordBytes + 16 * (spec.stages + kDecodeRecords);
}

/// Units that the loading warp of sm90/decode_latent posts ahead; bytes of each, and of what a group leaves of a row.
inline constexpr std::int32_t kLatentRecords = 2;
inline constexpr std::int32_t kLatentRecordBytes = 96;
inline constexpr std::int32_t kLatentPartBytes = 16;
/// Panels of 64 columns of a tile of keys that arrive together.
inline constexpr std::int32_t kLatentPanelsOfBox = 3;

/// Dynamic shared memory of sm90/decode_latent: queries and tiles of keys, which are the values too; of rows, 8 bytes
/// for each tile and a part for each of two groups; posted units and tiles; barriers.
constexpr std::int32_t sm90_latent_shared_bytes(const Sm90LatentSpec& spec) {
  return 2 * spec.head_dim_qk * (spec.tile_q + spec.stages * spec.tile_kv) +
         spec.tile_q * (8 * spec.stages + 2 * kLatentPartBytes) +
         kLatentRecords * kLatentRecordBytes + 8 * spec.stages +
         8 * ((spec.head_dim_qk / 64 / kLatentPanelsOfBox + 2) * spec.stages + 2 * kLatentRecords +
              2);
}

/// Of sm80/attention_forward_f32: f32 rows of Q, K, V and P, each a word longer than a multiple of 32 words.
constexpr std::int32_t sm80_plain_shared_bytes(const PlainSpec& spec) {
  return 4 * (spec.tile_q * (spec.head_dim_qk + 1) + spec.tile_kv * (spec.head_dim_qk + 1) +
              spec.tile_kv * (spec.head_dim_v + 1) + spec.tile_q * (spec.tile_kv + 1));
}

/// sm90/attention_forward: sequences have lengths of their own, posted beside each row tile.
constexpr bool sm90_posts_place(const Sm90ForwardSpec& spec) {
  return spec.is_varlen || spec.is_cached || spec.is_split;
}

/// Warps that load.
constexpr std::int32_t sm90_num_loaders(const Sm90ForwardSpec& spec) {
  return spec.loads_by_cp_async ? 2 : 1;
}

/// Words for pages of keys: by TMA one of each box, by threads one of each row, for the kv tiles that values, keys and
/// look-ups are at.
constexpr std::int32_t sm90_page_words(const Sm90ForwardSpec& spec) {
  if (!spec.is_paged) return 0;
  return spec.loads_by_cp_async ? 3 * spec.tile_kv : spec.tile_kv / 8;
}

/// Shared memory of sm90/attention_forward: where each member begins, in bytes from the start of the CTA's.
struct Sm90ForwardLayout {
  // Row tiles that are posted. With places: one that computes, one that follows it, one to come; else the first is
  // known by then.
  std::int32_t num_slots, slot_bytes;
  std::int32_t q_bytes;  // of a group: Q, later O

  std::int32_t q;     // [q stage][group]
  std::int32_t k, v;  // [stage]
  std::int32_t q_full, q_empty,
      o_full;  // [q stage][group] barriers of 8 bytes, as all up to round_done
  std::int32_t k_full, k_empty, v_full, v_empty;  // [stage]
  std::int32_t slot_full, slot_empty;             // [slot]
  std::int32_t group_full, group_empty;           // [2]
  std::int32_t claim, v_landed, round_done;
  std::int32_t slots;            // [slot] RowTile, SequencePlace
  std::int32_t groups_of_tiles;  // [2] VisitedGroup
  std::int32_t misses;           // [group][2] a word for each warp
  std::int32_t kv_tiles;         // [stage] KvTile and the one after it
  std::int32_t pages;            // sm90_page_words
  std::int32_t redo_list;        // [2] heads of lists
  std::int32_t pass, needs_low;
  std::int32_t ids;  // [4] of row tiles
  std::int32_t bytes;
};

constexpr Sm90ForwardLayout sm90_forward_layout(const Sm90ForwardSpec& spec) {
  const std::int32_t groups = spec.tile_q / 64;
  const std::int32_t queries = spec.q_stages * groups;
  const std::int32_t widest =
      spec.head_dim_qk > spec.head_dim_v ? spec.head_dim_qk : spec.head_dim_v;
  std::int32_t end = 0;
  const auto take = [&end](std::int32_t bytes) { return (end += bytes) - bytes; };
  Sm90ForwardLayout at{};
  at.num_slots = sm90_posts_place(spec) ? 3 : 2;
  at.slot_bytes = sm90_posts_place(spec) ? 32 : 16;
  at.q_bytes = 64 * 2 * widest;
  at.q = take(queries * at.q_bytes);
  at.k = take(spec.stages * spec.tile_kv * 2 * spec.head_dim_qk);
  at.v = take(spec.stages * spec.tile_kv * 2 * spec.head_dim_v);
  at.q_full = take(8 * queries);
  at.q_empty = take(8 * queries);
  at.o_full = take(8 * queries);
  at.k_full = take(8 * spec.stages);
  at.k_empty = take(8 * spec.stages);
  at.v_full = take(8 * spec.stages);
  at.v_empty = take(8 * spec.stages);
  at.slot_full = take(8 * at.num_slots);
  at.slot_empty = take(8 * at.num_slots);
  at.group_full = take(8 * 2);
  at.group_empty = take(8 * 2);
  at.claim = take(8);
  at.v_landed = take(8);
  at.round_done = take(8);
  end = (end + 15) / 16 * 16;
  at.slots = take(at.slot_bytes * at.num_slots);
  at.groups_of_tiles = take(16 * 2);
  at.misses = take(16 * 2 * groups);
  at.kv_tiles = take(8 * spec.stages);
  at.pages = take(4 * sm90_page_words(spec));
  at.redo_list = take(4 * 2);
  at.pass = take(4);
  at.needs_low = take(4);
  at.ids = take(4 * 4);
  at.bytes = end;
  return at;
}

}  // namespace fovea::cuda
