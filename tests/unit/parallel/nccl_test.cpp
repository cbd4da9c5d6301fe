// Ranks over a fake NCCL and a fake driver: the library is found and refused by name, collectives are in order with the
// caller's stream, failures are said, and engines give over it what one rank gives.
#include "parallel/communicator/nccl.hpp"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "parallel/communicator/nccl_communicator.hpp"
#include "unit/parallel/fake_libnccl.hpp"
#include "unit/parallel/whole_against_ranks.hpp"

namespace fovea::parallel {

FakeNccl& fresh_fake_nccl(const char* libcuda) {
  const auto symbol = [](const char* file, const char* name) {
    void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    return dlsym(library, name);
  };
  using Access = FakeNccl* (*)();
  FakeNccl& state = *reinterpret_cast<Access>(symbol(kFakeLibnccl, "fake_nccl_state"))();
  state = FakeNccl{};
  state.enqueue = reinterpret_cast<decltype(FakeNccl::enqueue)>(symbol(libcuda, "fake_enqueue"));
  return state;
}

namespace {

using cuda::driver::DeviceContext;
using cuda::driver::Driver;
using cuda::driver::EventHandle;
using cuda::driver::FakeState;
using cuda::driver::FakeStreamCall;
using cuda::driver::StreamHandle;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(NcclTest, WhatIsNamedIsTheOnlyOneTried) {
  const Nccl absent("/nowhere/libnccl.so.2");
  EXPECT_FALSE(absent.is_present());
  EXPECT_EQ(absent.why_absent(),
            "no NCCL: FOVEA_NCCL is '/nowhere/libnccl.so.2'; expected libnccl.so.2 or the folder "
            "that holds it");
  EXPECT_THROW(absent.api(), Unsupported);
  EXPECT_THAT(Nccl("/nowhere").why_absent(), HasSubstr("FOVEA_NCCL is '/nowhere'"));
  EXPECT_TRUE(Nccl(kFakeLibnccl).is_present());
}

// Any library that is no NCCL: the C library's mathematics.
TEST(NcclTest, ALibraryThatIsNoNcclIsRefusedByTheFunctionItLacks) {
  EXPECT_EQ(Nccl("libm.so.6").why_absent(),
            "libm.so.6 lacks ncclGetUniqueId; expected NCCL 2.7 or newer");
}

/// A fake driver and a fake NCCL, fresh for each test.
class NcclRanksTest : public ::testing::Test {
 protected:
  std::unique_ptr<NcclCommunicator> alone() {
    NcclId id;
    EXPECT_EQ(nccl_.api().unique_id(&id), kNcclSuccess);
    return join_nccl(nccl_, id, 0, 1, context_);
  }

  /// As many threads join; `wrap` may put another communicator around each end.
  template <typename Kind>
  std::vector<std::unique_ptr<Communicator>> joined(int world_size) {
    NcclId id;
    EXPECT_EQ(nccl_.api().unique_id(&id), kNcclSuccess);
    std::vector<std::unique_ptr<Communicator>> ends(static_cast<std::size_t>(world_size));
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < world_size; ++rank) {
      threads.emplace_back([&, rank] {
        ends[static_cast<std::size_t>(rank)] =
            std::make_unique<Kind>(join_nccl(nccl_, id, rank, world_size, context_));
      });
    }
    threads.clear();  // joins
    return ends;
  }

  FakeState& fake_ = cuda::driver::fresh_fake();
  FakeNccl& fake_nccl_ = fresh_fake_nccl(kFakeLibcuda);
  Driver driver_{kFakeLibcuda};
  DeviceContext context_{driver_, 0};
  Nccl nccl_{kFakeLibnccl};
};

void* const kCallStream = reinterpret_cast<void*>(0xA0);

/// "cuEventRecord on the call's stream" and so on, events numbered by their first record.
std::vector<std::string> told(const std::vector<FakeStreamCall>& calls) {
  std::vector<EventHandle> events;
  std::vector<std::string> result;
  for (const FakeStreamCall& call : calls) {
    std::string text = call.name;
    if (call.event != nullptr) {
      const auto found = std::ranges::find(events, call.event);
      text += " " + std::to_string(found - events.begin());
      if (found == events.end()) events.push_back(call.event);
    }
    result.push_back(text + (call.stream == kCallStream ? " of the call" : " of exchanges"));
  }
  return result;
}

TEST_F(NcclRanksTest, CollectivesWaitForTheCallAndTheCallForThem) {
  const auto ranks = alone();
  EXPECT_EQ(ranks->rank(), 0);
  EXPECT_EQ(ranks->world_size(), 1);
  EXPECT_EQ(ranks->device(), Device::cuda(0));
  const float sent = 3;
  float gathered = 0, sum = 0;
  const Exchange first = ranks->begin_all_gather(&sent, &gathered, sizeof(sent), kCallStream);
  const Exchange second = ranks->begin_reduce_scatter(&sent, &sum, 1, kCallStream);
  ranks->wait(second, kCallStream);
  ranks->wait(first, kCallStream);
  EXPECT_THAT(told(fake_.stream_calls),
              ElementsAre("cuEventRecord 0 of the call", "cuStreamWaitEvent 0 of exchanges",
                          "ncclAllGather of exchanges", "cuEventRecord 1 of exchanges",
                          "cuEventRecord 0 of the call", "cuStreamWaitEvent 0 of exchanges",
                          "ncclReduceScatter of exchanges", "cuEventRecord 2 of exchanges",
                          "cuStreamWaitEvent 2 of the call", "cuStreamWaitEvent 1 of the call"));
  EXPECT_EQ(gathered, 3);
  EXPECT_EQ(sum, 3);
  EXPECT_THROW(ranks->wait(first, kCallStream), InvalidArgument);
  const int num_events = fake_.count("cuEventCreate");
  ranks->wait(ranks->begin_all_gather(&sent, &gathered, sizeof(sent), kCallStream), kCallStream);
  EXPECT_EQ(fake_.count("cuEventCreate"), num_events) << "events serve again";
}

TEST_F(NcclRanksTest, MessagesAreOneGroupAndNoneAreNoGroup) {
  auto ends = joined<Forwarding>(2);
  const auto errors = on_ranks(std::move(ends), [](std::shared_ptr<Communicator> end) {
    const int other = 1 - end->rank(), sent = 10 + end->rank();
    int received = 0;
    const OutgoingMessage outgoing[] = {{other, &sent, sizeof(sent)}};
    const IncomingMessage incoming[] = {{other, &received, sizeof(received)}};
    end->wait(end->begin_messages(outgoing, incoming, nullptr), nullptr);
    EXPECT_EQ(received, 10 + other);
    end->wait(end->begin_messages({}, {}, nullptr), nullptr);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_EQ(fake_nccl_.count("ncclGroupStart"), 2);
  EXPECT_EQ(fake_nccl_.count("ncclGroupEnd"), 2);
  EXPECT_EQ(fake_nccl_.count("ncclSend"), 2);
}

TEST_F(NcclRanksTest, FailuresAreSaidByCallAndRank) {
  const auto ranks = alone();
  const float sent = 3;
  float gathered = 0;
  const OutgoingMessage outgoing[] = {{0, &sent, sizeof(sent)}};
  fake_nccl_.failing_call = "ncclSend";
  fake_nccl_.failing_result = 2;
  try {
    ranks->begin_messages(outgoing, {}, nullptr);
    FAIL() << "nothing thrown";
  } catch (const DeviceError& error) {
    EXPECT_STREQ(error.what(),
                 "communicator: ncclSend failed on rank 0: as the test asked (2); has another rank "
                 "ended or raised an error?");
  }
  // The group of calls is closed all the same, before the group of ranks is aborted.
  ASSERT_GE(fake_nccl_.calls.size(), 2U);
  EXPECT_EQ(fake_nccl_.calls.end()[-2].name, "ncclGroupEnd");
  EXPECT_EQ(fake_nccl_.calls.back().name, "ncclCommAbort");
  try {
    ranks->begin_all_gather(&sent, &gathered, sizeof(sent), nullptr);
    FAIL() << "nothing thrown";
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(), HasSubstr("an exchange on rank 0 has failed before"));
  }
}

TEST_F(NcclRanksTest, AsynchronousErrorsAreErrorsOfTheNextExchange) {
  auto ranks = alone();
  const float sent = 3;
  float gathered = 0;
  const Exchange exchange = ranks->begin_all_gather(&sent, &gathered, sizeof(sent), nullptr);
  fake_nccl_.async_errors[0] = 6;
  try {
    ranks->wait(exchange, nullptr);
    FAIL() << "nothing thrown";
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("an exchange of NCCL failed on rank 0: remote process exited (6)"));
  }
  ranks.reset();
  EXPECT_EQ(fake_nccl_.count("ncclCommAbort"), 1);
  EXPECT_EQ(fake_nccl_.count("ncclCommDestroy"), 0);
}

TEST_F(NcclRanksTest, ACallersGroupStaysTheCallers) {
  NcclId id;
  ASSERT_EQ(nccl_.api().unique_id(&id), kNcclSuccess);
  NcclComm comm = nullptr;
  ASSERT_EQ(nccl_.api().init_rank(&comm, 1, id, 0), kNcclSuccess);
  const float sent = 3;
  float gathered = 0;
  {
    NcclCommunicator ranks(nccl_, comm, NcclOwner::caller, context_, kCallStream);
    ranks.wait(ranks.begin_all_gather(&sent, &gathered, sizeof(sent), kCallStream), kCallStream);
    EXPECT_THAT(told(fake_.stream_calls), Each(HasSubstr("of the call")));
    EXPECT_EQ(fake_.count("cuStreamCreate"), 0);
    fake_nccl_.async_errors[0] = 6;
    EXPECT_THROW(ranks.check(), DeviceError);
  }
  EXPECT_EQ(fake_nccl_.count("ncclCommAbort"), 0);
  EXPECT_EQ(fake_nccl_.count("ncclCommDestroy"), 0);
  nccl_.api().destroy(comm);
}

TEST_F(NcclRanksTest, AGroupThatDoesNotBlockIsWaitedFor) {
  fake_nccl_.num_in_progress = 3;
  const auto ranks = alone();
  EXPECT_EQ(fake_nccl_.num_in_progress, 0);
  const float sent = 3;
  float gathered = 0;
  fake_nccl_.failing_call = "ncclAllGather";
  fake_nccl_.failing_result = kNcclInProgress;
  fake_nccl_.num_in_progress = 3;
  ranks->begin_all_gather(&sent, &gathered, sizeof(sent), nullptr);
  EXPECT_EQ(fake_nccl_.num_in_progress, 0);
}

TEST_F(NcclRanksTest, RanksThatCannotJoinAreRefused) {
  EXPECT_THROW(join_nccl(nccl_, {}, 2, 2, context_), InvalidArgument);
  EXPECT_THROW(join_nccl(nccl_, {}, -1, 2, context_), InvalidArgument);
  fake_nccl_.failing_call = "ncclCommInitRank";
  fake_nccl_.failing_result = 4;
  try {
    join_nccl(nccl_, {}, 1, 2, context_);
    FAIL() << "nothing thrown";
  } catch (const DeviceError& error) {
    EXPECT_STREQ(error.what(),
                 "join_nccl_ranks: ncclCommInitRank failed on rank 1 of 2: as the test asked (4)");
  }
  EXPECT_THROW((void)use_nccl_ranks(nullptr), InvalidArgument);
  EXPECT_THROW((void)join_nccl_ranks({}, 0, 1, Device::cpu()), InvalidArgument);
}

// The fake moves bytes of the host: engines compute on the cpu over NCCL's collectives. `Forwarding` says that memory
// is the cpu's.
TEST_F(NcclRanksTest, EverySchemeEqualsOneRankOverNccl) {
  const auto ids = document_ids();
  const MaskMod mask = causal() && documents(view(ids.data(), {kBatch, kSeqlen}));
  for (const bool is_deterministic : {true, false}) {
    WholeAgainstRanks test({.mask = mask, .num_heads_kv = 8, .is_deterministic = is_deterministic});
    for (int scheme = 0; scheme < kNumParallelSchemes; ++scheme) {
      const auto wrong = test.run(static_cast<ParallelScheme>(scheme), 4,
                                  [this](int ranks) { return joined<Forwarding>(ranks); });
      ASSERT_TRUE(wrong.has_value());
      EXPECT_THAT(*wrong, IsEmpty()) << name(static_cast<ParallelScheme>(scheme));
    }
  }
  EXPECT_GT(fake_nccl_.count("ncclAllGather"), 0);
  EXPECT_GT(fake_nccl_.count("ncclReduceScatter"), 0);
  EXPECT_GT(fake_nccl_.count("ncclSend"), 0);
}

TEST_F(NcclRanksTest, RanksAreToldThatOneHasEnded) {
  const Case problem{.mask = causal(), .num_heads_kv = 8};
  const ShardPlan plan = context_parallel_plan(problem.problem(), 2);
  const Tensors whole(8);
  const auto errors = on_ranks(joined<Forwarding>(2), [&](std::shared_ptr<Communicator> end) {
    const int rank = end->rank();
    Tensors own(whole, plan.tokens(rank));
    ContextParallel attention(plan, std::move(end));
    attention.forward(problem.forward(own));
    if (rank != 1) attention.forward(problem.forward(own));
  });
  EXPECT_THAT(errors[1], IsEmpty());
  EXPECT_THAT(errors[0], AllOf(HasSubstr("ncclAllGather failed on rank 0: remote process exited"),
                               HasSubstr("has another rank ended")));
}

}  // namespace
}  // namespace fovea::parallel
