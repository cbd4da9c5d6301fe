// Plan once, run often: everything is decided and refused at plan time; a run allocates nothing. One plan serves every
// length up to its bound.
#include <cmath>
#include <cstdio>
#include <fovea/attention.hpp>
#include <vector>

int main() {
  constexpr std::int64_t kMaxSeqlen = 256, kNumHeads = 4, kHeadDim = 64;
  const auto tensor = [](std::vector<float>& x, std::int64_t seqlen) {
    return fovea::view(x.data(), {1, seqlen, kNumHeads, kHeadDim});
  };
  std::vector<float> q(kMaxSeqlen * kNumHeads * kHeadDim), k = q, v = q, out = q;
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i] = std::sin(static_cast<float>(i));
    k[i] = std::cos(static_cast<float>(i));
    v[i] = static_cast<float>(i % kHeadDim + 1);
  }

  const fovea::TensorSpec spec = tensor(q, kMaxSeqlen).spec();
  fovea::Problem problem{.q = spec, .k = spec, .v = spec};
  problem.mask = fovea::causal() && fovea::window(64, 0);
  problem.seqlen_q = fovea::up_to(kMaxSeqlen);
  problem.seqlen_kv = fovea::up_to(kMaxSeqlen);

  const fovea::Plan plan = fovea::plan(problem);
  std::printf("%s\n", plan.explain().print().c_str());

  std::vector<std::byte> workspace(plan.workspace_bytes());
  for (std::int64_t seqlen : {256, 200, 1}) {
    plan.run({.q = tensor(q, seqlen),
              .k = tensor(k, seqlen),
              .v = tensor(v, seqlen),
              .out = tensor(out, seqlen),
              .mask = problem.mask,
              .workspace = workspace});
    std::printf("seqlen %3lld: out[0] = %g\n", static_cast<long long>(seqlen),
                static_cast<double>(out[0]));
    if (out[0] != v[0]) return 1;  // the first query sees the first key alone
  }
  return 0;
}
