// What a Runtime holds: the default executor and the plans made so far.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"
#include "fovea/jvp.hpp"
#include "fovea/runtime.hpp"

#include "cuda/append/append_to_cache.hpp"
#include "cuda/merge/merge_states.hpp"
#include "cuda/pages/rank_pages.hpp"
#include "cuda/prefix/prefix_places.hpp"
#include "cuda/rotary/rotary.hpp"
#include "cuda/sum/sum_parts.hpp"
#include "expr/node.hpp"

namespace fovea {

struct SharedPrefixPlan;  // shared_prefix.hpp

struct Runtime::Impl {
  int num_threads = 0;
  std::mutex mutex;
  std::unique_ptr<Executor> executor;
  Allocator host_allocator, cuda_allocator, rocm_allocator;
  template <typename P>
  using Cache = std::unordered_map<expr::Digest, P, expr::DigestHash>;
  std::tuple<Cache<Plan>, Cache<BackwardPlan>, Cache<JvpPlan>, Cache<cuda::AppendPlan>,
             Cache<cuda::MergePlan>, Cache<cuda::PrefixPlan>, Cache<cuda::RankPagesPlan>,
             Cache<cuda::RotaryPlan>, Cache<cuda::SumPlan>,
             Cache<std::shared_ptr<const SharedPrefixPlan>>>
      caches;

  /// The plan of an equal problem, or the one that `make` gives. Forgets everything at kMaxPlans: a program that poses
  /// new problems without end must not grow without end.
  template <typename Make, typename P = std::invoke_result_t<Make>>
  P find_or_make(const expr::Digest& key, const Make& make) {
    auto& plans = std::get<Cache<P>>(caches);
    {
      const std::lock_guard lock(mutex);
      if (const auto found = plans.find(key); found != plans.end()) return found->second;
    }
    P plan = make();
    const std::lock_guard lock(mutex);
    if (plans.size() >= kMaxPlans) plans.clear();
    plans.emplace(key, plan);
    return plan;
  }

  /// Under the mutex.
  Allocator& allocator_of(Device::Kind kind) {
    if (kind == Device::Kind::cpu) return host_allocator;
    return kind == Device::Kind::cuda ? cuda_allocator : rocm_allocator;
  }

  /// Of calls that begin now.
  Allocator current_allocator(Device device) {
    const std::lock_guard lock(mutex);
    return allocator_of(device.kind);
  }

  static constexpr std::size_t kMaxPlans = 4096;
};

}  // namespace fovea
