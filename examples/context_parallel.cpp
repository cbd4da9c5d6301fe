// One causal sequence over four ranks, here threads of one process: each holds a quarter of the tokens, balanced by
// the work that the mask leaves, and gets the rows that attention over the whole gives.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fovea/context_parallel.hpp>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

int main() {
  constexpr std::int64_t kSeqlen = 1024, kHeads = 4, kDim = 64, kRow = kHeads * kDim;
  constexpr int kRanks = 4;
  std::vector<float> q(kSeqlen * kRow), k = q, v = q, whole = q, joined = q;
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i] = std::sin(static_cast<float>(i));
    k[i] = std::cos(static_cast<float>(3 * i));
    v[i] = std::sin(static_cast<float>(7 * i));
  }
  const auto all = [=](auto& x) { return fovea::view(x.data(), {1, kSeqlen, kHeads, kDim}); };
  fovea::attention_forward(
      {.q = all(q), .k = all(k), .v = all(v), .out = all(whole), .mask = fovea::causal()});

  // A pure function: ranks of other processes would each make this plan by themselves.
  const fovea::ShardPlan shards = fovea::context_parallel_plan(
      {.q = all(q).spec(), .k = all(k).spec(), .v = all(v).spec(), .mask = fovea::causal()},
      kRanks);
  const auto run_rank = [&](std::unique_ptr<fovea::Communicator> communicator) {
    const auto tokens = shards.tokens(communicator->rank());
    std::vector<float> own_q, own_k, own_v, own_out(kSeqlen / kRanks * kRow);
    for (const fovea::TokenRange& range : tokens) {
      const auto take = [&](std::vector<float>& own, const std::vector<float>& from) {
        own.insert(own.end(), from.begin() + range.begin * kRow, from.begin() + range.end * kRow);
      };
      take(own_q, q);
      take(own_k, k);
      take(own_v, v);
    }
    const auto own = [=](auto& x) {
      return fovea::view(x.data(), {1, kSeqlen / kRanks, kHeads, kDim});
    };
    fovea::ContextParallel attention(shards, std::move(communicator));
    attention.forward({.q = own(own_q),
                       .k = own(own_k),
                       .v = own(own_v),
                       .out = own(own_out),
                       .mask = fovea::causal()});
    const float* row = own_out.data();
    for (const fovea::TokenRange& range : tokens) {
      std::copy_n(row, range.size() * kRow, joined.begin() + range.begin * kRow);
      row += range.size() * kRow;
    }
  };
  std::vector<std::thread> ranks;
  for (auto& communicator : fovea::make_thread_communicators(kRanks))
    ranks.emplace_back(run_rank, std::move(communicator));
  for (std::thread& rank : ranks) rank.join();

  std::printf("%s, %s: %s\n", fovea::name(shards.scheme()).data(), shards.dealing().data(),
              joined == whole ? "the same bits" : "other bits");
  return joined == whole ? 0 : 1;
}
