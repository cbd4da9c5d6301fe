// Bits of recipes: equal whatever else is in the batch, however rows are packed, and by whatever number of threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/mask.hpp"
#include "fovea/quant.hpp"

#include "reference/attention_forward.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

Case case_of(const NamedQuantization& named) {
  Case problem{.label = std::string(named.name)};
  problem.batch = 3;
  problem.seqlen_q = 67;
  problem.seqlen_kv = 150;
  problem.num_heads_q = 4;
  problem.num_heads_kv = 2;
  problem.head_dim_qk = problem.head_dim_v = 32;
  problem.mask = causal();
  problem.quant = named.quant;
  return problem;
}

TEST(QuantizedBits, DoNotDependOnThreads) {
  const auto one = make_thread_pool(1), four = make_thread_pool(4);
  for (const NamedQuantization& named : quantizations()) {
    CaseMemory memory(case_of(named));
    AttentionForward args = memory.args();
    args.executor = one.get();
    attention_forward(args);
    const auto out = bits_of(args.out), lse = bits_of(args.lse);
    memory.poison_outputs();
    args.executor = four.get();
    attention_forward(args);
    EXPECT_EQ(bits_of(args.out), out) << named.name;
    EXPECT_EQ(bits_of(args.lse), lse) << named.name;
  }
}

/// Sequence 1 of three, alone.
TEST(QuantizedBits, DoNotDependOnBatchMates) {
  for (const NamedQuantization& named : quantizations()) {
    if (named.quant.scales == ScaleSource::given) continue;
    const Case problem = case_of(named);
    CaseMemory memory(problem);
    AttentionForward all = memory.args();
    attention_forward(all);
    const std::vector<double> together = values_of(all.out);
    std::vector<float> out(static_cast<std::size_t>(67 * 4 * 32));
    const auto one = [](const TensorView& view) {
      TensorSpec spec = view.spec();
      const auto* const data = static_cast<const float*>(view.data()) + spec.strides[0];
      spec.shape[0] = 1;
      return TensorView(static_cast<const void*>(data), spec);
    };
    AttentionForward alone{.q = one(all.q), .k = one(all.k), .v = one(all.v)};
    alone.out = view(out.data(), {1, 67, 4, 32});
    alone.mask = all.mask;
    alone.quant = all.quant;
    attention_forward(alone);
    for (std::size_t i = 0; i < out.size(); ++i)
      ASSERT_EQ(out[i], static_cast<float>(together[out.size() + i])) << named.name;
  }
}

/// The same sequences in one packed tensor: groups of scales and tiles start with their sequence.
TEST(QuantizedBits, DoNotDependOnPacking) {
  const std::vector<std::int32_t> cu_q{0, 67, 134, 201}, cu_kv{0, 150, 300, 450};
  for (const NamedQuantization& named : quantizations()) {
    CaseMemory memory(case_of(named));
    AttentionForward dense = memory.args();
    dense.lse = {};
    dense.row_max = {};
    attention_forward(dense);
    const auto packed_rows = [](const TensorView& view) {
      TensorSpec spec = make_spec(
          view.dtype(),
          std::vector<std::int64_t>{view.size(0) * view.size(1), view.size(2), view.size(3)});
      return TensorView(view.data(), spec);
    };
    std::vector<float> out(static_cast<std::size_t>(201 * 4 * 32));
    AttentionForward packed = dense;
    packed.q = packed_rows(dense.q);
    packed.k = packed_rows(dense.k);
    packed.v = packed_rows(dense.v);
    packed.out = view(out.data(), {201, 4, 32});
    packed.cu_seqlens_q = view(cu_q.data(), {4});
    packed.cu_seqlens_kv = view(cu_kv.data(), {4});
    attention_forward(packed);
    const std::vector<double> expected = values_of(dense.out);
    for (std::size_t i = 0; i < out.size(); ++i)
      ASSERT_EQ(out[i], static_cast<float>(expected[i])) << named.name;
  }
}

/// A row that holds NaN or infinity: it alone where it is a query, those that see it where it is a key. Panels of one
/// item share memory, on targets of few lanes many do.
TEST(QuantizedBits, OfOtherRowsDoNotDependOnWhatIsNotFinite) {
  for (const NamedQuantization& named : quantizations()) {
    for (const CpuTarget target : targets_for(Dtype::f32)) {
      Case problem = case_of(named);
      problem.batch = 1;
      problem.seqlen_q = 150;
      problem.mask = causal(Align::top_left);
      CaseMemory memory(problem);
      set_row(memory.q, {.batch = 0, .row = 10, .head = 1}, NAN);
      set_row(memory.k, {.batch = 0, .row = 120, .head = 0}, INFINITY);
      memory.q.seal();
      memory.k.seal();
      AttentionForward args = memory.args();
      args.cpu_target = target;
      attention_forward(args);
      const std::vector<double> out = values_of(args.out);
      for (std::int64_t row = 0; row < 150; ++row) {
        for (std::int64_t head = 0; head < 4; ++head) {
          const bool sees_key = row >= 120 && head < 2;
          const double value = out[static_cast<std::size_t>((row * 4 + head) * 32)];
          if (row == 10 && head == 1) {
            EXPECT_TRUE(std::isnan(value)) << named.name << " on " << name(target);
          } else if (!sees_key) {
            EXPECT_TRUE(std::isfinite(value))
                << named.name << " on " << name(target) << ": row " << row << " head " << head;
          }
        }
      }
    }
  }
}

/// Tiles of 64 keys: none, one, whole ones and a part. Rows that fill panels of 48, and that do not.
std::vector<Case> cases_of_whole_tiles() {
  struct Sizes {
    std::int64_t seqlen_q, seqlen_kv, head_dim_qk, head_dim_v;
  };
  std::vector<Case> cases;
  for (const Sizes& size :
       {Sizes{1, 1, 64, 64}, Sizes{1, 64, 40, 72}, Sizes{16, 65, 72, 40}, Sizes{33, 127, 128, 16},
        Sizes{48, 128, 128, 128}, Sizes{49, 191, 1, 65}, Sizes{97, 577, 128, 256},
        Sizes{61, 331, 256, 128}}) {
    for (const float scale :
         {0.05F, 6.0F}) {  // references that stay, and that rise with many tiles
      Case problem{.label = "int8"};
      problem.seqlen_q = size.seqlen_q;
      problem.seqlen_kv = size.seqlen_kv;
      problem.head_dim_qk = size.head_dim_qk;
      problem.head_dim_v = size.head_dim_v;
      problem.num_heads_q = 2;
      problem.dtype = Dtype::bf16;
      problem.softmax_scale = scale;
      problem.quant = parse_quantization("int8");
      cases.push_back(problem);
      problem.batch = 2;
      problem.mask = causal();
      cases.push_back(problem);
    }
  }
  return cases;
}

/// Sums of codes are exact and probabilities the same numbers, step by step and in turns that overlap.
TEST(QuantizedBits, OfInt8AreTheSameWhereverCodesAreMultiplied) {
  const std::vector<CpuTarget> of_codes{CpuTarget::avx_vnni, CpuTarget::avx512_vnni,
                                        CpuTarget::avx512_bf16, CpuTarget::amx_bf16};
  for (const Case& problem : cases_of_whole_tiles()) {
    CaseMemory memory(problem);
    AttentionForward args = memory.args();
    std::vector<std::uint64_t> out, lse, row_max;
    for (const CpuTarget target : targets_for(problem)) {
      if (std::ranges::find(of_codes, target) == of_codes.end()) continue;
      memory.poison_outputs();
      args.cpu_target = target;
      EXPECT_EQ(run_with_poisoned_workspace(args), "");
      if (out.empty()) {
        out = bits_of(args.out);
        lse = bits_of(args.lse);
        row_max = bits_of(args.row_max);
      }
      EXPECT_EQ(bits_of(args.out), out) << problem.describe() << " on " << name(target);
      EXPECT_EQ(bits_of(args.lse), lse) << problem.describe() << " on " << name(target);
      EXPECT_EQ(bits_of(args.row_max), row_max) << problem.describe() << " on " << name(target);
    }
  }
}

/// Keys and values that are not finite, in the middle of whole tiles: the same rows are lost, no other bit differs.
TEST(QuantizedBits, OfInt8AreTheSameBesideWhatIsNotFinite) {
  Case problem{.label = "int8"};
  problem.seqlen_q = 70;
  problem.seqlen_kv = 400;
  problem.head_dim_qk = problem.head_dim_v = 64;
  problem.dtype = Dtype::bf16;
  problem.quant = parse_quantization("int8");
  problem.mask = causal();
  problem.has_infinite_values = true;
  CaseMemory memory(problem);
  set_row(memory.k, {.batch = 0, .row = 390, .head = 0}, INFINITY);
  memory.k.seal();
  AttentionForward args = memory.args();
  std::vector<std::uint64_t> out;
  for (const CpuTarget target : targets_for(problem)) {
    if (target != CpuTarget::avx512_vnni && target != CpuTarget::amx_bf16) continue;
    memory.poison_outputs();
    args.cpu_target = target;
    attention_forward(args);
    if (out.empty()) out = bits_of(args.out);
    EXPECT_EQ(bits_of(args.out), out) << name(target);
  }
}

/// Numbers of magnitudes from those that scales of e4m3 lose to those that they saturate: a scale for each group.
std::vector<float> of_many_magnitudes(std::int64_t count, std::uint64_t stream) {
  std::vector<float> values;
  const Random random(4, stream);
  for (std::int64_t i = 0; i < count; ++i)
    values.push_back(
        static_cast<float>(std::ldexp(random.normal(i), static_cast<int>(i / 16 % 29) - 13)));
  return values;
}

/// What results show of codes, each as it is, on every target: a row that sees one key has its values, and its greatest
/// score, where the query is 6 in one channel, that channel of the key. Groups are cut at the ends of both.
TEST(QuantizedBits, OfGroupsAreThoseOfTheOracle) {
  constexpr std::int64_t kKeys = 75, kDim = 41;
  std::vector<float> q(kKeys * kDim * kDim), out(q.size());
  std::vector<float> row_max(static_cast<std::size_t>(kKeys * kDim));
  for (std::int64_t i = 0; i < kKeys * kDim; ++i)
    q[static_cast<std::size_t>(i * kDim + i % kDim)] = 6;
  const std::vector<float> k = of_many_magnitudes(kKeys * kDim, 0);
  const std::vector<float> v = of_many_magnitudes(kKeys * kDim, 1);
  for (const char* recipe : {"nvfp4", "mxfp4"}) {
    AttentionForward one_key{.q = view(q.data(), {kKeys, kDim, 1, kDim}),
                             .k = view(k.data(), {kKeys, 1, 1, kDim}),
                             .v = view(v.data(), {kKeys, 1, 1, kDim}),
                             .out = view(out.data(), {kKeys, kDim, 1, kDim}),
                             .row_max = view(row_max.data(), {kKeys, 1, kDim}),
                             .softmax_scale = 1};
    one_key.quant = parse_quantization(std::string(recipe) + ",smooth_q=none,smooth_k=none");
    AttentionForward own_key = one_key;
    own_key.q = view(k.data(), {1, kKeys, 1, kDim});
    own_key.k = own_key.q;
    own_key.v = view(v.data(), {1, kKeys, 1, kDim});
    own_key.out = view(out.data(), {1, kKeys, 1, kDim});
    own_key.row_max = {};
    own_key.mask = parse_mask_mod("q_idx == kv_idx");
    const std::vector<double> keys = reference::attention_forward(one_key).row_max;
    const std::vector<double> values = reference::attention_forward(own_key).out;
    for (const CpuTarget target : targets_for(Dtype::f32)) {
      one_key.cpu_target = own_key.cpu_target = target;
      attention_forward(one_key);
      for (std::size_t i = 0; i < keys.size(); ++i)
        ASSERT_EQ(row_max[i], static_cast<float>(keys[i])) << recipe << " k " << i;
      attention_forward(own_key);
      for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_EQ(out[i], static_cast<float>(values[i])) << recipe << " v " << i;
    }
  }
}

}  // namespace
}  // namespace fovea::testing
