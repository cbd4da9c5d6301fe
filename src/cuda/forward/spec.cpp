#include "cuda/forward/spec.hpp"

#include <fmt/format.h>

#include "cuda/spec_text.hpp"

namespace fovea::cuda {

template <>
struct SpecText<ForwardSpec> {
  static constexpr std::string_view kName = "ForwardSpec";
  using Base = void;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(ForwardSpec, element),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, out_element),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, head_dim_qk),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, head_dim_v),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, tile_q),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, tile_kv),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, num_warps),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, stages),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, ctas_per_sm),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, heads_per_tile),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, is_varlen),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, has_packed_q),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, is_paged),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, is_split),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, has_padded_head_dim),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, is_prescaled),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, has_dropout),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, reads_dropout_seed),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, wants_row_max),
                                       FOVEA_SPEC_MEMBER(ForwardSpec, most_splits)};
};

template <>
struct SpecText<TeamSpec> {
  static constexpr std::string_view kName = "TeamSpec";
  using Base = ForwardSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(TeamSpec, keeps_queries),
                                       FOVEA_SPEC_MEMBER(TeamSpec, has_panels)};
};

template <>
struct SpecText<PlainSpec> {
  static constexpr std::string_view kName = "PlainSpec";
  using Base = ForwardSpec;
  static constexpr std::tuple<> kMembers{};
};

template <>
struct SpecText<Sm90DecodeSpec> {
  static constexpr std::string_view kName = "Sm90DecodeSpec";
  using Base = ForwardSpec;
  static constexpr std::tuple<> kMembers{};
};

template <>
struct SpecText<Sm90LatentSpec> {
  static constexpr std::string_view kName = "Sm90LatentSpec";
  using Base = ForwardSpec;
  static constexpr std::tuple<> kMembers{};
};

template <>
struct SpecText<Sm90ForwardSpec> {
  static constexpr std::string_view kName = "Sm90ForwardSpec";
  using Base = ForwardSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(Sm90ForwardSpec, q_stages),
                                       FOVEA_SPEC_MEMBER(Sm90ForwardSpec, is_dynamic),
                                       FOVEA_SPEC_MEMBER(Sm90ForwardSpec, is_cached),
                                       FOVEA_SPEC_MEMBER(Sm90ForwardSpec, loads_by_cp_async)};
};

std::string AnyForwardSpec::print(std::string_view name) const {
  return std::visit([&](const auto& spec) { return print_spec(spec, name); }, spec_);
}

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
  return text;
}

}  // namespace fovea::cuda
