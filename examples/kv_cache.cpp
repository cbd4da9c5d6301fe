// Serving from pages: a prompt is prefilled in one call, then tokens come one at a time. Each call writes its new keys
// into the cache and attends over all of it; the results are those of one causal call over the whole sequence.
#include <cmath>
#include <cstdio>
#include <fovea/kv_cache.hpp>
#include <vector>

int main() {
  constexpr std::int64_t kTokens = 40, kPrompt = 29, kHeads = 4, kHeadsKv = 2, kDim = 32;
  constexpr std::int64_t kPageSize = 16, kPages = 3;
  std::vector<float> q(kTokens * kHeads * kDim), whole = q, served = q;
  std::vector<float> k(kTokens * kHeadsKv * kDim), v = k;
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = std::sin(static_cast<float>(i));
  for (std::size_t i = 0; i < k.size(); ++i) {
    k[i] = std::cos(static_cast<float>(3 * i));
    v[i] = std::sin(static_cast<float>(7 * i));
  }
  // Rows [begin, begin + count) of one sequence.
  const auto rows = [](std::vector<float>& x, std::int64_t begin, std::int64_t count) {
    const auto heads = static_cast<std::int64_t>(x.size()) / (kTokens * kDim);
    return fovea::view(x.data() + begin * heads * kDim, {1, count, heads, kDim});
  };

  std::vector<float> k_pages(kPages * kPageSize * kHeadsKv * kDim), v_pages = k_pages;
  std::vector<std::int32_t> page_table{2, 0, 1};  // any order: pages are handed out as they come
  std::int32_t seqlen = 0;
  const auto pages = [](auto& x) {
    return fovea::view(x.data(), {kPages, kPageSize, kHeadsKv, kDim});
  };
  for (std::int64_t begin = 0; begin < kTokens;) {
    const std::int64_t count = begin == 0 ? kPrompt : 1;
    fovea::attention_decode({.q = rows(q, begin, count),
                             .cache = {.k = pages(k_pages),
                                       .v = pages(v_pages),
                                       .page_table = fovea::view(page_table.data(), {1, kPages}),
                                       .seqlens = fovea::view(&seqlen, {1})},
                             .append = {.k = rows(k, begin, count), .v = rows(v, begin, count)},
                             .out = rows(served, begin, count)});
    begin += count;
    seqlen = static_cast<std::int32_t>(begin);
  }

  fovea::attention_forward({.q = rows(q, 0, kTokens),
                            .k = rows(k, 0, kTokens),
                            .v = rows(v, 0, kTokens),
                            .out = rows(whole, 0, kTokens),
                            .mask = fovea::causal()});
  float worst = 0;
  for (std::size_t i = 0; i < whole.size(); ++i)
    worst = std::max(worst, std::abs(whole[i] - served[i]));
  std::printf("served from pages and computed at once differ by at most %g\n",
              static_cast<double>(worst));
  return worst < 1e-5F ? 0 : 1;
}
