// fovea.h as a C program sees it: the same results as the C++ functions, and refusals that say which argument is wrong.
#include "fovea/fovea.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "quant/formats.hpp"
#include "support/case.hpp"
#include "support/compare.hpp"
#include "unit/ffi/c_call.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

Outcome forward(const fovea_attention_forward_args& args) {
  return outcome_of(fovea_attention_forward, &args);
}

void forward_through_c(const AttentionForward& args) {
  const CCall call(args);
  const Outcome outcome = forward(call.args);
  if (outcome.kind != FOVEA_OK) throw Error(ErrorKind::internal, outcome.message);
}

void expect_equals_oracle_through_c(const Case& problem) {
  expect_equals_oracle(problem, {.run = forward_through_c});
}

// 19 x 67: neither is a multiple of a vector or a tile; heads 4/2 make groups of two.
Case ragged_case() {
  Case problem;
  problem.batch = 2;
  problem.seqlen_q = 19;
  problem.seqlen_kv = 67;
  problem.num_heads_q = 4;
  problem.num_heads_kv = 2;
  problem.head_dim_qk = 24;
  problem.head_dim_v = 40;
  return problem;
}

TEST(CAttentionForward, EqualsTheOracleForEveryDtype) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    Case problem = ragged_case();
    problem.dtype = dtype;
    expect_equals_oracle_through_c(problem);
  }
}

TEST(CAttentionForward, CarriesStridesSinksScaleAndDropout) {
  Case problem = ragged_case();
  problem.layout = Layout::bhsd;
  problem.out_layout = Layout::padded;
  problem.has_sinks = true;
  problem.softmax_scale = 0.3F;
  problem.dropout = {.p = 0.25F, .seed = 7, .offset = 3};
  expect_equals_oracle_through_c(problem);
}

TEST(CAttentionForward, CarriesProgramsWithTensorsAndScalarsAsText) {
  Case problem = ragged_case();
  const TensorView slopes =
      problem.capture(Dtype::f32, {4}, [](std::int64_t i) { return 0.5 / double(i + 1); });
  const TensorView banned =
      problem.capture(Dtype::i32, {67}, [](std::int64_t i) { return double(i % 3 == 1); });
  problem.score = parse_score_mod(
      "score * gain + slopes[q_head] * (kv_idx - q_idx)",
      {.tensors = {{"slopes", slopes}}, .scalars = {CapturedScalar::of("gain", 0.5F)}});
  problem.mask = parse_mask_mod(
      "kv_idx <= q_idx + reach && banned[kv_idx] == 0",
      {.tensors = {{"banned", banned}}, .scalars = {CapturedScalar::of("reach", 40)}});
  expect_equals_oracle_through_c(problem);
}

TEST(CAttentionForward, CarriesPackedSequences) {
  Case problem = ragged_case();
  problem.sequences = {{5, 9}, {0, 3}, {13, 1}, {1, 40}};
  problem.trailing_rows = 2;
  problem.mask = causal();
  expect_equals_oracle_through_c(problem);
}

// What each convenience field stands for, as the C++ word.
struct Word {
  const char* name;
  std::function<void(fovea_attention_forward_args&)> set;
  ScoreMod score;
  MaskMod mask;
};

class CWords : public ::testing::Test {
 protected:
  static constexpr std::int64_t kSeqlenQ = 5, kSeqlenKv = 7;

  CWords() {
    for (std::size_t i = 0; i < q.values.size(); ++i) q.values[i] = std::sin(float(i));
    for (std::size_t i = 0; i < k.values.size(); ++i) k.values[i] = std::cos(float(i));
    for (std::size_t i = 0; i < v.values.size(); ++i) v.values[i] = std::sin(0.3F * float(i));
    for (std::size_t i = 0; i < bias.values.size(); ++i) bias.values[i] = 0.1F * float(i % 11);
  }

  fovea_attention_forward_args args() {
    fovea_attention_forward_args result{};
    result.struct_size = sizeof(result);
    result.version = FOVEA_ABI_VERSION;
    result.q = &q.tensor;
    result.k = &k.tensor;
    result.v = &v.tensor;
    result.out = &out.tensor;
    return result;
  }

  static TensorView view_of(FloatTensor& t) {
    return {t.values.data(), make_spec(Dtype::f32, t.shape)};
  }

  std::vector<float> expected(const ScoreMod& score, const MaskMod& mask) {
    FloatTensor result({1, kSeqlenQ, 2, 8});
    attention_forward({.q = view_of(q),
                       .k = view_of(k),
                       .v = view_of(v),
                       .out = view_of(result),
                       .score = score,
                       .mask = mask});
    return result.values;
  }

  FloatTensor q{{1, kSeqlenQ, 2, 8}}, k{{1, kSeqlenKv, 2, 8}}, v{{1, kSeqlenKv, 2, 8}};
  FloatTensor out{{1, kSeqlenQ, 2, 8}}, bias{{kSeqlenQ, kSeqlenKv}}, slopes{{2}, 0.5F};
};

TEST_F(CWords, MeanWhatTheirCxxNamesakesMean) {
  std::vector<std::uint8_t> visible(kSeqlenQ * kSeqlenKv, 1);
  visible[3] = visible[12] = 0;
  std::vector<std::int64_t> visible_shape = {kSeqlenQ, kSeqlenKv};
  const DLTensor visible_tensor{visible.data(),       {kDLCPU, 0}, 2, {kDLBool, 8, 1},
                                visible_shape.data(), nullptr,     0};
  const TensorView visible_view(visible.data(), make_spec(Dtype::boolean, visible_shape));

  const Word words[] = {
      {"softcap", [](auto& a) { a.softcap = 2; }, softcap(2), {}},
      {"bias", [&](auto& a) { a.bias = &bias.tensor; }, fovea::bias(view_of(bias)), {}},
      {"alibi", [&](auto& a) { a.alibi = &slopes.tensor; }, alibi(view_of(slopes)), {}},
      {"alibi top_left",
       [&](auto& a) {
         a.alibi = &slopes.tensor;
         a.align = FOVEA_TOP_LEFT;
       },
       alibi(view_of(slopes), Align::top_left),
       {}},
      {"softcap before bias",
       [&](auto& a) {
         a.softcap = 2;
         a.bias = &bias.tensor;
       },
       softcap(2) | fovea::bias(view_of(bias)),
       {}},
      {"causal", [](auto& a) { a.causal = 1; }, {}, causal()},
      {"causal top_left",
       [](auto& a) {
         a.causal = 1;
         a.align = FOVEA_TOP_LEFT;
       },
       {},
       causal(Align::top_left)},
      {"window",
       [](auto& a) {
         a.has_window_left = a.has_window_right = 1;
         a.window_left = 2;
       },
       {},
       window(2, 0)},
      {"window open to the right",
       [](auto& a) {
         a.has_window_left = 1;
         a.window_left = 1;
       },
       {},
       window(1, std::nullopt)},
      {"mask", [&](auto& a) { a.mask = &visible_tensor; }, {}, dense_mask(visible_view)},
      {"mask_mod",
       [](auto& a) { a.mask_mod = "(q_idx + kv_idx) % 2 == 0"; },
       {},
       parse_mask_mod("(q_idx + kv_idx) % 2 == 0")},
  };
  for (const Word& word : words) {
    fovea_attention_forward_args a = args();
    word.set(a);
    out.values.assign(out.values.size(), -7.0F);
    const Outcome outcome = forward(a);
    ASSERT_EQ(outcome.kind, FOVEA_OK) << word.name << ": " << outcome.message;
    EXPECT_EQ(out.values, expected(word.score, word.mask)) << word.name;
    EXPECT_NE(out.values, expected({}, {})) << word.name << " changed nothing, so proves nothing";
  }
}

TEST_F(CWords, OfACallAreItsOwnThoughAThreadKeepsTheirFormulas) {
  FloatTensor other({kSeqlenQ, kSeqlenKv}, 0.25F);
  other.values[3] = -2;
  fovea_attention_forward_args a = args();
  a.has_window_left = 1;
  for (int round = 0; round < 2; ++round) {
    for (FloatTensor* given : {&bias, &other}) {
      for (const int left : {1, 3}) {
        a.bias = &given->tensor;
        a.window_left = left;
        ASSERT_EQ(forward(a).message, "");
        EXPECT_EQ(out.values, expected(fovea::bias(view_of(*given)), window(left, std::nullopt)))
            << "round " << round << ", left " << left;
      }
    }
  }
  EXPECT_NE(expected(fovea::bias(view_of(bias)), {}), expected(fovea::bias(view_of(other)), {}));
}

/// An index beyond an end would read the last element again: too few rows, keys, sequences or heads are no broadcast.
TEST_F(CWords, TensorsHaveAnElementForEachIndexOfTheCall) {
  using Shape = std::vector<std::int64_t>;
  const auto message_with = [&](const DLTensor* fovea_attention_forward_args::*field,
                                const Shape& shape, DLDataType dtype) {
    std::vector<std::int64_t> zeros(1000);
    Shape extents = shape;
    const DLTensor tensor{
        zeros.data(), {kDLCPU, 0}, int(extents.size()), dtype, extents.data(), nullptr, 0};
    fovea_attention_forward_args a = args();
    if (field == &fovea_attention_forward_args::segments_q) a.segments_kv = &tensor;
    a.*field = &tensor;
    return forward(a).message;
  };
  constexpr DLDataType kF32{kDLFloat, 32, 1}, kBool{kDLBool, 8, 1}, kI64{kDLInt, 64, 1};
  constexpr auto kBias = &fovea_attention_forward_args::bias;
  constexpr auto kMask = &fovea_attention_forward_args::mask;
  constexpr auto kAlibi = &fovea_attention_forward_args::alibi;
  constexpr auto kSegments = &fovea_attention_forward_args::segments_q;

  for (const Shape& shape :
       {Shape{5, 7}, {1, 7}, {5, 1}, {6, 9}, {2, 5, 7}, {1, 2, 5, 7}, {3, 1, 8, 8}}) {
    EXPECT_EQ(message_with(kBias, shape, kF32), "");
    EXPECT_EQ(message_with(kMask, shape, kBool), "");
  }
  for (const Shape& shape : {Shape{5, 6}, {4, 7}, {3, 5, 7}, {1, 3, 5, 7}, {2, 2, 7}}) {
    EXPECT_THAT(message_with(kBias, shape, kF32), HasSubstr("bias is f32 [")) << shape.size();
    EXPECT_THAT(message_with(kMask, shape, kBool), HasSubstr("dense_mask: mask is bool ["))
        << shape.size();
  }
  EXPECT_THAT(message_with(kBias, {5, 6}, kF32),
              HasSubstr("bias is f32 [5, 6]; expected [5, 7], of which all but heads may be more, "
                        "or 1 where all share an element"));
  for (const Shape& shape : {Shape{2}, {1}, {1, 2}, {4, 2}})
    EXPECT_EQ(message_with(kAlibi, shape, kF32), "");
  for (const Shape& shape : {Shape{3}, {1, 3}, {2, 4}})
    EXPECT_THAT(message_with(kAlibi, shape, kF32), HasSubstr("alibi: slopes is f32 ["));
  EXPECT_EQ(message_with(kSegments, {1, 7}, kI64), "");
  EXPECT_THAT(message_with(kSegments, {1, 4}, kI64),
              HasSubstr("segments is i64 [1, 4]; expected [1, 7]"));
  EXPECT_THAT(message_with(kSegments, {1, 6}, kI64),
              HasSubstr("segments is i64 [1, 6]; expected [1, 7]"));
}

TEST_F(CWords, SegmentsOfOneSideServeBothWhereLengthsAreEqual) {
  SmallCall call;
  std::int32_t ids[] = {0, 0, 1, 1, -1};
  std::int64_t shape[] = {1, 5};
  const DLTensor segments{ids, {kDLCPU, 0}, 2, {kDLInt, 32, 1}, shape, nullptr, 0};
  call.args.segments_q = &segments;
  ASSERT_EQ(forward(call.args).message, "");
  const std::vector<float> one_side = call.out.values;
  EXPECT_EQ(one_side.back(), 0) << "padding sees nothing";
  call.args.segments_kv = &segments;
  ASSERT_EQ(forward(call.args).message, "");
  EXPECT_EQ(call.out.values, one_side);

  fovea_attention_forward_args unequal = args();
  unequal.segments_q = &segments;
  EXPECT_THAT(forward(unequal).message, HasSubstr("segments_kv: is NULL"));
}

TEST(CAttentionForward, AnOlderCallersStructTakesDefaults) {
  SmallCall call;
  ASSERT_EQ(forward(call.args).message, "");
  const std::vector<float> plain = call.out.values;
  call.args.causal = 1;  // beyond the size below: an older caller never set it
  call.args.struct_size = offsetof(fovea_attention_forward_args, causal);
  ASSERT_EQ(forward(call.args).message, "");
  EXPECT_EQ(call.out.values, plain);
}

TEST(CAttentionForward, RefusalsNameTheArgumentAndWriteNothing) {
  struct Row {
    std::function<void(SmallCall&)> spoil;
    const char* expected;
  };
  const Row rows[] = {
      {[](SmallCall& c) { c.args.q = nullptr; }, "q: is NULL"},
      {[](SmallCall& c) { c.args.out = nullptr; }, "out: is NULL"},
      {[](SmallCall& c) { c.args.causal = 2; }, "causal: is 2; expected 0 to 1"},
      {[](SmallCall& c) {
         c.args.align = -1;
         c.args.causal = 1;
       },
       "align: is -1; expected 0 to 1"},
      {[](SmallCall& c) { c.args.cpu_target = 99; }, "cpu_target: is 99"},
      {[](SmallCall& c) { c.args.compute_dtype = 3; }, "compute_dtype: is 3"},
      {[](SmallCall& c) { c.args.num_tensors = 1; }, "tensors: is NULL"},
      {[](SmallCall& c) { c.args.num_scalars = 1; }, "scalars: is NULL"},
      {[](SmallCall& c) { c.args.workspace_bytes = 1; }, "workspace is NULL"},
      {[](SmallCall& c) { c.k.shape[3] = 4; }, "head_dim"},
      {[](SmallCall& c) { c.args.score_mod = "score + slope"; }, "slope"},
      {[](SmallCall& c) { c.args.mask_mod = "score > 0"; }, "score"},
      {[](SmallCall& c) {
         c.args.has_window_left = 1;
         c.args.window_left = -3;
       },
       "-3"},
      {[](SmallCall& c) { c.q.tensor.dtype.bits = 64; }, "q: dtype"},
  };
  for (const Row& row : rows) {
    SmallCall call;
    row.spoil(call);
    const Outcome outcome = forward(call.args);
    EXPECT_EQ(outcome.kind, FOVEA_INVALID_ARGUMENT) << row.expected;
    EXPECT_THAT(outcome.message, HasSubstr(row.expected));
    EXPECT_EQ(call.out.values, std::vector<float>(call.out.values.size(), -7.0F)) << row.expected;
  }
  EXPECT_EQ(outcome_of(fovea_attention_forward, nullptr).kind, FOVEA_INVALID_ARGUMENT);
}

TEST(CAttentionForward, IntScalarsAreWhole) {
  SmallCall call;
  for (const double value : {0.5, 2147483648.0, std::nan("")}) {
    const fovea_named_scalar scalar{"n", FOVEA_SCALAR_INT, value};
    call.args.scalars = &scalar;
    call.args.num_scalars = 1;
    EXPECT_THAT(forward(call.args).message, HasSubstr("n: is ")) << value;
  }
}

TEST(CAttentionForward, TensorsOnAGpuAreRefusedByTheDoor) {
  SmallCall call;
  call.q.tensor.device = call.k.tensor.device = call.v.tensor.device =
      call.out.tensor.device = {kDLCUDA, 0};
  EXPECT_NE(forward(call.args).kind, FOVEA_OK);
}

// Whose they are is said, also where there is no driver of theirs.
TEST(CAttentionForward, TensorsOfAmdAreRefusedByTheirName) {
  SmallCall call;
  call.q.tensor.device = call.k.tensor.device = call.v.tensor.device =
      call.out.tensor.device = {kDLROCM, 1};
  const auto outcome = forward(call.args);
  EXPECT_EQ(outcome.kind, FOVEA_UNSUPPORTED);
  EXPECT_THAT(outcome.message, HasSubstr("rocm:1"));
}

// Executors ------------------------------------------------------------------------------------

struct CountingPool {
  int concurrency = 3;
  std::int64_t tasks = 0;

  fovea_executor executor() {
    return {sizeof(fovea_executor),
            FOVEA_ABI_VERSION,
            0,
            this,
            [](void* context) -> std::int32_t {
              return static_cast<CountingPool*>(context)->concurrency;
            },
            [](void* context, std::int64_t count, fovea_task task, void* task_context) {
              auto& pool = *static_cast<CountingPool*>(context);
              pool.tasks += count;
              for (std::int64_t i = count - 1; i >= 0; --i) {  // backwards: order must not matter
                task(task_context, static_cast<std::int32_t>(i % pool.concurrency), i);
              }
            }};
  }
};

TEST(CExecutor, RunsTheWorkAndChangesNoBits) {
  SmallCall call;
  ASSERT_EQ(forward(call.args).message, "");
  const std::vector<float> plain = call.out.values;
  CountingPool pool;
  const fovea_executor executor = pool.executor();
  call.args.executor = &executor;
  ASSERT_EQ(forward(call.args).message, "");
  EXPECT_GT(pool.tasks, 0);
  EXPECT_EQ(call.out.values, plain);
}

TEST(CExecutor, WithoutFunctionsOrWorkersIsRefused) {
  SmallCall call;
  CountingPool pool;
  fovea_executor executor = pool.executor();
  call.args.executor = &executor;
  pool.concurrency = 0;
  EXPECT_THAT(forward(call.args).message, HasSubstr("executor: concurrency is 0"));
  executor.run = nullptr;
  EXPECT_THAT(forward(call.args).message, HasSubstr("concurrency or run is NULL"));
}

TEST(CRuntime, GivesTheSameBitsForEveryThreadCount) {
  SmallCall call;
  ASSERT_EQ(forward(call.args).message, "");
  const std::vector<float> plain = call.out.values;
  for (const int num_threads : {0, 1, 3}) {
    fovea_runtime* runtime = nullptr;
    ASSERT_EQ(outcome_of(fovea_runtime_create, num_threads, &runtime).message, "");
    call.args.runtime = runtime;
    EXPECT_EQ(forward(call.args).message, "");
    EXPECT_EQ(call.out.values, plain) << num_threads;
    fovea_runtime_destroy(runtime);
  }
}

struct CountedMemory {
  int num_lent = 0, num_allocations = 0;

  fovea_allocator allocator() {
    fovea_allocator result{};
    result.struct_size = sizeof(result);
    result.version = FOVEA_ABI_VERSION;
    result.context = this;
    result.allocate = [](void* context, std::size_t bytes, std::size_t alignment, DLDevice device,
                         void* stream) -> void* {
      auto& memory = *static_cast<CountedMemory*>(context);
      if (device.device_type != kDLCPU || stream != nullptr) return nullptr;
      ++memory.num_lent;
      ++memory.num_allocations;
      return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    };
    result.deallocate = [](void* context, void* data, std::size_t, DLDevice, void*) {
      --static_cast<CountedMemory*>(context)->num_lent;
      std::free(data);
    };
    return result;
  }
};

TEST(CRuntime, AsksItsAllocatorForWorkspace) {
  SmallCall call;
  CountedMemory first, second;
  fovea_allocator allocator = first.allocator();
  fovea_runtime* runtime = nullptr;
  ASSERT_EQ(outcome_of(fovea_runtime_create, 1, &runtime).message, "");
  ASSERT_EQ(outcome_of(fovea_runtime_set_allocator, runtime, &allocator).message, "");
  call.args.runtime = runtime;
  EXPECT_EQ(forward(call.args).message, "");
  EXPECT_EQ(first.num_allocations, 1);
  allocator = second.allocator();
  ASSERT_EQ(outcome_of(fovea_runtime_set_allocator, runtime, &allocator).message, "");
  EXPECT_EQ(forward(call.args).message, "");
  EXPECT_EQ(second.num_allocations, 1);
  const fovea_allocator* const none = nullptr;
  ASSERT_EQ(outcome_of(fovea_runtime_set_allocator, runtime, none).message, "");
  EXPECT_EQ(forward(call.args).message, "");
  EXPECT_EQ(first.num_allocations, 1);
  EXPECT_EQ(first.num_lent + second.num_lent, 0);
  allocator.deallocate = nullptr;
  EXPECT_THAT(outcome_of(fovea_runtime_set_allocator, runtime, &allocator).message,
              HasSubstr("allocate or deallocate is NULL"));
  fovea_runtime_destroy(runtime);
}

TEST(CRuntime, WithoutOneTheAllocatorIsThatOfCallsWithoutOne) {
  SmallCall call;
  CountedMemory memory;
  fovea_allocator allocator = memory.allocator();
  fovea_runtime* const process = nullptr;
  ASSERT_EQ(outcome_of(fovea_runtime_set_allocator, process, &allocator).message, "");
  EXPECT_EQ(forward(call.args).message, "");
  EXPECT_EQ(memory.num_allocations, 1);
  const fovea_allocator* const none = nullptr;
  ASSERT_EQ(outcome_of(fovea_runtime_set_allocator, process, none).message, "");
  EXPECT_EQ(forward(call.args).message, "");
  EXPECT_EQ(memory.num_allocations, 1);
  EXPECT_EQ(memory.num_lent, 0);
}

TEST(CRuntime, HasAnAllocatorForEachTypeOfDevice) {
  SmallCall call;
  CountedMemory memory;
  fovea_allocator allocator = memory.allocator();
  fovea_runtime* runtime = nullptr;
  ASSERT_EQ(outcome_of(fovea_runtime_create, 1, &runtime).message, "");
  call.args.runtime = runtime;
  const auto allocations_with = [&](std::int32_t device_type) {
    allocator.device_type = device_type;
    EXPECT_EQ(outcome_of(fovea_runtime_set_allocator, runtime, &allocator).message, "");
    const int before = memory.num_allocations;
    EXPECT_EQ(forward(call.args).message, "");
    return memory.num_allocations - before;
  };
  EXPECT_EQ(allocations_with(kDLCUDA), 0);
  EXPECT_EQ(allocations_with(kDLROCM), 0);
  EXPECT_EQ(allocations_with(kDLCPU), 1);
  allocator.allocate = nullptr, allocator.deallocate = nullptr;
  EXPECT_EQ(allocations_with(kDLCUDA), 1) << "that of the host is still there";
  EXPECT_EQ(allocations_with(kDLCPU), 0);
  allocator.device_type = kDLCUDAHost;
  EXPECT_THAT(
      outcome_of(fovea_runtime_set_allocator, runtime, &allocator).message,
      HasSubstr("device_type is 3; expected kDLCPU (1), kDLCUDA (2), kDLROCM (10), or 0 for all"));
  fovea_runtime_destroy(runtime);
}

TEST(CRuntime, RefusesNegativeThreads) {
  auto* runtime = reinterpret_cast<fovea_runtime*>(1);
  EXPECT_EQ(outcome_of(fovea_runtime_create, -1, &runtime).kind, FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(runtime, nullptr) << "a failed create leaves nothing to destroy";
}

// Plans ----------------------------------------------------------------------------------------

struct OwnedPlan {
  explicit OwnedPlan(const fovea_attention_forward_args& args,
                     const fovea_plan_options* options = nullptr) {
    outcome = outcome_of(fovea_plan_create, &args, options, &plan);
  }
  OwnedPlan(const OwnedPlan&) = delete;
  OwnedPlan& operator=(const OwnedPlan&) = delete;
  ~OwnedPlan() { fovea_plan_destroy(plan); }

  fovea_plan* plan = nullptr;
  Outcome outcome;
};

TEST(CPlan, RunsWithTheWorkspaceItAskedFor) {
  SmallCall call;
  call.args.causal = 1;
  ASSERT_EQ(forward(call.args).message, "");
  const std::vector<float> expected = call.out.values;
  call.out.values.assign(expected.size(), -7.0F);

  const OwnedPlan owned(call.args);
  ASSERT_EQ(owned.outcome.message, "");
  std::vector<std::byte> workspace(fovea_plan_workspace_bytes(owned.plan));
  call.args.workspace = workspace.data();
  call.args.workspace_bytes = workspace.size();
  EXPECT_EQ(outcome_of(fovea_plan_run, owned.plan, &call.args).message, "");
  EXPECT_EQ(call.out.values, expected);
}

TEST(CPlan, NeedsNoDataToBeMade) {
  SmallCall call;
  call.q.tensor.data = call.k.tensor.data = call.v.tensor.data = call.out.tensor.data = nullptr;
  EXPECT_EQ(OwnedPlan(call.args).outcome.message, "");
}

TEST(CPlan, SaysWhetherItIsFinal) {
  SmallCall call;
  fovea_plan_options options{};
  options.struct_size = sizeof(options);
  options.version = FOVEA_ABI_VERSION;
  for (const int mode : {FOVEA_COMPILE_AUTOMATIC, FOVEA_COMPILE_COMPLETE, FOVEA_COMPILE_STAGED}) {
    options.compile_mode = mode;
    const OwnedPlan owned(call.args, &options);
    ASSERT_EQ(owned.outcome.message, "");
    int32_t is_final = -1;
    EXPECT_EQ(outcome_of(fovea_plan_is_final, owned.plan, &is_final).message, "");
    EXPECT_EQ(is_final, 1) << "nothing is compiled for a cpu";
    EXPECT_EQ(outcome_of(fovea_plan_wait, owned.plan).message, "");
  }
  options.compile_mode = 3;
  EXPECT_EQ(OwnedPlan(call.args, &options).outcome.message,
            "fovea_plan_create: options: compile_mode is 3; expected a fovea_compile_mode, 0 to 2");
  fovea_plan* const none = nullptr;
  int32_t is_final = -1;
  EXPECT_EQ(outcome_of(fovea_plan_is_final, none, &is_final).kind, FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(outcome_of(fovea_plan_wait, none).kind, FOVEA_INVALID_ARGUMENT);
}

TEST(CPlan, BoundsServeShorterLengthsAndRefuseLongerOnes) {
  SmallCall call;
  fovea_plan_options options{};
  options.struct_size = sizeof(options);
  options.version = FOVEA_ABI_VERSION;
  options.max_seqlen_q = options.max_seqlen_kv = 5;
  const OwnedPlan owned(call.args, &options);
  ASSERT_EQ(owned.outcome.message, "");
  std::vector<std::byte> workspace(fovea_plan_workspace_bytes(owned.plan));

  SmallCall shorter;
  for (FloatTensor* t : {&shorter.q, &shorter.k, &shorter.v, &shorter.out}) t->shape[1] = 3;
  ASSERT_EQ(forward(shorter.args).message, "");
  const std::vector<float> expected = shorter.out.values;
  shorter.out.values.assign(expected.size(), -7.0F);
  shorter.args.workspace = workspace.data();
  shorter.args.workspace_bytes = workspace.size();
  EXPECT_EQ(outcome_of(fovea_plan_run, owned.plan, &shorter.args).message, "");
  EXPECT_EQ(shorter.out.values, expected);

  FloatTensor longer({1, 6, 2, 8});
  SmallCall call_longer;
  call_longer.args.q = call_longer.args.k = call_longer.args.v = &longer.tensor;
  FloatTensor longer_out({1, 6, 2, 8});
  call_longer.args.out = &longer_out.tensor;
  call_longer.args.workspace = workspace.data();
  call_longer.args.workspace_bytes = workspace.size();
  EXPECT_EQ(outcome_of(fovea_plan_run, owned.plan, &call_longer.args).kind, FOVEA_INVALID_ARGUMENT);
}

/// Programs are kept from run to run: whatever they read must still be this run's.
TEST(CPlan, EachRunReadsItsOwnScalarsTensorsAndWindow) {
  SmallCall call;
  FloatTensor slopes({2}, 0.5F), others({2}, -0.25F);
  fovea_named_tensor tensor{"slopes", &slopes.tensor};
  fovea_named_scalar scalar{"n", FOVEA_SCALAR_FLOAT, 0.5};
  call.args.score_mod = "score + slopes[q_head] * n * float(kv_idx)";
  call.args.tensors = &tensor;
  call.args.scalars = &scalar;
  call.args.num_tensors = call.args.num_scalars = 1;
  call.args.has_window_left = 1;
  call.args.window_left = 1;
  const OwnedPlan owned(call.args);
  ASSERT_EQ(owned.outcome.message, "");
  std::vector<std::byte> workspace(fovea_plan_workspace_bytes(owned.plan));
  const std::function<void()> changes[] = {
      [] {},
      [] {},
      [&] { scalar.value = 2; },
      [&] { tensor.tensor = &others.tensor; },
      [&] { others.values[0] = 1; },
      [&] { call.args.window_left = 3; },
      [&] { scalar.value = 0.5; },
  };
  std::vector<std::vector<float>> outs;
  for (const auto& change : changes) {
    change();
    call.args.workspace = nullptr;
    call.args.workspace_bytes = 0;
    ASSERT_EQ(forward(call.args).message, "");
    const std::vector<float> expected = call.out.values;
    call.out.values.assign(expected.size(), -7.0F);
    call.args.workspace = workspace.data();
    call.args.workspace_bytes = workspace.size();
    EXPECT_EQ(outcome_of(fovea_plan_run, owned.plan, &call.args).message, "");
    EXPECT_EQ(call.out.values, expected) << outs.size();
    outs.push_back(expected);
  }
  for (std::size_t i = 2; i < outs.size(); ++i) EXPECT_NE(outs[i], outs[i - 1]) << i;
  call.args.score_mod = "score - slopes[q_head] * n * float(kv_idx)";
  EXPECT_EQ(outcome_of(fovea_plan_run, owned.plan, &call.args).kind, FOVEA_INVALID_ARGUMENT);
}

TEST(CPlan, ManyThreadsShareOnePlan) {
  SmallCall first;
  const OwnedPlan owned(first.args);
  ASSERT_EQ(owned.outcome.message, "");
  ASSERT_EQ(forward(first.args).message, "");
  std::vector<std::thread> threads;
  std::vector<int> is_equal(4, 0);
  for (int& result : is_equal) {
    threads.emplace_back([&] {
      SmallCall call;
      std::vector<std::byte> workspace(fovea_plan_workspace_bytes(owned.plan));
      call.args.workspace = workspace.data();
      call.args.workspace_bytes = workspace.size();
      result = fovea_plan_run(owned.plan, &call.args, nullptr) == FOVEA_OK &&
               call.out.values == first.out.values;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(is_equal, std::vector<int>(4, 1));
}

TEST(CPlan, NullHandlesAreRefusedOrIgnored) {
  SmallCall call;
  EXPECT_EQ(outcome_of(fovea_plan_run, nullptr, &call.args).kind, FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(outcome_of(fovea_plan_create, &call.args, nullptr, nullptr).kind,
            FOVEA_INVALID_ARGUMENT);
  EXPECT_EQ(fovea_plan_workspace_bytes(nullptr), 0U);
  fovea_plan_destroy(nullptr);
  fovea_runtime_destroy(nullptr);
  fovea_string_free(nullptr);
}

TEST(CExplain, TextAndJsonComeFromThePlanAndFromTheProblem) {
  SmallCall call;
  call.args.causal = 1;
  const OwnedPlan owned(call.args);
  ASSERT_EQ(owned.outcome.message, "");
  char* text = nullptr;
  ASSERT_EQ(outcome_of(fovea_plan_explain, owned.plan, FOVEA_TEXT, &text).message, "");
  EXPECT_THAT(text, HasSubstr("cpu/attention_forward"));
  fovea_string_free(text);
  ASSERT_EQ(outcome_of(fovea_explain, &call.args, nullptr, FOVEA_JSON, &text).message, "");
  EXPECT_EQ(text[0], '{');
  EXPECT_THAT(text, HasSubstr("cpu/attention_forward"));
  fovea_string_free(text);
  EXPECT_THAT(outcome_of(fovea_plan_explain, owned.plan, 7, &text).message,
              HasSubstr("format is 7"));
  EXPECT_EQ(text, nullptr);
}

/// What a caller lends for a call is unmapped behind it: whoever reads it later crashes.
TEST(CPlan, KeepsNothingThatWasLentToMakeIt) {
  constexpr std::size_t kPage = 4096;
  void* const lent =
      mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(lent, MAP_FAILED);
  auto* const segments = static_cast<std::int64_t*>(lent);
  auto* const slopes = reinterpret_cast<float*>(segments + 8);
  auto* const shape = segments + 16;
  auto* const text = reinterpret_cast<char*>(segments + 64);
  const std::string formula = "score * slopes[q_head] * n";
  std::copy(formula.begin(), formula.end(), text);
  shape[0] = 1, shape[1] = 5, shape[2] = 2;
  const DLTensor segments_tensor{lent, {kDLCPU, 0}, 2, {kDLInt, 64, 1}, shape, nullptr, 0};
  const DLTensor slopes_tensor{slopes, {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, shape + 2, nullptr, 0};
  const fovea_named_tensor tensor{"slopes", &slopes_tensor};
  const fovea_named_scalar scalar{"n", FOVEA_SCALAR_FLOAT, 2};
  SmallCall call;
  call.args.segments_q = call.args.segments_kv = &segments_tensor;
  call.args.score_mod = text;
  call.args.tensors = &tensor;
  call.args.scalars = &scalar;
  call.args.num_tensors = call.args.num_scalars = 1;
  const OwnedPlan owned(call.args);
  ASSERT_EQ(owned.outcome.message, "");
  std::vector<std::byte> workspace(fovea_plan_workspace_bytes(owned.plan));
  call.args.workspace = workspace.data();
  call.args.workspace_bytes = workspace.size();
  // A first run through memory that is lent, a second one through other memory.
  EXPECT_EQ(outcome_of(fovea_plan_run, owned.plan, &call.args).message, "");
  munmap(lent, kPage);

  char* page = nullptr;
  ASSERT_EQ(outcome_of(fovea_plan_explain, owned.plan, static_cast<std::int32_t>(FOVEA_TEXT), &page)
                .message,
            "");
  EXPECT_THAT(std::string(page), HasSubstr("score * slopes[q_head] * n  where n = 2"));
  fovea_string_free(page);

  FloatTensor own({2}, 0.5F);
  std::vector<std::int64_t> ids(5, 3), extents{1, 5};
  const DLTensor own_ids{ids.data(), {kDLCPU, 0}, 2, {kDLInt, 64, 1}, extents.data(), nullptr, 0};
  const fovea_named_tensor own_tensor{"slopes", &own.tensor};
  call.args.segments_q = call.args.segments_kv = &own_ids;
  call.args.score_mod = formula.c_str();
  call.args.tensors = &own_tensor;
  EXPECT_EQ(outcome_of(fovea_plan_run, owned.plan, &call.args).message, "");
}

TEST(CDescribe, IsTheJsonOfCpp) {
  char* text = nullptr;
  ASSERT_EQ(outcome_of(fovea_describe, &text).message, "");
  EXPECT_THAT(text, HasSubstr("\"operations\": [{\"name\": \"attention_forward\""));
  fovea_string_free(text);
  EXPECT_THAT(outcome_of(fovea_describe, static_cast<char**>(nullptr)).message,
              HasSubstr("text is NULL"));
}

TEST(CVersion, IsToldWithoutACall) {
  EXPECT_EQ(fovea_version(), std::to_string(FOVEA_VERSION_MAJOR) + "." +
                                 std::to_string(FOVEA_VERSION_MINOR) + "." +
                                 std::to_string(FOVEA_VERSION_PATCH));
  EXPECT_EQ(fovea_abi_version(), FOVEA_ABI_VERSION);
}

TEST(CAttentionForward, DropoutTakesASeedOfRankZeroFromMemory) {
  SmallCall call;
  call.args.dropout = {0.5F, 7, 1};
  ASSERT_EQ(outcome_of(fovea_attention_forward, &call.args).message, "");
  const std::vector<float> expected = call.out.values;
  std::int64_t numbers[2] = {5, -1}, one = 1;
  const DLTensor seed{&numbers[0], {kDLCPU, 0}, 0, {kDLInt, 64, 1}, nullptr, nullptr, 0};
  const DLTensor offset{&numbers[1], {kDLCPU, 0}, 1, {kDLInt, 64, 1}, &one, nullptr, 0};
  call.args.dropout = {0.5F, 2, 2};
  call.args.dropout_seed = &seed;
  call.args.dropout_offset = &offset;
  ASSERT_EQ(outcome_of(fovea_attention_forward, &call.args).message, "");
  EXPECT_EQ(call.out.values, expected);
  numbers[0] = 6;
  ASSERT_EQ(outcome_of(fovea_attention_forward, &call.args).message, "");
  EXPECT_NE(call.out.values, expected);
}

TEST(CAttentionForward, TakesRecipesAsText) {
  SmallCall call;
  ASSERT_EQ(outcome_of(fovea_attention_forward, &call.args).message, "");
  const std::vector<float> exact = call.out.values;
  call.args.quant = "int8,hadamard=no";
  ASSERT_EQ(outcome_of(fovea_attention_forward, &call.args).message, "");
  EXPECT_NE(call.out.values, exact);
  for (std::size_t i = 0; i < exact.size(); ++i) EXPECT_NEAR(call.out.values[i], exact[i], 0.1);
  call.args.quant = "none";
  ASSERT_EQ(outcome_of(fovea_attention_forward, &call.args).message, "");
  EXPECT_EQ(call.out.values, exact);
  call.args.quant = "acurate";
  EXPECT_EQ(outcome_of(fovea_attention_forward, &call.args).message.substr(0, 81),
            "fovea_attention_forward: quant 'acurate': no recipe is called 'acurate'; expected");
  call.args.quant = "fp8_static";
  EXPECT_EQ(outcome_of(fovea_attention_forward, &call.args).message.substr(0, 61),
            "attention_forward: q_scale is missing and quant is fp8_static");
}

/// The bits of the same numbers in f32. One scale serves all sequences and heads.
TEST(CAttentionForward, TakesCodesByTheirScales) {
  SmallCall call;
  for (std::size_t i = 0; i < call.v.values.size(); ++i)
    call.v.values[i] = static_cast<float>(i % 8);
  float quarter = 0.25F;
  std::int64_t shape[2] = {1, 2}, strides[2] = {0, 0};
  const DLTensor scale{&quarter, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, strides, 0};
  call.args.quant = "fp8_static";
  call.args.q_scale = call.args.k_scale = call.args.v_scale = &scale;
  ASSERT_EQ(outcome_of(fovea_attention_forward, &call.args).message, "");
  const std::vector<float> expected =
      std::exchange(call.out.values, std::vector<float>(call.out.values.size(), std::nanf("")));
  call.out.tensor.data = call.out.values.data();
  std::vector<std::uint8_t> bits[3];
  DLTensor codes[3] = {call.q.tensor, call.k.tensor, call.v.tensor};
  for (int i = 0; i < 3; ++i) {
    for (const float x : std::array{&call.q, &call.k, &call.v}[static_cast<std::size_t>(i)]->values)
      bits[i].push_back(quant::e4m3_bits(x / quarter));
    codes[i].data = bits[i].data();
    codes[i].dtype = {kDLFloat8_e4m3fn, 8, 1};
  }
  call.args.q = &codes[0], call.args.k = &codes[1], call.args.v = &codes[2];
  ASSERT_EQ(outcome_of(fovea_attention_forward, &call.args).message, "");
  EXPECT_EQ(call.out.values, expected);
  call.args.q_scale = call.args.k_scale = call.args.v_scale = nullptr;
  call.args.quant = nullptr;
  const Outcome refused = outcome_of(fovea_attention_forward, &call.args);
  EXPECT_EQ(refused.kind, FOVEA_INVALID_ARGUMENT);
  EXPECT_NE(refused.message.find("q, k and v are e4m3 and quant is none"), std::string::npos);
}

}  // namespace
}  // namespace fovea::testing
