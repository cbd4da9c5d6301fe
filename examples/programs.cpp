// One formula, three spellings: a lambda, a text and a library word give the same program, and so the same bits.
#include <cstdio>
#include <fovea/attention.hpp>
#include <vector>

int main() {
  std::vector<float> slope_values{0.5F, 0.25F};
  const fovea::TensorView slopes = fovea::view(slope_values.data(), {2});

  const auto table = fovea::capture("slopes", slopes);
  const fovea::ScoreMod lambda = fovea::score_mod([&](auto x) {
    return x.score - table[x.q_head] * abs(x.q_idx + (x.seqlen_kv - x.seqlen_q) - x.kv_idx);
  });
  const fovea::ScoreMod text = fovea::parse_score_mod(
      "score - slopes[q_head] * abs(q_idx + (seqlen_kv - seqlen_q) - kv_idx)",
      {.tensors = {{"slopes", slopes}}});
  const fovea::ScoreMod word = fovea::alibi(slopes);
  std::printf("lambda: %s\ntext:   %s\nword:   %s\n", lambda.to_string().c_str(),
              text.to_string().c_str(), word.to_string().c_str());
  if (!(lambda == text)) return 1;

  std::vector<float> q(16 * 2 * 8, 0.3F), k = q, v(q.size()), from_lambda = q, from_word = q;
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i % 16);
  const auto tensor = [](auto& x) { return fovea::view(x.data(), {1, 16, 2, 8}); };
  fovea::AttentionForward args{
      .q = tensor(q), .k = tensor(k), .v = tensor(v), .out = tensor(from_lambda)};
  args.mask =
      fovea::causal() || fovea::mask_mod([](auto x) { return x.kv_idx < 4; });  // prefix of four
  args.score = fovea::softcap(30.0F) | lambda;  // left to right, as in a pipe
  fovea::attention_forward(args);

  args.out = tensor(from_word);
  args.score = fovea::softcap(30.0F) | word;
  fovea::attention_forward(args);
  std::printf("mask:   %s\n", args.mask.to_string().c_str());
  return from_lambda == from_word ? 0 : 1;
}
