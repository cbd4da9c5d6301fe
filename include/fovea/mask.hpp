// The library's words: score and mask programs that everybody needs, each with the text that it stands for.
// They are ordinary formulas (expr.hpp): combine masks with && || !, scores with |. Their tensors have an element for
// each index of a call (Axis in expr.hpp): those too small are refused, where other programs read the last again.
#pragma once

#include <cstdint>
#include <optional>

#include "fovea/export.hpp"
#include "fovea/expr.hpp"

namespace fovea {

/// Where the diagonal lies when seqlen_q != seqlen_kv: the last query meets the last key, or the first meets the first.
enum class Align : std::uint8_t { bottom_right, top_left };

/// The query's position among the keys: q_idx + (seqlen_kv - seqlen_q), or q_idx for top_left.
[[nodiscard]] FOVEA_EXPORT Expr aligned_q_idx(Align align = Align::bottom_right);

/// kv_idx <= q_idx + (seqlen_kv - seqlen_q); top_left: kv_idx <= q_idx
[[nodiscard]] FOVEA_EXPORT MaskMod causal(Align align = Align::bottom_right);

/// kv_idx >= pos - window_left && kv_idx <= pos + window_right, pos the aligned query position, both ends inclusive;
/// nullopt leaves a side open. Throws InvalidArgument for a negative side.
[[nodiscard]] FOVEA_EXPORT MaskMod window(std::optional<std::int64_t> left,
                                          std::optional<std::int64_t> right,
                                          Align align = Align::bottom_right);

/// segments_q[batch, q_idx] == segments_kv[batch, kv_idx] && segments_q[batch, q_idx] != -1
/// Ids [batch, seqlen] i32 or i64; id -1 is padding: it sees nothing and is seen by nobody.
[[nodiscard]] FOVEA_EXPORT MaskMod documents(const TensorView& segments_q,
                                             const TensorView& segments_kv);
/// One tensor for both sides (self-attention).
[[nodiscard]] FOVEA_EXPORT MaskMod documents(const TensorView& segments);

/// Ids of packed sequences, one for each row: row cu_seqlens_q[batch] + q_idx of segments_q is that of a query.
struct PackedSegments {
  TensorView segments_q{};     // [total_q] i32 or i64
  TensorView segments_kv{};    // [total_kv]; not given: those of queries serve keys too
  TensorView cu_seqlens_q{};   // [num_sequences + 1] i32 or i64, those of the call
  TensorView cu_seqlens_kv{};  // not given: cu_seqlens_q, where segments_kv is not given either
};
/// segments_q[cu_seqlens_q[batch] + q_idx] == segments_kv[cu_seqlens_kv[batch] + kv_idx] && segments_q[...] != -1:
/// documents within the sequences of a packed call. Id -1 is padding, as above.
[[nodiscard]] FOVEA_EXPORT MaskMod documents(const PackedSegments& packed);

/// kv_idx < prefix_lengths[batch] || causal. prefix_lengths [batch] i32 or i64
[[nodiscard]] FOVEA_EXPORT MaskMod prefix_lm(const TensorView& prefix_lengths,
                                             Align align = Align::bottom_right);

/// pos // chunk_size == kv_idx // chunk_size (local attention in chunks). Throws InvalidArgument unless chunk_size > 0.
[[nodiscard]] FOVEA_EXPORT MaskMod chunked(std::int64_t chunk_size,
                                           Align align = Align::bottom_right);

/// (pos - kv_idx) % step == 0. Throws InvalidArgument unless step > 0.
[[nodiscard]] FOVEA_EXPORT MaskMod dilated(std::int64_t step, Align align = Align::bottom_right);

/// The last seqlen_q keys form a tree of draft tokens, all before them are visible:
/// kv_idx < t0 || (tree_bits[q_idx, (kv_idx - t0) // 32] >> (kv_idx - t0) % 32 & 1) == 1, t0 = seqlen_kv - seqlen_q.
/// tree_bits [seqlen_q, ceil(seqlen_q / 32)] i32, or [batch, seqlen_q, words].
[[nodiscard]] FOVEA_EXPORT MaskMod tree(const TensorView& tree_bits);

/// The first num_sinks keys and a sliding window to the left ("streaming"): kv_idx < num_sinks || window(left, 0),
/// causal.
[[nodiscard]] FOVEA_EXPORT MaskMod streaming(std::int64_t num_sinks, std::int64_t window_left,
                                             Align align = Align::bottom_right);

/// mask[batch, q_head, q_idx, kv_idx], bool or u8; rank 2 [q, kv], 3 [heads, q, kv] or 4; extents of 1 broadcast.
[[nodiscard]] FOVEA_EXPORT MaskMod dense_mask(const TensorView& mask);

/// table[batch, q_head, q_idx // tile_q, kv_idx // tile_kv], bool or u8: tiles of the score matrix that are visible or
/// hidden whole. Rank 2 [q_tiles, kv_tiles], 3 [heads, q_tiles, kv_tiles] or 4; extents of 1 broadcast. Positions
/// behind the table's end are as its last tiles. tile_q and tile_kv are part of the formula: kernels choose their own
/// tiles by them. Throws InvalidArgument unless both are > 0.
[[nodiscard]] FOVEA_EXPORT MaskMod tile_mask(const TensorView& table, std::int64_t tile_q,
                                             std::int64_t tile_kv);

/// Visible tiles as lists (BSR): row r of the table sees tiles indices[indptr[r]] to indices[indptr[r + 1] - 1].
struct TileLists {
  TensorView indptr{};   // [rows + 1] i32 or i64, rows being those of the table in its order
  TensorView indices{};  // [number of visible tiles] i32 or i64, rising in each row
  TensorView table{};    // what tile_mask takes, bool or u8, contents written
};

/// Writes the table of lists. All tensors are the host's: lists are checked, once, here.
/// Throws   InvalidArgument, before anything is written: a tensor of another dtype or rank, offsets that do not begin
///          at 0, fall, or do not end at the number of indices, a tile out of range, twice in its row or out of order.
FOVEA_EXPORT void tile_table(const TileLists& lists);

/// softcap * tanh(score / softcap). Throws InvalidArgument unless cap > 0 and finite.
[[nodiscard]] FOVEA_EXPORT ScoreMod softcap(float cap);

/// score - slopes[q_head] * abs(pos - kv_idx). slopes [num_heads_q] or [batch, num_heads_q], a float dtype
[[nodiscard]] FOVEA_EXPORT ScoreMod alibi(const TensorView& slopes,
                                          Align align = Align::bottom_right);

/// score + bias[batch, q_head, q_idx, kv_idx]; rank 2 [q, kv], 3 [heads, q, kv] or 4; extents of 1 broadcast.
[[nodiscard]] FOVEA_EXPORT ScoreMod bias(const TensorView& bias);

/// score + table[q_head, bucket], bucket a formula of positions, clamped into the table. table [num_heads_q,
/// num_buckets]
[[nodiscard]] FOVEA_EXPORT ScoreMod relative_bias(const TensorView& table, const Expr& bucket);

}  // namespace fovea
