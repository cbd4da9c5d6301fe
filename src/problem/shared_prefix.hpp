// A decode call with a shared prefix as two calls over views of one cache: all queries of a group as rows of one
// sequence over the prefix, and each sequence over its own keys. What the views do not say stands in index tensors,
// which the backend writes before the calls (cpu/prefix_places.hpp, cuda/prefix/prefix_places.hpp).
//
//            prefix                                       suffix
//   rows     of a group, in the order of q                of a sequence
//   keys     [0, n) of the group's first sequence         [n, seqlen_kv) of its own
//   programs read batch, q_idx and lengths of a row       kv_idx + n, seqlen_kv + n for kv_idx, seqlen_kv, where it
//            in a table by its number                     matters (shift_keys)
//   sinks    none                                         all
//   out, lse a state in f32                               another
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "fovea/kv_cache.hpp"
#include "fovea/state.hpp"

#include "problem/cache.hpp"

namespace fovea {

/// Positions of a call with a shared prefix: shifted ones of programs are exact up to here.
inline constexpr std::int64_t kMostKeysWithPrefix = std::int64_t{1} << 28;

/// Columns of the table of rows that programs of the prefix read.
inline constexpr std::int64_t kPrefixRowColumns = 4;  // batch, q_idx, seqlen_q, seqlen_kv

/// The formulas of both calls. Captures are those of the call, and what names below stand for.
struct PrefixPrograms {
  ScoreMod prefix_score, suffix_score;
  MaskMod prefix_mask, suffix_mask;
  std::string rows, group_begins, num_keys;  // names of slots: of the table, cu_seqlens, n

  /// Whether the prefix's programs read the table of rows.
  bool read_rows() const;
};
PrefixPrograms prefix_programs(const ScoreMod& score, const MaskMod& mask, bool has_groups);

/// Index tensors of both calls, i32, side by side; what a call does not want is absent.
struct PrefixPlaces {
  TensorView prefix_seqlens{};       // [groups]
  TensorView prefix_left_padding{};  // [groups]
  TensorView slots{};                // [groups] contiguous caches
  TensorView page_table{};           // [groups, pages]: entries of the first sequence
  TensorView cu_seqlens{};           // [groups + 1] rows of the groups, where they are packed
  TensorView suffix_seqlens{};       // [batch]
  TensorView suffix_left_padding{};  // [batch]
  TensorView rows{};                 // [rows, 4]
};

/// What the places are made from.
struct PrefixSource {
  const KvCache& cache;
  SequenceRows queries{}, new_tokens{};
  std::int64_t total_new = 0;  // rows of packed new tokens
  TensorView cu_sequences{};   // not given: one group
  std::int64_t batch = 0, num_groups = 0, num_rows = 0;
  std::int64_t num_keys = 0;  // of the prefix
  // rows of the cache before those that views of the suffix begin with
  std::int64_t skipped_rows = 0;
};

struct PrefixCalls {
  AttentionDecode prefix, suffix;
  PrefixPlaces places;
  PrefixSource source;
  MergeStates merge;      // of both states, into those of the call
  std::size_t bytes = 0;  // of memory: states and places
};
/// `q`: the queries of `args`, turned where there is a rotary. `memory` is aligned to 256; null where only shapes and
/// bytes are asked for. The views look into `args`.
PrefixCalls split_at_prefix(const AttentionDecode& args, const TensorView& q,
                            const PrefixPrograms& programs, std::byte* memory);
/// Its bytes and the shapes of its states alone.
PrefixCalls measure_prefix(const AttentionDecode& args, const TensorView& q,
                           const PrefixPrograms& programs);

/// What follows from shapes, after decode_batch: lengths, groups, rows that are no sequence.
void check_shared_prefix(const AttentionDecode& args, std::string_view where);
/// What tensors hold, on the host alone: after validate_cache.
void check_prefix_lengths(const AttentionDecode& args, std::string_view where);

}  // namespace fovea
