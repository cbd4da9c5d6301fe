// A penalty on a gradient has a gradient of its own: attention_double_backward. Here the penalty is half the square of
// dq, and its slope along the gradient is measured by moving q a little. explain_double_backward tells which path runs.
#include <cmath>
#include <cstdio>
#include <fovea/backward.hpp>
#include <vector>

constexpr std::int64_t kSeqlen = 20, kHeads = 2, kDim = 8;

struct Model {
  std::vector<float> q, k, v, out, dq, grad_q, lse = std::vector<float>(kSeqlen * kHeads);

  Model() : q(kSeqlen * kHeads * kDim), k(q), v(q), out(q), dq(q), grad_q(q) {
    for (std::size_t i = 0; i < q.size(); ++i) {
      q[i] = std::sin(static_cast<float>(i));
      k[i] = std::cos(static_cast<float>(3 * i));
      v[i] = std::sin(static_cast<float>(7 * i));
    }
  }

  static fovea::TensorView tensor(std::vector<float>& x) {
    return fovea::view(x.data(), {1, kSeqlen, kHeads, kDim});
  }

  /// Half the square of dq.
  double penalty(fovea::AttentionDoubleBackward& call) {
    fovea::AttentionForward forward{
        .q = tensor(q), .k = tensor(k), .v = tensor(v), .out = tensor(out)};
    forward.lse = fovea::view(lse.data(), {1, kHeads, kSeqlen});
    forward.mask = fovea::causal();
    fovea::attention_forward(forward);
    // Any gradient of out will do.
    call.backward = {.dout = tensor(k), .forward = forward, .dq = tensor(dq)};
    fovea::attention_backward(call.backward);
    double sum = 0;
    for (float x : dq) sum += static_cast<double>(x) * static_cast<double>(x) / 2;
    return sum;
  }
};

int main() {
  fovea::AttentionDoubleBackward call;
  Model model, ahead, behind;
  model.penalty(call);
  call.ddq = Model::tensor(model.dq);  // d penalty / d dq
  call.grad_q = Model::tensor(model.grad_q);
  fovea::attention_double_backward(call);
  std::printf("%s", fovea::explain_double_backward(call).print().c_str());

  double slope = 0;
  for (std::size_t i = 0; i < model.q.size(); ++i) {
    slope += static_cast<double>(model.grad_q[i]) * static_cast<double>(model.grad_q[i]);
    ahead.q[i] += 0.1F * model.grad_q[i];
    behind.q[i] -= 0.1F * model.grad_q[i];
  }
  const double measured = (ahead.penalty(call) - behind.penalty(call)) / 0.2;
  std::printf("slope of the penalty along its gradient: %g, measured %g\n", slope, measured);
  return std::abs(slope - measured) < 0.01 * slope ? 0 : 1;
}
