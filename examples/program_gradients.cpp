// A score program of your own has gradients too: here a temperature for all heads, and a slope per head by which
// distant keys fade. The gradients are compared with what happens when each number moves a little.
#include <array>
#include <cmath>
#include <cstdio>
#include <fovea/backward.hpp>
#include <vector>

namespace {

constexpr std::int64_t kSeqlen = 40, kHeads = 2, kDim = 16;
using Parameters = std::array<float, 3>;  // a slope for each head, the temperature

/// The sum of out, and how it changes with the parameters.
double loss(const Parameters& parameters, Parameters& gradient) {
  std::vector<float> q(kSeqlen * kHeads * kDim), k = q, v = q, out = q, lse(kSeqlen * kHeads);
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i] = std::sin(static_cast<float>(i));
    k[i] = std::cos(static_cast<float>(3 * i));
    v[i] = std::sin(static_cast<float>(7 * i));
  }
  const auto tensor = [](auto& x) { return fovea::view(x.data(), {1, kSeqlen, kHeads, kDim}); };
  fovea::AttentionForward forward{
      .q = tensor(q), .k = tensor(k), .v = tensor(v), .out = tensor(out)};
  forward.lse = fovea::view(lse.data(), {1, kHeads, kSeqlen});
  forward.score = fovea::parse_score_mod(
      "score / temperature - slopes[q_head] * log(1 + abs(q_idx - kv_idx))",
      {.tensors = {{"slopes", fovea::view(parameters.data(), {kHeads})}},
       .scalars = {fovea::CapturedScalar::of("temperature", parameters[2])}});
  fovea::attention_forward(forward);
  const float one = 1;  // dout of every element: strides of 0
  fovea::attention_backward(
      {.dout = fovea::view(&one, {1, kSeqlen, kHeads, kDim}, {0, 0, 0, 0}),
       .forward = forward,
       .dcaptured = {{"slopes", fovea::view(gradient.data(), {kHeads})},
                     {"temperature", fovea::view(gradient.data() + 2, {1})}}});
  double sum = 0;
  for (float x : out) sum += static_cast<double>(x);
  return sum;
}

}  // namespace

int main() {
  const Parameters parameters{0.05F, 0.2F, 0.8F};
  Parameters gradient{}, ignored{};
  loss(parameters, gradient);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Parameters more = parameters, less = parameters;
    more[i] += 0.01F;
    less[i] -= 0.01F;
    const double measured = (loss(more, ignored) - loss(less, ignored)) / 0.02;
    std::printf("gradient %9.5f, measured %9.5f\n", static_cast<double>(gradient[i]), measured);
    if (std::abs(static_cast<double>(gradient[i]) - measured) > 1e-2) return 1;
  }
  return 0;
}
