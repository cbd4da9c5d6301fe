// Ranks whose tensors lie on a GPU, over a fake driver, compiler and NCCL: nothing is computed, but every copy, launch,
// exchange and piece of memory stands in one list. What is asked: who waits for whom, how long memory lives, that keys
// travel while others are attended to, and that ranks agree by way of the device.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fovea/fovea.h"

#include "cuda/driver/context.hpp"
#include "parallel/communicator/nccl_communicator.hpp"
#include "unit/parallel/fake_libnccl.hpp"
#include "unit/parallel/whole_against_ranks.hpp"

namespace fovea::parallel {
namespace {

using cuda::driver::EventHandle;
using cuda::driver::FakeState;
using cuda::driver::FakeStreamCall;
using cuda::driver::StreamHandle;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Before anything asks for a GPU the fakes become the process's own; nothing of theirs is kept on a disk.
[[maybe_unused]] const bool is_process_fake = [] {
  setenv("FOVEA_NVRTC", kFakeLibnvrtc, 1);
  setenv("FOVEA_NCCL", kFakeLibnccl, 1);
  setenv("FOVEA_CACHE_MAX_MIB", "0", 1);
  return dlopen(kFakeProcessLibcuda, RTLD_NOW | RTLD_LOCAL) != nullptr;
}();

constexpr int kNumRanks = 4;  // of which hybrid makes two groups
constexpr std::int64_t kDim = 64, kKvHeads = 4;

/// A tensor of the fake device: its memory is the host's.
class DeviceTensor {
 public:
  explicit DeviceTensor(Dtype dtype, std::vector<std::int64_t> shape)
      : spec_(make_spec(dtype, shape)),
        bytes_(static_cast<std::size_t>(spec_.num_elements()) * size_bytes(dtype) + 256) {
    spec_.device = Device::cuda(0);
  }
  TensorView view() {
    const auto at = reinterpret_cast<std::uintptr_t>(bytes_.data());
    return {static_cast<void*>(bytes_.data() + (256 - at % 256) % 256), spec_};
  }

 private:
  TensorSpec spec_;
  std::vector<std::byte> bytes_;
};

/// What a rank has of a sequence of 1024 tokens.
struct DeviceRank {
  static constexpr std::int64_t kTokens = 1024;
  DeviceTensor q = bf16(8), k = bf16(kKvHeads), v = bf16(kKvHeads), out = bf16(8);
  DeviceTensor dout = bf16(8), dq = bf16(8), dk = bf16(kKvHeads), dv = bf16(kKvHeads);
  DeviceTensor lse{Dtype::f32, {1, 8, kTokens / kNumRanks}};

  static DeviceTensor bf16(std::int64_t heads) {
    return DeviceTensor(Dtype::bf16, {1, kTokens / kNumRanks, heads, kDim});
  }
  static Problem problem() {
    const auto spec = [](std::int64_t heads) {
      return make_spec(Dtype::bf16, std::array<std::int64_t, 4>{1, kTokens, heads, kDim});
    };
    return {.q = spec(8), .k = spec(kKvHeads), .v = spec(kKvHeads), .mask = causal()};
  }
  AttentionForward forward(void* stream, bool is_deterministic) {
    AttentionForward args{
        .q = q.view(), .k = k.view(), .v = v.view(), .out = out.view(), .lse = lse.view()};
    args.mask = causal();
    args.stream = stream;
    args.is_deterministic = is_deterministic;
    return args;
  }
  AttentionBackward backward(void* stream, bool is_deterministic) {
    return {.dout = dout.view(),
            .forward = forward(stream, is_deterministic),
            .dq = dq.view(),
            .dk = dk.view(),
            .dv = dv.view()};
  }
};

void* stream_of_call(int rank) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(0xA000 + 16 * rank));
}

/// The calls of one rank, of its two streams, between two places of the list.
class RankCalls {
 public:
  RankCalls(const std::vector<FakeStreamCall>& all, int rank) {
    call_ = static_cast<StreamHandle>(stream_of_call(rank));
    // Of what the call's stream waits for, the stream that records it is the one of exchanges.
    std::set<EventHandle> awaited;
    for (const FakeStreamCall& each : all) {
      if (each.stream == call_ && each.name == "cuStreamWaitEvent") awaited.insert(each.event);
    }
    for (const FakeStreamCall& each : all) {
      if (each.name == "cuEventRecord" && awaited.contains(each.event)) exchanges_ = each.stream;
    }
    for (const FakeStreamCall& each : all) {
      if (each.stream == call_ || each.stream == exchanges_) calls_.push_back(each);
    }
  }

  /// Each exchange is enqueued behind all that the call has enqueued, each time the call goes on behind it, and memory
  /// that it reads or writes is given back behind that.
  std::string wrong_order() const {
    std::string wrong;
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      if (calls_[i].stream != exchanges_ || !calls_[i].name.starts_with("nccl")) continue;
      if (!begins_behind_the_call(i)) wrong += calls_[i].name + " does not wait for the call; ";
      const std::size_t waited = end_of_wait(i);
      if (waited == 0) wrong += calls_[i].name + " is waited for by nobody; ";
      for (const auto memory : {calls_[i].memory, calls_[i].written}) {
        const std::optional<std::uint64_t> taken = taken_for(i, memory);
        if (!taken) continue;  // the caller's
        const std::size_t freed = given_back(i, *taken);
        if (freed < waited) wrong += calls_[i].name + ": memory goes too early; ";
        if (freed == calls_.size()) wrong += calls_[i].name + ": memory stays; ";
      }
    }
    return wrong;
  }

  std::string unbalanced() const {
    std::multiset<std::uint64_t> taken;
    for (const FakeStreamCall& each : calls_) {
      if (each.name == "cuMemAllocAsync") taken.insert(each.memory);
      if (each.name != "cuMemFreeAsync") continue;
      const auto found = taken.find(each.memory);
      if (found == taken.end()) return "memory is given back that nobody took";
      taken.erase(found);
    }
    return taken.empty() ? "" : std::to_string(taken.size()) + " pieces of memory stay";
  }

  /// Letters in their order: G a gather, S a sum, W the call waits for an exchange; L one or more launches.
  std::string shape() const {
    std::string result;
    for (const FakeStreamCall& each : calls_) {
      const bool is_of_call = each.stream == call_;
      if (each.name == "ncclAllGather") result += 'G';
      if (each.name == "ncclReduceScatter") result += 'S';
      if (each.name == "cuStreamWaitEvent" && is_of_call) result += 'W';
      if (each.name == "cuLaunchKernelEx" && (result.empty() || result.back() != 'L'))
        result += 'L';
    }
    return result;
  }

 private:
  /// The event that exchanges wait for last was recorded behind the call's last launch.
  bool begins_behind_the_call(std::size_t at) const {
    EventHandle awaited = nullptr;
    for (std::size_t i = at; i-- > 0 && awaited == nullptr;) {
      if (calls_[i].stream == exchanges_ && calls_[i].name == "cuStreamWaitEvent")
        awaited = calls_[i].event;
      if (calls_[i].name == "cuLaunchKernelEx") return false;
      at = i;
    }
    for (std::size_t i = at; i-- > 0;) {
      if (calls_[i].name == "cuLaunchKernelEx") return false;
      if (calls_[i].name == "cuEventRecord" && calls_[i].event == awaited)
        return calls_[i].stream == call_;
    }
    return false;
  }
  /// Where the call's stream waits for the record behind this exchange; 0: nowhere.
  std::size_t end_of_wait(std::size_t at) const {
    EventHandle done = nullptr;
    for (std::size_t i = at + 1; i < calls_.size(); ++i) {
      if (done == nullptr && calls_[i].name == "cuEventRecord" && calls_[i].stream == exchanges_)
        done = calls_[i].event;
      if (done != nullptr && calls_[i].name == "cuStreamWaitEvent" && calls_[i].stream == call_ &&
          calls_[i].event == done)
        return i;
    }
    return 0;
  }
  /// The piece of memory, taken before this call, that an address lies in.
  std::optional<std::uint64_t> taken_for(std::size_t at, std::uint64_t address) const {
    for (std::size_t i = at; i-- > 0;) {
      const FakeStreamCall& each = calls_[i];
      const bool holds = address >= each.memory && address < each.memory + each.bytes;
      if (each.name == "cuMemAllocAsync" && holds) return each.memory;
    }
    return std::nullopt;
  }
  std::size_t given_back(std::size_t at, std::uint64_t memory) const {
    for (std::size_t i = at; i < calls_.size(); ++i) {
      if (calls_[i].name == "cuMemFreeAsync" && calls_[i].memory == memory) return i;
    }
    return calls_.size();
  }

  StreamHandle call_ = nullptr, exchanges_ = nullptr;
  std::vector<FakeStreamCall> calls_;
};

class DeviceTensorsTest : public ::testing::Test {
 protected:
  DeviceTensorsTest() { fake_.has_memory = true; }

  std::vector<std::unique_ptr<Communicator>> joined() {
    NcclId id;
    EXPECT_EQ(nccl_.api().unique_id(&id), kNcclSuccess);
    std::vector<std::unique_ptr<Communicator>> ends(kNumRanks);
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < kNumRanks; ++rank) {
      threads.emplace_back([&, rank] {
        ends[static_cast<std::size_t>(rank)] =
            join_nccl(nccl_, id, rank, kNumRanks, cuda::driver::process_context(Device::cuda()));
      });
    }
    return ends;
  }

  /// A second forward and backward of every rank: the first one agrees and plans.
  std::vector<RankCalls> warm_calls(ParallelScheme scheme, bool is_deterministic) {
    const ShardPlan plan = context_parallel_plan(DeviceRank::problem(), kNumRanks, scheme);
    std::vector<DeviceRank> ranks(kNumRanks);
    return second_calls<ContextParallel>(
        [&](std::shared_ptr<Communicator> end) { return ContextParallel(plan, std::move(end)); },
        [&](ContextParallel& attention, int rank) {
          DeviceRank& own = ranks[static_cast<std::size_t>(rank)];
          attention.forward(own.forward(stream_of_call(rank), is_deterministic));
          attention.backward(own.backward(stream_of_call(rank), is_deterministic));
        });
  }

  /// What ranks enqueue when they call for the second time; each makes something over its end, and calls with it.
  template <typename Made>
  std::vector<RankCalls> second_calls(
      const std::function<Made(std::shared_ptr<Communicator>)>& make,
      const std::function<void(Made&, int)>& make_call) {
    std::vector<std::unique_ptr<Made>> made(kNumRanks);
    const auto call = [&](int rank) { make_call(*made[static_cast<std::size_t>(rank)], rank); };
    EXPECT_THAT(on_ranks(joined(),
                         [&](std::shared_ptr<Communicator> end) {
                           const int rank = end->rank();
                           made[static_cast<std::size_t>(rank)] =
                               std::make_unique<Made>(make(std::move(end)));
                           call(rank);
                         }),
                Each(IsEmpty()));
    fake_.stream_calls.clear();
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < kNumRanks; ++rank) threads.emplace_back(call, rank);
    threads.clear();  // joins
    const std::vector<FakeStreamCall> calls = fake_.stream_calls;
    std::vector<RankCalls> result;
    for (int rank = 0; rank < kNumRanks; ++rank) result.emplace_back(calls, rank);
    return result;
  }

  FakeState& fake_ = cuda::driver::fresh_fake(kFakeProcessLibcuda);
  FakeNccl& fake_nccl_ = fresh_fake_nccl(kFakeProcessLibcuda);
  Nccl nccl_{kFakeLibnccl};
};

TEST_F(DeviceTensorsTest, ExchangesWaitForTheCallAndMemoryOutlivesThem) {
  for (int scheme = 0; scheme < kNumParallelSchemes; ++scheme) {
    const auto which = static_cast<ParallelScheme>(scheme);
    for (const bool is_deterministic : {true, false}) {
      for (const RankCalls& calls : warm_calls(which, is_deterministic)) {
        EXPECT_EQ(calls.wrong_order(), "") << name(which);
        EXPECT_EQ(calls.unbalanced(), "") << name(which);
      }
    }
  }
}

TEST_F(DeviceTensorsTest, KeysOfThePartThatFollowsTravelWhileOneIsAttendedTo) {
  const std::string begun = "LGLG",  // k and v are packed, each is on its way
      arrived = "WLWL",              // waited for, put in order
      forward = begun + arrived +    // the next part's leave before attention is launched
                "GLGL" + arrived + "GLGL" + arrived + "GLGL" + arrived + "L",
                    backward =
                        begun +
                        arrived +  // and sums of gradients leave before the next part is waited for
                        "GLGLSLS" + arrived + "GLGLSLS" + arrived + "GLGLSLS" + arrived + "LSLS" +
                        "WWLWWLWWLWWL";  // dk and dv of each part, home
  std::string expected;
  for (const char letter : forward + backward) {
    if (expected.empty() || letter != 'L' || expected.back() != 'L') expected += letter;
  }
  for (const RankCalls& calls : warm_calls(ParallelScheme::head_group_all_gather, false))
    EXPECT_EQ(calls.shape(), expected);
}

/// What each rank is told whose first call is this.
std::vector<std::string> told_of_first_call(
    std::vector<std::unique_ptr<Communicator>> ends,
    const std::function<void(int, AttentionForward&)>& change) {
  const ShardPlan plan = context_parallel_plan(DeviceRank::problem(), kNumRanks);
  return on_ranks(std::move(ends), [&](std::shared_ptr<Communicator> end) {
    const int rank = end->rank();
    DeviceRank own;
    AttentionForward args = own.forward(stream_of_call(rank), true);
    change(rank, args);
    ContextParallel(plan, std::move(end)).forward(args);
  });
}

TEST_F(DeviceTensorsTest, RanksAgreeByWayOfTheDevice) {
  fake_.fail("cuEventQuery", cuda::driver::kNotReady, 3);  // the host asks again
  EXPECT_THAT(told_of_first_call(joined(), [](int, AttentionForward&) {}), Each(IsEmpty()));
  EXPECT_THAT(told_of_first_call(joined(),
                                 [](int rank, AttentionForward& args) {
                                   TensorSpec spec = args.q.spec();
                                   spec.device = Device::cpu();
                                   if (rank == 3) args.q = TensorView(args.q.data(), spec);
                                 }),
              Each("context_parallel_forward: rank 3: a tensor lives on cpu; expected cuda:0, "
                   "where the communicator exchanges"));
}

TEST_F(DeviceTensorsTest, ARankThatEndsWhileOthersWaitForTheDeviceIsAnError) {
  auto ends = joined();
  fake_.fail("cuEventQuery", cuda::driver::kNotReady);
  fake_nccl_.num_in_progress = 100;  // meanwhile exchanges have begun
  for (int rank = 0; rank < kNumRanks; ++rank) fake_nccl_.async_errors[rank] = 6;
  EXPECT_THAT(told_of_first_call(std::move(ends), [](int, AttentionForward&) {}),
              Each(HasSubstr("an exchange of NCCL failed on rank")));
  EXPECT_EQ(fake_nccl_.count("ncclCommAbort"), kNumRanks);
}

// ---- The doors to a group ----

TEST_F(DeviceTensorsTest, AGroupIsJoinedByIdOrTakenFromAProgram) {
  const auto own = join_nccl_ranks(make_nccl_id(), 0, 1, Device::cuda(0));
  EXPECT_EQ(own->world_size(), 1);
  NcclId id;
  NcclComm comm = nullptr;
  ASSERT_EQ(nccl_.api().unique_id(&id), kNcclSuccess);
  ASSERT_EQ(nccl_.api().init_rank(&comm, 1, id, 0), kNcclSuccess);
  EXPECT_EQ(use_nccl_ranks(comm)->device(), Device::cuda(0));
  EXPECT_EQ(fake_nccl_.count("ncclCommDestroy"), 0) << "the program's";
  EXPECT_EQ(nccl_.api().destroy(comm), kNcclSuccess);
}

// ---- Decoding ----

/// Caches of eight sequences, of which a rank has pages, and queries of all of them or of some.
struct DecodingRank {
  static constexpr std::int64_t kSequences = 8, kPages = 6, kPageSize = 16;
  std::int64_t own;  // sequences
  DeviceTensor q{Dtype::bf16, {own, 2, 8, kDim}}, out{Dtype::bf16, {own, 2, 8, kDim}};
  DeviceTensor k_new{Dtype::bf16, {own, 2, kKvHeads, kDim}}, v_new = k_new;
  DeviceTensor k{Dtype::bf16, {kSequences * kPages, kPageSize, kKvHeads, kDim}}, v = k;
  DeviceTensor table{Dtype::i32, {kSequences, kPages}}, seqlens{Dtype::i32, {kSequences}};
  DeviceTensor cos{Dtype::f32, {512, kDim / 2}}, sin = cos;

  AttentionDecode call(void* stream) {
    AttentionDecode args{.q = q.view(),
                         .cache = {.k = k.view(),
                                   .v = v.view(),
                                   .page_table = table.view(),
                                   .seqlens = seqlens.view()},
                         .append = {.k = k_new.view(), .v = v_new.view()},
                         .rotary = Rotary{.cos = cos.view(), .sin = sin.view()},
                         .out = out.view()};
    args.stream = stream;
    return args;
  }
};

TEST_F(DeviceTensorsTest, DecodingIsOneExchangeOfStatesAndNoRankWaitsForItsDevice) {
  for (const bool is_shared_out : {false, true}) {
    std::vector<DecodingRank> ranks;
    for (int rank = 0; rank < kNumRanks; ++rank)
      ranks.push_back({DecodingRank::kSequences / (is_shared_out ? kNumRanks : 1)});
    int waits = 0;
    const auto all = second_calls<ContextParallelDecode>(
        [](std::shared_ptr<Communicator> end) { return ContextParallelDecode(std::move(end)); },
        [&](ContextParallelDecode& decoding, int rank) {
          if (rank == 0) waits = fake_.count("cuEventQuery") + fake_.count("cuStreamSynchronize");
          decoding.run(ranks[static_cast<std::size_t>(rank)].call(stream_of_call(rank)));
        });
    for (const RankCalls& calls : all) {
      EXPECT_EQ(calls.wrong_order(), "");
      EXPECT_EQ(calls.unbalanced(), "");
      // Queries and new keys and values of all; places, append and attention; states; their union.
      EXPECT_EQ(calls.shape(), is_shared_out ? "GWGWGWLWL" : "LGWL");
    }
    EXPECT_EQ(fake_.count("cuEventQuery") + fake_.count("cuStreamSynchronize"), waits);
  }
}

TEST_F(DeviceTensorsTest, WhatDecodesElsewhereIsRefusedByName) {
  ContextParallelDecode decoding(join_nccl_ranks(make_nccl_id(), 0, 1, Device::cuda(0)));
  DecodingRank own{DecodingRank::kSequences};
  AttentionDecode args = own.call(nullptr);
  TensorSpec spec = args.cache.seqlens.spec();
  spec.device = Device::cpu();
  args.cache.seqlens = TensorView(args.cache.seqlens.data(), spec);
  try {
    decoding.run(args);
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(),
                 "context_parallel_decode: rank 0: cache.seqlens lives on cpu; expected cuda:0, "
                 "where the communicator exchanges");
  }
}

TEST_F(DeviceTensorsTest, CCallersHaveTheSameRanks) {
  fovea_nccl_id id{};
  ASSERT_EQ(fovea_nccl_id_make(&id, nullptr), FOVEA_OK);
  fovea_nccl_args args{};
  args.struct_size = sizeof(args);
  args.version = FOVEA_ABI_VERSION;
  args.world_size = 1;
  args.id = &id;
  fovea_nccl_ranks* ranks = nullptr;
  ASSERT_EQ(fovea_nccl_ranks_create(&args, &ranks, nullptr), FOVEA_OK);
  fovea_communicator communicator{};
  communicator.struct_size = sizeof(communicator);
  communicator.version = FOVEA_ABI_VERSION;
  communicator.nccl = ranks;
  fovea_context_parallel_decode* decoding = nullptr;
  ASSERT_EQ(fovea_context_parallel_decode_create(&communicator, &decoding, nullptr), FOVEA_OK);
  fovea_nccl_ranks_destroy(ranks);
  EXPECT_EQ(fake_nccl_.count("ncclCommDestroy"), 0) << "kept by what was made over them";
  fovea_context_parallel_decode_destroy(decoding);
  EXPECT_EQ(fake_nccl_.count("ncclCommDestroy"), 1);
}

}  // namespace
}  // namespace fovea::parallel
