// Validation of attention over a cache: the problem that a call poses, without addresses and lengths, and what its
// arguments must satisfy. The cache itself is cache.hpp's business.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "fovea/kv_cache.hpp"

#include "expr/node.hpp"
#include "problem/cache.hpp"
#include "problem/forward.hpp"

namespace fovea {

/// Plans over caches are made for at least so many keys: a short cache grows.
inline constexpr std::int64_t kLeastPlannedKeys = 2048;

/// The batch, before anything else is known of the call. Refuses tensors of another rank. What tensors hold is not
/// looked at.
std::int64_t decode_batch(const AttentionDecode& args, std::string_view where);

/// Packed queries: their offsets, before anything reads them.
void validate_query_offsets(const AttentionDecode& args, std::string_view where);

/// The problem of attention over caches of up to max_seqlen_kv keys a sequence: shapes without addresses or lengths.
/// Refuses what decode_batch does.
Problem decode_problem(const AttentionDecode& args, std::int64_t max_seqlen_kv, int num_threads,
                       std::string_view where);

CacheLayout cache_layout(const AttentionDecode& args);

/// What attention itself takes of a call: keys and values are in the cache.
AttentionForward forward_of(const AttentionDecode& args);

/// Everything that a plan depends on, as problem_key.
expr::Digest decode_key(const Problem& problem, const CacheLayout& cache);

/// validate, for keys and values of dtypes of their own.
ForwardProblem validate_decode_problem(const Problem& problem, const CacheLayout& cache,
                                       std::string_view where);

/// What validate_cache does not see: queries and their rotation, outputs, programs, and memory that overlaps.
void validate_decode(const ForwardProblem& problem, const AttentionDecode& args,
                     std::string_view where);

/// As validate_decode for append_to_cache alone: memory that overlaps.
void validate_append(const KvCache& cache, const Append& append,
                     const std::optional<Rotary>& rotary, std::string_view where);

}  // namespace fovea
