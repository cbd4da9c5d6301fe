// Multi-head latent attention: keys of 576 whose first 512 columns are the values, one kv head for all q heads. Caches
// of them are in decode_test.cpp.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "fovea/backward.hpp"
#include "fovea/jvp.hpp"
#include "fovea/mask.hpp"

#include "support/compare.hpp"
#include "support/gradient_compare.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

constexpr std::int64_t kKeyWidth = 576, kValueWidth = 512;

/// 16 heads of 3 queries fill a panel of 48 rows; 150 keys are a tile of 128 and a part.
Case latent_case(std::string label) {
  return {.label = std::move(label),
          .seqlen_q = 3,
          .seqlen_kv = 150,
          .num_heads_q = 16,
          .head_dim_qk = kKeyWidth,
          .head_dim_v = kValueWidth,
          .mask = causal()};
}

TEST(CpuLatent, ForwardEqualsOracle) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    Case problem = latent_case("latent");
    problem.dtype = dtype;
    expect_equals_oracle(problem);
    problem.seqlen_q = 1;
    problem.num_heads_q = 128;
    expect_equals_oracle(problem);
  }
}

TEST(CpuLatent, GradientsEqualOracle) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    GradientCase problem{.forward = latent_case("latent gradients")};
    problem.forward.dtype = dtype;
    const std::string backward = backward_difference(problem);
    EXPECT_TRUE(backward.empty()) << name(dtype) << " " << backward;
    const std::string jvp = jvp_difference(problem);
    EXPECT_TRUE(jvp.empty()) << name(dtype) << " " << jvp;
  }
}

// ---- k and v in one memory -------------------------------------------------------------------------

constexpr std::int64_t kRows = 5, kKeys = 37, kHeads = 4;

std::vector<float> noise(std::int64_t count, std::uint64_t stream) {
  const Random random(1, stream);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i)
    values[static_cast<std::size_t>(i)] = static_cast<float>(random.normal(i));
  return values;
}

/// All that the operations write, for values in the memory of keys or beside it.
struct Results {
  std::vector<float> out = std::vector<float>(kRows * kHeads * kValueWidth);
  std::vector<float> lse = std::vector<float>(kHeads * kRows);
  std::vector<float> dq = std::vector<float>(kRows * kHeads * kKeyWidth);
  std::vector<float> dk = std::vector<float>(kKeys * kKeyWidth);
  std::vector<float> dv = std::vector<float>(kKeys * kValueWidth);
  std::vector<float> out_tangent = std::vector<float>(out.size());
  std::vector<float> grad_q = dq, grad_k = dk, grad_v = dv, grad_dout = out;

  bool operator==(const Results&) const = default;
};

class OneMemory {
 public:
  /// The first columns of k, dense.
  OneMemory() : values_(kKeys * kValueWidth) {
    for (std::size_t i = 0; i < values_.size(); ++i)
      values_[i] = k_[i / kValueWidth * kKeyWidth + i % kValueWidth];
  }

  Results run(bool is_shared) const {
    Results r;
    const TensorView k = view(k_.data(), {1, kKeys, 1, kKeyWidth});
    const TensorView v = is_shared ? view(k_.data(), {1, kKeys, 1, kValueWidth},
                                          {kKeys * kKeyWidth, kKeyWidth, kKeyWidth, 1})
                                   : view(values_.data(), {1, kKeys, 1, kValueWidth});
    const AttentionForward forward{.q = view(q_.data(), {1, kRows, kHeads, kKeyWidth}),
                                   .k = k,
                                   .v = v,
                                   .out = view(r.out.data(), {1, kRows, kHeads, kValueWidth}),
                                   .lse = view(r.lse.data(), {1, kHeads, kRows}),
                                   .mask = causal()};
    attention_forward(forward);
    AttentionBackward backward{.dout = view(dout_.data(), {1, kRows, kHeads, kValueWidth}),
                               .forward = forward,
                               .dq = view(r.dq.data(), {1, kRows, kHeads, kKeyWidth}),
                               .dk = view(r.dk.data(), {1, kKeys, 1, kKeyWidth}),
                               .dv = view(r.dv.data(), {1, kKeys, 1, kValueWidth})};
    attention_backward(backward);
    attention_jvp({.forward = forward,
                   .q_tangent = view(q_tangent_.data(), {1, kRows, kHeads, kKeyWidth}),
                   .k_tangent = k,
                   .v_tangent = v,
                   .out_tangent = view(r.out_tangent.data(), {1, kRows, kHeads, kValueWidth})});
    backward.dq = backward.dk = backward.dv = {};
    attention_double_backward(
        {.backward = backward,
         .ddq = view(q_tangent_.data(), {1, kRows, kHeads, kKeyWidth}),
         .ddk = k,
         .ddv = v,
         .grad_dout = view(r.grad_dout.data(), {1, kRows, kHeads, kValueWidth}),
         .grad_q = view(r.grad_q.data(), {1, kRows, kHeads, kKeyWidth}),
         .grad_k = view(r.grad_k.data(), {1, kKeys, 1, kKeyWidth}),
         .grad_v = view(r.grad_v.data(), {1, kKeys, 1, kValueWidth})});
    return r;
  }

 private:
  std::vector<float> q_ = noise(kRows * kHeads * kKeyWidth, 1);
  std::vector<float> k_ = noise(kKeys * kKeyWidth, 2);
  std::vector<float> dout_ = noise(kRows * kHeads * kValueWidth, 3);
  std::vector<float> q_tangent_ = noise(kRows * kHeads * kKeyWidth, 4);
  std::vector<float> values_;
};

TEST(CpuLatent, ValuesInTheMemoryOfKeysGiveTheSameBits) {
  const OneMemory memory;
  const Results apart = memory.run(false);
  EXPECT_TRUE(memory.run(true) == apart);
  EXPECT_NE(apart.dv, std::vector<float>(apart.dv.size()));
  EXPECT_NE(apart.grad_v, std::vector<float>(apart.grad_v.size()));
}

}  // namespace
}  // namespace fovea::testing
