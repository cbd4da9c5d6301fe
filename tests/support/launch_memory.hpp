// The memory of a forward call, as a launch names it: which bytes its tensors span, and the same launch over a copy of
// them, on a device or in the emulator.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"
#include "fovea/jvp.hpp"
#include "fovea/kv_cache.hpp"
#include "fovea/state.hpp"

#include "cuda/forward/launch.hpp"
#include "problem/cache.hpp"

namespace fovea::testing {

/// From the first to behind the last element of a tensor, whatever its strides.
struct TensorBytes {
  std::string name;
  std::byte* begin = nullptr;
  std::size_t size = 0;
  bool is_output = false;
};

/// Of size 0 where there is nothing.
TensorBytes tensor_bytes(const std::string& name, const TensorView& view, bool is_output = false);

/// Every tensor that a call reads or writes, captured ones too. Tensors without elements are left out.
std::vector<TensorBytes> tensors_of_call(const AttentionForward& args);

/// The same of gradients: out and lse are read.
std::vector<TensorBytes> tensors_of_gradients(const AttentionBackward& args);
/// And of forward mode.
std::vector<TensorBytes> tensors_of_tangents(const AttentionJvp& args);

/// The same of a cache.
std::vector<TensorBytes> tensors_of_cache(const KvCache& cache);

/// The same of an append, with the cache that it writes.
std::vector<TensorBytes> tensors_of_tokens(const NewTokens& tokens);

/// The same of states that are merged. What is merged in place stands here once.
std::vector<TensorBytes> tensors_of_merge(const MergeStates& args);

/// Replaces the address of every tensor in the launch. `moved` is given each one that is not null.
void move_tensors(cuda::ForwardLaunch& launch,
                  const std::function<const void*(const void*)>& moved);

}  // namespace fovea::testing
