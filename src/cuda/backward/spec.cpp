#include "cuda/backward/spec.hpp"

#include <fmt/format.h>

#include "cuda/spec_text.hpp"

namespace fovea::cuda {

template <>
struct SpecText<BackwardSpec> {
  static constexpr std::string_view kName = "BackwardSpec";
  using Base = void;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(BackwardSpec, element),
                                       FOVEA_SPEC_MEMBER(BackwardSpec, dout_element),
                                       FOVEA_SPEC_MEMBER(BackwardSpec, head_dim_qk),
                                       FOVEA_SPEC_MEMBER(BackwardSpec, head_dim_v),
                                       FOVEA_SPEC_MEMBER(BackwardSpec, num_warps),
                                       FOVEA_SPEC_MEMBER(BackwardSpec, ctas_per_sm),
                                       FOVEA_SPEC_MEMBER(BackwardSpec, is_varlen),
                                       FOVEA_SPEC_MEMBER(BackwardSpec, has_padded_head_dim),
                                       FOVEA_SPEC_MEMBER(BackwardSpec, has_origins),
                                       FOVEA_SPEC_MEMBER(BackwardSpec, has_dropout),
                                       FOVEA_SPEC_MEMBER(BackwardSpec, reads_dropout_seed),
                                       FOVEA_SPEC_MEMBER(BackwardSpec, has_dropout_places)};
};

template <>
struct SpecText<OwnerSpec> {
  static constexpr std::string_view kName = "OwnerSpec";
  using Base = BackwardSpec;
  static constexpr std::tuple kMembers{
      FOVEA_SPEC_MEMBER(OwnerSpec, owns_keys),   FOVEA_SPEC_MEMBER(OwnerSpec, sums_scores),
      FOVEA_SPEC_MEMBER(OwnerSpec, sums_values), FOVEA_SPEC_MEMBER(OwnerSpec, tile_owned),
      FOVEA_SPEC_MEMBER(OwnerSpec, tile_walked), FOVEA_SPEC_MEMBER(OwnerSpec, stages),
      FOVEA_SPEC_MEMBER(OwnerSpec, instructions)};
};

template <>
struct SpecText<Sm80BackwardSpec> {
  static constexpr std::string_view kName = "Sm80BackwardSpec";
  using Base = OwnerSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(Sm80BackwardSpec, is_redo),
                                       FOVEA_SPEC_MEMBER(Sm80BackwardSpec, column_warps),
                                       FOVEA_SPEC_MEMBER(Sm80BackwardSpec, takes_turns),
                                       FOVEA_SPEC_MEMBER(Sm80BackwardSpec, is_staggered),
                                       FOVEA_SPEC_MEMBER(Sm80BackwardSpec, asks_redo)};
};

template <>
struct SpecText<PlainBackwardSpec> {
  static constexpr std::string_view kName = "PlainBackwardSpec";
  using Base = OwnerSpec;
  static constexpr std::tuple<> kMembers{};
};

template <>
struct SpecText<CapturedSpec> {
  static constexpr std::string_view kName = "CapturedSpec";
  using Base = OwnerSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(CapturedSpec, multiplies_by_mma),
                                       FOVEA_SPEC_MEMBER(CapturedSpec, keeps_products)};
};

template <>
struct SpecText<Sm90BackwardSpec> {
  static constexpr std::string_view kName = "Sm90BackwardSpec";
  using Base = BackwardSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(Sm90BackwardSpec, tile_q),
                                       FOVEA_SPEC_MEMBER(Sm90BackwardSpec, stages),
                                       FOVEA_SPEC_MEMBER(Sm90BackwardSpec, is_deterministic),
                                       FOVEA_SPEC_MEMBER(Sm90BackwardSpec, writes_elements),
                                       FOVEA_SPEC_MEMBER(Sm90BackwardSpec, hides_keys),
                                       FOVEA_SPEC_MEMBER(Sm90BackwardSpec, asks_redo),
                                       FOVEA_SPEC_MEMBER(Sm90BackwardSpec, spares_registers),
                                       FOVEA_SPEC_MEMBER(Sm90BackwardSpec, is_staggered),
                                       FOVEA_SPEC_MEMBER(Sm90BackwardSpec, finishes_queries),
                                       FOVEA_SPEC_MEMBER(Sm90BackwardSpec, subtracts_deltas),
                                       FOVEA_SPEC_MEMBER(Sm90BackwardSpec, stores_pairs)};
};

template <>
struct SpecText<Sm100BackwardSpec> {
  static constexpr std::string_view kName = "Sm100BackwardSpec";
  using Base = Sm90BackwardSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(Sm100BackwardSpec, awaits_keys)};
};

template <>
struct SpecText<Sm90WideBackwardSpec> {
  static constexpr std::string_view kName = "Sm90WideBackwardSpec";
  using Base = OwnerSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(Sm90WideBackwardSpec, v_stages),
                                       FOVEA_SPEC_MEMBER(Sm90WideBackwardSpec, asks_redo)};
};

template <>
struct SpecText<DeltaSpec> {
  static constexpr std::string_view kName = "DeltaSpec";
  using Base = void;
  static constexpr std::tuple kMembers{
      FOVEA_SPEC_MEMBER(DeltaSpec, element),      FOVEA_SPEC_MEMBER(DeltaSpec, out_element),
      FOVEA_SPEC_MEMBER(DeltaSpec, dout_element), FOVEA_SPEC_MEMBER(DeltaSpec, is_varlen),
      FOVEA_SPEC_MEMBER(DeltaSpec, has_origins),  FOVEA_SPEC_MEMBER(DeltaSpec, has_dependents)};
};

namespace {

std::string describe_tile(const OwnerSpec& spec) {
  const char* const what = !spec.owns_keys     ? "dq"
                           : !spec.sums_scores ? "dv"
                           : spec.sums_values  ? "dk, dv"
                                               : "dk";
  return fmt::format(" {} tile {}x{}", what, spec.tile_owned, spec.tile_walked);
}

std::string describe_tile(const Sm80BackwardSpec& spec) {
  if (!spec.is_one_walk()) return describe_tile(static_cast<const OwnerSpec&>(spec));
  return fmt::format(" one walk, tile {}x{}{}", spec.tile_owned, spec.tile_walked,
                     spec.takes_turns ? "" : ", sums of dq in any order");
}

std::string describe_tile(const Sm90BackwardSpec& spec) {
  return fmt::format(" tile {}x{}{}", kSm90BackwardKeys, spec.tile_q,
                     spec.is_deterministic ? "" : ", sums of dq in any order");
}

std::string describe_with(const BackwardSpec& spec, const std::string& tile) {
  std::string text = fmt::format("{} d{}", name(spec.element), spec.head_dim_qk);
  if (spec.head_dim_v != spec.head_dim_qk) text += fmt::format("/{}", spec.head_dim_v);
  text += tile;
  if (spec.is_varlen) text += " packed";
  if (spec.has_dropout) text += " dropout";
  if (spec.reads_dropout_seed) text += " by a seed in memory";
  if (spec.has_dropout_places) text += " of a part";
  return text;
}

}  // namespace

const OwnerSpec* AnyBackwardSpec::owner() const {
  return std::visit(
      [](const auto& spec) -> const OwnerSpec* {
        if constexpr (std::is_base_of_v<OwnerSpec, std::decay_t<decltype(spec)>>) return &spec;
        return nullptr;
      },
      spec_);
}

const Sm90BackwardSpec* AnyBackwardSpec::key_walk() const {
  return std::visit(
      [](const auto& spec) -> const Sm90BackwardSpec* {
        if constexpr (std::is_base_of_v<Sm90BackwardSpec, std::decay_t<decltype(spec)>>)
          return &spec;
        return nullptr;
      },
      spec_);
}

bool AnyBackwardSpec::takes_turns() const {
  const auto* const sm80 = std::get_if<Sm80BackwardSpec>(&spec_);
  if (sm80 != nullptr) return sm80->takes_turns;
  return key_walk() != nullptr && key_walk()->is_deterministic;
}

bool AnyBackwardSpec::stores_pairs() const {
  return key_walk() != nullptr && key_walk()->stores_pairs;
}

bool AnyBackwardSpec::adds_queries() const {
  const auto* const sm80 = std::get_if<Sm80BackwardSpec>(&spec_);
  return key_walk() != nullptr || (sm80 != nullptr && sm80->is_one_walk());
}

std::string AnyBackwardSpec::print(std::string_view name) const {
  return std::visit([&](const auto& spec) { return print_spec(spec, name); }, spec_);
}

std::string AnyBackwardSpec::describe() const {
  std::string text = describe_with(
      **this, std::visit([](const auto& each) { return describe_tile(each); }, spec_));
  const auto* const team = std::get_if<Sm80BackwardSpec>(&spec_);
  if (team != nullptr && team->is_redo) text += " again, where not finite";
  return text;
}

std::string print_delta_spec(const DeltaSpec& spec) { return print_spec(spec); }

std::string print_captured_spec(const CapturedSpec& spec, std::string_view name) {
  return print_spec(spec, name);
}

std::string describe(const CapturedSpec& spec) {
  return describe_with(spec, fmt::format(" tile {}x{}{}", spec.tile_owned, spec.tile_walked,
                                         spec.multiplies_by_mma ? "" : " plain"));
}

}  // namespace fovea::cuda
