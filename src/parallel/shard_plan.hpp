// What a ShardPlan holds. context_parallel_plan.cpp makes it, transfers.cpp reads exchanges and bytes off it,
// print_shard_plan.cpp and draw_ranks.cpp show it.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "fovea/parallel.hpp"

#include "problem/forward.hpp"

namespace fovea {

namespace parallel {

/// One attention problem, as far as sharding it goes.
struct Shape {
  std::int64_t batch = 0, seqlen = 0;
  std::int64_t num_heads_q = 0, num_heads_kv = 0;
  std::int64_t head_dim_qk = 0, head_dim_v = 0;
  std::int64_t element_bytes = 0;

  std::int64_t group() const { return num_heads_q / num_heads_kv; }
};

Shape shape_of(const ForwardProblem& problem);

/// The rows of every (sequence, head) in tiles, each inside one chunk, and the keys that each sees.
class RowTiles {
 public:
  std::vector<TokenRange> tiles;  // ascending, the whole sequence
  std::int64_t tile_kv = 1;
  std::int64_t num_mapped_sequences = 0, num_mapped_heads = 0;  // 1 where all are alike

  /// In the order of maps: sequences, in each heads, in each tiles.
  void add(std::span<const TileRun> runs) {
    runs_.insert(runs_.end(), runs.begin(), runs.end());
    ends_.push_back(runs_.size());
  }
  std::span<const TileRun> runs(std::size_t tile, std::int64_t mapped_sequence,
                                std::int64_t mapped_head) const {
    const auto map = static_cast<std::size_t>(mapped_sequence * num_mapped_heads + mapped_head);
    const std::size_t row = map * tiles.size() + tile;
    const std::size_t begin = row == 0 ? 0 : ends_[row - 1];
    return std::span(runs_).subspan(begin, ends_[row] - begin);
  }
  std::int64_t mapped_sequence(std::int64_t sequence) const {
    return num_mapped_sequences == 1 ? 0 : sequence;
  }
  std::int64_t mapped_head(std::int64_t q_head) const { return num_mapped_heads == 1 ? 0 : q_head; }

 private:
  std::vector<TileRun> runs_;
  std::vector<std::size_t> ends_;
};

/// Tenths of a full tile, so that sums are exact. A partial tile runs the mask: about a tenth more.
inline constexpr std::int64_t kFullWork = 10, kPartialWork = 11;
inline std::int64_t work_of(const TileCount& tiles) {
  return kFullWork * tiles.full + kPartialWork * tiles.partial;
}

inline std::int64_t num_tokens(std::span<const TokenRange> ranges) {
  std::int64_t sum = 0;
  for (const TokenRange& range : ranges) sum += range.size();
  return sum;
}

/// What lies in both; both ascending and disjoint.
std::vector<TokenRange> intersection(std::span<const TokenRange> a, std::span<const TokenRange> b);

}  // namespace parallel

/// Ranks form groups that compute the same rows, each rank of a group a part of the heads: rank = group · head_ranks +
/// part. Ulysses is one group, hybrid several; every other scheme has groups of one.
struct ShardPlan::Impl {
  parallel::Shape shape{};
  ParallelScheme scheme = ParallelScheme::all_gather;
  int world_size = 1;
  int head_ranks = 1;
  ShardOptions options{};  // resolved: nothing is 0 that the scheme reads
  MaskMod mask{};          // by formula: what it captured when the plan was made may be gone
  std::string_view dealing;

  parallel::RowTiles row_tiles{};
  std::vector<int> group_of_tile{};
  std::vector<std::vector<TokenRange>> group_rows{};  // ascending, neighbours merged
  std::vector<std::vector<TokenRange>> group_needs{};
  std::vector<std::vector<TokenRange>> rank_tokens{};
  std::vector<TileCount> tiles{};  // of each rank
  std::vector<std::int64_t>
      returned_tokens{};  // of each rank: times that others sum gradients of its own keys

  int num_groups() const { return world_size / head_ranks; }
  int group(int rank) const { return rank / head_ranks; }
  int part(int rank) const { return rank % head_ranks; }
};

namespace parallel {

/// The part of the heads that a rank computes.
HeadRange q_heads_of(const ShardPlan::Impl& plan, int rank);
HeadRange kv_heads_of(const ShardPlan::Impl& plan, int rank);

/// Throws InvalidArgument for an index out of range.
void check_sequence_and_head(const Shape& shape, std::int64_t sequence, std::int64_t q_head);

std::vector<Transfer> transfers(const ShardPlan::Impl& plan, int rank);
RankLoad load(const ShardPlan::Impl& plan, int rank);

/// The times that other groups need tokens of each group's own.
std::vector<std::int64_t> returned_tokens(const std::vector<std::vector<TokenRange>>& needs,
                                          const std::vector<std::vector<TokenRange>>& own);

}  // namespace parallel
}  // namespace fovea
