// Context parallelism, run: attention of a sequence whose tokens lie on several ranks, by a ShardPlan, over a
// Communicator.
//
//   ContextParallel attention(context_parallel_plan(problem, ranks), communicator);  // on every rank
//   attention.forward({.q = q, .k = k, .v = v, .out = out, .lse = lse, .mask = causal()});
//
// Call path: this header -> src/parallel/engine/context_parallel.cpp (ranks agree) -> the scheme's engine beside it ->
// attention_forward, attention_backward and merge_states on what a rank has.
#pragma once

#include <memory>

#include "fovea/backward.hpp"
#include "fovea/communicator.hpp"
#include "fovea/kv_cache.hpp"
#include "fovea/parallel.hpp"

namespace fovea {

/// One rank's part of attention over all tokens of a plan. Every rank makes one and makes the same calls in the same
/// order; a rank has one call at a time.
///
/// forward  q, k, v, out and lse are those of attention_forward for this rank's tokens, plan.tokens(rank), ascending:
///          [batch, seqlen / world_size, heads, head_dim]. mask is the plan's, by formula; score and mask speak of
///          positions, lengths and heads of the whole sequence, and what they capture is whole on every rank.
/// backward forward's arguments with out and lse as it wrote them. dq, dk and dv are of all ranks' losses; dsinks and
///          dcaptured are what this rank's rows (and heads) contribute, as those of any weight are: their sum over
///          ranks is the whole.
/// Bits     with is_deterministic no bit of out, lse, dq, dk or dv depends on the number of ranks under all_gather,
///          head_group_all_gather and ulysses, where a rank's rows and the whole are of one class
///          (docs/design/contract.md) and every kv head has one rank: keys stand in the sequence's order, and gradients
///          by keys are computed by who has them from all rows; by those whose |lse| is above 64 they are taken from
///          lse as it is rounded, where one call sums such rows again. Without it, these gradients are sums in f32
///          that are reduce-scattered: five products in place of seven. Other schemes sum in f32 in the order of ranks,
///          the same bits in every run.
/// Memory   of keys as the plan says (RankLoad::kv_bytes), and copies of what is sent; allocated at each call: on a GPU
///          by the process's runtime (Runtime::set_allocator), else in the order of the call's stream.
/// Device   where the communicator exchanges: the cpu, or a GPU of each rank over NCCL. There calls are enqueued on
///          args.stream and return; exchanges have a stream of their own, and the host waits for the device in the
///          first call of a problem alone, when ranks agree. What masks capture lies on the device.
/// Dropout  draws for positions, heads and batch entries of the whole: every scheme drops what one rank does.
/// quant    under ulysses alone, which gives a rank whole sequences of its heads: means and scales are theirs.
/// Refused  by name: tensors elsewhere, recipes under other schemes, packed tensors, and dropout over a plan whose
///          ranges of keys do not begin at multiples of 4.
/// Throws   InvalidArgument, on every rank and naming the rank, where ranks do not have one problem or one of them has
///          none that can run: ranks agree at the first call of each problem. DeviceError where an exchange fails;
///          memory of exchanges that were under way is given back when they end.
class FOVEA_EXPORT ContextParallel {
 public:
  /// Throws InvalidArgument where the plan is for another number of ranks.
  ContextParallel(ShardPlan shards, std::shared_ptr<Communicator> ranks);
  ~ContextParallel();
  ContextParallel(ContextParallel&&) noexcept;
  ContextParallel& operator=(ContextParallel&&) noexcept;

  void forward(const AttentionForward& args);
  void backward(const AttentionBackward& args);

  const ShardPlan& shards() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Serving: one rank's part of attention over caches whose pages are dealt over ranks in turn. Queries travel, which
/// are few, and keys stay; every rank attends to the keys that it has, and partial results are merged.
///
///   ContextParallelDecode decoding(communicator);  // on every rank
///   KvCache cache{.k = k_pages, .v = v_pages, .page_table = own_pages, .seqlens = seqlens};
///   decoding.run({.q = q, .cache = cache, .out = out});
///
/// cache      page n of every sequence lies on rank n % world_size: page_table[b, n / world_size] there, [batch,
///            pages]. seqlens are those of whole sequences, the same on all ranks.
/// q, out, lse, append
///            of all sequences, the same on every rank; or of batch / world_size of them, rank r those from
///            r · batch / world_size on: then they travel to all ranks, and partial results back.
/// append     new tokens are written by the rank that has their page.
/// score, mask, rotary
///            speak of positions and lengths of whole sequences; mask is causal unless given.
/// Bits       the same in every run: states are merged in the order of ranks. Other numbers of ranks round elsewhere.
/// Device     where the communicator exchanges: the cpu, or a GPU of each rank over NCCL. There calls are enqueued on
///            args.stream; lengths and pages are read where they lie, and the host waits for the device in the first
///            call of a problem alone, when ranks agree.
/// Throws     as ContextParallel. Refused by name: contiguous caches, slots, left padding, pages by offsets, packed
///            queries, shared prefixes.
class FOVEA_EXPORT ContextParallelDecode {
 public:
  explicit ContextParallelDecode(std::shared_ptr<Communicator> ranks);
  ~ContextParallelDecode();
  ContextParallelDecode(ContextParallelDecode&&) noexcept;
  ContextParallelDecode& operator=(ContextParallelDecode&&) noexcept;

  void run(const AttentionDecode& args);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fovea
