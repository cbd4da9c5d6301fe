// Bits of recipes: equal whatever else is in the batch, however rows are packed, and by whatever number of threads.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/mask.hpp"

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

/// A row that holds NaN or infinity: it alone where it is a query, those that see it where it is a key.
TEST(QuantizedBits, OfOtherRowsDoNotDependOnWhatIsNotFinite) {
  for (const NamedQuantization& named : quantizations()) {
    Case problem = case_of(named);
    problem.batch = 1;
    problem.mask = causal(Align::top_left);
    CaseMemory memory(problem);
    set_row(memory.q, {.batch = 0, .row = 10, .head = 1}, NAN);
    set_row(memory.k, {.batch = 0, .row = 60, .head = 0}, INFINITY);
    memory.q.seal();
    memory.k.seal();
    AttentionForward args = memory.args();
    attention_forward(args);
    const std::vector<double> out = values_of(args.out);
    for (std::int64_t row = 0; row < 67; ++row) {
      for (std::int64_t head = 0; head < 4; ++head) {
        const bool sees_key = row >= 60 && head < 2;
        const double value = out[static_cast<std::size_t>((row * 4 + head) * 32)];
        if (row == 10 && head == 1) {
          EXPECT_TRUE(std::isnan(value)) << named.name;
        } else if (!sees_key) {
          EXPECT_TRUE(std::isfinite(value)) << named.name << " row " << row << " head " << head;
        }
      }
    }
  }
}

}  // namespace
}  // namespace fovea::testing
