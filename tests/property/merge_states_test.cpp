// Attention over parts of the keys, merged, is attention over all of them.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "fovea/mask.hpp"
#include "fovea/state.hpp"

#include "reference/attention_forward.hpp"
#include "support/compare.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

/// Up to 5 parts, some of them empty; 300 keys: parts longer than a tile. The mask of some problems hides whole parts
/// from some rows.
Case draw() {
  Case problem;
  problem.label = "drawn";
  problem.batch = *rc::gen::inRange<std::int64_t>(1, 3);
  problem.seqlen_q = *rc::gen::inRange<std::int64_t>(1, 40);
  problem.seqlen_kv = *rc::gen::inRange<std::int64_t>(1, 300);
  problem.num_heads_kv = *rc::gen::inRange<std::int64_t>(1, 3);
  problem.num_heads_q = problem.num_heads_kv * *rc::gen::inRange<std::int64_t>(1, 3);
  problem.head_dim_qk = *rc::gen::inRange<std::int64_t>(1, 40);
  problem.head_dim_v = *rc::gen::inRange<std::int64_t>(1, 40);
  problem.dtype = *rc::gen::element(Dtype::f32, Dtype::f16, Dtype::bf16);
  problem.out_dtype = Dtype::f32;  // the law is between sums, not between roundings
  problem.poisons_hidden_keys = false;
  problem.seed = *rc::gen::inRange<std::uint64_t>(1, 1000000);
  return problem;
}

/// Keys [begin, end) of k or v.
TensorView part_of(const TensorView& view, std::int64_t begin, std::int64_t end) {
  TensorSpec spec = view.spec();
  spec.shape[1] = end - begin;
  const auto* data = static_cast<const std::byte*>(view.data()) +
                     begin * view.stride(1) * static_cast<std::int64_t>(size_bytes(spec.dtype));
  return {static_cast<const void*>(data), spec};
}

/// Bottom-right causal over the whole, seen from a part that starts at key `begin`.
MaskMod causal_part(const Case& problem, std::int64_t begin) {
  const std::int64_t diagonal = problem.seqlen_kv - problem.seqlen_q - begin;
  return mask_mod([=](auto x) { return x.kv_idx <= x.q_idx + diagonal; });
}

struct State {
  GuardedTensor out, lse;
};

TEST(MergeStates, KeysSplitAndMergedEqualTheWhole) {
  const auto law = [] {
    Case problem = draw();
    const bool is_causal = *rc::gen::arbitrary<bool>();
    CaseMemory memory(problem);
    const AttentionForward args = memory.args();
    std::vector<std::int64_t> cuts =
        *rc::gen::resize(5, rc::gen::container<std::vector<std::int64_t>>(
                                rc::gen::inRange<std::int64_t>(0, problem.seqlen_kv + 1)));
    cuts.push_back(0);
    cuts.push_back(problem.seqlen_kv);
    std::sort(cuts.begin(), cuts.end());

    std::vector<State> states;
    MergeStates merge;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      states.push_back(
          {GuardedTensor(
               make_spec(Dtype::f32, std::vector{problem.batch, problem.seqlen_q,
                                                 problem.num_heads_q, problem.head_dim_v})),
           GuardedTensor(make_spec(
               Dtype::f32, std::vector{problem.batch, problem.num_heads_q, problem.seqlen_q}))});
      AttentionForward part = args;
      part.k = part_of(args.k, cuts[i], cuts[i + 1]);
      part.v = part_of(args.v, cuts[i], cuts[i + 1]);
      part.out = states.back().out.mutable_view();
      part.lse = states.back().lse.mutable_view();
      part.row_max = {};
      if (is_causal) part.mask = causal_part(problem, cuts[i]);
      attention_forward(part);
      merge.outs.push_back(part.out);
      merge.lses.push_back(part.lse);
    }
    merge.out = args.out;
    merge.lse = args.lse;
    const auto one = make_thread_pool(1), three = make_thread_pool(3);
    merge.executor = one.get();
    merge_states(merge);
    const auto bits = bits_of(args.out), lse_bits = bits_of(args.lse);
    memory.poison_outputs();
    merge.executor = three.get();
    merge_states(merge);
    RC_ASSERT(bits_of(args.out) == bits);
    RC_ASSERT(bits_of(args.lse) == lse_bits);

    AttentionForward whole = args;
    if (is_causal) whole.mask = causal_part(problem, 0);
    const reference::ForwardResult expected = reference::attention_forward(whole);
    const ComputeDtype compute_dtype =
        compute_dtype_on(targets_for(problem.dtype).back(), problem.dtype, ComputeDtype::automatic);
    const Tolerances allowed = tolerances(whole, expected, compute_dtype);
    const auto assert_near = [](const std::vector<double>& got, const std::vector<double>& want,
                                const Tolerance& tolerance) {
      for (std::size_t i = 0; i < want.size(); ++i) {
        if (got[i] == want[i]) continue;
        RC_ASSERT(std::fabs(got[i] - want[i]) <= 2 * tolerance.allowed(want[i]));
      }
    };
    assert_near(values_of(args.out), expected.out, allowed.out);
    assert_near(values_of(args.lse), expected.lse, allowed.lse);
  };
  EXPECT_TRUE(rc::check("split and merge", law));
}

}  // namespace
}  // namespace fovea::testing
