// Plans against dense masks written out element by element: what ranks compute, need and receive.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "fovea/parallel.hpp"

#include "support/long_run.hpp"

namespace fovea {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

using Ids = std::vector<std::int32_t>;

struct Sizes {
  std::int64_t batch = 1, seqlen = 96;
  std::int64_t num_heads_q = 8, num_heads_kv = 8;
};

Problem problem_of(const Sizes& sizes, const MaskMod& mask, Dtype dtype = Dtype::bf16) {
  const auto spec = [&](std::int64_t heads, std::int64_t head_dim) {
    return make_spec(dtype, std::array{sizes.batch, sizes.seqlen, heads, head_dim});
  };
  return {.q = spec(sizes.num_heads_q, 16),
          .k = spec(sizes.num_heads_kv, 16),
          .v = spec(sizes.num_heads_kv, 8),
          .mask = mask};
}

ShardOptions small_tiles() { return {.tile_q = 4, .tile_kv = 4}; }

ParallelScheme scheme_at(int i) { return static_cast<ParallelScheme>(i); }

bool holds(std::span<const TokenRange> ranges, std::int64_t token) {
  return std::ranges::any_of(
      ranges, [&](const TokenRange& r) { return r.begin <= token && token < r.end; });
}

std::int64_t size_of(std::span<const TokenRange> ranges) {
  std::int64_t sum = 0;
  for (const TokenRange& range : ranges) sum += range.size();
  return sum;
}

/// The mask itself, [batch, heads, seqlen, seqlen].
class DenseMask {
 public:
  DenseMask(const MaskMod& mask, const Sizes& sizes)
      : sizes_(sizes),
        visible_(static_cast<std::size_t>(sizes.batch * sizes.num_heads_q * sizes.seqlen *
                                          sizes.seqlen)) {
    materialize_mask(
        {.mask = mask,
         .batch = sizes.batch,
         .num_heads_q = sizes.num_heads_q,
         .num_heads_kv = sizes.num_heads_kv,
         .seqlen_q = sizes.seqlen,
         .seqlen_kv = sizes.seqlen},
        view(visible_.data(), {sizes.batch, sizes.num_heads_q, sizes.seqlen, sizes.seqlen}));
  }
  bool at(std::int64_t batch, std::int64_t head, std::int64_t q, std::int64_t kv) const {
    const std::int64_t row = (batch * sizes_.num_heads_q + head) * sizes_.seqlen + q;
    return visible_[static_cast<std::size_t>(row * sizes_.seqlen + kv)] != 0;
  }

 private:
  Sizes sizes_;
  std::vector<std::uint8_t> visible_;
};

struct Masks {
  Ids documents_ids = Ids(2 * 96), far_ids = Ids(96);
  std::vector<std::pair<std::string, MaskMod>> all;

  Masks() {
    for (std::size_t i = 0; i < documents_ids.size(); ++i) {
      const std::size_t token = i % 96;
      documents_ids[i] =
          token >= 90 ? -1 : static_cast<std::int32_t>(token * token / 1000 + i / 96);
    }
    const MaskMod documents_mask = documents(view(documents_ids.data(), {2, 96}));
    all = {{"none", MaskMod()},
           {"causal", causal()},
           {"window", window(5, 0)},
           {"documents", documents_mask && causal()},
           {"heads", parse_mask_mod("kv_idx <= q_idx && (q_head % 2 == 0 || kv_idx > q_idx - 9)")},
           {"nothing", parse_mask_mod("kv_idx < 0")}};
  }
};

/// runs(problem, plan, mask, sizes) for every scheme, mask, head count and number of ranks that go together.
template <typename Visit>
void for_each_plan(const Visit& visit) {
  const Masks masks;
  for (const auto& [name, mask] : masks.all) {
    for (const std::int64_t num_heads_kv : {8, 2, 1}) {
      const Sizes sizes{.batch = 2, .num_heads_kv = num_heads_kv};
      const Problem problem = problem_of(sizes, mask);
      for (const int world_size : {1, 2, 3, 4, 8}) {
        for (const SchemeForecast& forecast :
             forecast_context_parallel(problem, world_size, small_tiles())) {
          if (!forecast.refusal.empty()) continue;
          const ShardPlan plan =
              context_parallel_plan(problem, world_size, forecast.scheme, small_tiles());
          SCOPED_TRACE(name + ", " + std::to_string(num_heads_kv) + " kv heads, " + plan.print());
          visit(plan, mask, sizes);
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TEST(ShardPlan, EveryTokenIsHeldOnceAndEveryHeadOfEveryRowComputedOnce) {
  for_each_plan([](const ShardPlan& plan, const MaskMod&, const Sizes& sizes) {
    std::vector<std::int64_t> permutation = plan.permutation();
    std::ranges::sort(permutation);
    ASSERT_THAT(permutation, SizeIs(96));
    for (std::int64_t i = 0; i < 96; ++i) ASSERT_EQ(permutation[static_cast<std::size_t>(i)], i);
    std::map<std::pair<std::int64_t, std::int64_t>, int> times;
    for (int rank = 0; rank < plan.world_size(); ++rank) {
      std::int64_t held = 0, before = -1;
      for (const TokenRange& range : plan.tokens(rank)) {
        ASSERT_GT(range.begin, before);
        before = range.end;
        held += range.size();
      }
      ASSERT_EQ(held, 96 / plan.world_size());
      for (const TokenRange& range : plan.rows(rank)) {
        for (std::int64_t row = range.begin; row < range.end; ++row) {
          const HeadRange heads = plan.q_heads(rank);
          for (std::int64_t head = heads.begin; head < heads.end; ++head) ++times[{row, head}];
        }
      }
    }
    ASSERT_THAT(times, SizeIs(static_cast<std::size_t>(96 * sizes.num_heads_q)));
    for (const auto& [place, count] : times) ASSERT_EQ(count, 1);
  });
}

TEST(ShardPlan, RowTilesAreTheMaskOfTheRanksRowsAndNeedsCoverIt) {
  for_each_plan([](const ShardPlan& plan, const MaskMod& mask, const Sizes& sizes) {
    const DenseMask dense(mask, sizes);
    for (int rank = 0; rank < plan.world_size(); ++rank) {
      std::vector<std::int64_t> rows;
      for (const RowTile& tile : plan.row_tiles(rank, 1, plan.q_heads(rank).begin)) {
        const std::int64_t head = plan.q_heads(rank).begin;
        for (std::int64_t q = tile.rows.begin; q < tile.rows.end; ++q) {
          rows.push_back(q);
          ASSERT_TRUE(holds(plan.rows(rank), q));
          for (std::int64_t kv = 0; kv < sizes.seqlen; ++kv) {
            const auto run = std::ranges::find_if(
                tile.runs, [&](const TileRun& r) { return r.begin <= kv / 4 && kv / 4 < r.end; });
            const bool is_visible = dense.at(1, head, q, kv);
            if (is_visible) {
              ASSERT_NE(run, tile.runs.end()) << q << " " << kv;
              ASSERT_TRUE(holds(plan.needed_kv(rank), kv)) << q << " " << kv;
            } else {
              ASSERT_TRUE(run == tile.runs.end() || run->kind == TileKind::partial)
                  << q << " " << kv;
            }
          }
        }
      }
      ASSERT_EQ(static_cast<std::int64_t>(rows.size()), size_of(plan.rows(rank)));
    }
  });
}

/// (tensor, token, head) that a rank has.
using Holding = std::set<std::tuple<Transfer::Tensor, std::int64_t, std::int64_t>>;

void add(Holding& holding, Transfer::Tensor tensor, std::span<const TokenRange> tokens,
         HeadRange heads) {
  for (const TokenRange& range : tokens) {
    for (std::int64_t token = range.begin; token < range.end; ++token) {
      for (std::int64_t head = heads.begin; head < heads.end; ++head)
        holding.emplace(tensor, token, head);
    }
  }
}

/// Runs a forward pass's exchange and holds it to its promises: nobody sends what it does not have, every rank has q
/// and the keys that its rows see when it computes, and all outputs of its own tokens at the end.
void exchange(const ShardPlan& plan, const Sizes& sizes) {
  using Tensor = Transfer::Tensor;
  const auto world = static_cast<std::size_t>(plan.world_size());
  std::vector<Holding> holdings(world);
  int last_step = 0;
  for (int rank = 0; rank < plan.world_size(); ++rank) {
    Holding& own = holdings[static_cast<std::size_t>(rank)];
    add(own, Tensor::q, plan.tokens(rank), {0, sizes.num_heads_q});
    add(own, Tensor::kv, plan.tokens(rank), {0, sizes.num_heads_kv});
    add(own, Tensor::out, plan.rows(rank), plan.q_heads(rank));
    for (const Transfer& transfer : plan.transfers(rank))
      last_step = std::max(last_step, transfer.step);
  }
  for (int step = 0; step <= last_step; ++step) {
    const std::vector<Holding> before = holdings;
    for (std::size_t rank = 0; rank < world; ++rank) {
      for (const Transfer& transfer : plan.transfers(static_cast<int>(rank))) {
        if (transfer.step != step) continue;
        Holding received;
        add(received, transfer.tensor, std::array{transfer.tokens}, transfer.heads);
        for (const auto& part : received) {
          ASSERT_TRUE(before[static_cast<std::size_t>(transfer.from)].contains(part))
              << "rank " << transfer.from << " sends what it does not have, step " << step;
          ASSERT_TRUE(holdings[rank].insert(part).second) << "rank " << rank << " receives twice";
        }
      }
    }
  }
  for (int rank = 0; rank < plan.world_size(); ++rank) {
    Holding wanted;
    add(wanted, Tensor::q, plan.rows(rank), plan.q_heads(rank));
    add(wanted, Tensor::kv, plan.needed_kv(rank), plan.kv_heads(rank));
    add(wanted, Tensor::out, plan.tokens(rank), {0, sizes.num_heads_q});
    ASSERT_TRUE(std::ranges::includes(holdings[static_cast<std::size_t>(rank)], wanted))
        << "rank " << rank;
  }
}

TEST(ShardPlan, TransfersBringWhatIsNeededFromThoseWhoHaveIt) {
  for_each_plan(
      [](const ShardPlan& plan, const MaskMod&, const Sizes& sizes) { exchange(plan, sizes); });
}

TEST(ShardPlan, ForwardBytesAreThoseOfTheTransfers) {
  for_each_plan([](const ShardPlan& plan, const MaskMod&, const Sizes& sizes) {
    for (int rank = 0; rank < plan.world_size(); ++rank) {
      std::int64_t bytes = 0;
      for (const Transfer& transfer : plan.transfers(rank)) {
        const std::int64_t head_dims = transfer.tensor == Transfer::Tensor::kv  ? 16 + 8
                                       : transfer.tensor == Transfer::Tensor::q ? 16
                                                                                : 8;
        bytes += sizes.batch * transfer.tokens.size() * transfer.heads.size() * head_dims * 2;
      }
      ASSERT_EQ(plan.load(rank).forward_bytes, bytes) << "rank " << rank;
    }
  });
}

TEST(ShardPlan, TilesOfAllRanksAreThoseOfTheWholeMap) {
  for_each_plan([](const ShardPlan& plan, const MaskMod& mask, const Sizes& sizes) {
    const std::int64_t tokens = 96 / plan.world_size();
    if (plan.dealing() == "zigzag" || tokens < 16) return;  // chunks are no whole tiles
    const TileCount whole = block_map({.mask = mask,
                                       .batch = sizes.batch,
                                       .num_heads_q = sizes.num_heads_q,
                                       .num_heads_kv = sizes.num_heads_kv,
                                       .seqlen_q = sizes.seqlen,
                                       .seqlen_kv = sizes.seqlen,
                                       .tile_q = 4,
                                       .tile_kv = 4})
                                .count();
    TileCount sum;
    for (int rank = 0; rank < plan.world_size(); ++rank) {
      const TileCount tiles = plan.load(rank).tiles;
      sum.full += tiles.full;
      sum.partial += tiles.partial;
      sum.empty += tiles.empty;
    }
    ASSERT_EQ(std::tuple(sum.full, sum.partial, sum.empty),
              std::tuple(whole.full, whole.partial, whole.empty));
  });
}

TEST(ShardPlan, OneCausalSequenceIsDealtInZigzag) {
  const Problem problem = problem_of({.seqlen = 4096}, causal());
  const ShardPlan plan = context_parallel_plan(problem, 4);
  EXPECT_EQ(plan.dealing(), "zigzag");
  EXPECT_THAT(plan.tokens(1), ElementsAre(TokenRange{512, 1024}, TokenRange{3072, 3584}));
  EXPECT_EQ(plan.balance(), 1.0);
  // The last rank's chunks meet in the middle.
  EXPECT_THAT(plan.tokens(3), ElementsAre(TokenRange{1536, 2560}));
}

TEST(ShardPlan, BytesAreTheFormulas) {
  // 1024 tokens, 4 ranks, 8 query and 4 kv heads of 16 and 8, bf16: keys and values of a token and head are 48 bytes.
  const Sizes sizes{.batch = 1, .seqlen = 1024, .num_heads_q = 8, .num_heads_kv = 4};
  const Problem problem = problem_of(sizes, causal());
  const auto load = [&](ParallelScheme scheme, ShardOptions options = {}) {
    return context_parallel_plan(problem, 4, scheme, options).load(2);
  };
  const std::int64_t all_kv = std::int64_t{1024} * 4 * 48;

  const RankLoad gathered = load(ParallelScheme::all_gather);
  EXPECT_EQ(gathered.forward_bytes, all_kv * 3 / 4);
  EXPECT_EQ(gathered.backward_bytes, all_kv * 3 / 4 + 2 * all_kv * 3 / 4);  // sums in f32
  EXPECT_EQ(gathered.kv_bytes, all_kv);

  const RankLoad by_heads = load(ParallelScheme::head_group_all_gather);
  EXPECT_EQ(by_heads.forward_bytes, gathered.forward_bytes);
  EXPECT_EQ(by_heads.kv_bytes, all_kv * 2 / 4);

  const RankLoad ring = load(ParallelScheme::ring);
  EXPECT_EQ(ring.forward_bytes, all_kv * 3 / 4);
  EXPECT_EQ(ring.backward_bytes, all_kv * 3 / 4 + 2 * all_kv);
  EXPECT_EQ(ring.kv_bytes, all_kv * 2 / 4);

  // 768 tokens of others, 2 query heads and 1 kv head; back come 6 heads of 256 tokens.
  const RankLoad ulysses = load(ParallelScheme::ulysses);
  EXPECT_EQ(ulysses.forward_bytes, 768 * (2 * 32 + 48) + 256 * 6 * 16);
  EXPECT_EQ(ulysses.backward_bytes, 768 * 2 * 16 + 256 * (6 * 32 + 3 * 48));
  EXPECT_EQ(ulysses.kv_bytes, all_kv / 4);

  // Two groups of two ranks: 256 tokens of the partner, 4 and 2 heads; 512 tokens of the other group.
  const RankLoad hybrid = load(ParallelScheme::hybrid);
  EXPECT_EQ(hybrid.forward_bytes, 256 * (4 * 32 + 2 * 48) + 256 * 4 * 16 + 512 * 2 * 48);
  EXPECT_EQ(hybrid.backward_bytes,
            256 * 4 * 16 + 256 * (4 * 32 + 2 * 48) + 512 * 2 * 48 + 1024 * 2 * 96);
  EXPECT_EQ(hybrid.kv_bytes, 2 * 512 * 2 * 48);
}

TEST(ShardPlan, ShortWindowsNeedTheirNeighboursHaloAlone) {
  const Sizes sizes{.batch = 1, .seqlen = 16384, .num_heads_q = 4, .num_heads_kv = 4};
  const ShardPlan plan =
      context_parallel_plan(problem_of(sizes, window(256, 0)), 8, ParallelScheme::needed_only);
  EXPECT_EQ(plan.dealing(), "contiguous");
  EXPECT_THAT(plan.tokens(3), ElementsAre(TokenRange{3 * 2048, 4 * 2048}));
  EXPECT_THAT(plan.transfers(3), ElementsAre(Transfer{.step = 0,
                                                      .from = 2,
                                                      .tensor = Transfer::Tensor::kv,
                                                      .tokens = {3 * 2048 - 256, 3 * 2048},
                                                      .heads = {0, 4}}));
  EXPECT_EQ(plan.load(3).forward_bytes, 256 * 4 * 48);
  // Sums of the gradients of its own last 256 keys come back from rank 4.
  EXPECT_EQ(plan.load(3).backward_bytes, 256 * 4 * 48 + 256 * 4 * 96);
  EXPECT_LE(plan.balance(), 1.02);
}

TEST(ShardPlan, DocumentsOnOneRankNeedNoExchange) {
  Ids ids(4096);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i / 256);
  const Sizes sizes{.batch = 1, .seqlen = 4096};
  const ShardPlan plan =
      context_parallel_plan(problem_of(sizes, documents(view(ids.data(), {1, 4096})) && causal()),
                            8, ParallelScheme::needed_only);
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_THAT(plan.transfers(rank), SizeIs(0));
    EXPECT_EQ(plan.load(rank).forward_bytes + plan.load(rank).backward_bytes, 0);
  }
}

TEST(ShardPlan, ExchangesOfChunksAreThoseThatAreReceivedLeast) {
  // The first half has most of the work. Late rows of its first document would even that out, too, and see all of it:
  // 1,824 keys would be received.
  Ids ids;
  std::int32_t id = 0;
  for (const std::size_t length : {1078, 422, 1083, 119, 157, 203, 8, 219, 190, 331, 82, 204})
    ids.insert(ids.end(), length, id++);
  const Sizes sizes{.batch = 1, .seqlen = 4096, .num_heads_q = 4, .num_heads_kv = 4};
  const ShardPlan plan =
      context_parallel_plan(problem_of(sizes, documents(view(ids.data(), {1, 4096})) && causal()),
                            2, ParallelScheme::needed_only, {.tile_q = 16, .tile_kv = 16});
  EXPECT_EQ(plan.dealing(), "evened out");
  EXPECT_LE(plan.balance(), 1.02);
  EXPECT_LE(plan.load(0).forward_bytes + plan.load(1).forward_bytes, 600 * 4 * 48);
}

TEST(ShardPlan, ReturnedSumsAreCountedOverAllRanks) {
  // What all receive in a backward pass is what all need of others, in f32 and beside the keys themselves.
  for_each_plan([](const ShardPlan& plan, const MaskMod&, const Sizes&) {
    if (plan.scheme() != ParallelScheme::needed_only) return;
    std::int64_t forward = 0, backward = 0;
    for (int rank = 0; rank < plan.world_size(); ++rank) {
      forward += plan.load(rank).forward_bytes;
      backward += plan.load(rank).backward_bytes;
    }
    ASSERT_EQ(backward, forward + 2 * forward);
  });
}

/// Lengths from 64 tokens to a quarter of all, evenly in their logarithm.
Ids random_documents(std::mt19937_64& random, std::size_t num_tokens) {
  Ids ids;
  std::uniform_real_distribution<double> exponent(6,
                                                  std::log2(static_cast<double>(num_tokens)) - 2);
  for (std::int32_t id = 0; ids.size() < num_tokens; ++id) {
    const auto length = static_cast<std::size_t>(std::exp2(exponent(random)));
    ids.insert(ids.end(), std::min(length, num_tokens - ids.size()), id);
  }
  return ids;
}

// A thousand sets: FOVEA_TEST_LONG=10.
TEST(ShardPlan, RandomDocumentSetsAreEvenOver64Ranks) {
  std::mt19937_64 random(1 + testing::first_seed());
  constexpr std::size_t kTokens = 1 << 17;
  const Sizes sizes{.batch = 1, .seqlen = kTokens, .num_heads_q = 1, .num_heads_kv = 1};
  for (int i = 0; i < 100 * testing::times_longer(); ++i) {
    const Ids ids = random_documents(random, kTokens);
    const MaskMod mask =
        documents(view(ids.data(), {1, static_cast<std::int64_t>(kTokens)})) && causal();
    ASSERT_LE(context_parallel_plan(problem_of(sizes, mask), 64).balance(), 1.02) << "set " << i;
  }
}

TEST(ShardPlan, LengthsThatChunksDoNotDivideKeepEqualShares) {
  // 7 x 389 tokens: a prime share.
  const Sizes sizes{.batch = 1, .seqlen = 7 * 389};
  Ids ids(7 * 389);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i / 600);
  const MaskMod mask = documents(view(ids.data(), {1, 7 * 389})) && causal();
  const ShardPlan plan = context_parallel_plan(
      problem_of(sizes, mask), 7, ParallelScheme::all_gather, {.tile_q = 16, .tile_kv = 16});
  for (int rank = 0; rank < 7; ++rank) {
    EXPECT_EQ(size_of(plan.tokens(rank)), 389);
  }
  EXPECT_LE(plan.balance(), 1.1);
}

TEST(ShardPlan, EmptySequencesHavePlans) {
  const ShardPlan plan = context_parallel_plan(problem_of({.seqlen = 0}, causal()), 2);
  EXPECT_EQ(plan.balance(), 1.0);
  EXPECT_THAT(plan.tokens(1), SizeIs(0));
  EXPECT_THAT(plan.permutation(), SizeIs(0));
}

TEST(ShardPlan, PictureShowsWhoComputesWhat) {
  const ShardPlan plan = context_parallel_plan(problem_of({.seqlen = 16}, causal()), 2,
                                               ParallelScheme::all_gather, small_tiles());
  EXPECT_EQ(plan.print_ranks(),
            "┌────┐\n"
            "│0   │\n"
            "│11  │\n"
            "│111 │\n"
            "│0000│\n"
            "└────┘\n");
  const MaskPicture picture = plan.draw_ranks(0, 0, 4);
  ASSERT_EQ(picture.width, 4);
  ASSERT_EQ(picture.height, 4);
  const auto pixel = [&](int row, int column) {
    const auto at = static_cast<std::size_t>(3 * (4 * row + column));
    return std::array{picture.rgb[at], picture.rgb[at + 1], picture.rgb[at + 2]};
  };
  EXPECT_THAT(pixel(0, 1), Each(255));
  EXPECT_EQ(pixel(0, 0), pixel(3, 3));
  EXPECT_NE(pixel(0, 0), pixel(1, 1));
}

TEST(ShardPlan, HeadsOfUlyssesAreDrawnByTheirRank) {
  const ShardPlan plan = context_parallel_plan(problem_of({.seqlen = 16}, MaskMod()), 2,
                                               ParallelScheme::ulysses, small_tiles());
  EXPECT_THAT(plan.print_ranks(0, 3), HasSubstr("0000"));
  EXPECT_THAT(plan.print_ranks(0, 4), HasSubstr("1111"));
}

TEST(ShardPlan, PagesNameSchemeBalanceAndBytes) {
  const ShardPlan plan = context_parallel_plan(problem_of({.seqlen = 4096}, causal()), 4);
  EXPECT_THAT(plan.print(), HasSubstr("all_gather over 4 ranks, zigzag"));
  EXPECT_THAT(plan.print(), HasSubstr("512..1024 3072..3584"));
  EXPECT_THAT(plan.json(), HasSubstr("\"tokens\": [[512, 1024], [3072, 3584]]"));
}

TEST(ShardPlan, ForecastsRefuseByNameAndNeverHideMoreThanThereIs) {
  const Problem problem =
      problem_of({.seqlen = 4096, .num_heads_q = 6, .num_heads_kv = 1}, causal());
  const auto forecasts = forecast_context_parallel(problem, 4);
  ASSERT_THAT(forecasts, SizeIs(kNumParallelSchemes));
  EXPECT_THAT(forecasts[3].refusal,
              HasSubstr("6 query and 1 kv heads do not divide among 4 ranks"));
  EXPECT_THAT(forecasts[1].refusal, HasSubstr("no divisor"));
  const SchemeForecast &gathered = forecasts[0], &ring = forecasts[2];
  EXPECT_LT(ring.forward_ms, gathered.forward_ms);
  // With links of no cost, all that is left is computation, which no scheme overlaps with itself.
  const auto free = forecast_context_parallel(problem, 4, {}, {.flops = 1e12, .bytes = 1e30});
  EXPECT_NEAR(free[0].forward_ms, free[2].forward_ms, 1e-9);
  EXPECT_THAT(print_forecasts(forecasts), HasSubstr("ulysses                no: 6 query"));
}

std::string refusal_of(const Problem& problem, int world_size,
                       ParallelScheme scheme = ParallelScheme::all_gather,
                       const ShardOptions& options = {}) {
  try {
    static_cast<void>(context_parallel_plan(problem, world_size, scheme, options));
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(ShardPlan, RefusalsNameArgumentGotExpectedAndHint) {
  const Problem causal_96 = problem_of({}, causal());
  EXPECT_EQ(refusal_of(causal_96, 0),
            "context_parallel_plan: world_size is 0; expected 1 to 65536");
  EXPECT_EQ(refusal_of(causal_96, 7),
            "context_parallel_plan: seqlen is 96 for 7 ranks; expected a multiple, pad to 98 with "
            "tokens that the mask "
            "hides");
  EXPECT_THAT(refusal_of(causal_96, 3, ParallelScheme::ulysses),
              HasSubstr("ulysses: 8 query and 8 kv heads do not divide among 3 ranks"));
  EXPECT_THAT(refusal_of(causal_96, 3, ParallelScheme::hybrid),
              HasSubstr("hybrid: no part of 3 ranks"));
  EXPECT_THAT(refusal_of(causal_96, 4, ParallelScheme::hybrid, {.head_ranks = 3}),
              HasSubstr("head_ranks is 3 for 4 ranks"));
  EXPECT_THAT(refusal_of(causal_96, 4, ParallelScheme::head_group_all_gather, {.head_parts = 3}),
              HasSubstr("head_parts is 3; expected a divisor of num_heads_kv, 8"));
  EXPECT_THAT(refusal_of(causal_96, 4, ParallelScheme::all_gather, {.tile_q = 0}),
              HasSubstr("tile_q is 0; expected 1 to"));
  Problem other = causal_96;
  other.k.shape[1] = other.v.shape[1] = 48;
  EXPECT_THAT(refusal_of(other, 2), HasSubstr("k has seqlen 48 but q has 96"));
  other = causal_96;
  other.seqlen_q = up_to(96);
  EXPECT_THAT(refusal_of(other, 2), HasSubstr("is a bound"));
  other = causal_96;
  other.quant = parse_quantization("accurate");
  EXPECT_THAT(refusal_of(other, 2), HasSubstr("quant is accurate; expected none: shards have no"));
  const ShardPlan plan = context_parallel_plan(causal_96, 2);
  EXPECT_THROW(plan.tokens(2), InvalidArgument);
  EXPECT_THROW(static_cast<void>(plan.print_ranks(1)), InvalidArgument);
}

TEST(ShardPlan, SchemesHaveNames) {
  for (int i = 0; i < kNumParallelSchemes; ++i)
    EXPECT_EQ(parse_parallel_scheme(name(scheme_at(i))), scheme_at(i));
  EXPECT_EQ(parse_parallel_scheme("all-gather"), std::nullopt);
}

}  // namespace
}  // namespace fovea
