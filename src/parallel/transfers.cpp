// What ranks receive: the transfers of a forward pass one by one, and the bytes of both passes in closed form.
#include <algorithm>
#include <array>

#include "core/check.hpp"
#include "parallel/shard_plan.hpp"

namespace fovea::parallel {
namespace {

using Tensor = Transfer::Tensor;
using Plan = ShardPlan::Impl;

constexpr std::int64_t kSumBytes = 4;  // gradients are summed in f32

class TransferList {
 public:
  TransferList(const Plan& plan, int rank) : plan_(plan), rank_(rank) {}

  std::vector<Transfer> list() {
    switch (plan_.scheme) {
      case ParallelScheme::all_gather:
        gather(all_kv_heads(), 0);
        break;
      case ParallelScheme::head_group_all_gather:
        gather_by_heads();
        break;
      case ParallelScheme::needed_only:
        gather_needed();
        break;
      case ParallelScheme::ring:
      case ParallelScheme::ulysses:
      case ParallelScheme::hybrid:
        exchange_heads_and_ring();
        break;
    }
    return std::move(list_);
  }

 private:
  HeadRange all_kv_heads() const { return {0, plan_.shape.num_heads_kv}; }

  void add(int step, int from, Tensor tensor, std::span<const TokenRange> tokens, HeadRange heads) {
    for (const TokenRange& range : tokens)
      list_.push_back(
          {.step = step, .from = from, .tensor = tensor, .tokens = range, .heads = heads});
  }

  void gather(HeadRange heads, int step) {
    for (int from = 0; from < plan_.world_size; ++from) {
      if (from != rank_) add(step, from, Tensor::kv, tokens(from), heads);
    }
  }

  void gather_by_heads() {
    const std::int64_t heads = plan_.shape.num_heads_kv / plan_.options.head_parts;
    for (std::int64_t part = 0; part < plan_.options.head_parts; ++part)
      gather({part * heads, (part + 1) * heads}, static_cast<int>(part));
  }

  void gather_needed() {
    const std::vector<TokenRange>& needs =
        plan_.group_needs[static_cast<std::size_t>(plan_.group(rank_))];
    for (int from = 0; from < plan_.world_size; ++from) {
      if (from != rank_)
        add(0, from, Tensor::kv, intersection(needs, tokens(from)), all_kv_heads());
    }
  }

  /// Step 0: this rank's heads of the group's tokens. Then the ring, a neighbour's group a step; at last outputs of its
  /// own tokens from those who computed other heads. A ring alone is one of groups of one rank.
  void exchange_heads_and_ring() {
    const int first = plan_.group(rank_) * plan_.head_ranks;
    const bool shares_heads = plan_.head_ranks > 1;
    for (int from = first; shares_heads && from < first + plan_.head_ranks; ++from) {
      if (from == rank_) continue;
      add(0, from, Tensor::q, tokens(from), q_heads_of(plan_, rank_));
      add(0, from, Tensor::kv, tokens(from), kv_heads_of(plan_, rank_));
    }
    const int num_groups = plan_.num_groups(), group = plan_.group(rank_);
    const int neighbour =
        (group + num_groups - 1) % num_groups * plan_.head_ranks + plan_.part(rank_);
    for (int step = 1; step < num_groups; ++step) {
      const auto origin = static_cast<std::size_t>((group + num_groups - step) % num_groups);
      add(step, neighbour, Tensor::kv, plan_.group_rows[origin], kv_heads_of(plan_, rank_));
    }
    for (int from = first; shares_heads && from < first + plan_.head_ranks; ++from) {
      if (from != rank_) add(num_groups, from, Tensor::out, tokens(rank_), q_heads_of(plan_, from));
    }
  }

  std::span<const TokenRange> tokens(int rank) const {
    return plan_.rank_tokens[static_cast<std::size_t>(rank)];
  }

  const Plan& plan_;
  const int rank_;
  std::vector<Transfer> list_;
};

/// Bytes that one rank receives and holds.
class Bytes {
 public:
  Bytes(const Plan& plan, int rank) : plan_(plan), shape_(plan.shape), rank_(rank) {}

  void write(RankLoad& load) const {
    switch (plan_.scheme) {
      case ParallelScheme::all_gather:
        write_gather(load, 1);
        break;
      case ParallelScheme::head_group_all_gather:
        // One part is attended to while the next one arrives.
        write_gather(load, std::min<std::int64_t>(2, plan_.options.head_parts));
        load.kv_bytes /= plan_.options.head_parts;
        break;
      case ParallelScheme::needed_only:
        write_needed(load);
        break;
      case ParallelScheme::ring:
      case ParallelScheme::ulysses:
      case ParallelScheme::hybrid:
        write_heads_and_ring(load);
        break;
    }
  }

 private:
  /// Of keys and values of so many tokens and heads.
  std::int64_t kv(std::int64_t tokens, std::int64_t heads, std::int64_t bytes) const {
    return shape_.batch * tokens * heads * (shape_.head_dim_qk + shape_.head_dim_v) * bytes;
  }
  std::int64_t kv(std::int64_t tokens) const {
    return kv(tokens, shape_.num_heads_kv, shape_.element_bytes);
  }
  std::int64_t kv_sums(std::int64_t tokens) const {
    return kv(tokens, shape_.num_heads_kv, kSumBytes);
  }
  std::int64_t rows(std::int64_t tokens, std::int64_t heads, std::int64_t head_dim) const {
    return shape_.batch * tokens * heads * head_dim * shape_.element_bytes;
  }
  std::int64_t own() const { return shape_.seqlen / plan_.world_size; }

  void write_gather(RankLoad& load, std::int64_t copies) const {
    const std::int64_t others = shape_.seqlen - own();
    load.forward_bytes = kv(others);
    load.backward_bytes = kv(others) + kv_sums(others);
    load.kv_bytes = copies * kv(shape_.seqlen);
  }

  void write_needed(RankLoad& load) const {
    const auto rank = static_cast<std::size_t>(rank_);
    const std::vector<TokenRange>& needs = plan_.group_needs[rank];
    const std::int64_t missing =
        num_tokens(needs) - num_tokens(intersection(needs, plan_.rank_tokens[rank]));
    load.forward_bytes = kv(missing);
    load.backward_bytes = kv(missing) + kv_sums(plan_.returned_tokens[rank]);
    load.kv_bytes = kv(own() + missing);
  }

  void write_heads_and_ring(RankLoad& load) const {
    const std::int64_t kv_heads = kv_heads_of(plan_, rank_).size(),
                       q_heads = q_heads_of(plan_, rank_).size();
    const std::int64_t group_tokens = shape_.seqlen / plan_.num_groups();
    const std::int64_t of_partners = group_tokens - own();
    const std::int64_t heads_of_partners = shape_.num_heads_q - q_heads;
    const std::int64_t kv_of_partners = kv(of_partners, kv_heads, shape_.element_bytes);
    const std::int64_t out_of_partners = rows(own(), heads_of_partners, shape_.head_dim_v);
    const std::int64_t ring = kv(shape_.seqlen - group_tokens, kv_heads, shape_.element_bytes);
    // Sums go round with their keys and one step more, home.
    const std::int64_t ring_sums =
        plan_.num_groups() == 1 ? 0 : kv(shape_.seqlen, kv_heads, kSumBytes);
    const std::int64_t gradients_of_partners =
        rows(own(), heads_of_partners, shape_.head_dim_qk) +
        (plan_.head_ranks - 1) * kv(own(), kv_heads, shape_.element_bytes);
    load.forward_bytes =
        rows(of_partners, q_heads, shape_.head_dim_qk) + kv_of_partners + out_of_partners + ring;
    load.backward_bytes =
        rows(of_partners, q_heads, shape_.head_dim_v) + gradients_of_partners + ring + ring_sums;
    load.kv_bytes =
        (plan_.num_groups() == 1 ? 1 : 2) * kv(group_tokens, kv_heads, shape_.element_bytes);
  }

  const Plan& plan_;
  const Shape& shape_;
  const int rank_;
};

/// Sum over tokens before a place of how many ranges hold each.
class Coverage {
 public:
  explicit Coverage(const std::vector<std::vector<TokenRange>>& lists) {
    std::vector<std::array<std::int64_t, 2>>
        changes;  // place, ranges that begin less those that end
    for (const std::vector<TokenRange>& list : lists) {
      for (const TokenRange& range : list) {
        changes.push_back({range.begin, 1});
        changes.push_back({range.end, -1});
      }
    }
    std::ranges::sort(changes);
    std::int64_t depth = 0, sum = 0, place = 0;
    for (const auto& [at, change] : changes) {
      sum += depth * (at - place);
      depth += change;
      place = at;
      steps_.push_back({.place = at, .sum = sum, .depth = depth});
    }
  }

  std::int64_t of(const TokenRange& range) const { return before(range.end) - before(range.begin); }

 private:
  struct Step {
    std::int64_t place = 0, sum = 0, depth = 0;
  };

  std::int64_t before(std::int64_t place) const {
    const auto after = std::ranges::upper_bound(steps_, place, {}, &Step::place);
    if (after == steps_.begin()) return 0;
    const Step& step = *std::prev(after);
    return step.sum + step.depth * (place - step.place);
  }

  std::vector<Step> steps_;
};

}  // namespace

std::vector<TokenRange> intersection(std::span<const TokenRange> a, std::span<const TokenRange> b) {
  std::vector<TokenRange> result;
  std::size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    const TokenRange common{std::max(a[i].begin, b[j].begin), std::min(a[i].end, b[j].end)};
    if (common.size() > 0) result.push_back(common);
    if (a[i].end < b[j].end) {
      ++i;
    } else {
      ++j;
    }
  }
  return result;
}

std::vector<std::int64_t> returned_tokens(const std::vector<std::vector<TokenRange>>& needs,
                                          const std::vector<std::vector<TokenRange>>& own) {
  const Coverage coverage(needs);
  std::vector<std::int64_t> result;
  for (std::size_t group = 0; group < own.size(); ++group) {
    std::int64_t times = -num_tokens(intersection(needs[group], own[group]));  // its own need
    for (const TokenRange& range : own[group]) times += coverage.of(range);
    result.push_back(times);
  }
  return result;
}

std::vector<Transfer> transfers(const ShardPlan::Impl& plan, int rank) {
  return TransferList(plan, rank).list();
}

RankLoad load(const ShardPlan::Impl& plan, int rank) {
  RankLoad load{.tiles = plan.tiles[static_cast<std::size_t>(rank)]};
  load.work = static_cast<double>(work_of(load.tiles)) / static_cast<double>(kFullWork);
  Bytes(plan, rank).write(load);
  return load;
}

}  // namespace fovea::parallel
