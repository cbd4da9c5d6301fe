// Queries, keys and values that are codes of e4m3 already, as an 8-bit cache or another kernel leaves them, with a
// scale for each sequence and head. Nothing is widened or rounded again; only probabilities are rounded.
#include <cmath>
#include <cstdio>
#include <fovea/attention.hpp>
#include <fovea/quantize.hpp>
#include <vector>

int main() {
  constexpr std::int64_t kSeqlen = 96, kNumHeads = 2, kHeadDim = 64;
  constexpr std::int64_t kSize = kSeqlen * kNumHeads * kHeadDim;
  std::vector<float> q(kSize), k = q, v = q, out = q, exact = q;
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i] = 3 * std::sin(static_cast<float>(i));
    k[i] = std::cos(static_cast<float>(3 * i));
    v[i] = 1 + std::sin(static_cast<float>(7 * i));
  }
  const auto rows = [](auto& x) {
    return fovea::view(x.data(), {1, kSeqlen, kNumHeads, kHeadDim});
  };

  const auto measured = fovea::parse_quantization("fp8_static,scales=measured");
  std::vector<std::uint8_t> q_bits(kSize), k_bits = q_bits, v_bits = q_bits;
  std::vector<float> q_scale(kNumHeads), k_scale = q_scale, v_scale(kNumHeads * kHeadDim);
  const auto of_heads = [](auto& scale) { return fovea::view(scale.data(), {1, kNumHeads, 1}); };
  fovea::quantize_q(
      {.q = rows(q), .codes = rows(q_bits), .scales = of_heads(q_scale), .quant = measured});
  fovea::quantize_k(
      {.k = rows(k), .codes = rows(k_bits), .scales = of_heads(k_scale), .quant = measured});
  fovea::quantize_v({.v = rows(v),
                     .codes = rows(v_bits),
                     .scales = fovea::view(v_scale.data(), {1, kNumHeads, 1, kHeadDim}),
                     .quant = measured});

  const auto codes = [](std::vector<std::uint8_t>& bits) {
    return fovea::view(reinterpret_cast<const fovea::float8_e4m3*>(bits.data()),
                       {1, kSeqlen, kNumHeads, kHeadDim});
  };
  fovea::attention_forward(
      {.q = codes(q_bits),
       .k = codes(k_bits),
       .v = codes(v_bits),
       .out = rows(out),  // f32 here; bf16 and f16 too
       .mask = fovea::causal(),
       .quant = fovea::parse_quantization("fp8_static"),
       .q_scale = fovea::view(q_scale.data(), {1, kNumHeads}),
       .k_scale = fovea::view(k_scale.data(), {1, kNumHeads}),
       // All channels of a head have the same one.
       .v_scale = fovea::view(v_scale.data(), {1, kNumHeads}, {kNumHeads * kHeadDim, kHeadDim})});
  fovea::attention_forward(
      {.q = rows(q), .k = rows(k), .v = rows(v), .out = rows(exact), .mask = fovea::causal()});

  double error = 0, norm = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    error += std::pow(out[i] - exact[i], 2);
    norm += std::pow(exact[i], 2);
  }
  std::printf("eight bits cost %.2f %% of out\n", 100 * std::sqrt(error / norm));
  return std::sqrt(error / norm) < 0.05 ? 0 : 1;
}
