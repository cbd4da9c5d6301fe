// From a problem to its shards: chunks of tokens are cut, mapped by the mask and dealt to groups of ranks.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/check.hpp"
#include "core/float_environment.hpp"
#include "expr/passes.hpp"
#include "mask/block_map.hpp"
#include "parallel/deal_chunks.hpp"
#include "parallel/scheme.hpp"
#include "parallel/shard_plan.hpp"
#include "problem/captured_tensors.hpp"
#include "problem/forward.hpp"
#include "problem/quant.hpp"

namespace fovea {
namespace {

using expr::Variable;
using parallel::RowTiles;
using parallel::Shape;

constexpr std::string_view kWhere = "context_parallel_plan";

constexpr int kMostRanks = 1 << 16;
constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();  // programs count so far
constexpr std::int64_t kMostRows = std::int64_t{1} << 26;  // of tiles, in all maps: gigabytes

// More chunks are more even and less together: 16 leave less than 2 % of 64 ranks' work uneven (shard_plan_test.cpp).
constexpr std::int64_t kChunksPerRank = 16, kFewestChunksPerRank = 4;

// Of a chunk, by all rows of its tiles, that exchanges are weighed by: more of them take longer than they save.
constexpr std::size_t kMostSeenChunks = 512;

// Rows of tiles that are asked about together before each is: documents are some tiles long, sequences thousands.
constexpr std::size_t kRowsOfHull = 16;

constexpr double kBalancedTolerance = 0.001;
constexpr double kContiguousTolerance = 0.02;  // what lies together is not moved for less

/// What is asked of arguments, in the name of the function.
class Checks {
 public:
  Checks(const Problem& problem, int world_size, const ShardOptions& options)
      : problem_(problem), world_size_(world_size), options_(options), checks_(kWhere) {}

  Shape shape() const {
    check_range("world_size", world_size_, 1, kMostRanks);
    check_range("tile_q", options_.tile_q, 1, kMost);
    check_range("tile_kv", options_.tile_kv, 1, kMost);
    check_range("chunk", options_.chunk, 0, kMost);
    check_range("head_parts", options_.head_parts, 0, kMost);
    check_range("head_ranks", options_.head_ranks, 0, kMostRanks);
    refuse_quantization(checks_, problem_, "shards");  // a mean is one of all ranks' keys
    const ForwardProblem f = validate(problem_, kWhere);
    check_lengths(f);
    for (const CapturedTensor& tensor : problem_.mask.captures().tensors) {
      const bool has_no_data = tensor.view.data() == nullptr;
      if (has_no_data && tensor.view.spec().num_elements() > 0) continue;
      check_captured_tensor(f, tensor, checks_);
    }
    return parallel::shape_of(f);
  }

 private:
  void check_range(std::string_view name, std::int64_t value, std::int64_t least,
                   std::int64_t most) const {
    if (value >= least && value <= most) return;
    checks_.refuse(fmt::format("{} is {}; expected {} to {}", name, value, least, most));
  }

  void check_lengths(const ForwardProblem& f) const {
    if (f.is_varlen) {
      checks_.refuse(
          "q is packed; expected [batch, seqlen, num_heads, head_dim], with documents(segments) "
          "for "
          "the sequences in it");
    }
    if (problem_.seqlen_q || problem_.seqlen_kv)
      checks_.refuse(
          "seqlen_q or seqlen_kv is a bound; expected lengths, which shards are cut from");
    if (f.seqlen_q != f.seqlen_kv) {
      checks_.refuse(
          fmt::format("k has seqlen {} but q has {}; expected equal lengths, tokens are sharded "
                      "with their keys",
                      f.seqlen_kv, f.seqlen_q));
    }
    if (f.seqlen_q % world_size_ != 0) {
      const std::int64_t padded = (f.seqlen_q / world_size_ + 1) * world_size_;
      checks_.refuse(
          fmt::format("seqlen is {} for {} ranks; expected a multiple, pad to {} with tokens that "
                      "the mask hides",
                      f.seqlen_q, world_size_, padded));
    }
  }

  const Problem& problem_;
  const int world_size_;
  const ShardOptions& options_;
  const TensorChecks checks_;
};

/// The sequence in chunks of one size, and what each group's part of it leaves over.
struct Cut {
  std::int64_t chunk = 1;             // tokens
  std::int64_t chunks_per_group = 0;  // and one rest of each group, where it is not empty
  std::int64_t rest = 0;              // tokens
};

struct Chunk {
  TokenRange tokens{};
  bool is_rest = false;
  std::int64_t work = 0;
  int group = 0;
};

std::vector<TokenRange> merged(std::vector<TokenRange> ranges) {
  std::ranges::sort(ranges, {}, &TokenRange::begin);
  std::vector<TokenRange> result;
  for (const TokenRange& range : ranges) {
    if (result.empty() || range.begin > result.back().end) {
      result.push_back(range);
    } else {
      result.back().end = std::max(result.back().end, range.end);
    }
  }
  return result;
}

/// Tokens begin to end, counted along the ranges.
std::vector<TokenRange> slice(std::span<const TokenRange> ranges, std::int64_t begin,
                              std::int64_t end) {
  std::vector<TokenRange> result;
  std::int64_t place = 0;
  for (const TokenRange& range : ranges) {
    const TokenRange part{range.begin + std::max<std::int64_t>(begin - place, 0),
                          std::min(range.begin + (end - place), range.end)};
    if (part.size() > 0) result.push_back(part);
    place += range.size();
  }
  return result;
}

class Planner {
 public:
  Planner(const Problem& problem, int world_size, ParallelScheme scheme,
          const ShardOptions& options)
      : mask_(problem.mask) {
    plan_.shape = Checks(problem, world_size, options).shape();
    plan_.mask = problem.mask;
    plan_.scheme = scheme;
    plan_.world_size = world_size;
    plan_.options = options;
    const parallel::HeadDivision heads =
        parallel::divide_heads(plan_.shape, world_size, scheme, options);
    if (!heads.refusal.empty())
      TensorChecks(kWhere).refuse(fmt::format("{}: {}", name(scheme), heads.refusal));
    plan_.head_ranks = plan_.options.head_ranks = heads.head_ranks;
    plan_.options.head_parts = heads.head_parts;
  }

  ShardPlan::Impl make() {
    is_zigzag_ = finds_zigzag();
    cut_chunks();
    cut_tiles();
    map_rows();
    deal();
    collect_rows();
    collect_needs();
    count_tiles();
    return std::move(plan_);
  }

 private:
  int num_groups() const { return plan_.num_groups(); }

  /// One causal sequence: the only mask whose even shares have a closed form.
  bool finds_zigzag() const {
    const bool is_causal = mask_ == causal() || mask_ == causal(Align::top_left);
    return is_causal && num_groups() > 1 && plan_.scheme != ParallelScheme::needed_only &&
           plan_.options.chunk == 0 && plan_.shape.seqlen % (2 * num_groups()) == 0;
  }

  Cut cut_of_group(std::int64_t tokens) const {
    std::int64_t chunk = plan_.options.chunk;
    if (is_zigzag_) chunk = tokens / 2;
    if (num_groups() == 1) chunk = tokens;
    if (chunk == 0) {
      const std::int64_t tile = plan_.options.tile_q;
      const std::int64_t whole_tiles = std::max(tokens / kChunksPerRank / tile * tile, tile);
      chunk = std::min(whole_tiles, tokens / kFewestChunksPerRank);
    }
    chunk = std::clamp<std::int64_t>(chunk, 1, std::max<std::int64_t>(tokens, 1));
    return {.chunk = chunk, .chunks_per_group = tokens / chunk, .rest = tokens % chunk};
  }

  void cut_chunks() {
    const std::int64_t tokens = plan_.shape.seqlen / num_groups();
    const Cut cut = cut_of_group(tokens);
    plan_.options.chunk = cut.chunk;
    for (int group = 0; group < num_groups(); ++group) {
      std::int64_t begin = group * tokens;
      for (std::int64_t i = 0; i < cut.chunks_per_group; ++i, begin += cut.chunk)
        chunks_.push_back({.tokens = {begin, begin + cut.chunk}, .group = group});
      if (cut.rest > 0)
        chunks_.push_back({.tokens = {begin, begin + cut.rest}, .is_rest = true, .group = group});
    }
  }

  void cut_tiles() {
    RowTiles& rows = plan_.row_tiles;
    rows.tile_kv = plan_.options.tile_kv;
    const expr::Node& formula = mask_.expr().node();
    const bool heads_differ =
        expr::reads(formula, Variable::q_head) || expr::reads(formula, Variable::kv_head);
    const bool sequences_differ = expr::reads(formula, Variable::batch);
    const Shape& shape = plan_.shape;
    rows.num_mapped_sequences =
        sequences_differ ? shape.batch : std::min<std::int64_t>(1, shape.batch);
    rows.num_mapped_heads =
        heads_differ ? shape.num_heads_q : std::min<std::int64_t>(1, shape.num_heads_q);
    refuse_too_many_rows();
    const std::int64_t tile = plan_.options.tile_q;
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      const TokenRange tokens = chunks_[i].tokens;
      for (std::int64_t begin = tokens.begin; begin < tokens.end; begin += tile) {
        rows.tiles.push_back({begin, std::min(begin + tile, tokens.end)});
        chunk_of_tile_.push_back(i);
      }
    }
  }

  void refuse_too_many_rows() const {
    const RowTiles& rows = plan_.row_tiles;
    const std::int64_t maps =
        std::max<std::int64_t>(rows.num_mapped_sequences * rows.num_mapped_heads, 1);
    const std::int64_t tiles =
        plan_.shape.seqlen / std::min(plan_.options.tile_q, plan_.options.chunk);
    if (tiles <= kMostRows / maps) return;
    TensorChecks(kWhere).refuse(
        fmt::format("{} rows of tiles in {} sequences and heads are to be mapped; expected at most "
                    "{} in all, take a larger "
                    "tile_q or chunk",
                    tiles, maps, kMostRows));
  }

  void map_rows() {
    RowTiles& rows = plan_.row_tiles;
    const mask::BlockMapper mapper(mask_, rows.tile_kv);
    std::vector<TileRun> runs;
    for (std::int64_t sequence = 0; sequence < rows.num_mapped_sequences; ++sequence) {
      for (std::int64_t head = 0; head < rows.num_mapped_heads; ++head) {
        mask::TileRow row{.batch = sequence,
                          .q_head_begin = head,
                          .q_head_end = head + 1,
                          .kv_head = head / plan_.shape.group(),
                          .seqlen_q = plan_.shape.seqlen,
                          .seqlen_kv = plan_.shape.seqlen};
        for (std::size_t i = 0; i < rows.tiles.size(); ++i) {
          if (i % kRowsOfHull == 0) find_hull(mapper, i, row);
          row.q_begin = rows.tiles[i].begin;
          row.q_end = rows.tiles[i].end;
          mapper.row(row, runs);
          rows.add(runs);
        }
      }
    }
  }

  /// Tiles that neighbouring rows see, from `first` on.
  void find_hull(const mask::BlockMapper& mapper, std::size_t first, mask::TileRow& row) const {
    const std::vector<TokenRange>& tiles = plan_.row_tiles.tiles;
    row.tiles_begin = 0;
    row.tiles_end = std::numeric_limits<std::int64_t>::max();
    row.q_begin = tiles[first].begin;
    row.q_end = tiles[std::min(first + kRowsOfHull, tiles.size()) - 1].end;
    const mask::Span hull = mapper.hull(row);
    row.tiles_begin = hull.begin;
    row.tiles_end = hull.end;
  }

  /// visit(tile, sequence, head, runs) of every row of every map.
  template <typename Visit>
  void for_each_row(const Visit& visit) const {
    const RowTiles& rows = plan_.row_tiles;
    for (std::int64_t sequence = 0; sequence < rows.num_mapped_sequences; ++sequence) {
      for (std::int64_t head = 0; head < rows.num_mapped_heads; ++head) {
        for (std::size_t tile = 0; tile < rows.tiles.size(); ++tile)
          visit(tile, head, rows.runs(tile, sequence, head));
      }
    }
  }

  TileCount count(std::span<const TileRun> runs) const {
    TileCount count;
    for (const TileRun& run : runs)
      (run.kind == TileKind::full ? count.full : count.partial) += run.end - run.begin;
    const std::int64_t tile_kv = plan_.row_tiles.tile_kv;
    count.empty = (plan_.shape.seqlen + tile_kv - 1) / tile_kv - count.full - count.partial;
    return count;
  }

  void deal() {
    if (num_groups() == 1 || chunks_.empty()) {
      plan_.dealing = "contiguous";
      return;
    }
    if (is_zigzag_) {
      plan_.dealing = "zigzag";
      give(parallel::deal_zigzag(num_groups()));
      return;
    }
    for_each_row([this](std::size_t tile, std::int64_t, std::span<const TileRun> runs) {
      chunks_[chunk_of_tile_[tile]].work += parallel::work_of(count(runs));
    });
    std::vector<std::int64_t> works, base(static_cast<std::size_t>(num_groups()));
    for (const Chunk& chunk : chunks_) {
      if (chunk.is_rest) {
        base[static_cast<std::size_t>(chunk.group)] += chunk.work;
      } else {
        works.push_back(chunk.work);
      }
    }
    deal(works, base);
  }

  /// Of each chunk that is dealt those whose keys it sees; none where these are too many to be weighed.
  std::vector<std::vector<std::size_t>> seen_chunks() const {
    std::vector<std::size_t> dealt(chunks_.size());  // place among chunks that are no rests
    std::size_t num_dealt = 0;
    for (std::size_t i = 0; i < chunks_.size(); ++i)
      dealt[i] = chunks_[i].is_rest ? num_dealt : num_dealt++;
    std::vector<std::vector<std::size_t>> seen(num_dealt);
    const std::size_t most = kMostSeenChunks * num_dealt;
    std::size_t found = 0;  // each as often as rows of tiles see it
    for_each_row([&](std::size_t tile, std::int64_t, std::span<const TileRun> runs) {
      const std::size_t row_chunk = chunk_of_tile_[tile];
      if (chunks_[row_chunk].is_rest || found > most) return;
      for (const TileRun& run : runs) {
        const std::int64_t begin = run.begin * plan_.row_tiles.tile_kv;
        const std::int64_t end = run.end * plan_.row_tiles.tile_kv;
        const auto first = std::ranges::upper_bound(
            chunks_, begin, {}, [](const Chunk& chunk) { return chunk.tokens.end; });
        for (auto at = first; at != chunks_.end() && at->tokens.begin < end; ++at) {
          if (at->is_rest) continue;
          seen[dealt[row_chunk]].push_back(dealt[static_cast<std::size_t>(at - chunks_.begin())]);
          ++found;
        }
      }
    });
    if (found > most) return {};
    for (std::vector<std::size_t>& chunks : seen) {
      std::ranges::sort(chunks);
      chunks.erase(std::ranges::unique(chunks).begin(), chunks.end());
    }
    return seen;
  }

  /// What lies together stays together where that is even, or where it is exchanged less.
  void deal(const std::vector<std::int64_t>& works, const std::vector<std::int64_t>& base) {
    const bool is_needed_only = plan_.scheme == ParallelScheme::needed_only;
    parallel::Chunks chunks{
        .works = works,
        .base = base,
        .tolerance = is_needed_only ? kContiguousTolerance : kBalancedTolerance};
    std::vector<int> groups = parallel::deal_contiguous(chunks);
    plan_.dealing = "contiguous";
    if (parallel::unevenness(chunks, groups) > chunks.tolerance) {
      plan_.dealing = is_needed_only ? "evened out" : "balanced";
      const auto seen = is_needed_only ? seen_chunks() : std::vector<std::vector<std::size_t>>{};
      chunks.seen = seen;
      groups =
          is_needed_only ? parallel::even_out(chunks, groups) : parallel::deal_balanced(chunks);
    }
    give(groups);
  }

  /// Groups of the chunks that are no rests.
  void give(const std::vector<int>& groups) {
    std::size_t next = 0;
    for (Chunk& chunk : chunks_) {
      if (!chunk.is_rest) chunk.group = groups[next++];
    }
  }

  void collect_rows() {
    std::vector<std::vector<TokenRange>> rows(static_cast<std::size_t>(num_groups()));
    for (const Chunk& chunk : chunks_)
      rows[static_cast<std::size_t>(chunk.group)].push_back(chunk.tokens);
    for (std::vector<TokenRange>& ranges : rows)
      plan_.group_rows.push_back(merged(std::move(ranges)));
    const std::int64_t tokens = plan_.shape.seqlen / plan_.world_size;
    for (int rank = 0; rank < plan_.world_size; ++rank) {
      const auto& of_group = plan_.group_rows[static_cast<std::size_t>(plan_.group(rank))];
      const std::int64_t begin = plan_.part(rank) * tokens;
      plan_.rank_tokens.push_back(slice(of_group, begin, begin + tokens));
    }
    for (const std::size_t chunk : chunk_of_tile_)
      plan_.group_of_tile.push_back(chunks_[chunk].group);
  }

  void collect_needs() {
    const std::int64_t tile = plan_.row_tiles.tile_kv, seqlen = plan_.shape.seqlen;
    std::vector<std::vector<TokenRange>> needs(static_cast<std::size_t>(num_groups()));
    for_each_row([&](std::size_t row, std::int64_t, std::span<const TileRun> runs) {
      auto& of_group = needs[static_cast<std::size_t>(plan_.group_of_tile[row])];
      for (const TileRun& run : runs)
        of_group.push_back({run.begin * tile, std::min(run.end * tile, seqlen)});
    });
    for (std::vector<TokenRange>& ranges : needs)
      plan_.group_needs.push_back(merged(std::move(ranges)));
    if (plan_.scheme == ParallelScheme::needed_only)
      plan_.returned_tokens = parallel::returned_tokens(plan_.group_needs, plan_.rank_tokens);
  }

  void count_tiles() {
    const RowTiles& rows = plan_.row_tiles;
    const auto heads = static_cast<std::size_t>(rows.num_mapped_heads);
    std::vector<TileCount> of_groups(static_cast<std::size_t>(num_groups()) * heads);
    const auto add = [](TileCount& sum, const TileCount& part, std::int64_t times) {
      sum.empty += part.empty * times;
      sum.partial += part.partial * times;
      sum.full += part.full * times;
    };
    for_each_row([&](std::size_t tile, std::int64_t head, std::span<const TileRun> runs) {
      const auto group = static_cast<std::size_t>(plan_.group_of_tile[tile]);
      add(of_groups[group * heads + static_cast<std::size_t>(head)], count(runs), 1);
    });
    const std::int64_t alike_sequences =
        rows.num_mapped_sequences == 0 ? 0 : plan_.shape.batch / rows.num_mapped_sequences;
    for (int rank = 0; rank < plan_.world_size; ++rank) {
      const TileCount* of_group = &of_groups[static_cast<std::size_t>(plan_.group(rank)) * heads];
      TileCount sum;
      const HeadRange q_heads = parallel::q_heads_of(plan_, rank);
      for (std::int64_t head = q_heads.begin; head < q_heads.end; ++head)
        add(sum, of_group[rows.mapped_head(head)], alike_sequences);
      plan_.tiles.push_back(sum);
    }
  }

  const MaskMod& mask_;
  ShardPlan::Impl plan_;
  bool is_zigzag_ = false;
  std::vector<Chunk> chunks_;  // ascending
  std::vector<std::size_t> chunk_of_tile_;
};

void check_index(std::string_view name, std::int64_t index, std::int64_t count) {
  if (index >= 0 && index < count) return;
  invalid("ShardPlan", fmt::format("{} is {}; expected 0 to {}", name, index, count - 1));
}

std::size_t checked_rank(const ShardPlan::Impl& plan, int rank) {
  check_index("rank", rank, plan.world_size);
  return static_cast<std::size_t>(rank);
}

std::size_t checked_group(const ShardPlan::Impl& plan, int rank) {
  checked_rank(plan, rank);
  return static_cast<std::size_t>(plan.group(rank));
}

}  // namespace

parallel::Shape parallel::shape_of(const ForwardProblem& problem) {
  return {.batch = problem.num_sequences,
          .seqlen = problem.seqlen_q,
          .num_heads_q = problem.num_heads_q,
          .num_heads_kv = problem.num_heads_kv,
          .head_dim_qk = problem.head_dim_qk,
          .head_dim_v = problem.head_dim_v,
          .element_bytes = static_cast<std::int64_t>(size_bytes(problem.problem.q.dtype))};
}

void parallel::check_sequence_and_head(const Shape& shape, std::int64_t sequence,
                                       std::int64_t q_head) {
  check_index("sequence", sequence, shape.batch);
  check_index("q_head", q_head, shape.num_heads_q);
}

HeadRange parallel::q_heads_of(const ShardPlan::Impl& plan, int rank) {
  const std::int64_t heads = plan.shape.num_heads_q / plan.head_ranks;
  return {plan.part(rank) * heads, (plan.part(rank) + 1) * heads};
}

HeadRange parallel::kv_heads_of(const ShardPlan::Impl& plan, int rank) {
  const HeadRange heads = q_heads_of(plan, rank);
  const std::int64_t group = plan.shape.group();
  return {heads.begin / group, (heads.end + group - 1) / group};
}

ShardPlan context_parallel_plan(const Problem& problem, int world_size, ParallelScheme scheme,
                                const ShardOptions& options) {
  const FloatEnvironment environment;
  return ShardPlan(std::make_shared<const ShardPlan::Impl>(
      Planner(problem, world_size, scheme, options).make()));
}

ParallelScheme ShardPlan::scheme() const { return impl_->scheme; }
int ShardPlan::world_size() const { return impl_->world_size; }
std::int64_t ShardPlan::seqlen() const { return impl_->shape.seqlen; }
std::string_view ShardPlan::dealing() const { return impl_->dealing; }

std::span<const TokenRange> ShardPlan::tokens(int rank) const {
  return impl_->rank_tokens[checked_rank(*impl_, rank)];
}
std::span<const TokenRange> ShardPlan::rows(int rank) const {
  return impl_->group_rows[checked_group(*impl_, rank)];
}
std::span<const TokenRange> ShardPlan::needed_kv(int rank) const {
  return impl_->group_needs[checked_group(*impl_, rank)];
}
HeadRange ShardPlan::q_heads(int rank) const {
  checked_rank(*impl_, rank);
  return parallel::q_heads_of(*impl_, rank);
}
HeadRange ShardPlan::kv_heads(int rank) const {
  checked_rank(*impl_, rank);
  return parallel::kv_heads_of(*impl_, rank);
}

std::vector<RowTile> ShardPlan::row_tiles(int rank, std::int64_t sequence,
                                          std::int64_t q_head) const {
  const std::size_t group = checked_group(*impl_, rank);
  const RowTiles& rows = impl_->row_tiles;
  parallel::check_sequence_and_head(impl_->shape, sequence, q_head);
  std::vector<RowTile> result;
  for (std::size_t tile = 0; tile < rows.tiles.size(); ++tile) {
    if (static_cast<std::size_t>(impl_->group_of_tile[tile]) != group) continue;
    result.push_back({rows.tiles[tile],
                      rows.runs(tile, rows.mapped_sequence(sequence), rows.mapped_head(q_head))});
  }
  return result;
}

std::vector<Transfer> ShardPlan::transfers(int rank) const {
  checked_rank(*impl_, rank);
  return parallel::transfers(*impl_, rank);
}

RankLoad ShardPlan::load(int rank) const {
  checked_rank(*impl_, rank);
  return parallel::load(*impl_, rank);
}

double ShardPlan::balance() const {
  std::int64_t sum = 0, most = 0;
  for (const TileCount& tiles : impl_->tiles) {
    const std::int64_t work = parallel::work_of(tiles);
    sum += work;
    most = std::max(most, work);
  }
  if (sum == 0) return 1;
  return static_cast<double>(most) * impl_->world_size / static_cast<double>(sum);
}

std::vector<std::int64_t> ShardPlan::permutation() const {
  std::vector<std::int64_t> result;
  result.reserve(static_cast<std::size_t>(seqlen()));
  for (const std::vector<TokenRange>& ranges : impl_->rank_tokens) {
    for (const TokenRange& range : ranges) {
      for (std::int64_t token = range.begin; token < range.end; ++token) result.push_back(token);
    }
  }
  return result;
}

}  // namespace fovea
