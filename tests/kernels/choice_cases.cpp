#include "kernels/choice_cases.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string_view>

#include "cuda/forward/choices.hpp"
#include "cuda/forward/sm80.hpp"
#include "cuda/forward/sm80_short.hpp"
#include "cuda/forward/sm90_converted.hpp"
#include "cuda/forward/sm90_decode.hpp"
#include "cuda/forward/sm90_short.hpp"
#include "support/features.hpp"
#include "support/plan_without.hpp"

namespace fovea::testing {
namespace {

using Tile = cuda::TileChoice;

/// A choice by the members that tell it from others.
struct NamedChoice {
  std::string_view label;
  std::vector<std::pair<std::int32_t Tile::*, std::int32_t>> members;
};

const std::vector<NamedChoice>& named_choices() {
  static const std::vector<NamedChoice> all = {
      // 16 rows a warp, Q in registers, three stages
      {"choice_sm80_three_stages", {{&Tile::tile_q, 64}, {&Tile::tile_kv, 64}, {&Tile::stages, 3}}},
      {"choice_sm80_wide_rows", {{&Tile::tile_q, 128}, {&Tile::tile_kv, 32}}},
      {"choice_sm80_not_split", {{&Tile::is_split, 0}, {&Tile::stages, 3}}},
      // What fits GPUs of 8.6.
      {"choice_plain_latent", {{&Tile::tile_q, 16}, {&Tile::tile_kv, 8}}},
      {"choice_wide_two_warps", {{&Tile::tile_q, 32}}},
      // Keys of three times two panels: more than the rows of a tile.
      {"choice_hopper_long_tile", {{&Tile::tile_q, 128}, {&Tile::tile_kv, 192}}},
      {"choice_hopper_three_stages",
       {{&Tile::tile_q, 128}, {&Tile::tile_kv, 96}, {&Tile::stages, 3}, {&Tile::q_stages, 1}}},
      {"choice_hopper_three_groups",
       {{&Tile::tile_q, 192}, {&Tile::tile_kv, 64}, {&Tile::stages, 3}}},
      // Of masks that show more than 2,048 keys.
      {"choice_hopper_d96",
       {{&Tile::tile_q, 192}, {&Tile::tile_kv, 96}, {&Tile::stages, 2}, {&Tile::q_stages, 2}}},
      {"choice_decode_four_readers", {{&Tile::num_warps, 6}}},
  };
  return all;
}

Case started(std::string_view label, std::int64_t head_dim) {
  Case problem = plain_case(Dtype::bf16);
  problem.label = label;
  problem.batch = 1;
  problem.head_dim_qk = problem.head_dim_v = head_dim;
  problem.mask = causal();
  return problem;
}

/// Row tiles and kv tiles with tails, every stage used again.
Case several_tiles(std::string_view label, std::int64_t head_dim, std::int64_t seqlen_kv) {
  Case problem = started(label, head_dim);
  problem.seqlen_q = 210;
  problem.seqlen_kv = seqlen_kv;
  return problem;
}

/// Three splits of 256 keys, the last one cut.
Case few_rows(std::string_view label, std::int64_t head_dim) {
  Case problem = started(label, head_dim);
  problem.seqlen_q = 2;
  problem.seqlen_kv = 531;
  problem.num_heads_q = 4;
  problem.num_heads_kv = 2;
  problem.has_sinks = true;
  return problem;
}

}  // namespace

std::vector<Case> sm80_choice_cases() {
  Case latent = started("choice_plain_latent", 576);
  latent.head_dim_v = 512;
  latent.seqlen_q = 5;
  latent.seqlen_kv = 19;
  latent.num_heads_q = 4;
  Case wide = latent;
  wide.label = "choice_wide_two_warps";
  wide.seqlen_q = 19;
  wide.seqlen_kv = 70;
  latent.dtype = Dtype::f32;
  return {latent, wide, several_tiles("choice_sm80_three_stages", 64, 280),
          several_tiles("choice_sm80_wide_rows", 64, 150), few_rows("choice_sm80_not_split", 64)};
}

std::vector<Case> quickest_cases() {
  Case wide = started("quickest_wide", 200);  // O of 256 columns, of which some do not exist
  wide.seqlen_q = 70;
  wide.seqlen_kv = 37;
  wide.has_infinite_values = true;
  Case packed = started("quickest_packed", 40);
  packed.sequences = {{70, 101}, {3, 40}, {1, 0}};
  packed.num_heads_q = 4;
  packed.num_heads_kv = 2;
  packed.dtype = Dtype::f16;
  packed.out_dtype = Dtype::f32;
  packed.score = parse_score_mod("score + 0.5 * tanh(score)");
  packed.dropout = kSomeDropped;
  return {several_tiles("quickest_causal", 64, 150), few_rows("quickest_few_rows", 64), packed,
          wide};
}

std::vector<Case> hopper_choice_cases() {
  return {several_tiles("choice_hopper_long_tile", 64, 640),
          several_tiles("choice_hopper_three_stages", 64, 500),
          several_tiles("choice_hopper_three_groups", 64, 500),
          several_tiles("choice_hopper_d96", 96, 500)};
}

std::vector<Case> decode_choice_cases() { return {few_rows("choice_decode_four_readers", 64)}; }

cuda::DeviceTraits small_hopper() {
  cuda::DeviceTraits device = cuda::typical_device(9, 0);
  device.num_sms = 2;
  return device;
}

namespace {

/// Who folds splits, whatever the device: bits are the same.
cuda::Sm90DecodeSpec decode_of_label(const std::string& label, const ForwardProblem& problem,
                                     const cuda::DeviceTraits& device) {
  const auto has = [&label](std::string_view word) { return label.find(word) != label.npos; };
  // Kernels are printed for a GPU of many SMs: as many boxes as that leaves room for.
  cuda::Sm90DecodeSpec spec = cuda::Sm90Decode::choose(problem, cuda::typical_device(9, 0));
  spec.takes_groups = spec.has_groups && has("groups");
  const auto splits = static_cast<std::uint32_t>(max_splits(spec, problem));
  spec.ctas_of_cluster = has("cluster") ? static_cast<std::int32_t>(std::bit_ceil(splits)) : 1;
  const int step =
      std::max(sm90_decode_parts(spec) / spec.slices_of_box, sm90_decode_loaders(spec));
  while (sm90_decode_layout(spec).bytes > device.shared_bytes_per_cta) spec.stages -= step;
  return spec;
}

}  // namespace

cuda::ForwardPlan plan_of(const std::string& label, const ForwardProblem& problem,
                          const cuda::DeviceTraits& device) {
  if (label.starts_with("quickest_")) {
    const auto spec = cuda::Sm80Forward::quickest(problem, device);
    if (!spec) throw std::logic_error(label + ": no kernel is quick");
    return plan_choice(problem, device, {&cuda::candidate_named(cuda::Sm80Forward::kName), *spec});
  }
  // On Hopper most cases are short; those that do not say so are of the kernels for long ones.
  constexpr std::string_view kShort = cuda::Sm80ForwardShort::kName;
  constexpr std::string_view kHopperShort = cuda::Sm90ForwardShort::kName;
  cuda::ForwardPlan plan = choose_forward(problem, device);
  const bool is_short = plan.candidate == kShort || plan.candidate == kHopperShort;
  if (is_short && !label.starts_with("wgmma_short_")) {
    plan = label.starts_with("short_") ? plan_without({kHopperShort}, problem, device)
                                       : plan_without({kHopperShort, kShort}, problem, device);
  }
  if (label.starts_with("hopper_chunk_") && plan.candidate == cuda::Sm90ForwardConverted::kName)
    plan = plan_without({cuda::Sm90ForwardConverted::kName}, problem, device);
  // Of more than 16 rows too, whose kernel is the one for long problems where heads are wide.
  if (label.starts_with("hopper_") && plan.candidate == cuda::Sm90Decode::kName)
    plan = plan_without({cuda::Sm90Decode::kName}, problem, device);
  if (plan.spec.get_if<cuda::Sm90DecodeSpec>() != nullptr) {
    cuda::Choice choice{&cuda::candidate_named(plan.candidate), plan.spec};
    choice.spec = decode_of_label(label, problem, device);
    plan = plan_choice(problem, device, choice);
  }
  if (!label.starts_with("choice_")) return plan;
  const auto named = std::ranges::find(named_choices(), label, &NamedChoice::label);
  for (const cuda::Choice& choice : choices_of(problem, device)) {
    const Tile tile = tile_of(choice.spec);
    const bool is_it = choice.candidate->name == plan.candidate &&
                       std::ranges::all_of(named->members, [&](const auto& member) {
                         return tile.*member.first == member.second;
                       });
    if (is_it) return plan_choice(problem, device, choice);
  }
  throw std::logic_error(label + ": no kernel has this choice");
}

}  // namespace fovea::testing
