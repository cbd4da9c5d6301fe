#include "cuda/forward/choices.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "cuda/forward/sm100.hpp"

namespace fovea::cuda {
namespace {

constexpr std::array kTileMembers = {TileMember{"tile_q", &TileChoice::tile_q},
                                     TileMember{"tile_kv", &TileChoice::tile_kv},
                                     TileMember{"num_warps", &TileChoice::num_warps},
                                     TileMember{"stages", &TileChoice::stages},
                                     TileMember{"q_stages", &TileChoice::q_stages},
                                     TileMember{"ctas_per_sm", &TileChoice::ctas_per_sm},
                                     TileMember{"heads_per_tile", &TileChoice::heads_per_tile},
                                     TileMember{"is_split", &TileChoice::is_split},
                                     TileMember{"is_dynamic", &TileChoice::is_dynamic},
                                     TileMember{"takes_groups", &TileChoice::takes_groups}};

void add_new(const Candidate& candidate, const AnyForwardSpec& spec, std::vector<Choice>& choices) {
  const bool is_there = std::ranges::any_of(choices, [&](const Choice& other) {
    return other.candidate == &candidate && tile_of(other.spec) == tile_of(spec);
  });
  if (!is_there) choices.push_back({&candidate, spec});
}

}  // namespace

std::span<const TileMember> tile_members() { return kTileMembers; }

TileChoice tile_of(const AnyForwardSpec& spec) {
  TileChoice tile{.tile_q = spec->tile_q,
                  .tile_kv = spec->tile_kv,
                  .num_warps = spec->num_warps,
                  .stages = spec->stages,
                  .q_stages = 1,
                  .ctas_per_sm = spec->ctas_per_sm,
                  .heads_per_tile = spec->heads_per_tile,
                  .is_split = spec->is_split ? 1 : 0};
  if (const auto* sm90 = persistent_spec(spec)) {
    tile.q_stages = sm90->q_stages;
    tile.is_dynamic = sm90->is_dynamic ? 1 : 0;
  }
  if (const auto* decode = spec.get_if<Sm90DecodeSpec>())
    tile.takes_groups = decode->takes_groups ? 1 : 0;
  if (const auto* sm90_short = spec.get_if<Sm90ShortSpec>()) tile.q_stages = sm90_short->q_stages;
  return tile;
}

std::string print_tile(const TileChoice& tile) {
  std::string text;
  for (const TileMember& member : kTileMembers)
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", member.name, tile.*member.value);
  return text;
}

std::vector<Choice> choices_of(const ForwardProblem& problem, const DeviceTraits& device) {
  std::vector<Choice> choices;
  for (const Candidate& candidate : forward_candidates()) {
    if (candidate.refuses(problem, device)) continue;
    add_new(candidate, candidate.choose(problem, device), choices);
    for (const AnyForwardSpec& spec : candidate.alternatives(problem, device))
      add_new(candidate, spec, choices);
  }
  return choices;
}

}  // namespace fovea::cuda
