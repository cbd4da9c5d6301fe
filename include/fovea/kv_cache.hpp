// Serving: keys and values in a cache that grows, contiguous or paged, and attention over it: as many queries of every
// sequence, or packed ones, chunks of prompts beside single tokens.
//
// Call path: this header -> src/plan/decode.cpp (validate, plan) -> src/cpu/append.cpp or
// src/cuda/append/append_to_cache.cpp (new keys, rotary) -> attention_forward.cpp of the backend (the same tiles as any
// forward call, read through the cache).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "fovea/attention.hpp"

namespace fovea {

/// Where the keys and values of each sequence lie. Views only: the memory is the caller's.
///
/// Contiguous  k [num_slots, capacity, num_heads_kv, head_dim_qk], sequence b in slot batch_idx[b] (or b).
/// Paged       k [num_pages, page_size, num_heads_kv, head_dim_qk], key i of sequence b in page page_table[b, i /
///             page_size], row i % page_size. Any page_size from 1 up. Any order of dimensions by strides: heads before
///             rows too. Instead of the padded table, page_indptr and page_indices: page_indices[page_indptr[b] + n] is
///             page n of sequence b, which has room for page_indptr[b + 1] - page_indptr[b] pages.
///
/// Codes       k or v as i8 or e4m3 (float8): numbers are codes times a scale. Appending rounds, after rotary, and
///             writes the scale of each row and head: its greatest magnitude by 127 or 448. With one scale for a head,
///             or for all, which the caller gives, it writes none, and what is larger saturates.
///
/// What no sequence uses is never read: neither rows behind its end or in its left padding, nor page-table entries that
/// name only such rows. They may hold anything, and so may their scales.
struct KvCache {
  CacheView k{};
  // as k with head_dim_v; its dtype may differ from k's, and both from q's: f32, f16, bf16, i8, e4m3
  CacheView v{};
  IndexView page_table{};  // [batch, max_pages] i32 or i64, optional: makes the cache paged
  // [batch] i32 or i64: rows in use before this call, left padding included; read where it lies
  IndexView seqlens{};
  // [batch] i32 or i64, optional: slot of each sequence (contiguous caches alone)
  IndexView batch_idx{};
  // [batch] i32 or i64, optional: rows at the start of a slot that do not belong to the sequence
  IndexView left_padding{};
  IndexView page_indptr{};   // [batch + 1] i32 or i64: starts at 0, never decreases
  IndexView page_indices{};  // [num_indices] i32 or i64: pages of every sequence in turn
  /// Of codes, f32: [num_slots, capacity, num_heads_kv], paged [num_pages, page_size, num_heads_kv], one beside each
  /// row and head, in any strides; or of e4m3 one that is given, [batch, num_heads_kv] or [1], finite and above 0. A
  /// row that holds NaN or infinity has scale NaN, so that whoever sees it sees NaN.
  Float32View k_scale{};
  Float32View v_scale{};
};

/// Rotary position embedding of queries and appended keys. Pair j of a head turns by the angle of row `position`:
/// (x, y) -> (x cos - y sin, x sin + y cos).
struct Rotary {
  // [max_positions, rotary_dim / 2] f32, f16, bf16; rotary_dim <= head_dim_qk, the rest is copied
  FloatView cos{};
  FloatView sin{};              // as cos
  bool is_interleaved = false;  // pairs (2j, 2j + 1); false: pairs (j, j + rotary_dim / 2)
  /// [batch, seqlen_q] i32 or i64, packed [total_q], optional: the position of each new token; default: its place in
  /// the sequence, kv_idx of the appended key. Query i stands at seqlen_kv - seqlen_q + i; before the first key it is
  /// not turned. Turned in f32, rounded to the dtype of the cache, and of q.
  IndexView positions{};
  /// [batch, seqlen_q], packed [total_q], optional: positions of queries alone; `positions` are then those of new keys
  /// alone, of which there may be another number.
  IndexView positions_q{};
};

/// New tokens, written into the cache behind what is there before attention is computed.
struct Append {
  // [batch, seqlen_new, num_heads_kv, head_dim_qk] f32, f16, bf16; packed: [total_new, num_heads_kv, head_dim_qk]
  FloatView k{};
  // As k with head_dim_v; none where cache.v is the first columns of cache.k, which are written with k.
  FloatView v{};
  // [batch + 1] i32 or i64, of packed k and v; default: cu_seqlens_q, so that a sequence gains its queries' tokens
  IndexView cu_seqlens{};
};

/// Keys that sequences begin with in common: attention over them is computed once for all their queries together, over
/// the other keys of each sequence apart, and the two states are merged (state.hpp).
struct SharedPrefix {
  /// The first keys of every sequence, no more than stand before its first query: seqlen_kv - seqlen_q. 0: none.
  std::int64_t seqlen = 0;
  /// [num_groups + 1] i32 or i64, optional: sequences cu_sequences[g] to cu_sequences[g + 1] share keys of their own
  /// (offsets start at 0, never decrease, the last is the batch). Default: one group of all.
  IndexView cu_sequences{};

  explicit operator bool() const { return seqlen != 0; }
};

/// Everything that attention_decode takes.
struct AttentionDecode {
  FloatView
      q{};  // [batch, seqlen_q, num_heads_q, head_dim_qk]; packed: [total_q, num_heads_q, head_dim_qk]
  KvCache cache{};
  Append append{};                 // optional
  std::optional<Rotary> rotary{};  // of q, and of append.k
  FloatView out{};                 // as q with head_dim_v
  Float32View lse{};  // [batch, num_heads_q, seqlen_q], packed [num_heads_q, total_q], optional

  ScoreMod score{};
  MaskMod mask = causal();  // bottom-right: the last query meets the last key
  std::optional<float> softmax_scale{};
  Float32View sinks{};       // [num_heads_q] f32, optional
  IndexView cu_seqlens_q{};  // [batch + 1] i32 or i64: makes q, out and lse packed
  // Of packed queries: those of the longest sequence, or more; default: total_q. Kernels are chosen by it.
  std::optional<std::int64_t> max_seqlen_q{};
  SharedPrefix shared_prefix{};
  // A recipe, of scales that are measured: applied to the numbers of q's dtype that keys and values of the cache are.
  Quantization quant{};

  CpuTarget cpu_target = CpuTarget::automatic;
  ComputeDtype compute_dtype = ComputeDtype::automatic;
  int sm_margin = 0;  // as in AttentionForward
  std::span<std::byte> workspace{};
  Executor* executor = nullptr;  // cpu
  void* stream = nullptr;        // cuda: the CUstream of the call; null: the default stream
};

/// Appends, then attends: decode (seqlen_q 1), speculative and tree decode, chunked prefill, all one call.
///
/// Sequence b has seqlen_kv = seqlens[b] - left_padding[b] + seqlen_new keys; kv_idx counts them from 0 in every
/// layout, so masks and programs mean the same paged and contiguous. seqlens is not written: the caller adds
/// seqlen_new.
///
/// Packed queries: a batch as serving engines form it, chunks of prompts and single tokens in one call. Sequence b has
/// the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q (offsets start at 0, never decrease, the last is at most
/// total_q), none where the two are equal; q_idx counts them from 0 and seqlen_q is their number, so a causal mask
/// aligns each sequence by itself. Rows after the last sequence get out 0, lse -inf. New tokens are packed likewise, by
/// offsets of their own or those of the queries.
///
/// Shared prefix: the first shared_prefix.seqlen keys of a group are read where its first sequence has them, nobody's
/// else are read. Programs, masks and rotary see every position as without it, and results
/// differ from those of the plain call by the rounding of partial states alone, which are f32. Queries are attended to
/// as rows of one sequence: dense q wants its rows evenly spaced, stride(0) = seqlen_q * stride(1).
///
/// Bits     as attention_forward over the same keys laid out densely: paged or contiguous, alone or in a batch, any
///          number of threads. Splits of the keys are cut by the sequence's own length. A shared prefix cuts them
///          there, and its rows are those of a sequence of all the group's queries.
/// Memory   as attention_forward, and a copy of q where it is rotated. With a shared prefix two states in f32, and the
///          places of keys and rows.
/// Device   that of the tensors, all of them. On cuda the call is enqueued on args.stream and returns; q, k and v have
///          one dtype; lengths, slots, pages and positions are read by the kernels and not checked, so a captured graph
///          serves whatever they hold at its replay, up to the capacity that shapes give. Time follows the lengths,
///          grid and workspace the capacity and, of packed queries, max_seqlen_q: give it, a decode step's kernels
///          want few queries of each sequence. More of them than it says are not looked at, and their rows unspecified.
/// Throws   InvalidArgument before anything is written: a sequence that would outgrow its slot or its pages, a page or
///          slot in use that is out of range, two sequences that append to one slot or page, a sequence whose queries
///          do not stand behind the shared prefix. That a page which one
///          sequence appends to is read by another is not looked for: pages of a shared prefix must be full.
FOVEA_EXPORT void attention_decode(const AttentionDecode& args);
FOVEA_EXPORT void attention_decode(const AttentionDecode& args, Runtime& runtime);

/// A validated decode problem, its kernels and its exact workspace, for tensors of these shapes, dtypes and layouts.
/// Immutable, cheap to copy, thread safe.
class FOVEA_EXPORT DecodePlan {
 public:
  std::size_t workspace_bytes() const;
  Explanation explain() const;
  /// As attention_decode with args.workspace, for sequences of no more keys than were planned for; nothing is looked
  /// up, allocated or compiled, but for range tables as in Plan::run. Throws InvalidArgument before it writes.
  void run(const AttentionDecode& args) const;

  struct Impl;
  explicit DecodePlan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

/// For sequences of up to max_seqlen_kv keys, new ones among them; of them up to shared_prefix.seqlen shared, in as
/// many groups, whole pages if that is. What tensors hold is not looked at: they need no
/// data. The executor, where one is given, says how many workers the workspace is for. Throws as attention_decode does.
FOVEA_EXPORT DecodePlan plan_decode(const AttentionDecode& args, std::int64_t max_seqlen_kv);

/// As plan_decode(...).explain(), but a problem that nothing can run is explained instead of refused.
FOVEA_EXPORT Explanation explain(const AttentionDecode& args, std::int64_t max_seqlen_kv);

/// Everything that append_to_cache takes.
struct AppendToCache {
  KvCache cache{};
  Append append{};
  std::optional<Rotary> rotary{};  // of append.k
  Executor* executor = nullptr;    // cpu
  void* stream = nullptr;          // cuda: the CUstream of the call; null: the default stream
};

/// What attention_decode does with the new tokens alone: rotates append.k, writes append.k and append.v into the cache.
/// On cuda it is enqueued on args.stream.
FOVEA_EXPORT void append_to_cache(const AppendToCache& args);
FOVEA_EXPORT void append_to_cache(const AppendToCache& args, Runtime& runtime);

/// Such a call's kernel, for tensors of these shapes, dtypes and layouts: it wants no workspace. Immutable, cheap to
/// copy, thread safe.
class FOVEA_EXPORT AppendPlan {
 public:
  std::size_t workspace_bytes() const { return 0; }
  Explanation explain() const;
  void run(const AppendToCache& args) const;

  struct Impl;
  explicit AppendPlan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

/// Throws Unsupported where nothing can run on the cache's device.
FOVEA_EXPORT AppendPlan plan_append(const AppendToCache& args);

/// The workspace that attention_decode wants for caches up to max_seqlen_kv keys a sequence. On cuda every cache of
/// these shapes whose rows are as aligned wants one workspace, whatever its lengths.
[[nodiscard]] FOVEA_EXPORT std::size_t decode_workspace_bytes(const AttentionDecode& args,
                                                              std::int64_t max_seqlen_kv);

}  // namespace fovea
