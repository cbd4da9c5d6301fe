// Attention over one visible key is that key's value; and errors keep their type across the
// library's border.
#include <cstdio>
#include <fovea/attention.hpp>
#include <string>
#include <vector>

namespace {

bool first_row_sees_the_first_key_alone() {
  std::vector<float> q(2 * 4, 1.0F), k(2 * 4, 2.0F), v{1, 2, 3, 4, 5, 6, 7, 8}, out(2 * 4);
  const auto tensor = [](std::vector<float>& x) { return fovea::view(x.data(), {1, 2, 1, 4}); };
  fovea::attention_forward({.q = tensor(q),
                            .k = tensor(k),
                            .v = tensor(v),
                            .out = tensor(out),
                            .mask = fovea::causal()});
  return out == std::vector<float>{1, 2, 3, 4, 3, 4, 5, 6};
}

bool refusal_arrives_as_its_own_type() {
  try {
    static_cast<void>(fovea::parse_mask_mod("q_idx >= nonsense"));
  } catch (const fovea::InvalidArgument& error) {
    return std::string(error.what()).find("nonsense") != std::string::npos;
  }
  return false;
}

}  // namespace

int main() {
  const bool is_right = first_row_sees_the_first_key_alone();
  const bool is_refused = refusal_arrives_as_its_own_type();
  std::printf("fovea %s: attention %s, refusal %s\n", std::string(fovea::version()).c_str(),
              is_right ? "right" : "wrong", is_refused ? "right" : "wrong");
  return is_right && is_refused ? 0 : 1;
}
