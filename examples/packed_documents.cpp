// Three documents of different lengths without padding: packed by cu_seqlens, or in one row kept apart by segment ids.
// Both say the same, so the results agree.
#include <cmath>
#include <cstdio>
#include <fovea/attention.hpp>
#include <vector>

int main() {
  constexpr std::int64_t kTotal = 100, kNumHeads = 2, kHeadDim = 32;
  std::vector<std::int32_t> cu_seqlens{0, 17, 60, kTotal};
  std::vector<std::int32_t> segments(kTotal);
  for (std::int32_t i = 0; i < kTotal; ++i)
    segments[static_cast<std::size_t>(i)] = i < 17 ? 0 : i < 60 ? 1 : 2;

  std::vector<float> q(kTotal * kNumHeads * kHeadDim), k = q, v = q, packed = q, masked = q;
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i] = std::sin(static_cast<float>(i));
    k[i] = std::cos(static_cast<float>(3 * i));
    v[i] = std::sin(static_cast<float>(7 * i));
  }

  const auto sequences = fovea::view(cu_seqlens.data(), {4});
  const auto packed_tensor = [](auto& x) {
    return fovea::view(x.data(), {kTotal, kNumHeads, kHeadDim});
  };
  fovea::attention_forward({.q = packed_tensor(q),
                            .k = packed_tensor(k),
                            .v = packed_tensor(v),
                            .out = packed_tensor(packed),
                            .mask = fovea::causal(),
                            .cu_seqlens_q = sequences,
                            .cu_seqlens_kv = sequences});

  const auto dense_tensor = [](auto& x) {
    return fovea::view(x.data(), {1, kTotal, kNumHeads, kHeadDim});
  };
  const auto ids = fovea::view(segments.data(), {1, kTotal});
  fovea::attention_forward({.q = dense_tensor(q),
                            .k = dense_tensor(k),
                            .v = dense_tensor(v),
                            .out = dense_tensor(masked),
                            .mask = fovea::causal() && fovea::documents(ids)});

  float worst = 0;
  for (std::size_t i = 0; i < packed.size(); ++i)
    worst = std::max(worst, std::abs(packed[i] - masked[i]));
  std::printf("packed and masked differ by at most %g\n", static_cast<double>(worst));
  return worst < 1e-5F ? 0 : 1;
}
