// New tokens of a cache: keys and values written behind what is there, keys and queries turned by their positions.
#pragma once

#include "fovea/kv_cache.hpp"

#include "problem/cache.hpp"

namespace fovea::cpu {

/// What a call does before it attends. Arguments have been validated.
struct NewTokens {
  const KvCache& cache;
  const Append& append;
  const Rotary* rotary = nullptr;
  TensorView q{};          // turned where there is a rotary; not given: keys alone
  TensorView rotated_q{};  // as q, dense
};

/// Bound: memory; every element is read and written once.
void append_tokens(const NewTokens& tokens, Executor& executor);

}  // namespace fovea::cpu
