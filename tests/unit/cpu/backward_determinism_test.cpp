// Gradients of a sequence depend on that sequence alone: not on threads, on whether chunks of keys run side by side or
// in turn, on batch mates or packing.
#include <gtest/gtest.h>

#include <atomic>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fovea/mask.hpp"

#include "cpu/attention_backward.hpp"
#include "problem/backward.hpp"
#include "support/compare.hpp"
#include "support/gradient_case.hpp"
#include "support/gradient_compare.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

using Bits = std::vector<std::uint64_t>;

void append(Bits& bits, const TensorView& view) {
  if (!view) return;
  const Bits more = bits_of(view);
  bits.insert(bits.end(), more.begin(), more.end());
}

Bits bits_of_run(const AttentionBackward& args) {
  attention_backward(args);
  Bits bits;
  for (const TensorView* view :
       std::initializer_list<const TensorView*>{&args.dq, &args.dk, &args.dv, &args.dsinks})
    append(bits, *view);
  for (const CapturedTensor& tensor : args.dcaptured) append(bits, tensor.view);
  return bits;
}

/// Three chunks of keys, GQA; causal, so that work is uneven. 50 rows of two heads are three panels of AMX, more of any
/// other.
GradientCase long_keys(Dtype dtype) {
  return {.forward = {.label = "long keys",
                      .batch = 2,
                      .seqlen_q = 50,
                      .seqlen_kv = 1290,
                      .num_heads_q = 4,
                      .num_heads_kv = 2,
                      .head_dim_qk = 16,
                      .head_dim_v = 24,
                      .dtype = dtype,
                      .mask = causal(),
                      .has_sinks = true,
                      .dropout = {.p = 0.1F, .seed = 2, .offset = 0}}};
}

void expect_same_on_all_threads(const GradientCase& problem, CpuTarget target) {
  GradientMemory memory(problem);
  attention_forward(memory.forward.args());
  AttentionBackward args = memory.args(target);
  Bits expected;
  for (const int num_threads : {1, 2, 5, 5}) {
    const auto pool = make_thread_pool(num_threads);
    args.executor = pool.get();
    memory.poison_outputs();
    const Bits bits = bits_of_run(args);
    if (expected.empty()) expected = bits;
    EXPECT_TRUE(bits == expected) << problem.forward.label << ", " << num_threads << " threads on "
                                  << name(target);
  }
}

std::vector<CpuTarget> f32_targets() { return targets_for(Dtype::f32); }

TEST(BackwardDeterminism, ThreadCountChangesNoBit) {
  for (const CpuTarget target : f32_targets())
    expect_same_on_all_threads(long_keys(Dtype::f32), target);
  expect_same_on_all_threads(long_keys(Dtype::f16), CpuTarget::scalar);
  for (const CpuTarget target : {CpuTarget::scalar, gradient_targets_for(Dtype::bf16).back()})
    expect_same_on_all_threads(long_keys(Dtype::bf16), target);
}

/// One copy of sums per task (small), one for all (large), and both at once: the slopes and a bias of 16,384 elements
/// and more.
TEST(BackwardDeterminism, ThreadCountChangesNoBitOfCapturedGradients) {
  GradientCase problem = long_keys(Dtype::f32);
  Case& forward = problem.forward;
  const auto value = [](std::int64_t i) { return 0.01 * static_cast<double>(i % 17); };
  const TensorView slopes = forward.capture(Dtype::f32, {4}, value);
  const TensorView large = forward.capture(Dtype::f32, {4, 50, 1290}, value);
  const TensorView shared = forward.capture(Dtype::f32, {50, 1290}, value);
  for (const ScoreMod& score :
       {alibi(slopes), bias(large), bias(shared), alibi(slopes) | bias(shared)}) {
    forward.score = score;
    forward.label = score.to_string();
    expect_same_on_all_threads(problem, f32_targets().back());
    forward.dtype = Dtype::bf16;
    expect_same_on_all_threads(problem, gradient_targets_for(Dtype::bf16).back());
    forward.dtype = Dtype::f32;
  }
}

/// The schedules that the comparison of threads above relies on.
TEST(BackwardDeterminism, FewPairsRunChunksSideBySideAndManyInTurn) {
  GradientMemory memory(long_keys(Dtype::f32));
  const GradientProblem g = validate(problem_of(memory.args()), "test");
  EXPECT_FALSE(cpu::plan_backward(g, 1).schedule.is_side_by_side);
  EXPECT_FALSE(cpu::plan_backward(g, 2).schedule.is_side_by_side);  // 4 pairs of sequence and head
  EXPECT_TRUE(cpu::plan_backward(g, 5).schedule.is_side_by_side);
  EXPECT_EQ(cpu::plan_backward(g, 5).schedule.max_chunks, 3);
}

/// Tasks in reverse order, from several threads.
class ReversedExecutor : public Executor {
 public:
  int concurrency() const override { return 3; }
  void run(std::int64_t count, const Task& task) override {
    std::atomic<std::int64_t> next = count;
    std::vector<std::thread> threads;
    for (int worker = 0; worker < concurrency(); ++worker) {
      threads.emplace_back([&, worker] {
        for (std::int64_t i = --next; i >= 0; i = --next) task.body(task.context, worker, i);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

/// On the calling thread, forwards or backwards, as if on five.
class OrderedExecutor : public Executor {
 public:
  explicit OrderedExecutor(bool is_reversed) : is_reversed_(is_reversed) {}
  int concurrency() const override { return 5; }
  void run(std::int64_t count, const Task& task) override {
    for (std::int64_t i = 0; i < count; ++i)
      task.body(task.context, 0, is_reversed_ ? count - 1 - i : i);
  }

 private:
  bool is_reversed_;
};

/// Elements behind the end of a captured tensor are its last one: tasks that own heads, sequences or keys each would
/// meet there.
TEST(BackwardDeterminism, TasksDoNotMeetAtTheLastElementOfAShortTensor) {
  GradientCase problem = long_keys(Dtype::f32);
  Case& forward = problem.forward;
  const Random random(11, 0);
  const auto value = [&](std::int64_t i) { return 0.1 * random.normal(i); };
  const auto bias_of = [&](const std::string& indices, const std::vector<std::int64_t>& shape) {
    return parse_score_mod("score + table[" + indices + "]",
                           {.tensors = {{"table", forward.capture(Dtype::f32, shape, value)}}});
  };
  for (const ScoreMod& score : {bias_of("q_head, q_idx, kv_idx", {2, 50, 1290}),
                                bias_of("batch, q_idx, kv_idx", {1, 50, 1290}),
                                bias_of("q_head, q_idx, kv_idx", {4, 50, 600})}) {
    forward.score = score;
    GradientMemory memory(problem);
    attention_forward(memory.forward.args());
    AttentionBackward args = memory.args();
    OrderedExecutor forwards(false), backwards(true);
    args.executor = &forwards;
    const Bits expected = bits_of_run(args);
    memory.poison_outputs();
    args.executor = &backwards;
    EXPECT_TRUE(bits_of_run(args) == expected)
        << to_string(score.captures().tensors.front().view.spec());
  }
}

TEST(BackwardDeterminism, OrderOfTasksChangesNoBit) {
  GradientCase problem = long_keys(Dtype::f32);
  Case& forward = problem.forward;
  forward.score = alibi(forward.capture(Dtype::f32, {4}, [](std::int64_t) { return 0.1; }));
  GradientMemory memory(problem);
  attention_forward(memory.forward.args());
  const auto pool = make_thread_pool(3);
  AttentionBackward args = memory.args();
  args.executor = pool.get();
  const Bits expected = bits_of_run(args);
  ReversedExecutor reversed;
  args.executor = &reversed;
  memory.poison_outputs();
  EXPECT_TRUE(bits_of_run(args) == expected);
}

TensorView entry(const TensorView& view, std::int64_t batch) {
  if (!view) return view;
  TensorSpec spec = view.spec();
  auto* data = const_cast<std::byte*>(static_cast<const std::byte*>(view.data())) +
               batch * spec.strides[0] * static_cast<std::int64_t>(size_bytes(spec.dtype));
  spec.shape[0] = 1;
  return TensorView(static_cast<void*>(data), spec);
}

/// The bits of dq, dk and dv of one batch entry.
Bits bits_of_entry(const AttentionBackward& args, std::int64_t batch) {
  Bits bits;
  for (const TensorView* view : {&args.dq, &args.dk, &args.dv}) append(bits, entry(*view, batch));
  return bits;
}

TEST(BackwardDeterminism, BatchMatesChangeNoBit) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    GradientCase problem = long_keys(dtype);
    problem.forward.dropout = {};  // its decisions depend on the batch index, as they must
    GradientMemory memory(problem);
    attention_forward(memory.forward.args());
    AttentionBackward args = memory.args();
    attention_backward(args);
    const Bits expected = bits_of_entry(args, 1);
    memory.poison_outputs();
    AttentionBackward alone = args;
    AttentionForward& forward = alone.forward;
    for (TensorView* view : std::initializer_list<TensorView*>{
             &alone.dout, &alone.dlse, &alone.dq, &alone.dk, &alone.dv, &forward.q, &forward.k,
             &forward.v, &forward.out, &forward.lse})
      *view = entry(*view, 1);
    attention_backward(alone);
    EXPECT_TRUE(bits_of_entry(args, 1) == expected) << name(dtype);
  }
}

/// Packed behind a sequence of other lengths, whose chunks are longer: 5000 keys are 8 chunks of 640.
TEST(BackwardDeterminism, PackingChangesNoBit) {
  const auto packed = [](std::vector<Lengths> sequences) {
    return GradientCase{.forward = {.label = "packed",
                                    .sequences = std::move(sequences),
                                    .num_heads_q = 2,
                                    .num_heads_kv = 1,
                                    .head_dim_qk = 16,
                                    .head_dim_v = 8,
                                    .mask = causal()}};
  };
  const Lengths last{60, 1100};
  GradientMemory both(packed({{3, 5000}, last}));
  attention_forward(both.forward.args());
  const AttentionBackward args = both.args();
  attention_backward(args);

  GradientMemory one(packed({last}));
  const auto copy_tail = [](GuardedTensor& to, const TensorView& from, int rows_dim) {
    const std::vector<double> all = values_of(from);
    const std::vector<double> old = values_of(to.view());
    const std::int64_t heads = rows_dim == 0 ? 1 : from.size(0);
    const std::size_t per_head = all.size() / static_cast<std::size_t>(heads);
    const std::size_t tail = old.size() / static_cast<std::size_t>(heads);
    to.fill([&](std::int64_t i) {
      const auto at = static_cast<std::size_t>(i);
      return all[(at / tail + 1) * per_head - tail + at % tail];
    });
  };
  copy_tail(one.forward.q, args.forward.q, 0);
  copy_tail(one.forward.k, args.forward.k, 0);
  copy_tail(one.forward.v, args.forward.v, 0);
  copy_tail(one.dout, args.dout, 0);
  copy_tail(one.dlse, args.dlse, 1);
  attention_forward(one.forward.args());
  const AttentionBackward alone = one.args();
  attention_backward(alone);
  for (const auto& [got, want] :
       {std::pair{&alone.dq, &args.dq}, {&alone.dk, &args.dk}, {&alone.dv, &args.dv}}) {
    const Bits part = bits_of(*got);
    const Bits all = bits_of(*want);
    EXPECT_TRUE(std::equal(part.rbegin(), part.rend(), all.rbegin()));
  }
}

}  // namespace
}  // namespace fovea::testing
