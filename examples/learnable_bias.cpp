// A bias that learns: attention_backward gives the gradient of whatever a score program captures. Twenty steps of
// gradient descent find a bias under which attention reproduces given outputs.
#include <cmath>
#include <cstdio>
#include <fovea/backward.hpp>
#include <vector>

int main() {
  constexpr std::int64_t kBatch = 2, kSeqlen = 24, kHeads = 2, kDim = 16;
  constexpr std::int64_t kRows = kBatch * kSeqlen * kHeads;
  std::vector<float> q(kRows * kDim), k = q, v = q, target = q, out = q, dout = q;
  std::vector<float> lse(kRows), bias(kHeads * kSeqlen * kSeqlen), dbias = bias;
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i] = std::sin(static_cast<float>(i));
    k[i] = std::cos(static_cast<float>(3 * i));
    v[i] = std::sin(static_cast<float>(7 * i));
  }
  const auto tensor = [](auto& x) {
    return fovea::view(x.data(), {kBatch, kSeqlen, kHeads, kDim});
  };
  const auto table = [](auto& x) { return fovea::view(x.data(), {kHeads, kSeqlen, kSeqlen}); };
  fovea::AttentionForward forward{.q = tensor(q), .k = tensor(k), .v = tensor(v)};
  forward.lse = fovea::view(lse.data(), {kBatch, kHeads, kSeqlen});
  forward.mask = fovea::causal();
  forward.score = fovea::bias(table(bias));  // the tensor is named "bias"

  for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = 2 * std::cos(static_cast<float>(i));
  forward.out = tensor(target);
  fovea::attention_forward(forward);
  std::fill(bias.begin(), bias.end(), 0.0F);
  forward.out = tensor(out);

  float first_loss = 0, loss = 0;
  for (int step = 0; step < 20; ++step) {
    fovea::attention_forward(forward);
    loss = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      dout[i] = out[i] - target[i];  // the loss is half the sum of squares
      loss += dout[i] * dout[i] / 2;
    }
    if (step == 0) first_loss = loss;
    fovea::attention_backward(
        {.dout = tensor(dout), .forward = forward, .dcaptured = {{"bias", table(dbias)}}});
    for (std::size_t i = 0; i < bias.size(); ++i) bias[i] -= dbias[i];
  }
  std::printf("loss: %g at first, %g after 20 steps\n", static_cast<double>(first_loss),
              static_cast<double>(loss));
  return loss < first_loss / 2 ? 0 : 1;
}
