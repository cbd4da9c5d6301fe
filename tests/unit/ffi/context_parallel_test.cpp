// Context parallelism through the C ABI, over a caller's communicator: ranks of threads against one call of the whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fovea/communicator.hpp"
#include "fovea/fovea.h"

#include "unit/ffi/c_call.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kSeqlen = 48;
constexpr int kRanks = 3;

// ---- A caller's transport: C functions over the threads' letter boxes ----

Communicator& of(void* context) { return *static_cast<Communicator*>(context); }

int all_gather(void* context, const void* sent, void* received, std::size_t bytes, void* stream,
               std::uint64_t* exchange) {
  *exchange = of(context).begin_all_gather(sent, received, bytes, stream).number;
  return 0;
}
int reduce_scatter(void* context, const float* sent, float* received, std::size_t count,
                   void* stream, std::uint64_t* exchange) {
  *exchange = of(context).begin_reduce_scatter(sent, received, count, stream).number;
  return 0;
}
int messages(void* context, const fovea_outgoing_message* sent, std::size_t num_sent,
             const fovea_incoming_message* received, std::size_t num_received, void* stream,
             std::uint64_t* exchange) {
  std::vector<OutgoingMessage> outgoing;
  for (std::size_t i = 0; i < num_sent; ++i)
    outgoing.push_back({static_cast<int>(sent[i].to), sent[i].data, sent[i].bytes});
  std::vector<IncomingMessage> incoming;
  for (std::size_t i = 0; i < num_received; ++i)
    incoming.push_back({static_cast<int>(received[i].from), received[i].data, received[i].bytes});
  *exchange = of(context).begin_messages(outgoing, incoming, stream).number;
  return 0;
}
int wait(void* context, std::uint64_t exchange, void* stream) {
  of(context).wait({exchange}, stream);
  return 0;
}
int fails(void* /*context*/, std::uint64_t /*exchange*/, void* /*stream*/) { return 7; }

fovea_communicator communicator_of(Communicator& end) {
  fovea_communicator result{};
  result.struct_size = sizeof(result);
  result.version = FOVEA_ABI_VERSION;
  result.rank = end.rank();
  result.world_size = end.world_size();
  result.context = &end;
  result.begin_all_gather = all_gather;
  result.begin_reduce_scatter = reduce_scatter;
  result.begin_messages = messages;
  result.wait = wait;
  return result;
}

// ---- A causal call, forward and backward, of all tokens or of a rank's ----

struct CausalCall {
  explicit CausalCall(std::int64_t num_tokens)
      : q({1, num_tokens, 4, 8}),
        k({1, num_tokens, 2, 8}),
        v({1, num_tokens, 2, 8}),
        out({1, num_tokens, 4, 8}),
        lse({1, 4, num_tokens}),
        dout({1, num_tokens, 4, 8}),
        dq({1, num_tokens, 4, 8}),
        dk({1, num_tokens, 2, 8}),
        dv({1, num_tokens, 2, 8}) {
    forward.struct_size = sizeof(forward);
    forward.version = FOVEA_ABI_VERSION;
    forward.q = &q.tensor;
    forward.k = &k.tensor;
    forward.v = &v.tensor;
    forward.out = &out.tensor;
    forward.lse = &lse.tensor;
    forward.causal = 1;
    backward.struct_size = sizeof(backward);
    backward.version = FOVEA_ABI_VERSION;
    backward.forward = &forward;
    backward.dout = &dout.tensor;
    backward.dq = &dq.tensor;
    backward.dk = &dk.tensor;
    backward.dv = &dv.tensor;
  }

  void fill() {
    float next = 0;
    for (FloatTensor* tensor : {&q, &k, &v, &dout}) {
      for (float& value : tensor->values) value = std::sin(next += 1.7F);
    }
  }

  FloatTensor q, k, v, out, lse, dout, dq, dk, dv;
  fovea_attention_forward_args forward{};
  fovea_attention_backward_args backward{};
};

struct Plan {
  explicit Plan(const fovea_attention_forward_args& forward) {
    fovea_shard_args args{};
    args.struct_size = sizeof(args);
    args.version = FOVEA_ABI_VERSION;
    args.forward = &forward;
    args.world_size = kRanks;
    EXPECT_EQ(outcome_of(fovea_shard_plan_create, &args, &plan).message, "");
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() { fovea_shard_plan_destroy(plan); }

  std::vector<std::int64_t> permutation() const {
    std::vector<std::int64_t> tokens(kSeqlen);
    EXPECT_EQ(outcome_of(fovea_shard_plan_permutation, plan, tokens.data(), tokens.size()).message,
              "");
    return tokens;
  }

  fovea_shard_plan* plan = nullptr;
};

/// Whether what a rank has of [1, tokens, heads, 8] is what stands at its places of the whole.
float difference(const FloatTensor& own, const FloatTensor& whole, const std::int64_t* tokens) {
  const std::int64_t row = whole.shape[2] * whole.shape[3];
  float worst = 0;
  for (std::size_t i = 0; i < own.values.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const float expected =
        whole.values[static_cast<std::size_t>(tokens[at / row] * row + at % row)];
    worst = std::max(worst, std::abs(own.values[i] - expected));
  }
  return worst;
}

void take(FloatTensor& own, const FloatTensor& whole, const std::int64_t* tokens) {
  const std::int64_t row = whole.shape[2] * whole.shape[3];
  for (std::int64_t i = 0; i < own.shape[1]; ++i)
    std::copy_n(whole.values.begin() + tokens[i] * row, row, own.values.begin() + i * row);
}

TEST(CContextParallel, RanksEqualOneCall) {
  CausalCall whole(kSeqlen);
  whole.fill();
  ASSERT_EQ(outcome_of(fovea_attention_forward, &whole.forward).message, "");
  ASSERT_EQ(outcome_of(fovea_attention_backward, &whole.backward).message, "");
  const Plan plan(whole.forward);
  const std::vector<std::int64_t> permutation = plan.permutation();
  auto ends = make_thread_communicators(kRanks);
  std::vector<std::jthread> threads;
  for (auto& end : ends) {
    threads.emplace_back([&] {
      const std::int64_t* const tokens = permutation.data() + end->rank() * kSeqlen / kRanks;
      CausalCall own(kSeqlen / kRanks);
      take(own.q, whole.q, tokens);
      take(own.k, whole.k, tokens);
      take(own.v, whole.v, tokens);
      take(own.dout, whole.dout, tokens);
      const fovea_communicator communicator = communicator_of(*end);
      fovea_context_parallel* attention = nullptr;
      EXPECT_EQ(
          outcome_of(fovea_context_parallel_create, plan.plan, &communicator, &attention).message,
          "");
      EXPECT_EQ(outcome_of(fovea_context_parallel_forward, attention, &own.forward).message, "");
      EXPECT_EQ(outcome_of(fovea_context_parallel_backward, attention, &own.backward).message, "");
      fovea_context_parallel_destroy(attention);
      EXPECT_EQ(difference(own.out, whole.out, tokens), 0);
      EXPECT_EQ(difference(own.dq, whole.dq, tokens), 0);
      EXPECT_EQ(difference(own.dk, whole.dk, tokens), 0);
      EXPECT_EQ(difference(own.dv, whole.dv, tokens), 0);
    });
  }
}

TEST(CContextParallel, RefusesWhatIsNoCommunicatorAndTellsOfItsFailures) {
  CausalCall whole(kSeqlen);
  const Plan plan(whole.forward);
  const auto ends = make_thread_communicators(kRanks);
  const auto create = [&](const fovea_communicator& communicator,
                          fovea_context_parallel** attention) {
    return outcome_of(fovea_context_parallel_create, plan.plan, &communicator, attention);
  };
  fovea_context_parallel* attention = nullptr;
  fovea_communicator communicator = communicator_of(*ends[0]);
  communicator.wait = nullptr;
  EXPECT_THAT(create(communicator, &attention).message, HasSubstr("a function is NULL"));
  communicator = communicator_of(*ends[0]);
  communicator.rank = kRanks;
  EXPECT_THAT(create(communicator, &attention).message,
              HasSubstr("rank is 3 and world_size 3; expected a rank from 0 up, below world_size"));
  communicator.rank = 0;
  communicator.world_size = 2;
  EXPECT_THAT(create(communicator, &attention).message,
              HasSubstr("the communicator has 2 ranks; expected 3, those of the plan"));
  EXPECT_EQ(attention, nullptr);
  communicator = communicator_of(*ends[0]);
  communicator.wait = fails;
  ASSERT_EQ(create(communicator, &attention).message, "");
  CausalCall own(kSeqlen / kRanks);
  const Outcome outcome = outcome_of(fovea_context_parallel_forward, attention, &own.forward);
  EXPECT_EQ(outcome.kind, FOVEA_DEVICE_ERROR);
  EXPECT_THAT(outcome.message, HasSubstr("communicator: wait returned 7 on rank 0"));
  fovea_context_parallel_destroy(attention);
  attention = nullptr;
  EXPECT_THAT(outcome_of(fovea_context_parallel_forward, attention, &own.forward).message,
              HasSubstr("context_parallel is NULL"));
  fovea_context_parallel_destroy(attention);
}

// ---- Decoding ----

/// Two sequences over pages of 4 keys, 2 heads of 8.
struct PagedCall {
  static constexpr std::int64_t kPages = 4, kPageSize = 4, kHeads = 2, kDim = 8;

  /// `rank` has every world_size-th page of each sequence.
  PagedCall(int rank, int world_size)
      : q({2, 1, kHeads, kDim}),
        out({2, 1, kHeads, kDim}),
        k_new({2, 1, kHeads, kDim}),
        v_new({2, 1, kHeads, kDim}),
        k({2 * kPages, kPageSize, kHeads, kDim}),
        v({2 * kPages, kPageSize, kHeads, kDim}),
        seqlens({2}, {7, 12}),
        page_table({2, kPages / world_size}, own_pages(rank, world_size)) {
    for (FloatTensor* tensor : {&q, &k_new, &v_new, &k, &v}) fill(*tensor);
    forward.struct_size = sizeof(forward);
    forward.version = FOVEA_ABI_VERSION;
    forward.q = &q.tensor;
    forward.k = &k.tensor;
    forward.v = &v.tensor;
    forward.out = &out.tensor;
    decode.struct_size = sizeof(decode);
    decode.version = FOVEA_ABI_VERSION;
    decode.forward = &forward;
    decode.seqlens = &seqlens.tensor;
    decode.page_table = &page_table.tensor;
    decode.append_k = &k_new.tensor;
    decode.append_v = &v_new.tensor;
  }
  static std::vector<std::int32_t> own_pages(int rank, int world_size) {
    std::vector<std::int32_t> pages;
    for (std::int32_t page = 0; page < 2 * kPages; ++page) {
      if (page % world_size == rank) pages.push_back(page);
    }
    return pages;
  }
  static void fill(FloatTensor& tensor) {
    float next = static_cast<float>(tensor.values.size());
    for (float& value : tensor.values) value = std::sin(next += 1.7F);
  }

  FloatTensor q, out, k_new, v_new, k, v;
  IndexTensor seqlens, page_table;
  fovea_attention_forward_args forward{};
  fovea_attention_decode_args decode{};
};

TEST(CContextParallel, DecodingOverRanksEqualsOneCache) {
  constexpr int kDecodingRanks = 2;
  PagedCall whole(0, 1);
  ASSERT_EQ(outcome_of(fovea_attention_decode, &whole.decode).message, "");
  auto ends = make_thread_communicators(kDecodingRanks);
  std::vector<std::jthread> threads;
  for (auto& end : ends) {
    threads.emplace_back([&] {
      PagedCall own(end->rank(), kDecodingRanks);
      const fovea_communicator communicator = communicator_of(*end);
      fovea_context_parallel_decode* decoding = nullptr;
      EXPECT_EQ(outcome_of(fovea_context_parallel_decode_create, &communicator, &decoding).message,
                "");
      EXPECT_EQ(outcome_of(fovea_context_parallel_decode_run, decoding, &own.decode).message, "");
      fovea_context_parallel_decode_destroy(decoding);
      for (std::size_t i = 0; i < whole.out.values.size(); ++i)
        EXPECT_NEAR(own.out.values[i], whole.out.values[i], 1e-6) << i;
    });
  }
}

TEST(CContextParallel, DecodingRefusesByName) {
  PagedCall own(0, 1);
  const auto end = std::move(make_thread_communicators(1)[0]);
  const fovea_communicator communicator = communicator_of(*end);
  EXPECT_THAT(outcome_of(fovea_context_parallel_decode_create, &communicator,
                         static_cast<fovea_context_parallel_decode**>(nullptr))
                  .message,
              HasSubstr("context_parallel is NULL"));
  fovea_context_parallel_decode* decoding = nullptr;
  EXPECT_THAT(outcome_of(fovea_context_parallel_decode_run, decoding, &own.decode).message,
              HasSubstr("context_parallel is NULL"));
  ASSERT_EQ(outcome_of(fovea_context_parallel_decode_create, &communicator, &decoding).message, "");
  own.decode.page_table = nullptr;
  EXPECT_THAT(outcome_of(fovea_context_parallel_decode_run, decoding, &own.decode).message,
              HasSubstr("cache.page_table is missing"));
  fovea_context_parallel_decode_destroy(decoding);
}

// ---- Ranks over NCCL: what needs none of it; the rest is tests/unit/parallel/device_tensors_test.cpp ----

/// Before anything asks for NCCL.
[[maybe_unused]] const int has_no_nccl = setenv("FOVEA_NCCL", "/nowhere", 1);

TEST(CNcclRanks, AreRefusedByNameWhereThereIsNoNccl) {
  fovea_nccl_id id{};
  const Outcome outcome = outcome_of(fovea_nccl_id_make, &id);
  EXPECT_EQ(outcome.kind, FOVEA_UNSUPPORTED);
  EXPECT_THAT(outcome.message, HasSubstr("no NCCL: FOVEA_NCCL is '/nowhere'"));
  fovea_nccl_id* const none = nullptr;
  EXPECT_THAT(outcome_of(fovea_nccl_id_make, none).message, HasSubstr("id is NULL"));
}

TEST(CNcclRanks, AreMadeFromOneOfTwo) {
  fovea_nccl_args args{};
  args.struct_size = sizeof(args);
  args.version = FOVEA_ABI_VERSION;
  fovea_nccl_ranks* ranks = nullptr;
  EXPECT_THAT(outcome_of(fovea_nccl_ranks_create, &args, &ranks).message,
              HasSubstr("id and comm are both given or both NULL"));
  fovea_nccl_id id{};
  args.id = &id;
  args.comm = &id;
  EXPECT_THAT(outcome_of(fovea_nccl_ranks_create, &args, &ranks).message,
              HasSubstr("id and comm are both given or both NULL"));
  args.comm = nullptr;
  args.stream = &id;
  EXPECT_THAT(outcome_of(fovea_nccl_ranks_create, &args, &ranks).message,
              HasSubstr("stream is given beside id"));
  EXPECT_EQ(ranks, nullptr);
  fovea_nccl_ranks_destroy(ranks);
}

}  // namespace
}  // namespace fovea::testing
