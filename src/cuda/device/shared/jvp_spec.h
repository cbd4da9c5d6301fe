// What shapes the code of a forward-mode kernel. Read jvp_params.h next.
#pragma once

#include "shared/element.h"
#include "shared/forward_spec.h"
#include "shared/types.h"

namespace fovea::cuda {

/// sm80/attention_jvp and sm80/attention_jvp_f32. One type, since the first computes rows that are not finite again as
/// the second does.
struct JvpSpec : TeamSpec {
  // Which tangents there are; the others are 0. Those of sinks and captured data are no part of the tiles.
  bool has_q_tangent = true;
  bool has_k_tangent = true;
  bool has_v_tangent = true;
  Element q_tangent_element = Element::bf16;
  Element k_tangent_element = Element::bf16;
  Element v_tangent_element = Element::bf16;
  Element out_tangent_element = Element::bf16;

  bool operator==(const JvpSpec&) const = default;
};

/// Shared memory of sm80/attention_jvp_f32: rows of f32, each a word longer than a multiple of 32 words; none of
/// tangents that there are not.
struct PlainJvpLayout {
  std::int32_t qk_pitch, v_pitch, p_pitch;  // words of a row

  // In words. p: probabilities; w: times the tangents of their scores.
  std::int32_t q, q_tangent, k, k_tangent, v, v_tangent, p, w;
  std::int32_t bytes;
};

constexpr PlainJvpLayout sm80_plain_jvp_layout(const JvpSpec& spec) {
  SharedRoom words;
  PlainJvpLayout at{};
  at.qk_pitch = spec.head_dim_qk + 1;
  at.v_pitch = spec.head_dim_v + 1;
  at.p_pitch = spec.tile_kv + 1;
  at.q = words.take(spec.tile_q * at.qk_pitch);
  at.q_tangent = words.take(spec.has_q_tangent ? spec.tile_q * at.qk_pitch : 0);
  at.k = words.take(spec.tile_kv * at.qk_pitch);
  at.k_tangent = words.take(spec.has_k_tangent ? spec.tile_kv * at.qk_pitch : 0);
  at.v = words.take(spec.tile_kv * at.v_pitch);
  at.v_tangent = words.take(spec.has_v_tangent ? spec.tile_kv * at.v_pitch : 0);
  at.p = words.take(spec.tile_q * at.p_pitch);
  at.w = words.take(spec.tile_q * at.p_pitch);
  at.bytes = 4 * words.end;
  return at;
}

/// The plain kernel that computes rows of a CTA of sm80/attention_jvp again, tile_q of them at a time.
constexpr JvpSpec careful_jvp_spec(JvpSpec spec) {
  spec.tile_q = spec.num_warps * 8;  // four threads to a row
  spec.tile_kv = 8;
  return spec;
}

/// Of sm80/attention_jvp: a team's worth for the tensors, and behind it for their tangents.
constexpr std::int32_t sm80_jvp_tangents_at(const JvpSpec& spec) {
  SharedRoom room{sm80_forward_layout(spec).bytes};
  room.align(128);
  return room.end;
}

/// Both; or what computing again takes, in their place.
constexpr std::int32_t sm80_jvp_shared_bytes(const JvpSpec& spec) {
  const std::int32_t teams = sm80_jvp_tangents_at(spec) + sm80_forward_layout(spec).bytes;
  const std::int32_t careful = sm80_plain_jvp_layout(careful_jvp_spec(spec)).bytes;
  return teams > careful ? teams : careful;
}

}  // namespace fovea::cuda
