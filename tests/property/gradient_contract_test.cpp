// What holds for gradients of every size: right over many tiles, and bits that depend on a sequence
// alone.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "support/compare.hpp"
#include "support/features.hpp"
#include "support/gradient_compare.hpp"

namespace fovea::testing {
namespace {

/// 70 rows: past four panels of 16 lanes. 650 keys: six tiles, and past a chunk of 512.
GradientCase long_case(Dtype dtype) {
  return {.forward = {.label = "long",
                      .seqlen_q = 70,
                      .seqlen_kv = 650,
                      .num_heads_q = 2,
                      .num_heads_kv = 1,
                      .head_dim_qk = 16,
                      .head_dim_v = 24,
                      .dtype = dtype}};
}

TEST(GradientContract, EveryProgramAcrossTilesEqualsTheOracle) {
  for (const Feature& feature : features()) {
    GradientCase problem = long_case(Dtype::f32);
    feature.add(problem.forward);
    const bool is_program =
        !problem.forward.score.is_identity() || !problem.forward.mask.is_all_visible();
    if (is_program) {
      EXPECT_EQ(backward_difference(problem), "") << feature.name;
    }
  }
}

TEST(GradientContract, EveryDtypeAcrossTilesEqualsTheOracle) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    GradientCase problem = long_case(dtype);
    problem.forward.mask = causal();
    problem.forward.has_sinks = true;
    problem.forward.dropout = {.p = 0.1F, .seed = 3, .offset = 4};
    EXPECT_EQ(backward_difference(problem), "");
    problem.gradient_dtype = dtype == Dtype::f32 ? Dtype::bf16 : Dtype::f32;
    EXPECT_EQ(backward_difference(problem), "");
    problem.forward.distribution = Distribution::heavy_tailed;
    EXPECT_EQ(backward_difference(problem), "");
  }
}

TEST(GradientContract, ForwardModeAcrossTilesEqualsTheOracle) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    GradientCase problem = long_case(dtype);
    EXPECT_EQ(jvp_difference(problem), "");
    problem.forward.mask = causal();
    problem.forward.has_sinks = true;
    problem.forward.dropout = {.p = 0.1F, .seed = 3, .offset = 4};
    problem.forward.score = softcap(3) | problem.forward.score;
    EXPECT_EQ(jvp_difference(problem), "");
  }
}

/// Probabilities are exp(s - lse): the larger both are, the less their difference is known.
TEST(GradientContract, LargeScoresEqualTheOracle) {
  for (const float scale : {4.F, 40.F}) {
    GradientCase problem = long_case(Dtype::f32);
    problem.forward.softmax_scale = scale;
    EXPECT_EQ(backward_difference(problem), "");
  }
}

// ---- Bits ----

struct Range {
  std::int64_t begin = 0, count = 0;
};

/// All gradients of a call, as bits.
struct Bits {
  std::vector<std::uint64_t> dq, dk, dv, dsinks;
  std::vector<std::vector<std::uint64_t>> dcaptured;
  bool operator==(const Bits&) const = default;
};

Bits bits_of_run(GradientMemory& memory, CpuTarget target, Executor* executor = nullptr) {
  AttentionBackward args = memory.args(target);
  args.forward.executor = executor;
  attention_forward(args.forward);
  args.executor = executor;
  attention_backward(args);
  Bits bits{.dq = bits_of(args.dq),
            .dk = bits_of(args.dk),
            .dv = bits_of(args.dv),
            .dsinks = bits_of(args.dsinks),
            .dcaptured = {}};
  for (const CapturedTensor& each : args.dcaptured) bits.dcaptured.push_back(bits_of(each.view));
  return bits;
}

/// Uneven work, more than one chunk, every kind of sum.
GradientCase uneven_case(Dtype dtype) {
  GradientCase problem = long_case(dtype);
  problem.forward.batch = 2;
  problem.forward.num_heads_kv = 2;
  problem.forward.num_heads_q = 4;
  problem.forward.mask = causal();
  problem.forward.has_sinks = true;
  for (const Feature& feature : features()) {
    if (feature.name == "broadcast_bias" || feature.name == "alibi") feature.add(problem.forward);
  }
  return problem;
}

/// Calls the test for every target that has gradients in this dtype.
template <typename Test>
void on_every_target(Dtype dtype, const Test& test) {
  GradientMemory probe(long_case(dtype));
  int num_targets = 0;
  for (const CpuTarget target : targets_for(dtype)) {
    try {
      static_cast<void>(plan_backward(problem_of(probe.args(target))));
    } catch (const Unsupported&) {
      continue;
    }
    SCOPED_TRACE(std::string(fovea::name(target)) + " " + std::string(fovea::name(dtype)));
    test(target);
    ++num_targets;
  }
  EXPECT_GT(num_targets, 0);
}

TEST(GradientContract, ThreadsDoNotChangeBits) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    on_every_target(dtype, [&](CpuTarget target) {
      GradientMemory memory(uneven_case(dtype));
      const std::unique_ptr<Executor> one = make_thread_pool(1);
      const Bits expected = bits_of_run(memory, target, one.get());
      for (const int num_threads : {1, 2, 3, 8}) {
        memory.poison_outputs();
        const std::unique_ptr<Executor> pool = make_thread_pool(num_threads);
        EXPECT_EQ(bits_of_run(memory, target, pool.get()), expected) << num_threads;
      }
    });
  }
}

/// The rows [begin, begin + count) of a packed tensor, or columns of a packed statistic.
TensorView slice(const TensorView& view, int dim, const Range& rows) {
  TensorSpec spec = view.spec();
  const auto at = static_cast<std::size_t>(dim);
  spec.shape[at] = rows.count;
  const std::int64_t skipped = rows.begin * spec.strides[at];
  std::byte* const start = static_cast<std::byte*>(const_cast<void*>(view.data())) +
                           skipped * static_cast<std::int64_t>(size_bytes(spec.dtype));
  return {static_cast<void*>(start), spec};
}

/// One sequence of a packed call as a packed call of its own; its gradients go where they went.
struct Alone {
  std::int64_t cu_seqlens_q[2], cu_seqlens_kv[2];

  AttentionBackward args(const AttentionBackward& all, const Range& q, const Range& kv) {
    AttentionBackward part = all;
    using Views = std::initializer_list<TensorView*>;
    for (TensorView* each : Views{&part.forward.q, &part.forward.out, &part.dout, &part.dq})
      *each = slice(*each, 0, q);
    for (TensorView* each : Views{&part.forward.k, &part.forward.v, &part.dk, &part.dv})
      *each = slice(*each, 0, kv);
    for (TensorView* each : {&part.forward.lse, &part.dlse}) *each = slice(*each, 1, q);
    cu_seqlens_q[1] = q.count;
    cu_seqlens_kv[1] = kv.count;
    part.forward.cu_seqlens_q = view(static_cast<const std::int64_t*>(cu_seqlens_q), {2});
    part.forward.cu_seqlens_kv = view(static_cast<const std::int64_t*>(cu_seqlens_kv), {2});
    return part;
  }
};

/// Lengths on both sides of a chunk; the last sequence has no keys.
TEST(GradientContract, SequencesOfABatchHaveTheBitsOfTheirOwn) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    on_every_target(dtype, [&](CpuTarget target) {
      GradientCase problem = long_case(dtype);
      problem.forward.mask = causal();
      problem.forward.sequences = {{70, 650}, {3, 40}, {129, 513}, {5, 0}};
      GradientMemory memory(problem);
      const Bits together = bits_of_run(memory, target);
      memory.poison_outputs();
      Range q, kv;
      for (const Lengths& lengths : problem.forward.sequences) {
        q.count = lengths.q;
        kv.count = lengths.kv;
        Alone alone{.cu_seqlens_q = {}, .cu_seqlens_kv = {}};
        attention_backward(alone.args(memory.args(target), q, kv));
        q.begin += q.count;
        kv.begin += kv.count;
      }
      const AttentionBackward args = memory.args(target);
      EXPECT_EQ(bits_of(args.dq), together.dq);
      EXPECT_EQ(bits_of(args.dk), together.dk);
      EXPECT_EQ(bits_of(args.dv), together.dv);
    });
  }
}

/// Of dq, dk, dv and dsinks.
TEST(GradientContract, WhatIsNotWantedChangesNoBitOfTheRest) {
  on_every_target(Dtype::f32, [&](CpuTarget target) {
    GradientMemory memory(uneven_case(Dtype::f32));
    const Bits all = bits_of_run(memory, target);
    const auto run_without = [&](const std::function<void(AttentionBackward&)>& leave_out) {
      memory.poison_outputs();
      AttentionBackward args = memory.args(target);
      leave_out(args);
      attention_backward(args);
      return args;
    };
    AttentionBackward args = run_without([](auto& a) { a.dk = a.dv = a.dsinks = {}; });
    EXPECT_EQ(bits_of(args.dq), all.dq);
    args = run_without([](auto& a) { a.dq = a.dv = {}; });
    EXPECT_EQ(bits_of(args.dk), all.dk);
    EXPECT_EQ(bits_of(args.dsinks), all.dsinks);
    args = run_without([](auto& a) { a.dq = a.dk = {}; });
    EXPECT_EQ(bits_of(args.dv), all.dv);
  });
}

/// The values where nobody looks: NaN and Inf once, ordinary numbers the other time.
TEST(GradientContract, HiddenValuesChangeNoBit) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    on_every_target(dtype, [&](CpuTarget target) {
      GradientCase problem = long_case(dtype);
      problem.forward.mask = window(100, 0) && mask_mod([](auto x) { return x.q_idx % 7 != 0; });
      GradientMemory poisoned(problem);
      problem.forward.poisons_hidden_keys = false;
      GradientMemory clean(problem);
      EXPECT_EQ(bits_of_run(poisoned, target), bits_of_run(clean, target));
    });
  }
}

}  // namespace
}  // namespace fovea::testing
