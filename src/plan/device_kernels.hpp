// Kernels that serve every call of a device: found or loaded once for each.
#pragma once

#include "fovea/runtime.hpp"

#include "cuda/append/append_to_cache.hpp"
#include "cuda/merge/merge_states.hpp"
#include "cuda/pages/rank_pages.hpp"
#include "cuda/prefix/prefix_places.hpp"
#include "cuda/rotary/rotary.hpp"
#include "cuda/sum/sum_parts.hpp"
#include "plan/runtime.hpp"

namespace fovea {

inline expr::Digest device_key(Device device) {
  return {static_cast<std::uint64_t>(device.index), static_cast<std::uint64_t>(device.kind)};
}

inline cuda::AppendPlan find_append(Device device, Runtime& runtime) {
  return runtime.impl().find_or_make(device_key(device), [&] { return cuda::plan_append(device); });
}

inline cuda::MergePlan find_merge(Device device, Runtime& runtime) {
  return runtime.impl().find_or_make(device_key(device), [&] { return cuda::plan_merge(device); });
}

inline cuda::PrefixPlan find_prefix(Device device, Runtime& runtime) {
  return runtime.impl().find_or_make(device_key(device), [&] { return cuda::plan_prefix(device); });
}

inline cuda::RankPagesPlan find_rank_pages(Device device, Runtime& runtime) {
  return runtime.impl().find_or_make(device_key(device),
                                     [&] { return cuda::plan_rank_pages(device); });
}

inline cuda::RotaryPlan find_rotary(Device device, Runtime& runtime) {
  return runtime.impl().find_or_make(device_key(device), [&] { return cuda::plan_rotary(device); });
}

inline cuda::SumPlan find_sum(Device device, Runtime& runtime) {
  return runtime.impl().find_or_make(device_key(device), [&] { return cuda::plan_sum(device); });
}

}  // namespace fovea
