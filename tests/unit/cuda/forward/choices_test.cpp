// What a GPU may choose between: always the table's choice first, and nothing that the device or a kernel cannot have.
#include "cuda/forward/choices.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>

#include "fovea/mask.hpp"

#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/tuning.hpp"
#include "unit/cuda/forward/posed.hpp"

namespace fovea::cuda {
namespace {

MaskMod selected_tiles() {
  const TensorSpec table = make_spec(Dtype::boolean, std::array<std::int64_t, 3>{8, 32, 32});
  return parse_mask_mod(
      "sel[q_head, q_idx // 64, kv_idx // 64]",
      {.tensors = {{"sel", TensorView(static_cast<const void*>(nullptr), table)}}});
}

// Widths on both sides of every row of the tables, few rows and many, one dtype of each kernel; tiles that a mask
// selects.
std::vector<Posed> many_problems() {
  std::vector<Posed> problems;
  for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
    for (const std::int64_t qk : {32, 64, 96, 128, 192, 256}) {
      for (const std::int64_t v : {64, 128, 256}) {
        for (const std::int64_t rows : {1, 5, 2048}) {
          problems.push_back({.dtype = dtype,
                              .seqlen_q = rows,
                              .seqlen_kv = 2048,
                              .num_heads_kv = 2,
                              .head_dim_qk = qk,
                              .head_dim_v = v,
                              .mask = rows == 5 ? causal() : MaskMod()});
        }
        problems.push_back({.dtype = dtype,
                            .seqlen_q = 2048,
                            .seqlen_kv = 2048,
                            .head_dim_qk = qk,
                            .head_dim_v = v,
                            .mask = selected_tiles()});
      }
    }
  }
  return problems;
}

const std::vector<DeviceTraits>& devices() {
  static const std::vector<DeviceTraits> all = {typical_device(8, 0), typical_device(8, 9),
                                                typical_device(9, 0), typical_device(12, 0)};
  return all;
}

TEST(ForwardChoices, TableComesFirst) {
  for (const DeviceTraits& device : devices()) {
    for (const Posed& posed : many_problems()) {
      const ForwardProblem problem = pose(posed);
      const ForwardPlan plan = choose_forward(problem, device);
      const std::vector<Choice> choices = choices_of(problem, device);
      ASSERT_EQ(choices.empty(), plan.candidate.empty());
      if (choices.empty()) continue;
      EXPECT_EQ(choices[0].candidate->name, plan.candidate);
      EXPECT_EQ(choices[0].spec, plan.spec);
    }
  }
}

TEST(ForwardChoices, EachIsThereOnce) {
  for (const DeviceTraits& device : devices()) {
    for (const Posed& posed : many_problems()) {
      std::set<std::string> seen;
      for (const Choice& choice : choices_of(pose(posed), device))
        EXPECT_TRUE(seen.insert(print_choice(winner_of(choice))).second)
            << print_choice(winner_of(choice));
    }
  }
}

TEST(ForwardChoices, EachFitsTheDevice) {
  for (const DeviceTraits& device : devices()) {
    for (const Posed& posed : many_problems()) {
      for (const Choice& choice : choices_of(pose(posed), device)) {
        EXPECT_LE(choice.candidate->shared_bytes(choice.spec),
                  static_cast<std::size_t>(device.shared_bytes_per_cta))
            << print_choice(winner_of(choice));
        EXPECT_LE(choice.spec->num_warps, 16) << print_choice(winner_of(choice));
        EXPECT_GE(choice.spec->ctas_per_sm, 1) << print_choice(winner_of(choice));
      }
    }
  }
}

// A spec is the problem's features and a tile: two choices of a kernel differ in the tile alone.
TEST(ForwardChoices, TilesAreAllThatDiffers) {
  for (const Posed& posed : many_problems()) {
    const std::vector<Choice> choices = choices_of(pose(posed), typical_device(9, 0));
    for (const Choice& choice : choices) {
      const auto first = std::ranges::find(choices, choice.candidate, &Choice::candidate);
      AnyForwardSpec spec = first->spec;
      const TileChoice tile = tile_of(choice.spec);
      spec->tile_q = tile.tile_q;
      spec->tile_kv = tile.tile_kv;
      spec->num_warps = tile.num_warps;
      spec->stages = tile.stages;
      spec->ctas_per_sm = tile.ctas_per_sm;
      spec->heads_per_tile = tile.heads_per_tile;
      spec->is_split = tile.is_split != 0;
      if (auto* sm90 = spec.get_if<Sm90ForwardSpec>()) {
        sm90->q_stages = tile.q_stages;
        sm90->is_dynamic = tile.is_dynamic != 0;
      }
      if (auto* decode = spec.get_if<Sm90DecodeSpec>())
        decode->takes_groups = tile.takes_groups != 0;
      if (auto* team = spec.get_if<TeamSpec>())  // follows from the tile
        team->keeps_queries = choice.spec.as<TeamSpec>().keeps_queries;
      EXPECT_EQ(choice.spec, spec) << print_choice(winner_of(choice));
    }
  }
}

TEST(ForwardChoices, SeveralKernelsMayTakeOneProblem) {
  std::set<std::string_view> names;
  for (const Choice& choice : choices_of(pose(decoding()), typical_device(9, 0)))
    names.insert(choice.candidate->name);
  EXPECT_TRUE(names.contains("cuda/sm90/decode"));
  EXPECT_TRUE(names.contains("cuda/sm80/attention_forward"));
}

TEST(ForwardChoices, HopperVariesGroupsTilesAndStages) {
  const ForwardProblem problem = pose({.head_dim_qk = 64, .head_dim_v = 64});
  std::set<std::int32_t> tile_q, tile_kv, stages, q_stages;
  for (const Choice& choice : choices_of(problem, typical_device(9, 0))) {
    if (choice.candidate->name != "cuda/sm90/attention_forward") continue;
    tile_q.insert(choice.spec->tile_q);
    tile_kv.insert(choice.spec->tile_kv);
    stages.insert(choice.spec->stages);
    q_stages.insert(choice.spec.as<Sm90ForwardSpec>().q_stages);
  }
  EXPECT_EQ(tile_q, (std::set<std::int32_t>{128, 192}));
  EXPECT_GE(tile_kv.size(), 3U);
  EXPECT_EQ(stages, (std::set<std::int32_t>{2, 3}));
  EXPECT_EQ(q_stages, (std::set<std::int32_t>{1, 2}));
}

TEST(ForwardChoices, FewRowsMayStayWhole) {
  bool has_split = false, has_whole = false;
  for (const Choice& choice : choices_of(pose(decoding()), typical_device(8, 0)))
    (choice.spec->is_split ? has_split : has_whole) = true;
  EXPECT_TRUE(has_split && has_whole);
}

TEST(ForwardChoices, AProblemThatAllRefuseHasNone) {
  EXPECT_TRUE(choices_of(pose({}), typical_device(7, 0)).empty());
}

TEST(ForwardChoices, APlanOfAChoiceHasItsSpecAndItsWorkspace) {
  const ForwardProblem problem = pose(decoding());
  const DeviceTraits device = typical_device(9, 0);
  for (const Choice& choice : choices_of(problem, device)) {
    const ForwardPlan plan = plan_choice(problem, device, choice);
    EXPECT_EQ(plan.candidate, choice.candidate->name);
    EXPECT_EQ(plan.spec, choice.spec);
    EXPECT_GE(plan.workspace_bytes, choice.candidate->scratch_bytes(choice.spec, problem));
  }
}

}  // namespace
}  // namespace fovea::cuda
