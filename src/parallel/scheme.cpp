#include "parallel/scheme.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace fovea {
namespace {

constexpr std::array<std::string_view, kNumParallelSchemes> kNames = {
    "all_gather", "head_group_all_gather", "ring", "ulysses", "hybrid", "needed_only"};

}  // namespace

std::string_view name(ParallelScheme scheme) { return kNames[static_cast<std::size_t>(scheme)]; }

std::optional<ParallelScheme> parse_parallel_scheme(std::string_view name) {
  const auto* const found = std::ranges::find(kNames, name);
  if (found == kNames.end()) return std::nullopt;
  return static_cast<ParallelScheme>(found - kNames.begin());
}

namespace parallel {
namespace {

constexpr std::int64_t kMostHeadParts = 4;  // more hide little more and make small calls

/// Ranks may share a kv head (each then has a copy), query heads they may not.
bool can_share_heads(const Shape& shape, int ranks) {
  return shape.num_heads_q % ranks == 0 &&
         (shape.num_heads_kv % ranks == 0 || ranks % shape.num_heads_kv == 0);
}

std::string heads_in_words(const Shape& shape) {
  return fmt::format("{} query and {} kv heads", shape.num_heads_q, shape.num_heads_kv);
}

HeadDivision ulysses(const Shape& shape, int world_size) {
  if (can_share_heads(shape, world_size)) return {.head_ranks = world_size};
  return {.refusal = fmt::format(
              "{} do not divide among {} ranks; expected a multiple of the ranks (fewer kv heads: "
              "a divisor), or take all_gather",
              heads_in_words(shape), world_size)};
}

HeadDivision hybrid(const Shape& shape, int world_size, int asked) {
  const auto fits = [&](int ranks) {
    return ranks > 1 && ranks < world_size && world_size % ranks == 0;
  };
  if (asked != 0) {
    if (fits(asked) && can_share_heads(shape, asked)) return {.head_ranks = asked};
    return {
        .refusal = fmt::format(
            "head_ranks is {} for {} ranks, {}; expected a divisor of the ranks, above 1 and below "
            "them, that divides the heads",
            asked, world_size, heads_in_words(shape))};
  }
  for (int ranks = world_size - 1; ranks > 1; --ranks) {
    if (fits(ranks) && shape.num_heads_q % ranks == 0 && shape.num_heads_kv % ranks == 0)
      return {.head_ranks = ranks};
  }
  return {.refusal = fmt::format("no part of {} ranks divides {}; take ring or all_gather",
                                 world_size, heads_in_words(shape))};
}

HeadDivision head_groups(const Shape& shape, std::int64_t asked) {
  const std::int64_t heads = shape.num_heads_kv;
  if (asked != 0) {
    if (heads % asked == 0) return {.head_parts = asked};
    return {.refusal = fmt::format("head_parts is {}; expected a divisor of num_heads_kv, {}",
                                   asked, heads)};
  }
  for (std::int64_t parts = std::min(heads, kMostHeadParts); parts > 1; --parts) {
    if (heads % parts == 0) return {.head_parts = parts};
  }
  return {
      .refusal = fmt::format(
          "num_heads_kv is {}, which has no divisor from 2 to {}; expected one, set head_parts or "
          "take all_gather",
          heads, kMostHeadParts)};
}

}  // namespace

HeadDivision divide_heads(const Shape& shape, int world_size, ParallelScheme scheme,
                          const ShardOptions& options) {
  switch (scheme) {
    case ParallelScheme::ulysses:
      return ulysses(shape, world_size);
    case ParallelScheme::hybrid:
      return hybrid(shape, world_size, options.head_ranks);
    case ParallelScheme::head_group_all_gather:
      return head_groups(shape, options.head_parts);
    case ParallelScheme::all_gather:
    case ParallelScheme::ring:
    case ParallelScheme::needed_only:
      break;
  }
  return {};
}

}  // namespace parallel
}  // namespace fovea
