// New tokens of a cache: keys and values written behind what is there, keys and queries turned by their positions.
#pragma once

#include "fovea/kv_cache.hpp"

#include "problem/cache.hpp"

namespace fovea::cpu {

/// Arguments have been validated. Bound: memory; every element is read and written once.
void append_tokens(const NewTokens& tokens, Executor& executor);

}  // namespace fovea::cpu
