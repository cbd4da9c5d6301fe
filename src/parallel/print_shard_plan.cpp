// A plan as a page and as JSON.
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "parallel/shard_plan.hpp"
#include "parallel/words.hpp"
#include "plan/json.hpp"

namespace fovea {
namespace {

using parallel::bytes_in_words;

constexpr std::size_t kMostShownRanges = 3;
constexpr int kMostShownRanks = 64;

std::string in_words(std::span<const TokenRange> ranges) {
  std::string text;
  for (const TokenRange& range : ranges.first(std::min(ranges.size(), kMostShownRanges)))
    text += fmt::format("{}{}..{}", text.empty() ? "" : " ", range.begin, range.end);
  if (ranges.size() > kMostShownRanges)
    text += fmt::format(" and {} more", ranges.size() - kMostShownRanges);
  return text.empty() ? "none" : text;
}

std::string json_ranges(std::span<const TokenRange> ranges) {
  return json_list(ranges, [](const TokenRange& range) {
    return fmt::format("[{}, {}]", range.begin, range.end);
  });
}

std::string json_heads(const HeadRange& heads) {
  return fmt::format("[{}, {}]", heads.begin, heads.end);
}

std::string json_rank(const ShardPlan& plan, int rank) {
  const RankLoad load = plan.load(rank);
  const std::string tiles = JsonObject()
                                .number("full", load.tiles.full)
                                .number("partial", load.tiles.partial)
                                .number("empty", load.tiles.empty)
                                .done();
  return JsonObject()
      .number("rank", rank)
      .json("tokens", json_ranges(plan.tokens(rank)))
      .json("rows", json_ranges(plan.rows(rank)))
      .json("q_heads", json_heads(plan.q_heads(rank)))
      .json("kv_heads", json_heads(plan.kv_heads(rank)))
      .json("needed_kv", json_ranges(plan.needed_kv(rank)))
      .json("tiles", tiles)
      .json("work", fmt::format("{:.1f}", load.work))
      .number("forward_bytes", load.forward_bytes)
      .number("backward_bytes", load.backward_bytes)
      .number("kv_bytes", load.kv_bytes)
      .done();
}

}  // namespace

std::string ShardPlan::print() const {
  const Impl& plan = *impl_;
  std::string text = fmt::format(
      "shards   {} over {} ranks, {}\n"
      "tokens   {}, {} a rank in chunks of {}\n"
      "balance  {:.3f}: work of the busiest rank over the mean, by tiles of {} x {}\n",
      name(plan.scheme), plan.world_size, plan.dealing, plan.shape.seqlen,
      plan.shape.seqlen / plan.world_size, plan.options.chunk, balance(), plan.options.tile_q,
      plan.options.tile_kv);
  if (plan.head_ranks > 1) {
    text += fmt::format("heads    divided among {} ranks of each group\n", plan.head_ranks);
  } else if (plan.options.head_parts > 1) {
    text += fmt::format("heads    gathered in {} parts\n", plan.options.head_parts);
  }
  text += fmt::format("{:>4}  {:>12} {:>12} {:>12} {:>12} {:>12}  {}\n", "rank", "work", "received",
                      "in backward", "keys, values", "needed keys", "tokens");
  for (int rank = 0; rank < std::min(plan.world_size, kMostShownRanks); ++rank) {
    const RankLoad load = this->load(rank);
    text += fmt::format("{:>4}  {:>12.1f} {:>12} {:>12} {:>12} {:>12}  {}\n", rank, load.work,
                        bytes_in_words(load.forward_bytes), bytes_in_words(load.backward_bytes),
                        bytes_in_words(load.kv_bytes), parallel::num_tokens(needed_kv(rank)),
                        in_words(tokens(rank)));
  }
  if (plan.world_size > kMostShownRanks)
    text += fmt::format("and {} ranks more\n", plan.world_size - kMostShownRanks);
  return text;
}

std::string ShardPlan::json() const {
  const Impl& plan = *impl_;
  std::vector<int> ranks;
  for (int rank = 0; rank < plan.world_size; ++rank) ranks.push_back(rank);
  return JsonObject()
      .text("scheme", name(plan.scheme))
      .number("world_size", plan.world_size)
      .number("seqlen", plan.shape.seqlen)
      .number("num_heads_q", plan.shape.num_heads_q)
      .number("num_heads_kv", plan.shape.num_heads_kv)
      .text("dealing", plan.dealing)
      .number("chunk", plan.options.chunk)
      .number("tile_q", plan.options.tile_q)
      .number("tile_kv", plan.options.tile_kv)
      .number("head_ranks", plan.head_ranks)
      .number("head_parts", plan.options.head_parts)
      .json("balance", fmt::format("{:.6f}", balance()))
      .json("ranks", json_list(ranks, [this](int rank) { return json_rank(*this, rank); }))
      .done();
}

}  // namespace fovea
