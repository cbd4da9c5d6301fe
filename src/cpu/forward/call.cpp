#include "cpu/forward/call.hpp"

#include <algorithm>

namespace fovea::cpu {
namespace {

constexpr float kSmallestUnit = 1e-30F;  // the reciprocal of a smaller one leaves fp32

}  // namespace

ForwardCall::ForwardCall(const ForwardProblem& problem_of, const ForwardPlan& plan_of,
                         const AttentionForward& args_of, const GrownCache* cache_of)
    : problem(problem_of),
      plan(plan_of),
      spec(plan_of.spec),
      args(args_of),
      cache(cache_of),
      kernels(forward_kernels(plan_of.spec)),
      plain_kernels(cpu::plain_kernels(plan_of.spec)),
      q(args.q),
      k(cache != nullptr ? KeySource(cache->cache.k, cache->cache.k_scale, cache->cache)
                         : KeySource(args.k)),
      v(cache != nullptr ? KeySource(cache->cache.v, cache->cache.v_scale, cache->cache)
                         : KeySource(args.v)),
      out(args.out),
      score_bindings(plan.score.bindings(args.score)),
      mask_bindings(plan.mask.bindings(args.mask)),
      dropout(panel_dropout(args)),
      is_prescaled(!plan.score.empty() || problem.softmax_scale < kSmallestUnit),
      unit(is_prescaled ? 1.0F : problem.softmax_scale) {
  if (reads_captures(args.mask)) own_mapper_.emplace(plan.mapper->over(args.mask));
}

Sequence ForwardCall::sequence(std::int64_t index) const {
  if (cache == nullptr) return sequence_at(problem, args, index);
  const CachedSequence cached = cached_sequence(cache->cache, index);
  const SequenceRows queries = sequence_rows(args.q, args.cu_seqlens_q);
  return {.index = index,
          .batch_offset = queries.is_packed() ? 0 : index,
          .q_begin = queries.begin(index),
          .kv_begin = cached.begin,
          .seqlen_q = queries.count(index),
          .seqlen_kv = cached.end - cached.begin + cache->new_tokens.count(index),
          .slot = cached.slot};
}

TileSource ForwardCall::tile_of(const KeySource& source, const Sequence& of, std::int64_t kv_head,
                                std::int64_t tile, std::int64_t head_dim,
                                const RowList& list) const {
  const std::int64_t begin = tile * spec.tile_kv;
  const std::int64_t count = std::min(spec.tile_kv, of.seqlen_kv - begin);
  return source.tile(of, kv_head, begin, count, head_dim, list);
}

}  // namespace fovea::cpu
