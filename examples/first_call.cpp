// The call that people write first: causal attention over tensors that a program already has. It stands in the README.
#include <fovea/attention.hpp>
#include <vector>

int main() {
  std::vector<float> q(2 * 128 * 8 * 64, 0.1F), k = q, v = q, out = q;
  auto bshd = [](auto& x) { return fovea::view(x.data(), {2, 128, 8, 64}); };
  fovea::attention_forward(
      {.q = bshd(q), .k = bshd(k), .v = bshd(v), .out = bshd(out), .mask = fovea::causal()});
}
