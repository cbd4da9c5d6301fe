// The small set: every kind of kernel once, against the oracle, with nothing but the library. It is
// what an emulated processor has the patience for; the full suites are tests/unit and
// tests/property.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "fovea/attention.hpp"

#include "reference/attention_forward.hpp"

namespace fovea {
namespace {

struct Shape {
  std::int64_t seqlen_q, seqlen_kv, head_dim_qk, head_dim_v;
};

constexpr std::int64_t kBatch = 1;
constexpr std::int64_t kNumHeadsQ = 4;
constexpr std::int64_t kNumHeadsKv = 2;  // grouped: two query heads share a key head

// A decode step over several splits, one key, odd lengths around a tile with odd head dims, and a
// square.
constexpr std::array<Shape, 4> kShapes{
    {{1, 700, 64, 64}, {3, 1, 8, 16}, {17, 67, 20, 12}, {64, 64, 64, 64}}};

/// Deterministic and roughly normal: the sum of four uniforms, from a 64-bit linear congruential
/// generator (Knuth, MMIX).
class Noise {
 public:
  explicit Noise(std::uint64_t seed) : state_(seed) {}
  float next() {
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
      sum += static_cast<float>(state_ >> 40U) * 0x1p-24F - 0.5F;
    }
    return sum * 1.7F;
  }

 private:
  std::uint64_t state_;
};

template <typename T>
std::vector<T> noise(std::int64_t count, std::uint64_t seed) {
  Noise source(seed);
  std::vector<T> values(static_cast<std::size_t>(count));
  for (T& value : values) value = static_cast<T>(source.next());
  return values;
}

struct Programs {
  std::string name;
  std::function<void(AttentionForward&)> apply;
};

/// |got - expected| in units of what the dtype resolves at the size of the expected value, plus
/// fp32 sums.
template <typename T>
double allowed(double expected) {
  const double epsilon = std::is_same_v<T, float>     ? 0x1p-23
                         : std::is_same_v<T, float16> ? 0x1p-11
                                                      : 0x1p-8;
  return 32 * 0x1p-23 + 4 * epsilon * (1 + std::abs(expected));
}

template <typename T>
int check(const Shape& shape, const Programs& programs) {
  const auto q = noise<T>(kBatch * shape.seqlen_q * kNumHeadsQ * shape.head_dim_qk, 1);
  const auto k = noise<T>(kBatch * shape.seqlen_kv * kNumHeadsKv * shape.head_dim_qk, 2);
  const auto v = noise<T>(kBatch * shape.seqlen_kv * kNumHeadsKv * shape.head_dim_v, 3);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<T> out(
      static_cast<std::size_t>(kBatch * shape.seqlen_q * kNumHeadsQ * shape.head_dim_v), T(nan));
  std::vector<float> lse(static_cast<std::size_t>(kBatch * kNumHeadsQ * shape.seqlen_q), nan);

  AttentionForward args{
      .q = view(q.data(), {kBatch, shape.seqlen_q, kNumHeadsQ, shape.head_dim_qk}),
      .k = view(k.data(), {kBatch, shape.seqlen_kv, kNumHeadsKv, shape.head_dim_qk}),
      .v = view(v.data(), {kBatch, shape.seqlen_kv, kNumHeadsKv, shape.head_dim_v}),
      .out = view(out.data(), {kBatch, shape.seqlen_q, kNumHeadsQ, shape.head_dim_v}),
      .lse = view(lse.data(), {kBatch, kNumHeadsQ, shape.seqlen_q}),
  };
  programs.apply(args);
  attention_forward(args);
  const reference::ForwardResult expected = reference::attention_forward(args);

  const auto differs = [&](const char* what, std::size_t i, double got, double want, double limit) {
    if (got == want || std::abs(got - want) <= limit) return false;
    std::printf(
        "FAIL %s, %s, seqlen_q %lld, seqlen_kv %lld: %s[%zu] is %.9g; expected %.9g within %.2g\n",
        std::string(name(dtype_of<T>)).c_str(), programs.name.c_str(),
        static_cast<long long>(shape.seqlen_q), static_cast<long long>(shape.seqlen_kv), what, i,
        got, want, limit);
    return true;
  };
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double want = expected.out[i];
    if (differs("out", i, static_cast<double>(static_cast<float>(out[i])), want, allowed<T>(want)))
      return 1;
  }
  for (std::size_t i = 0; i < lse.size(); ++i) {
    const double want = expected.lse[i];
    if (differs("lse", i, static_cast<double>(lse[i]), want, allowed<T>(want))) return 1;
  }
  return 0;
}

template <typename T>
int check_all(const std::vector<Programs>& all_programs) {
  int num_failed = 0;
  for (const Shape& shape : kShapes) {
    for (const Programs& programs : all_programs) num_failed += check<T>(shape, programs);
  }
  return num_failed;
}

int run() {
  std::array<float, kNumHeadsQ> slopes{0.5F, 0.25F, 0.125F, 0.0625F};
  std::array<float, kNumHeadsQ> sinks{0.0F, 1.0F, -2.0F, 3.0F};
  const std::vector<Programs> all_programs{
      {"plain", [](AttentionForward&) {}},
      {"causal", [](AttentionForward& args) { args.mask = causal(); }},
      {"window and dilation",
       [](AttentionForward& args) {
         args.mask = window(9, 3, Align::top_left) && dilated(2, Align::top_left);
       }},
      {"softcap, ALiBi and sinks",
       [&](AttentionForward& args) {
         args.score = softcap(5.0F) | alibi(view(slopes.data(), {kNumHeadsQ}));
         args.sinks = view(sinks.data(), {kNumHeadsQ});
       }},
      {"text",
       [](AttentionForward& args) {
         args.score =
             parse_score_mod("score + 0.25 * tanh(float(q_idx - kv_idx)) * sigmoid(score)");
         args.mask = parse_mask_mod("kv_idx % 3 != q_head % 3 || q_idx == 0");
       }},
      {"dropout", [](AttentionForward& args) { args.dropout = {.p = 0.25F, .seed = 7}; }},
  };
  const int num_failed = check_all<float>(all_programs) + check_all<float16>(all_programs) +
                         check_all<bfloat16>(all_programs);
  const std::size_t num_checks = 3 * kShapes.size() * all_programs.size();
  std::printf("small set: %zu of %zu as the oracle says\n",
              num_checks - static_cast<std::size_t>(num_failed), num_checks);
  return num_failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fovea

int main() {
  try {
    return fovea::run();
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
}
