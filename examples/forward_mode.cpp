// Two ways to the same number: how a loss changes along a direction. Forward mode follows the direction through
// attention, reverse mode asks for the gradient and multiplies: <dout, out'> = <dq, q'> + <dk, k'> + <dv, v'>.
#include <cmath>
#include <cstdio>
#include <fovea/backward.hpp>
#include <fovea/jvp.hpp>
#include <vector>

namespace {

constexpr std::int64_t kSeqlen = 50, kHeads = 3, kDim = 16;

std::vector<float> wave(float frequency) {
  std::vector<float> x(kSeqlen * kHeads * kDim);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(frequency * static_cast<float>(i));
  return x;
}

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

}  // namespace

int main() {
  std::vector<float> q = wave(1), k = wave(3), v = wave(7), out = q, lse(kSeqlen * kHeads);
  std::vector<float> q_tangent = wave(11), k_tangent = wave(13), v_tangent = wave(17);
  std::vector<float> out_tangent = q, dout = wave(19), dq = q, dk = q, dv = q;
  const auto tensor = [](auto& x) { return fovea::view(x.data(), {1, kSeqlen, kHeads, kDim}); };
  fovea::AttentionForward forward{
      .q = tensor(q), .k = tensor(k), .v = tensor(v), .out = tensor(out)};
  forward.lse = fovea::view(lse.data(), {1, kHeads, kSeqlen});
  forward.score = fovea::softcap(5);
  forward.mask = fovea::causal();

  fovea::attention_jvp({.forward = forward,  // writes out and lse too
                        .q_tangent = tensor(q_tangent),
                        .k_tangent = tensor(k_tangent),
                        .v_tangent = tensor(v_tangent),
                        .out_tangent = tensor(out_tangent)});
  fovea::attention_backward({.dout = tensor(dout),
                             .forward = forward,
                             .dq = tensor(dq),
                             .dk = tensor(dk),
                             .dv = tensor(dv)});
  const double ahead = dot(dout, out_tangent);
  const double back = dot(dq, q_tangent) + dot(dk, k_tangent) + dot(dv, v_tangent);
  std::printf("forward mode %.6f, reverse mode %.6f\n", ahead, back);
  return std::abs(ahead - back) < 1e-4 * (1 + std::abs(back)) ? 0 : 1;
}
