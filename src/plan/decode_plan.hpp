// What plans of attention over a cache are made of, with a shared prefix and without.
#pragma once

#include <cstdint>
#include <string_view>

#include "fovea/kv_cache.hpp"
#include "fovea/runtime.hpp"

#include "core/verbose.hpp"
#include "plan/plan.hpp"
#include "problem/decode.hpp"

namespace fovea {

/// Plans are made for lengths up to a power of two, so that a growing cache meets a new one rarely; the bits do not
/// know it.
std::int64_t planned_keys(std::int64_t seqlen_kv, std::int64_t capacity);
/// What the host cannot read is planned for as if every sequence filled its room.
std::int64_t planned_keys(const AttentionDecode& args, std::int64_t longest);

int num_threads_of(const AttentionDecode& args);

/// The plan of such a call without a shared prefix, found or made.
Plan find_decode_plan(const AttentionDecode& args, std::int64_t max_seqlen_kv, Runtime& runtime,
                      CallLog& log, std::string_view where);

/// What it would decide, where nothing can run too.
Explanation explain_decode(const AttentionDecode& args, std::int64_t max_seqlen_kv,
                           std::string_view where);

/// Aligned bytes that it wants.
std::size_t aligned_bytes_of(const Plan& plan);

/// Attention of such a call, over what the cache holds after the append. `forward` has its queries, turned where there
/// is a rotary; `args` has an executor on the cpu. Returns the name of the kernel.
std::string_view attend(const Plan& plan, const AttentionDecode& args,
                        const AttentionForward& forward, std::byte* workspace);

}  // namespace fovea
