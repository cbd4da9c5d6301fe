#include "cuda/forward/spec.hpp"

#include <fmt/format.h>

namespace fovea::cuda {

std::string AnyForwardSpec::describe() const {
  const ForwardSpec& spec = **this;
  std::string text = fmt::format("{} d{}", name(spec.element), spec.head_dim_qk);
  if (spec.head_dim_v != spec.head_dim_qk) text += fmt::format("/{}", spec.head_dim_v);
  text += fmt::format(" tile {}x{}", spec.tile_q, spec.tile_kv);
  if (spec.heads_per_tile > 1) text += fmt::format(" heads {}", spec.heads_per_tile);
  if (spec.is_varlen || spec.has_packed_q) text += " packed";
  if (spec.has_packed_q) text += spec.is_varlen ? " cached" : " cached few";
  if (spec.is_paged) text += " paged";
  if (spec.is_split) text += " split";
  if (spec.has_dropout) text += " dropout";
  if (spec.reads_dropout_seed) text += " by a seed in memory";
  if (spec.has_dropout_places) text += " of a part";
  return text;
}

}  // namespace fovea::cuda
