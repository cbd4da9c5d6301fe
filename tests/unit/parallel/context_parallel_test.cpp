// Ranks as threads against one call of the whole: every scheme, mask, number of kv heads and of ranks; faults of
// exchanges are seen; ranks that disagree all say so.
#include "fovea/context_parallel.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "unit/parallel/whole_against_ranks.hpp"

namespace fovea {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

class ContextParallelTest : public ::testing::Test {
 protected:
  std::map<std::string, MaskMod> masks() {
    return {{"none", {}},
            {"causal", causal()},
            {"window", window(9, 2)},
            {"documents", causal() && documents(view(ids_.data(), {kBatch, kSeqlen}))},
            {"heads", parse_mask_mod("kv_idx <= q_idx && (q_head % 2 == 0 || kv_idx > q_idx - 9)")},
            {"nothing", parse_mask_mod("kv_idx < seqlen_q - seqlen_kv")}};
  }

  void expect_equal(const std::string& name, const Case& problem) {
    WholeAgainstRanks test(problem);
    for (const int world_size : kRanks) {
      int num_served = 0;
      for (int scheme = 0; scheme < kNumParallelSchemes; ++scheme) {
        const auto wrong = test.run(static_cast<ParallelScheme>(scheme), world_size);
        num_served += wrong ? 1 : 0;
        EXPECT_THAT(wrong.value_or(""), IsEmpty())
            << name << ", " << fovea::name(static_cast<ParallelScheme>(scheme)) << ", "
            << world_size << " ranks";
      }
      EXPECT_GE(num_served, 4) << name << ", " << world_size << " ranks";
    }
  }

  std::vector<std::int32_t> ids_ = document_ids();
};

TEST_F(ContextParallelTest, EverySchemeEqualsOneRankUnderEveryMask) {
  for (const auto& [name, mask] : masks())
    expect_equal(name, {.mask = mask, .num_heads_kv = name == "documents" ? 24 : 8});
}

TEST_F(ContextParallelTest, EverySchemeEqualsOneRankWithAnyNumberOfKvHeads) {
  for (const std::int64_t num_heads_kv : {24, 4, 1})
    expect_equal(std::to_string(num_heads_kv) + " kv heads",
                 {.mask = causal(), .num_heads_kv = num_heads_kv});
}

TEST_F(ContextParallelTest, SumsThatAreReduceScatteredEqualThoseOfOneRank) {
  expect_equal("sums",
               {.mask = masks()["documents"], .num_heads_kv = 8, .is_deterministic = false});
}

TEST_F(ContextParallelTest, ProgramsAndSinksReadPlacesAndHeadsOfTheWhole) {
  Tensor table({kHeads, 7}, 6), bias({1, kHeads, kSeqlen, kSeqlen}, 7), sinks({kHeads}, 8);
  const ScoreMod score = parse_score_mod(
      "score + table[q_head, (q_idx - kv_idx) % 7] * 0.5 + "
      "bias[0, q_head, q_idx, kv_idx] * float(seqlen_kv) / 96.0 + float(kv_head)",
      {.tensors = {{"table", table.view()}, {"bias", bias.view()}}});
  expect_equal("programs", {.mask = causal(), .num_heads_kv = 8, .score = score, .sinks = &sinks});
  Tensor slopes({kHeads}, 9);
  const ScoreMod with_slopes = score | alibi(slopes.view());
  expect_equal("large lse", {.mask = causal(),
                             .num_heads_kv = 8,
                             .score = with_slopes,
                             .sinks = &sinks,
                             .has_large_lse = true});
  for (float& slope : slopes.values()) slope *= 0.05F;
  expect_equal("words",
               {.mask = causal(), .num_heads_kv = 8, .score = with_slopes, .sinks = &sinks});
}

TEST_F(ContextParallelTest, EverySchemeDropsWhatOneRankDoes) {
  const Dropout dropout{.p = 0.4F, .seed = 7, .offset = 5};
  for (const bool is_deterministic : {true, false}) {
    expect_equal("chunks", {.mask = masks()["documents"],
                            .num_heads_kv = 8,
                            .is_deterministic = is_deterministic,
                            .dropout = dropout,
                            .chunk = 4});
  }
  WholeAgainstRanks zigzag({.mask = causal(), .num_heads_kv = 8, .dropout = dropout});
  for (const int world_size : {2, 3, 4}) {
    for (const ParallelScheme scheme : {ParallelScheme::all_gather, ParallelScheme::ring})
      EXPECT_THAT(*zigzag.run(scheme, world_size), IsEmpty()) << name(scheme) << world_size;
  }
}

TEST_F(ContextParallelTest, KeysThatDropoutCannotDrawInFoursAreRefused) {
  WholeAgainstRanks test({.mask = causal(), .num_heads_kv = 8, .dropout = {.p = 0.4F, .seed = 7}});
  EXPECT_THAT(
      *test.run(ParallelScheme::ring, 8),
      HasSubstr("dropout is given and keys of a rank are tokens 90 to 96; expected ranges"));
}

// Ulysses gives a rank whole sequences, whose means and scales are those of one rank.
TEST_F(ContextParallelTest, RecipesRoundUnderUlyssesAsOneRankDoes) {
  Tensor scales({kBatch, 8}, 9);
  for (float& scale : scales.values()) scale = 0.05F + std::abs(scale) / 10;
  for (const auto& [recipe, given] : {std::pair{"accurate", static_cast<Tensor*>(nullptr)},
                                      {"sage2", nullptr},
                                      {"fp8_static", &scales}}) {
    WholeAgainstRanks test({.mask = masks()["documents"],
                            .num_heads_kv = 8,
                            .quant = parse_quantization(recipe),
                            .scales = given});
    for (const int world_size : {1, 2, 4, 8})
      EXPECT_THAT(*test.run(ParallelScheme::ulysses, world_size), IsEmpty())
          << recipe << world_size;
    EXPECT_THAT(*test.run(ParallelScheme::all_gather, 2),
                HasSubstr("quant is given and the scheme is all_gather; expected ulysses"));
  }
}

// ---- Faults that the tests above must see ----

/// Parts of the first two ranks change places.
class SwapsParts : public Forwarding {
 public:
  using Forwarding::Forwarding;
  Exchange begin_all_gather(const void* sent, void* received, std::size_t bytes,
                            void* stream) override {
    const Exchange exchange = Forwarding::begin_all_gather(sent, received, bytes, stream);
    swapped_[exchange.number] = {static_cast<std::byte*>(received), bytes};
    return exchange;
  }
  void wait(Exchange exchange, void* stream) override {
    Forwarding::wait(exchange, stream);
    const auto found = swapped_.extract(exchange.number);
    if (found.empty()) return;
    const auto [data, bytes] = found.mapped();
    std::swap_ranges(data, data + bytes, data + bytes);
  }

 private:
  std::map<std::uint64_t, std::pair<std::byte*, std::size_t>> swapped_;
};

/// Nobody else's sums arrive.
class KeepsOwnSums : public Forwarding {
 public:
  using Forwarding::Forwarding;
  Exchange begin_reduce_scatter(const float* sent, float* received, std::size_t count,
                                void* stream) override {
    const Exchange exchange = Forwarding::begin_reduce_scatter(sent, received, count, stream);
    own_[exchange.number] = {sent + static_cast<std::size_t>(rank()) * count, received, count};
    return exchange;
  }
  void wait(Exchange exchange, void* stream) override {
    Forwarding::wait(exchange, stream);
    const auto found = own_.extract(exchange.number);
    if (found.empty()) return;
    const auto [from, to, count] = found.mapped();
    std::copy_n(from, count, to);
  }

 private:
  std::map<std::uint64_t, std::tuple<const float*, float*, std::size_t>> own_;
};

/// Of each exchange of messages the first one is not written.
class LosesAMessage : public Forwarding {
 public:
  using Forwarding::Forwarding;
  Exchange begin_messages(std::span<const OutgoingMessage> sent,
                          std::span<const IncomingMessage> received, void* stream) override {
    std::vector<IncomingMessage> changed(received.begin(), received.end());
    if (!changed.empty()) {
      lost_.emplace_back(changed[0].bytes);
      std::memset(changed[0].data, 0, changed[0].bytes);
      changed[0].data = lost_.back().data();
    }
    return Forwarding::begin_messages(sent, changed, stream);
  }

 private:
  std::vector<std::vector<std::byte>> lost_;
};

TEST_F(ContextParallelTest, FaultsOfExchangesAreSeen) {
  WholeAgainstRanks test({.mask = causal(), .num_heads_kv = 8});
  WholeAgainstRanks sums({.mask = causal(), .num_heads_kv = 8, .is_deterministic = false});
  EXPECT_THAT(*test.run(ParallelScheme::all_gather, 4, communicators_of<Forwarding>), IsEmpty());
  EXPECT_THAT(*test.run(ParallelScheme::all_gather, 4, communicators_of<SwapsParts>),
              HasSubstr("out is"));
  EXPECT_THAT(*sums.run(ParallelScheme::all_gather, 4, communicators_of<KeepsOwnSums>),
              AllOf(HasSubstr("dk is"), HasSubstr("dv is"), Not(HasSubstr("dq"))));
  for (const ParallelScheme scheme : {ParallelScheme::ring, ParallelScheme::ulysses,
                                      ParallelScheme::hybrid, ParallelScheme::needed_only}) {
    EXPECT_THAT(*test.run(scheme, 4, communicators_of<LosesAMessage>), HasSubstr("out is"))
        << name(scheme);
  }
}

// ---- Agreement ----

struct Said {
  ParallelScheme scheme = ParallelScheme::all_gather;
  Case problem{.mask = causal(), .num_heads_kv = 8};
  std::int64_t num_tokens = kSeqlen / 4;  // of this rank's tensors
  Dtype dtype = Dtype::f32;
};

/// What each of four ranks is told where the last one says something else.
std::vector<std::string> told(const Said& first, const Said& last) {
  return on_ranks(make_thread_communicators(4), [&](std::shared_ptr<Communicator> end) {
    const Said& said = end->rank() == 3 ? last : first;
    const ShardPlan plan = context_parallel_plan(said.problem.problem(), 4, said.scheme);
    const TokenRange range[] = {{0, said.num_tokens}};
    Tensors own(Tensors(said.problem.num_heads_kv), range);
    ContextParallel attention(plan, std::move(end));
    attention.forward(said.problem.forward(own));
  });
}

TEST_F(ContextParallelTest, RanksThatDisagreeAllSaySo) {
  const auto every_rank_says = [](const std::string& text) {
    return Each(StartsWith("context_parallel_forward: " + text));
  };
  EXPECT_THAT(told({}, {}), Each(IsEmpty()));
  EXPECT_THAT(told({}, {.scheme = ParallelScheme::ring}),
              every_rank_says("scheme is ring on rank 3 but all_gather on rank 0; expected one "
                              "problem on all ranks"));
  EXPECT_THAT(told({}, {.num_tokens = 5}),
              every_rank_says("rank 3: q is f32 [2, 5, 24, 8]; expected f32 [2, 24, 24, 8], this "
                              "rank's tokens"));
  EXPECT_THAT(told({}, {.problem = {.mask = window(5, 0), .num_heads_kv = 8}}),
              every_rank_says("mask is "));
  EXPECT_THAT(told({.problem = {.mask = window(5, 0), .num_heads_kv = 8}},
                   {.problem = {.mask = window(6, 0), .num_heads_kv = 8}}),
              every_rank_says("mask is "));
  EXPECT_THAT(told({}, {.problem = {.mask = causal(), .num_heads_kv = 4}}),
              every_rank_says("plan is "));
  EXPECT_THAT(told({}, {.problem = {.mask = causal(), .num_heads_kv = 8, .score = softcap(9)}}),
              every_rank_says("score is "));
  Tensor of_own_rows({24, kSeqlen});
  const Case with_own_rows{.mask = causal(), .num_heads_kv = 8, .score = bias(of_own_rows.view())};
  EXPECT_THAT(told({.problem = with_own_rows}, {.problem = with_own_rows}),
              every_rank_says("rank 0: bias is f32 [24, 96]; expected [96, 96]"));
  EXPECT_THAT(
      told({}, {.problem = {.mask = causal(), .num_heads_kv = 8, .is_deterministic = false}}),
      every_rank_says("is_deterministic is false on rank 3 but true on rank 0"));
}

TEST_F(ContextParallelTest, RanksAgreeAgainAfterARefusal) {
  const Case problem{.mask = causal(), .num_heads_kv = 8};
  const ShardPlan plan = context_parallel_plan(problem.problem(), 4);
  const Tensors whole(8);
  const auto errors =
      on_ranks(make_thread_communicators(4), [&](std::shared_ptr<Communicator> end) {
        const int rank = end->rank();
        Tensors own(whole, plan.tokens(rank));
        ContextParallel attention(plan, std::move(end));
        AttentionForward other = problem.forward(own);
        if (rank == 2) other.mask = window(3, 0);
        EXPECT_THROW(attention.forward(other), InvalidArgument);
        attention.forward(problem.forward(own));
      });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST_F(ContextParallelTest, RanksAreToldThatOneHasEnded) {
  const Case problem{.mask = causal(), .num_heads_kv = 8};
  const ShardPlan plan = context_parallel_plan(problem.problem(), 4);
  const Tensors whole(8);
  const auto errors =
      on_ranks(make_thread_communicators(4), [&](std::shared_ptr<Communicator> end) {
        const int rank = end->rank();
        Tensors own(whole, plan.tokens(rank));
        ContextParallel attention(plan, std::move(end));
        attention.forward(problem.forward(own));
        if (rank != 3) attention.forward(problem.forward(own));
      });
  EXPECT_THAT(errors[3], IsEmpty());
  for (int rank = 0; rank < 3; ++rank) {
    // By rank 3, or by a rank that was told of it before.
    EXPECT_THAT(errors[static_cast<std::size_t>(rank)],
                AllOf(HasSubstr("waits for rank"), HasSubstr("which has ended")));
  }
}

TEST_F(ContextParallelTest, WhatRanksCannotComputeIsRefusedByName) {
  const Case problem{.mask = causal(), .num_heads_kv = 8};
  const ShardPlan plan = context_parallel_plan(problem.problem(), 1);
  ContextParallel attention(plan, std::move(make_thread_communicators(1)[0]));
  Tensors own(8);
  const auto error_of = [&](const std::function<void(AttentionForward&)>& change) {
    AttentionForward args = problem.forward(own);
    change(args);
    try {
      attention.forward(args);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(error_of([](AttentionForward& args) { args.out = {}; }), HasSubstr("out is missing"));
  EXPECT_THAT(error_of([](AttentionForward& args) {
                TensorSpec spec = args.lse.spec();
                spec.shape[1] = 1;
                args.row_max = TensorView(args.lse.data(), spec);
              }),
              HasSubstr("expected f32 [2, 24, 96], this rank's tokens"));
  EXPECT_THAT(error_of([](AttentionForward& args) { args.out = args.q; }), HasSubstr("out"));
  EXPECT_THAT(error_of([](AttentionForward& args) { args.quant = parse_quantization("accurate"); }),
              HasSubstr("quant is given and the scheme is all_gather; expected ulysses"));
  EXPECT_THAT(error_of([](AttentionForward& args) {
                TensorSpec spec = args.q.spec();
                spec.dtype = Dtype::e4m3;
                args.q = TensorView(args.q.data(), spec);
              }),
              HasSubstr("q is e4m3; expected f32, f16 or bf16"));
  EXPECT_THAT(error_of([](AttentionForward&) {}), "accepted");
  EXPECT_THROW(ContextParallel(plan, std::move(make_thread_communicators(2)[0])), InvalidArgument);
}

TEST_F(ContextParallelTest, AMaskWithOtherNumbersThanThePlansIsRefused) {
  const Case problem{.mask = window(5, 0), .num_heads_kv = 8};
  ContextParallel attention(context_parallel_plan(problem.problem(), 1),
                            std::move(make_thread_communicators(1)[0]));
  Tensors own(8);
  AttentionForward args = problem.forward(own);
  attention.forward(args);
  args.mask = window(6, 0);
  try {
    attention.forward(args);
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("window_left = 6"), HasSubstr("window_left = 5")));
  }
}

// ---- Threads' letter boxes ----

TEST(ThreadCommunicatorTest, ExchangesMayBeWaitedForInAnyOrder) {
  const auto errors = on_ranks(make_thread_communicators(3), [](std::shared_ptr<Communicator> end) {
    const float rank = static_cast<float>(end->rank());
    const std::array sent{rank, 10 * rank, 100 * rank};
    std::array<float, 9> gathered{};
    float sum = 0, from_before = -1;
    const int next = (end->rank() + 1) % 3, before = (end->rank() + 2) % 3;
    const Exchange first =
        end->begin_all_gather(sent.data(), gathered.data(), sizeof(sent), nullptr);
    const Exchange second = end->begin_reduce_scatter(sent.data(), &sum, 1, nullptr);
    const OutgoingMessage outgoing[] = {{next, &rank, sizeof(rank)}};
    const IncomingMessage incoming[] = {{before, &from_before, sizeof(from_before)}};
    const Exchange third = end->begin_messages(outgoing, incoming, nullptr);
    end->wait(third, nullptr);
    end->wait(first, nullptr);
    end->wait(second, nullptr);
    EXPECT_EQ(from_before, static_cast<float>(before));
    EXPECT_EQ(gathered, (std::array<float, 9>{0, 0, 0, 1, 10, 100, 2, 20, 200}));
    EXPECT_EQ(sum, end->rank() == 0 ? 3 : end->rank() == 1 ? 30 : 300);
    EXPECT_THROW(end->wait(second, nullptr), InvalidArgument);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(ThreadCommunicatorTest, MessagesOfOtherSizesAreRefused) {
  const auto errors = on_ranks(make_thread_communicators(2), [](std::shared_ptr<Communicator> end) {
    std::array<float, 2> data{};
    const int other = 1 - end->rank();
    const OutgoingMessage outgoing[] = {{other, data.data(), end->rank() == 0 ? 4U : 8U}};
    const IncomingMessage incoming[] = {{other, data.data(), 4}};
    end->wait(end->begin_messages(outgoing, incoming, nullptr), nullptr);
  });
  EXPECT_THAT(errors[0], HasSubstr("rank 1 sent 8 bytes where rank 0 expects 4"));
  EXPECT_THAT(errors[1], IsEmpty());
  EXPECT_THROW((void)make_thread_communicators(0), InvalidArgument);
}

}  // namespace
}  // namespace fovea
