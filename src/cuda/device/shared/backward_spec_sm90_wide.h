// What sm90/attention_backward_wide is compiled for, and where things lie in its shared memory. Read
// backward_params_sm90_wide.h next.
#pragma once

#include "shared/backward_spec.h"
#include "shared/types.h"

namespace fovea::cuda {

/// sm90/attention_backward_wide: 64 keys, or 128 queries, which walk over tiles of 64 rows. `stages` are of what scores
/// are multiplied from, q or k.
struct Sm90WideBackwardSpec : OwnerSpec {
  std::int32_t v_stages = 1;  // of dout or v
  // Gradients that are not finite are named by tiles (RedoTiles): NaN and infinity in what is hidden or dropped meet
  // weights of 0.
  bool asks_redo = false;

  bool operator==(const Sm90WideBackwardSpec&) const = default;
};

/// Rows of a walked tile, of a group's part of an owned one, and of boxes of TMA.
inline constexpr std::int32_t kSm90WideRows = 64;
/// Tiles whose words are posted: more than roles are ever apart.
inline constexpr std::int32_t kSm90WideWords = 8;
/// Of weights that the group of dv passes to that of dk, and of bits of dropout behind them.
inline constexpr std::int32_t kSm90WidePassed = 2;
constexpr std::int32_t sm90_wide_passed_bytes(const Sm90WideBackwardSpec& spec) {
  return 2 * kSm90WideRows * kSm90WideRows + (spec.has_dropout ? 4 * 128 : 0);
}
/// What is known of walked queries: log_sum and origin; delta comes with dout.
constexpr std::int32_t sm90_wide_log_sum_bytes(const Sm90WideBackwardSpec& spec) {
  return 4 * kSm90WideRows * (spec.has_origins ? 2 : 1);
}

/// Shared memory of sm90/attention_backward_wide: where each member begins, in bytes from the start of the CTA's.
struct Sm90WideBackwardLayout {
  std::int32_t owned_qk, owned_v;            // k and v, or q and dout
  std::int32_t qk, v;                        // [stage], [v stage] of the other side
  std::int32_t passed;                       // [kSm90WidePassed] owns_keys
  std::int32_t log_sum, delta;               // [stage], [v stage] owns_keys
  std::int32_t owned_qk_full, owned_v_full;  // barriers of 8 bytes, as all up to passed_empty
  std::int32_t qk_full, qk_empty;            // [stage]
  std::int32_t v_full, v_empty;              // [v stage]
  std::int32_t passed_full, passed_empty;    // [kSm90WidePassed] owns_keys
  std::int32_t words;                        // [kSm90WideWords] posted tiles
  std::int32_t bytes;
};

constexpr Sm90WideBackwardLayout sm90_wide_backward_layout(const Sm90WideBackwardSpec& spec) {
  const std::int32_t element = element_bytes(spec.element);
  std::int32_t end = 0;
  const auto take = [&end](std::int32_t size) { return (end += size) - size; };
  const auto take_passed = [&](std::int32_t size) { return take(spec.owns_keys ? size : 0); };
  Sm90WideBackwardLayout at{};
  at.owned_qk = take(spec.tile_owned * element * spec.head_dim_qk);
  at.owned_v = take(spec.tile_owned * element * spec.head_dim_v);
  at.qk = take(spec.stages * kSm90WideRows * element * spec.head_dim_qk);
  at.v = take(spec.v_stages * kSm90WideRows * element * spec.head_dim_v);
  at.passed = take_passed(kSm90WidePassed * sm90_wide_passed_bytes(spec));
  at.log_sum = take_passed(spec.stages * sm90_wide_log_sum_bytes(spec));
  at.delta = take_passed(spec.v_stages * 4 * kSm90WideRows);
  at.owned_qk_full = take(8);
  at.owned_v_full = take(8);
  at.qk_full = take(8 * spec.stages);
  at.qk_empty = take(8 * spec.stages);
  at.v_full = take(8 * spec.v_stages);
  at.v_empty = take(8 * spec.v_stages);
  at.passed_full = take_passed(8 * kSm90WidePassed);
  at.passed_empty = take_passed(8 * kSm90WidePassed);
  at.words = take(8 * kSm90WideWords);
  at.bytes = end;
  return at;
}

}  // namespace fovea::cuda
