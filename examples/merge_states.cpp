// A prefix shared by a whole batch is attended once for all sequences, each sequence's own keys apart; the two partial
// results merge into what attention over both gives.
#include <cmath>
#include <cstdio>
#include <fovea/attention.hpp>
#include <fovea/state.hpp>
#include <vector>

int main() {
  constexpr std::int64_t kBatch = 4, kPrefix = 96, kOwn = 16, kAll = kPrefix + kOwn, kHeads = 2;
  constexpr std::int64_t kDim = 32, kRow = kHeads * kDim;
  std::vector<float> q(kBatch * kRow), out = q, prefix_out = q, whole = q;
  std::vector<float> k(kBatch * kAll * kRow), v = k, lse(kBatch * kHeads), prefix_lse = lse;
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = std::sin(static_cast<float>(i));
  for (std::size_t i = 0; i < k.size(); ++i) {
    const std::size_t at = i % (kAll * kRow);
    const bool is_shared = at < kPrefix * kRow;  // the same in every sequence
    k[i] = std::cos(static_cast<float>(is_shared ? at : 3 * i));
    v[i] = std::sin(static_cast<float>(is_shared ? at : 7 * i));
  }

  // Seen from the prefix, the queries of all sequences are rows of one sequence.
  const auto one_sequence = [](auto& x, std::int64_t rows) {
    return fovea::view(x.data(), {1, rows, kHeads, kDim});
  };
  fovea::attention_forward(
      {.q = one_sequence(q, kBatch),
       .k = one_sequence(k, kPrefix),
       .v = one_sequence(v, kPrefix),
       .out = one_sequence(prefix_out, kBatch),
       .lse = fovea::view(prefix_lse.data(), {1, kHeads, kBatch}, {0, 1, kHeads})});

  const auto rows = [](auto& x) { return fovea::view(x.data(), {kBatch, 1, kHeads, kDim}); };
  const auto lses = [](auto& x) { return fovea::view(x.data(), {kBatch, kHeads, 1}); };
  const auto own = [](auto& x) {
    return fovea::view(x.data() + kPrefix * kRow, {kBatch, kOwn, kHeads, kDim},
                       {kAll * kRow, kRow, kDim, 1});
  };
  fovea::attention_forward(
      {.q = rows(q), .k = own(k), .v = own(v), .out = rows(out), .lse = lses(lse)});
  fovea::merge_states({.outs = {rows(out), rows(prefix_out)},
                       .lses = {lses(lse), lses(prefix_lse)},
                       .out = rows(out),
                       .lse = lses(lse)});

  const auto all = [](auto& x) { return fovea::view(x.data(), {kBatch, kAll, kHeads, kDim}); };
  fovea::attention_forward({.q = rows(q), .k = all(k), .v = all(v), .out = rows(whole)});
  float worst = 0;
  for (std::size_t i = 0; i < out.size(); ++i) worst = std::max(worst, std::abs(out[i] - whole[i]));
  std::printf("merged and whole differ by at most %g\n", static_cast<double>(worst));
  return worst < 1e-5F ? 0 : 1;
}
