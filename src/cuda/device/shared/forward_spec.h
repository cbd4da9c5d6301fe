// What shapes the code of a forward kernel: its template argument, its key in memory and a constant of the generated
// unit. Each kernel has a spec of its own, which says what ForwardSpec does and more. Read forward_params.h next.
#pragma once

#include "shared/element.h"
#include "shared/instructions.h"
#include "shared/quantize_k.h"
#include "shared/rounding.h"
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
  bool has_dropout_places = false;  // has_dropout, of a part of the whole that is drawn for
  bool wants_row_max = false;
  std::int32_t most_splits = kMostSplits;  // of a sequence, where is_split

  bool operator==(const ForwardSpec&) const = default;
};

/// Of products of codes: are rows far from 0 by their scale and the greatest one of their head's keys
/// (common/code_units.cuh)? Of scores that a program has read, or that are scaled one by one, references say it.
constexpr bool reads_greatest_scale(const ForwardSpec& spec) { return !spec.is_prescaled; }

/// sm80/attention_forward, and what team/ is compiled for elsewhere.
struct TeamSpec : ForwardSpec {
  bool keeps_queries = false;  // Q in registers, for warps of 16 rows
  bool has_panels = false;     // K and V lie in shared memory as TMA writes them
  // Of a sequence: its kv tile i lies in stage i, and there are no more.
  bool holds_all_keys = false;
  // Q and K are codes of 8 bits, rounded by a kernel before it (quantize_kv.h). Two of them are an element: head_dim_qk
  // is half of theirs.
  bool multiplies_codes = false;
  // And V is, in e4m3, with its keys side by side (quantize_v.h); P becomes such codes in registers
  bool sums_codes = false;
  Rounding rounding = Rounding::rows;  // where there are codes
  std::int32_t scale_tile = 128;       // keys whose codes have scales of their own
  // The call's q, k and v are codes; `element` has the bits of their numbers.
  bool takes_codes = false;
  bool smooths_v = false;  // V comes without its mean (quantize_v.h), codes or not
  Instructions instructions = Instructions::sm80;

  /// Rows far from 0 are noted, and computed again by the kernel behind this one (lost_rows.h). Where exponentials are
  /// rounded none is lost.
  constexpr bool loses_far_rows() const {
    return multiplies_codes && !rounds_exponentials(rounding);
  }
  bool operator==(const TeamSpec&) const = default;
};

/// sm80/attention_coded: K and V lie in a cache as codes.
struct CodedSpec : TeamSpec {
  Codes k_codes = Codes::int8;
  Codes v_codes = Codes::int8;

  bool operator==(const CodedSpec&) const = default;
};

/// sm80/attention_forward_f32.
struct PlainSpec : ForwardSpec {
  bool operator==(const PlainSpec&) const = default;
};

/// sm90/decode, and sm90/decode_coded, which is it over codes.
struct Sm90DecodeSpec : ForwardSpec {
  // Neighbouring slices of tile_kv keys that arrive together; `stages` is how many such boxes shared memory has.
  std::int32_t slices_of_box = 1;
  // Splits are joined by groups (shared/split.h). A CTA takes groups or whole sequences, where lengths are such that
  // all CTAs have as much to do; else it takes splits, and the combine kernel makes groups of them. The same bits.
  bool has_groups = false;
  bool takes_groups = false;
  // Of a cache; none: elements of q's dtype. Both or neither.
  Codes k_codes = Codes::none;
  Codes v_codes = Codes::none;
  // More than 1: the CTAs of a cluster have all splits of the rows of a kv head, one each at most, and fold them. There
  // is no combine kernel. The same bits again.
  std::int32_t ctas_of_cluster = 1;

  constexpr bool has_codes() const { return k_codes != Codes::none; }
  bool operator==(const Sm90DecodeSpec&) const = default;
};

constexpr bool is_clustered(const Sm90DecodeSpec& spec) { return spec.ctas_of_cluster > 1; }

/// sm90/decode_latent.
struct Sm90LatentSpec : ForwardSpec {
  bool operator==(const Sm90LatentSpec&) const = default;
};

/// What a warp has of the rows of wgmma's sums, and what a thread has of neighbouring keys, with three others.
inline constexpr std::int32_t kCoarseRows = 16;
inline constexpr std::int32_t kCoarseKeys = 8;

/// sm90/attention_forward.
struct Sm90ForwardSpec : ForwardSpec {
  std::int32_t q_stages = 1;  // buffers of Q, later O; with two, row tiles overlap
  bool is_dynamic = false;    // row tiles are claimed from a counter, longest first
  bool is_cached = false;     // keys lie in slots of a cache, or in its pages
  // Q, K and V are copied by threads, whatever their alignment, strides and pages; else by TMA
  bool loads_by_cp_async = false;
  bool has_coarse_mask = false;  // it has one value for each kCoarseRows rows and kCoarseKeys keys
  // Q and K are codes of 8 bits: K is rounded by a kernel before it (quantize_k.h), Q when it has arrived
  bool multiplies_codes = false;
  // And V is, in e4m3, with its keys side by side (quantize_v.h); P becomes such codes in registers
  bool sums_codes = false;
  bool rotates = false;    // rows of Q and K, before they are rounded
  bool smooths_v = false;  // codes of V are without its mean
  // Of a cache; none: elements of q's dtype. Threads that load them make numbers of them, of both (loads_by_cp_async,
  // for Q is copied so then); or, where codes are multiplied, a kernel before this one has rounded them anew.
  Codes k_codes = Codes::none;
  Codes v_codes = Codes::none;

  constexpr bool has_codes() const { return k_codes != Codes::none && !multiplies_codes; }
  /// K, and V, lie in workspace, those of each sequence from row 0 on, wherever the cache has them.
  constexpr bool has_rounded_cache() const { return is_cached && multiplies_codes; }
  /// Tiles are copied from pages.
  constexpr bool copies_pages() const { return is_paged && !has_rounded_cache(); }
  /// Rows of codes may be far from 0 (sm90/forward/far_rows.cuh). Where P has 16 bits they may not: ptxas deals out its
  /// exponentials otherwise beside a walk for them, and full tiles take 2 to 5 % longer. Nor over a cache: beside the
  /// walk twice as much spills at head_dim 128, in the loop over full tiles too.
  constexpr bool takes_far_rows() const { return sums_codes && !is_prescaled && !is_cached; }
  /// They are noted there, and computed again by the kernel behind this one (lost_rows.h).
  constexpr bool loses_far_rows() const { return multiplies_codes && !takes_far_rows(); }
  bool operator==(const Sm90ForwardSpec&) const = default;
};

/// sm90/attention_forward_short: tile_q are the rows of a CTA, 64 after 64, num_warps its groups of four, which share
/// them; all keys lie in `stages` tiles of tile_kv, each of which is multiplied at once. Head dims are those of the
/// products, in steps of 16. A warp more than groups have: the last rows of a sequence, up to 16, are its; tile_q may
/// end with them.
struct Sm90ShortSpec : ForwardSpec {
  std::int32_t q_stages =
      1;  // a group's buffers of Q, later O: with fewer than it has row tiles it fills them again
  // Dense, and a product of each kind does a tile: CTAs take one tile after the other, and ask for what the next one
  // needs as soon as there is room for it.
  bool is_persistent = false;
  // One CTA has all rows, under a mask: its groups begin with the last row tiles. They see most keys, so the steps that
  // are left when the last bytes have come are few. Of a ring (kv_buffers): CTAs of the last row tiles come first.
  bool takes_last_first = false;
  // A group's queries lie in registers while they are multiplied, and the next ones land where they lay: one buffer is
  // enough for queries to be there a row tile ahead.
  bool keeps_queries = false;
  // Beside kept queries: the next scores are asked for ahead of the sums.
  bool runs_ahead = false;
  // Tiles of keys pass through so many buffers, one after the other; 0: each has its own.
  std::int32_t kv_buffers = 0;

  bool operator==(const Sm90ShortSpec&) const = default;
};

/// Rows that are lost are known by their scale as soon as Q is rounded, or by their references behind all scores.
template <typename Spec>
constexpr bool knows_lost_by_scale(const Spec& spec) {
  return spec.loses_far_rows() && reads_greatest_scale(spec);
}
template <typename Spec>
constexpr bool knows_lost_by_reference(const Spec& spec) {
  return spec.loses_far_rows() && !reads_greatest_scale(spec);
}

/// The larger of a spec's head dims.
constexpr std::int32_t widest_head_dim(const ForwardSpec& spec) {
  return spec.head_dim_qk > spec.head_dim_v ? spec.head_dim_qk : spec.head_dim_v;
}

/// Hands out shared memory: each member behind the one before it, in bytes from the start of the CTA's.
struct SharedRoom {
  std::int32_t end = 0;
  constexpr std::int32_t take(std::int32_t bytes) { return (end += bytes) - bytes; }
  constexpr void align(std::int32_t bytes) { end = (end + bytes - 1) / bytes * bytes; }
};

/// What a CTA of sm80/attention_forward works on: Work.
inline constexpr std::int32_t kSm80WorkBytes = 88;

/// Shared memory of sm80/attention_forward, and of whatever is made of its teams.
struct Sm80ForwardLayout {
  std::int32_t warp_bytes;  // of a warp: its rows of Q, later of O
  // Where Q and K are codes, what is beside them (quantize_kv.h): of rows behind those of Q, so many bytes from where
  // the warp's begin; of keys an address, and 32 bytes of each stage. Where V is, addresses of its codes and scales.
  std::int32_t rows_beside, keys_beside, key_scales;
  std::int32_t value_codes, value_scales;
  std::int32_t key_bytes, value_bytes;

  std::int32_t q;                                    // [warp]
  std::int32_t stages;                               // [stage] keys, then values
  std::int32_t votes;                                // [warp] a word
  std::int32_t work;                                 // Work
  std::int32_t key_head, value_head, queries_begin;  // addresses
  std::int32_t bytes;
};

constexpr Sm80ForwardLayout sm80_forward_layout(const TeamSpec& spec) {
  SharedRoom room;
  Sm80ForwardLayout at{};
  const std::int32_t warp_rows = spec.tile_q / spec.num_warps;
  at.rows_beside = element_bytes(spec.element) * warp_rows * spec.head_dim_qk;
  const std::int32_t query_bytes = at.rows_beside + (spec.multiplies_codes ? 8 * warp_rows : 0);
  const std::int32_t out_bytes = element_bytes(spec.element) * warp_rows * spec.head_dim_v;
  at.warp_bytes = query_bytes > out_bytes ? query_bytes : out_bytes;
  at.key_bytes = element_bytes(spec.element) * spec.tile_kv * spec.head_dim_qk;
  at.value_bytes =
      (spec.sums_codes ? 1 : element_bytes(spec.element)) * spec.tile_kv * spec.head_dim_v;
  at.q = room.take(spec.num_warps * at.warp_bytes);
  at.stages = room.take(spec.stages * (at.key_bytes + at.value_bytes));
  at.votes = room.take(4 * spec.num_warps);
  room.align(8);
  at.work = room.take(kSm80WorkBytes);
  at.key_head = room.take(8);
  at.value_head = room.take(8);
  at.queries_begin = room.take(8);
  if (spec.multiplies_codes) {
    at.keys_beside = room.take(8);
    room.align(16);
    at.key_scales = room.take(32 * spec.stages);
  }
  if (spec.sums_codes) {
    at.value_codes = room.take(8);
    at.value_scales = room.take(8);
  }
  at.bytes = room.end;
  return at;
}

/// Rows of a computing warp of sm90/decode: an m of mma.sync; or of codes an n of it, where there are no more.
inline constexpr std::int32_t kDecodeRows = 16, kFewDecodeRows = 8;
constexpr bool has_few_rows(const Sm90DecodeSpec& spec) { return spec.tile_q == kFewDecodeRows; }
/// Warps that have all rows of the CTA.
constexpr std::int32_t sm90_decode_blocks(const Sm90DecodeSpec& spec) {
  return has_few_rows(spec) ? 1 : spec.tile_q / kDecodeRows;
}
/// Warps of neighbouring rows are a warpgroup: 64 rows, which it multiplies by a box at once. Else each warp multiplies
/// its own by mma.sync; of codes it must, for they become operands in registers.
constexpr bool multiplies_by_wgmma(const Sm90DecodeSpec& spec) {
  return !spec.has_codes() && spec.tile_q > kDecodeRows;
}
/// What computing warps of sm90/decode with neighbouring rows have, as many as have all rows of the CTA: slices of
/// tile_kv keys.
constexpr TeamSpec spec_of_decoding_warps(const Sm90DecodeSpec& decode) {
  TeamSpec spec{decode};
  spec.num_warps = sm90_decode_blocks(decode);
  spec.tile_q = spec.num_warps * kDecodeRows;
  spec.stages = 1;
  spec.keeps_queries = !multiplies_by_wgmma(decode);
  spec.has_panels = true;
  return spec;
}

/// Warps of a CTA of sm90/decode that do not compute: over codes, and beside warpgroups, four, whose registers those
/// that compute get.
constexpr std::int32_t sm90_decode_helpers(const Sm90DecodeSpec& spec) {
  return spec.has_codes() || multiplies_by_wgmma(spec) ? 4 : 2;
}
constexpr std::int32_t sm90_decode_readers(const Sm90DecodeSpec& spec) {
  return spec.num_warps - sm90_decode_helpers(spec);
}
/// Those of them that load: over pages a box of codes is a quarter of what one request brings elsewhere.
constexpr std::int32_t sm90_decode_loaders(const Sm90DecodeSpec& spec) {
  return spec.has_codes() && spec.is_paged ? 4 : 2;
}
/// Those that bring queries, to warpgroups that take unit after unit: who has one has them sooner by all threads.
constexpr std::int32_t sm90_decode_query_loaders(const Sm90DecodeSpec& spec) {
  return multiplies_by_wgmma(spec) && spec.takes_groups ? 1 : 0;
}
/// Parts that the slices of a split are dealt to in turn: a row's sums are those of so many warps.
constexpr std::int32_t sm90_decode_parts(const Sm90DecodeSpec& spec) {
  return sm90_decode_readers(spec) / sm90_decode_blocks(spec);
}

/// Of these so many lie in shared memory at the end of a split. Two warpgroups exchange halves of theirs.
constexpr std::int32_t sm90_decode_kept_parts(const Sm90DecodeSpec& spec) {
  return multiplies_by_wgmma(spec) ? 1 : sm90_decode_parts(spec);
}

/// Of an element of keys and of values, as they arrive.
constexpr std::int32_t sm90_decode_key_bytes(const Sm90DecodeSpec& spec) {
  return spec.has_codes() ? 1 : element_bytes(spec.element);
}

/// Keys of a buffer, panel after panel.
constexpr std::int32_t sm90_decode_keys_of_box(const Sm90DecodeSpec& spec) {
  return spec.slices_of_box * spec.tile_kv;
}

/// Does sm90/decode load each panel of 64 elements by itself? All of them lie in one box, one behind the other, only
/// where that has all rows of a buffer, and the last panel is not cut.
constexpr bool sm90_decode_loads_panels(const Sm90DecodeSpec& spec, std::int32_t rows_per_box) {
  return spec.has_padded_head_dim ||
         (spec.is_paged && rows_per_box < sm90_decode_keys_of_box(spec));
}

/// Splits that the loading warp of sm90/decode posts ahead, and the bytes of each.
inline constexpr std::int32_t kDecodeRecords = 3;
inline constexpr std::int32_t kDecodeRecordBytes = 96;

/// What sm90/decode folds: splits of a group, groups of a sequence.
inline constexpr std::int32_t kLevelsOfUnit = 2;

/// Shared memory of sm90/decode.
struct Sm90DecodeLayout {
  std::int32_t slice_bytes;  // of keys and values
  std::int32_t box_bytes;
  std::int32_t scale_bytes;  // of a box of codes: its keys' scales, then its values'
  // What a computing warp leaves for those that join its rows: O, then origin, sum and maximum of each. Rows are 8
  // banks apart, so that the pairs which lanes hold go to different ones.
  std::int32_t part_row_bytes;
  std::int32_t part_bytes;
  std::int32_t state_bytes;

  std::int32_t boxes;    // [stage] keys, then values
  std::int32_t queries;  // of all rows, where wgmma multiplies them
  std::int32_t scales;   // [stage]
  std::int32_t parts;    // [part][row]
  std::int32_t
      states;  // [row][level] of units, or [row of the CTA][split]; of warpgroups [quad][thread]
  std::int32_t rows_beside;  // [warp] of warpgroups: which rows' sums are not finite, 8 bytes
  std::int32_t records;      // [record] Work
  std::int32_t full, empty;  // [stage] barriers of 8 bytes
  std::int32_t full_values, empty_values;    // of warpgroups: then those above are of keys
  std::int32_t queries_full, queries_empty;  // where a warp brings them: barriers, one each
  std::int32_t posted, read;                 // [record]
  std::int32_t joined;                       // a barrier: what warps left of a split is read
  std::int32_t bytes;
};

constexpr Sm90DecodeLayout sm90_decode_layout(const Sm90DecodeSpec& spec) {
  SharedRoom room;
  Sm90DecodeLayout at{};
  at.slice_bytes =
      sm90_decode_key_bytes(spec) * spec.tile_kv * (spec.head_dim_qk + spec.head_dim_v);
  at.box_bytes = spec.slices_of_box * at.slice_bytes;
  at.scale_bytes = spec.has_codes() ? 2 * 4 * spec.slices_of_box * spec.tile_kv : 0;
  at.part_row_bytes = 4 * spec.head_dim_v + 32;
  at.part_bytes = spec.tile_q * at.part_row_bytes;
  at.boxes = room.take(spec.stages * at.box_bytes);
  const std::int32_t query_bytes = element_bytes(spec.element) * spec.head_dim_qk;
  at.queries = room.take(multiplies_by_wgmma(spec) ? spec.tile_q * query_bytes : 0);
  at.scales = room.take(spec.stages * at.scale_bytes);
  at.parts = room.take(sm90_decode_kept_parts(spec) * at.part_bytes);
  // Of what warpgroups fold, groups are in registers, and of sequences all but the columns.
  at.state_bytes = 4 * spec.head_dim_v + (multiplies_by_wgmma(spec) && spec.takes_groups ? 0 : 16);
  const std::int32_t levels = multiplies_by_wgmma(spec) ? 1 : kLevelsOfUnit;
  const std::int32_t states_of_row = spec.takes_groups ? levels : is_clustered(spec) ? 1 : 0;
  at.states = room.take(spec.tile_q * states_of_row * at.state_bytes);
  at.rows_beside = room.take(multiplies_by_wgmma(spec) ? 8 * sm90_decode_readers(spec) : 0);
  at.records = room.take(kDecodeRecords * kDecodeRecordBytes);
  at.full = room.take(8 * spec.stages);
  at.empty = room.take(8 * spec.stages);
  at.full_values = room.take(multiplies_by_wgmma(spec) ? 8 * spec.stages : 0);
  at.empty_values = room.take(multiplies_by_wgmma(spec) ? 8 * spec.stages : 0);
  at.queries_full = room.take(8 * sm90_decode_query_loaders(spec));
  at.queries_empty = room.take(8 * sm90_decode_query_loaders(spec));
  at.posted = room.take(8 * kDecodeRecords);
  at.read = room.take(8 * kDecodeRecords);
  at.joined = room.take(8);
  at.bytes = room.end;
  return at;
}

/// Units that the loading warp of sm90/decode_latent posts ahead; bytes of each, and of what a group leaves of a row.
inline constexpr std::int32_t kLatentRecords = 2;
inline constexpr std::int32_t kLatentRecordBytes = 96;
inline constexpr std::int32_t kLatentPartBytes = 16;
/// Panels of 64 columns of a tile of keys that arrive together.
inline constexpr std::int32_t kLatentPanelsOfBox = 3;
/// Groups of four warps that compute.
inline constexpr std::int32_t kLatentGroups = 2;

/// Shared memory of sm90/decode_latent.
struct Sm90LatentLayout {
  std::int32_t num_parts;  // of a tile of keys, that arrive on their own

  std::int32_t queries;
  std::int32_t tiles;         // [buffer] keys, which are the values too
  std::int32_t stats;         // [buffer][row] 8 bytes
  std::int32_t parts;         // [group][row] of kLatentPartBytes
  std::int32_t records;       // [record] Unit
  std::int32_t words;         // [buffer] PostedTile, 8 bytes
  std::int32_t full;          // [buffer][part of the tile] barriers of 8 bytes
  std::int32_t p_full;        // [buffer]
  std::int32_t empty;         // [buffer]
  std::int32_t posted, read;  // [record]
  std::int32_t q_full, q_empty;
  std::int32_t bytes;
};

constexpr Sm90LatentLayout sm90_latent_layout(const Sm90LatentSpec& spec) {
  SharedRoom room;
  Sm90LatentLayout at{};
  const ElementTraits element = element_traits(spec.element);
  at.num_parts = spec.head_dim_qk / element.of_panel / kLatentPanelsOfBox;
  at.queries = room.take(spec.tile_q * element.bytes * spec.head_dim_qk);
  at.tiles = room.take(spec.stages * spec.tile_kv * element.bytes * spec.head_dim_qk);
  at.stats = room.take(spec.stages * spec.tile_q * 8);
  at.parts = room.take(kLatentGroups * spec.tile_q * kLatentPartBytes);
  at.records = room.take(kLatentRecords * kLatentRecordBytes);
  at.words = room.take(8 * spec.stages);
  at.full = room.take(8 * spec.stages * at.num_parts);
  at.p_full = room.take(8 * spec.stages);
  at.empty = room.take(8 * spec.stages);
  at.posted = room.take(8 * kLatentRecords);
  at.read = room.take(8 * kLatentRecords);
  at.q_full = room.take(8);
  at.q_empty = room.take(8);
  at.bytes = room.end;
  return at;
}

/// Shared memory of sm80/attention_forward_f32: rows of f32, each a word longer than a multiple of 32 words.
struct PlainLayout {
  std::int32_t qk_pitch, v_pitch, p_pitch;  // words of a row

  std::int32_t q, k, v, p;  // in words
  std::int32_t bytes;
};

constexpr PlainLayout sm80_plain_layout(const PlainSpec& spec) {
  SharedRoom words;
  PlainLayout at{};
  at.qk_pitch = spec.head_dim_qk + 1;
  at.v_pitch = spec.head_dim_v + 1;
  at.p_pitch = spec.tile_kv + 1;
  at.q = words.take(spec.tile_q * at.qk_pitch);
  at.k = words.take(spec.tile_kv * at.qk_pitch);
  at.v = words.take(spec.tile_kv * at.v_pitch);
  at.p = words.take(spec.tile_q * at.p_pitch);
  at.bytes = 4 * words.end;
  return at;
}

/// sm90/attention_forward: sequences have lengths of their own, posted beside each row tile.
constexpr bool sm90_posts_place(const Sm90ForwardSpec& spec) {
  return spec.is_varlen || spec.is_cached || spec.is_split;
}

/// Elements of a row of a box of TMA, which is the span of the swizzle: 128 bytes, or 64 where a head dim is no
/// multiple of that. One for all tensors: each warp puts O where it alone has read Q, so rows of both begin at the same
/// places.
constexpr std::int32_t sm90_panel_elements(const Sm90ForwardSpec& spec) {
  const std::int32_t widest = element_traits(spec.element).of_panel;
  const bool is_whole = spec.head_dim_qk % widest == 0 && spec.head_dim_v % widest == 0;
  return is_whole ? widest : widest / 2;
}

/// Warps that load. Codes are a warpgroup's, behind those that compute.
constexpr std::int32_t sm90_num_loaders(const Sm90ForwardSpec& spec) {
  return spec.has_codes() ? 4 : spec.loads_by_cp_async ? 2 : 1;
}
/// Warps of a CTA: those that load, store and schedule, those of `groups` that compute, those that load codes.
constexpr std::int32_t sm90_num_warps(const Sm90ForwardSpec& spec, std::int32_t groups) {
  return 4 * (groups + (spec.has_codes() ? 2 : 1));
}

/// Words for pages of keys: by TMA one of each box, by threads one of each row, for the kv tiles that values, keys and
/// look-ups are at.
constexpr std::int32_t sm90_page_words(const Sm90ForwardSpec& spec) {
  if (!spec.copies_pages() || spec.has_codes())
    return 0;  // of codes a lane keeps the page of its row
  return spec.loads_by_cp_async ? 3 * spec.tile_kv : spec.tile_kv / 8;
}

/// Bytes of an element of Q and K as it is multiplied.
constexpr std::int32_t sm90_qk_bytes(const Sm90ForwardSpec& spec) {
  return spec.multiplies_codes ? 1 : element_bytes(spec.element);
}

/// Of the mean of keys in shared memory, where those are codes; and their greatest scale, where P is codes too. Where
/// it is not, who stores rows reads it from memory: means 16 bytes longer than a power of two, and ptxas has another
/// order of exponentials in the loops of those who read them.
constexpr std::int32_t sm90_mean_bytes(const Sm90ForwardSpec& spec) {
  return 4 * key_mean_floats(spec.head_dim_qk, spec.sums_codes && reads_greatest_scale(spec));
}

/// Rows of ones below a tile of values that are codes: their sums are those of P, ready in all lanes.
inline constexpr std::int32_t kRowsOfOnes = 8;

/// Of a stage of values.
constexpr std::int32_t sm90_value_bytes(const Sm90ForwardSpec& spec) {
  if (spec.sums_codes) return spec.tile_kv * (spec.head_dim_v + kRowsOfOnes);
  return spec.tile_kv * spec.head_dim_v * element_bytes(spec.element);
}

/// Shared memory of sm90/attention_forward: where each member begins, in bytes from the start of the CTA's.
struct Sm90ForwardLayout {
  // Row tiles that are posted. With places: one that computes, one that follows it, one to come; else the first is
  // known by then.
  std::int32_t num_slots, slot_bytes;
  std::int32_t q_bytes;  // of a group: Q, later O

  std::int32_t q;            // [q stage][group]
  std::int32_t q_codes;      // [q stage][group] where Q becomes codes
  std::int32_t q_mean;       // [q stage][group] the mean of its keys, floats, which arrives with Q
  std::int32_t of_mean;      // [q stage][group] what its rows' scores lack then, a float each
  std::int32_t size_of_row;  // [q stage][group] how far from 0 its rows are, a float each
  std::int32_t
      has_far;         // [q stage][group] whether a warp has rows that are far from 0, a word each
  std::int32_t k, v;   // [stage]
  std::int32_t codes;  // of a tile, of keys and of values, where they land
  // [q stage][group] barriers of 8 bytes, as all up to round_done
  std::int32_t q_full, q_empty, o_full;
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

/// Barriers of keys and values, and those of row tiles and groups of kv tiles with what is posted there, for the roles
/// that load and schedule. at.num_slots and at.slot_bytes are known.
template <class Layout>
constexpr void take_schedule(SharedRoom& room, std::int32_t stages, Layout& at) {
  at.k_full = room.take(8 * stages);
  at.k_empty = room.take(8 * stages);
  at.v_full = room.take(8 * stages);
  at.v_empty = room.take(8 * stages);
  at.slot_full = room.take(8 * at.num_slots);
  at.slot_empty = room.take(8 * at.num_slots);
  at.group_full = room.take(8 * 2);
  at.group_empty = room.take(8 * 2);
  at.claim = room.take(8);
  at.v_landed = room.take(8);
  at.round_done = room.take(8);
  room.align(16);
  at.slots = room.take(at.slot_bytes * at.num_slots);
  at.groups_of_tiles = room.take(16 * 2);
}

constexpr Sm90ForwardLayout sm90_forward_layout(const Sm90ForwardSpec& spec) {
  const std::int32_t groups = spec.tile_q / 64;
  const std::int32_t queries = spec.q_stages * groups;
  SharedRoom room;
  Sm90ForwardLayout at{};
  at.num_slots = sm90_posts_place(spec) ? 3 : 2;
  at.slot_bytes = sm90_posts_place(spec) ? 32 : 16;
  const std::int32_t q_row_bytes = element_bytes(spec.element) * spec.head_dim_qk;
  const std::int32_t k_row_bytes = sm90_qk_bytes(spec) * spec.head_dim_qk;
  const std::int32_t codes = spec.multiplies_codes ? queries : 0;
  const std::int32_t o_row_bytes = element_bytes(spec.element) * spec.head_dim_v;
  at.q_bytes = 64 * (q_row_bytes > o_row_bytes ? q_row_bytes : o_row_bytes);
  at.q = room.take(queries * at.q_bytes);
  at.q_codes = room.take(codes * 64 * k_row_bytes);
  at.k = room.take(spec.stages * spec.tile_kv * k_row_bytes);
  at.v = room.take(spec.stages * sm90_value_bytes(spec));
  at.codes = room.take(spec.has_codes() ? spec.tile_kv * (spec.head_dim_qk + spec.head_dim_v) : 0);
  at.q_mean = room.take(codes * sm90_mean_bytes(spec));
  at.q_full = room.take(8 * queries);
  at.q_empty = room.take(8 * queries);
  at.o_full = room.take(8 * queries);
  take_schedule(room, spec.stages, at);
  at.misses = room.take(16 * 2 * groups);
  at.kv_tiles = room.take(8 * spec.stages);
  at.of_mean = room.take(codes * 64 * 4);
  at.size_of_row = room.take(spec.loses_far_rows() ? codes * 64 * 4 : 0);
  at.has_far = room.take(spec.takes_far_rows() ? codes * 4 * 4 : 0);
  at.pages = room.take(4 * sm90_page_words(spec));
  at.redo_list = room.take(4 * 2);
  at.pass = room.take(4);
  at.needs_low = room.take(4);
  at.ids = room.take(4 * 4);
  at.bytes = room.end;
  return at;
}

/// Of a warpgroup, and of its products.
inline constexpr std::int32_t kShortRows = 64;

/// What a warp has of them. So many rows behind the last whole row tile, or fewer, may have a warp of their own.
inline constexpr std::int32_t kShortLastRows = 16;
constexpr bool has_last_rows(const Sm90ShortSpec& spec) { return spec.num_warps % 4 != 0; }

/// Bytes of a panel of rows, as TMA writes them: 128 or, where that would leave half of the last one empty, 64. Of Q, K
/// and V one size: a warp's rows of O lie where its rows of Q did. A ring has few of them, and TMA takes two rows of
/// boxes sooner than three.
constexpr std::int32_t sm90_short_panel_bytes(const Sm90ShortSpec& spec) {
  const auto leaves_half = [&](std::int32_t head_dim) {
    const std::int32_t rest = element_bytes(spec.element) * head_dim % 128;
    return rest > 0 && rest <= 64;
  };
  return spec.kv_buffers == 0 && leaves_half(spec.head_dim_qk) && leaves_half(spec.head_dim_v)
             ? 64
             : 128;
}

/// Buffers of keys, and of values.
constexpr std::int32_t num_kv_buffers(const Sm90ShortSpec& spec) {
  return spec.kv_buffers > 0 ? spec.kv_buffers : spec.stages;
}

/// Shared memory of sm90/attention_forward_short.
struct Sm90ShortLayout {
  std::int32_t panel_bytes, qk_row_bytes, v_row_bytes;
  std::int32_t q_bytes;      // of 64 rows: Q, later O
  std::int32_t num_queries;  // buffers of so many

  std::int32_t q;               // [buffer]
  std::int32_t k, v;            // [buffer of keys]
  std::int32_t last_rows;       // Q, later O, of those that have a warp
  std::int32_t q_full;          // [buffer] barriers of 8 bytes
  std::int32_t k_full, v_full;  // [buffer of keys]
  std::int32_t q_empty;         // [buffer]
  std::int32_t
      kv_empty;  // persistent: of keys, of values; a ring: of keys, then of values [buffer of keys]
  std::int32_t votes;  // [warp] a word
  std::int32_t bytes;
};

constexpr Sm90ShortLayout sm90_short_layout(const Sm90ShortSpec& spec) {
  const std::int32_t row_tiles = spec.tile_q / kShortRows;
  const std::int32_t queries = spec.q_stages * (spec.num_warps / 4);
  SharedRoom room;
  Sm90ShortLayout at{};
  at.num_queries = queries < row_tiles ? queries : row_tiles;
  at.panel_bytes = sm90_short_panel_bytes(spec);
  const auto in_panels = [&](std::int32_t head_dim) {
    const std::int32_t bytes = element_bytes(spec.element) * head_dim;
    return (bytes + at.panel_bytes - 1) / at.panel_bytes * at.panel_bytes;
  };
  at.qk_row_bytes = in_panels(spec.head_dim_qk);
  at.v_row_bytes = in_panels(spec.head_dim_v);
  at.q_bytes = kShortRows * (at.qk_row_bytes > at.v_row_bytes ? at.qk_row_bytes : at.v_row_bytes);
  at.q = room.take(at.num_queries * at.q_bytes);
  const std::int32_t buffers = num_kv_buffers(spec);
  at.k = room.take(buffers * spec.tile_kv * at.qk_row_bytes);
  at.v = room.take(buffers * spec.tile_kv * at.v_row_bytes);
  at.last_rows = room.take(has_last_rows(spec) ? at.q_bytes / kShortRows * kShortLastRows : 0);
  at.q_full = room.take(8 * at.num_queries);
  at.k_full = room.take(8 * buffers);
  at.v_full = room.take(8 * buffers);
  at.q_empty = room.take(8 * at.num_queries);
  at.kv_empty = room.take(spec.is_persistent ? 16 : 16 * spec.kv_buffers);
  at.votes = room.take(4 * spec.num_warps);
  at.bytes = room.end;
  return at;
}

}  // namespace fovea::cuda
