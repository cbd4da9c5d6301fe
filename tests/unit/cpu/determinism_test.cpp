// A row's bits depend on its own sequence alone: not on threads, the executor, batch mates,
// packing or its place in a tile.
#include <gtest/gtest.h>

#include <atomic>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fovea/mask.hpp"

#include "support/compare.hpp"

namespace fovea::testing {
namespace {

struct Bits {
  std::vector<std::uint64_t> out, lse, row_max;
  bool operator==(const Bits&) const = default;
};

Bits bits_of_run(const AttentionForward& args) {
  attention_forward(args);
  return {bits_of(args.out), bits_of(args.lse), bits_of(args.row_max)};
}

/// Calls the test for every dtype and target of this machine.
template <typename Test>
void on_every_target(const Test& test) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const CpuTarget target : targets_for(dtype)) {
      SCOPED_TRACE(std::string(fovea::name(target)) + " " + std::string(fovea::name(dtype)));
      test(dtype, target);
    }
  }
}

/// Several tiles, panels and heads; causal, so that work is uneven.
Case prefill(Dtype dtype) {
  return {.label = "prefill",
          .batch = 2,
          .seqlen_q = 150,
          .seqlen_kv = 290,
          .num_heads_q = 4,
          .num_heads_kv = 2,
          .head_dim_qk = 16,
          .head_dim_v = 24,
          .dtype = dtype,
          .mask = causal()};
}
/// Few rows and many keys, so that keys are split.
Case decode(Dtype dtype) {
  return {.label = "decode",
          .batch = 1,
          .seqlen_q = 1,
          .seqlen_kv = 7001,
          .num_heads_q = 2,
          .num_heads_kv = 1,
          .head_dim_qk = 16,
          .head_dim_v = 16,
          .dtype = dtype};
}

TEST(CpuDeterminism, ThreadCountChangesNoBit) {
  const auto one = make_thread_pool(1);
  const auto two = make_thread_pool(2);
  const auto five = make_thread_pool(5);
  on_every_target([&](Dtype dtype, CpuTarget target) {
    for (Case problem : {prefill(dtype), decode(dtype)}) {
      problem.has_sinks = true;
      problem.dropout = {.p = 0.1F, .seed = 2, .offset = 0};
      CaseMemory memory(problem);
      AttentionForward args = memory.args(target);
      args.executor = one.get();
      const Bits expected = bits_of_run(args);
      for (Executor* pool : {two.get(), five.get(), five.get()}) {
        memory.poison_outputs();
        args.executor = pool;
        EXPECT_TRUE(bits_of_run(args) == expected)
            << problem.label << " with " << pool->concurrency() << " threads";
      }
    }
  });
}

/// The tensors of one batch entry of dense args.
AttentionForward alone(AttentionForward args, std::int64_t batch) {
  const auto entry = [batch](const TensorView& view) {
    if (!view) return view;
    TensorSpec spec = view.spec();
    spec.shape[0] = 1;
    const std::int64_t bytes =
        batch * view.stride(0) * static_cast<std::int64_t>(size_bytes(view.dtype()));
    if (view.is_mutable())
      return TensorView(static_cast<void*>(static_cast<std::byte*>(view.mutable_data()) + bytes),
                        spec);
    return TensorView(static_cast<const void*>(static_cast<const std::byte*>(view.data()) + bytes),
                      spec);
  };
  for (TensorView* view : std::initializer_list<TensorView*>{&args.q, &args.k, &args.v, &args.out,
                                                             &args.lse, &args.row_max})
    *view = entry(*view);
  return args;
}

TEST(CpuDeterminism, BatchMatesChangeNoBit) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    for (Case problem : {prefill(dtype), decode(dtype)}) {
      problem.batch = 3;
      problem.has_sinks = true;
      CaseMemory together(problem);
      attention_forward(together.args(target));
      CaseMemory apart(problem);
      for (std::int64_t batch = 0; batch < problem.batch; ++batch) {
        const Bits expected = bits_of_run(alone(apart.args(target), batch));
        const AttentionForward entry = alone(together.args(target), batch);
        EXPECT_TRUE(
            (Bits{bits_of(entry.out), bits_of(entry.lse), bits_of(entry.row_max)} == expected))
            << problem.label << " entry " << batch;
      }
    }
  });
}

TEST(CpuDeterminism, PackingChangesNoBit) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    // 1/5000: decode with splits beside a prefill; 60/130: heads share no panel evenly.
    Case packed{.label = "packed",
                .sequences = {{7, 20}, {1, 5000}, {60, 130}, {3, 2}},
                .trailing_rows = 1,
                .num_heads_q = 2,
                .dtype = dtype,
                .mask = causal()};
    CaseMemory memory(packed);
    const AttentionForward args = memory.args(target);
    attention_forward(args);
    const std::vector<std::uint64_t> out = bits_of(args.out);
    const std::vector<double> q = values_of(args.q), k = values_of(args.k), v = values_of(args.v);
    std::int64_t q_begin = 0, kv_begin = 0;
    for (const Lengths& lengths : packed.sequences) {
      const auto rows = [&](const std::vector<double>& all, std::int64_t begin, std::int64_t count,
                            std::int64_t heads) {
        const auto first = all.begin() + begin * heads * 8;
        return tensor_of(dtype, {1, count, heads, 8}, {first, first + count * heads * 8});
      };
      const GuardedTensor one_q = rows(q, q_begin, lengths.q, 2);
      const GuardedTensor one_k = rows(k, kv_begin, lengths.kv, 1);
      const GuardedTensor one_v = rows(v, kv_begin, lengths.kv, 1);
      GuardedTensor one_out(one_q.view().spec());
      AttentionForward dense{
          .q = one_q.view(), .k = one_k.view(), .v = one_v.view(), .out = one_out.mutable_view()};
      dense.mask = packed.mask;
      dense.cpu_target = target;
      const Bits expected = bits_of_run(dense);
      const auto first = out.begin() + q_begin * 2 * 8;
      EXPECT_TRUE((std::vector<std::uint64_t>(first, first + lengths.q * 2 * 8) == expected.out))
          << lengths.q << "/" << lengths.kv;
      q_begin += lengths.q;
      kv_begin += lengths.kv;
    }
  });
}

TEST(CpuDeterminism, PlaceInTheTileChangesNoBit) {
  // The last rows alone: causal is aligned to the end, so they see the same keys from another
  // place in their panel. The last part still has more rows than a sequence that is read row by row
  // (kFewRows), which sums in another order.
  on_every_target([](Dtype dtype, CpuTarget target) {
    Case problem = prefill(dtype);
    problem.batch = 1;
    CaseMemory memory(problem);
    const AttentionForward whole = memory.args(target);
    attention_forward(whole);
    const std::vector<std::uint64_t> out = bits_of(whole.out);
    const std::int64_t row = problem.num_heads_q * problem.head_dim_v;
    for (const std::int64_t begin : {1, 5, 16, 47, 100, 140}) {
      const std::int64_t count = problem.seqlen_q - begin;
      GuardedTensor part_out(make_spec(
          dtype, std::vector{std::int64_t{1}, count, problem.num_heads_q, problem.head_dim_v}));
      AttentionForward part = whole;
      TensorSpec q = whole.q.spec();
      q.shape[1] = count;
      const auto* data = static_cast<const std::byte*>(whole.q.data());
      part.q = TensorView(
          static_cast<const void*>(data + begin * q.strides[1] *
                                              static_cast<std::int64_t>(size_bytes(dtype))),
          q);
      part.out = part_out.mutable_view();
      part.lse = part.row_max = {};
      EXPECT_TRUE((bits_of_run(part).out ==
                   std::vector<std::uint64_t>(out.begin() + begin * row, out.end())))
          << "rows from " << begin;
    }
  });
}

/// Runs tasks last to first, one after another, as different workers.
class BackwardExecutor : public Executor {
 public:
  int concurrency() const override { return 3; }
  void run(std::int64_t count, const Task& task) override {
    for (std::int64_t i = count; i-- > 0;) {
      ++num_tasks;
      task.body(task.context, static_cast<int>(i % 3), i);
    }
  }
  std::int64_t num_tasks = 0;
};

/// A thread per worker, tasks taken in turn; notes workers out of range.
class ThreadExecutor : public Executor {
 public:
  int concurrency() const override { return 4; }
  void run(std::int64_t count, const Task& task) override {
    std::atomic<std::int64_t> next{0};
    std::vector<std::thread> threads;
    for (int worker = 0; worker < concurrency(); ++worker) {
      threads.emplace_back([&, worker] {
        for (std::int64_t i = next++; i < count; i = next++) task.body(task.context, worker, i);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

TEST(CpuExecutor, OwnExecutorRunsTheWorkAndChangesNoBit) {
  on_every_target([](Dtype dtype, CpuTarget target) {
    for (const Case& problem : {prefill(dtype), decode(dtype)}) {
      CaseMemory memory(problem);
      AttentionForward args = memory.args(target);
      const Bits expected = bits_of_run(args);
      BackwardExecutor backward;
      ThreadExecutor threads;
      for (Executor* executor : std::initializer_list<Executor*>{&backward, &threads}) {
        memory.poison_outputs();
        args.executor = executor;
        EXPECT_TRUE(bits_of_run(args) == expected) << problem.label;
      }
      EXPECT_GT(backward.num_tasks, 0);
    }
  });
}

TEST(CpuExecutor, OracleAgreesOnEveryExecutor) {
  BackwardExecutor backward;
  ThreadExecutor threads;
  for (Executor* executor : std::initializer_list<Executor*>{&backward, &threads}) {
    expect_equals_oracle(prefill(Dtype::f32), {.executor = executor});
    expect_equals_oracle(decode(Dtype::bf16), {.executor = executor});
  }
}

}  // namespace
}  // namespace fovea::testing
