// The score words. Each is an ordinary formula; numbers are run-time scalars, so changing a value changes no structure.
#include <fmt/format.h>

#include <cmath>

#include "fovea/mask.hpp"

#include "core/check.hpp"
#include "mask/word_arguments.hpp"

namespace fovea {

ScoreMod softcap(float cap) {
  if (!(cap > 0) || !std::isfinite(cap)) {
    invalid("softcap",
            fmt::format("cap is {}; expected > 0 and finite, or no softcap at all", cap));
  }
  const Expr c = scalar(CapturedScalar::of("softcap", cap));
  return ScoreMod(c * tanh(arguments().score / c));
}

ScoreMod alibi(const TensorView& slopes, Align align) {
  mask::check_tensor(slopes, {.word = "alibi",
                              .argument = "slopes",
                              .ranks = {1, 2},
                              .dtypes = {Dtype::f32, Dtype::f16, Dtype::bf16},
                              .shape = "[num_heads_q] or [batch, num_heads_q]"});
  const Arguments x = arguments();
  const bool is_shared = slopes.rank() == 1;
  const Captured table =
      is_shared ? mask::capture_for("alibi", "slopes", slopes, {Axis::q_head})
                : mask::capture_for("alibi", "slopes", slopes, {Axis::batch, Axis::q_head});
  const Expr slope = is_shared ? table[x.q_head] : table(x.batch, x.q_head);
  return ScoreMod(x.score - slope * abs(aligned_q_idx(align) - x.kv_idx));
}

ScoreMod bias(const TensorView& bias) {
  mask::check_tensor(bias, {.word = "bias",
                            .argument = "bias",
                            .ranks = {2, 3, 4},
                            .dtypes = {Dtype::f32, Dtype::f16, Dtype::bf16},
                            .shape = "[q, kv], [heads, q, kv] or [batch, heads, q, kv]"});
  return ScoreMod(arguments().score + mask::load_broadcast("bias", "bias", bias));
}

ScoreMod relative_bias(const TensorView& table, const Expr& bucket) {
  mask::check_tensor(table, {.word = "relative_bias",
                             .argument = "table",
                             .ranks = {2},
                             .dtypes = {Dtype::f32, Dtype::f16, Dtype::bf16},
                             .shape = "[num_heads_q, num_buckets]"});
  if (bucket.type() != ExprType::integer) {
    invalid("relative_bias", fmt::format("bucket '{}' is not an int; expected an int formula of "
                                         "positions, use to_int or floor_div",
                                         to_string(bucket)));
  }
  const Arguments x = arguments();
  const Captured captured =
      mask::capture_for("relative_bias", "table", table, {Axis::q_head, Axis::any});
  return ScoreMod(x.score + captured(x.q_head, bucket));
}

}  // namespace fovea
