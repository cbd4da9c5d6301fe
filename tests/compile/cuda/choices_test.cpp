// Tiles that no table has but fovea tune may: the furthest of each kernel goes through NVRTC. (Under the emulator they
// are compared with the oracle: tests/kernels/choice_cases.cpp.)
#include "cuda/forward/choices.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "compile/cuda/compiler.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/tuning.hpp"
#include "problem/forward.hpp"

namespace fovea::cuda {
namespace {

struct Furthest {
  const char* candidate;
  std::int64_t seqlen_q, num_heads_kv, head_dim;
  TileChoice tile;  // members that are 0 may be anything
};

bool has(const TileChoice& tile, const TileChoice& wanted) {
  return std::ranges::all_of(tile_members(), [&](const TileMember& member) {
    return wanted.*member.value == 0 || tile.*member.value == wanted.*member.value;
  });
}

Choice find(const Furthest& furthest, const ForwardProblem& problem, const DeviceTraits& device) {
  for (const Choice& choice : choices_of(problem, device)) {
    if (choice.candidate->name == furthest.candidate && has(tile_of(choice.spec), furthest.tile))
      return choice;
  }
  return {};
}

TEST(Choices, FurthestTilesCompile) {
  if (const auto why = why_no_compiler()) GTEST_SKIP() << *why;
  const DeviceTraits hopper = typical_device(9, 0);
  for (const Furthest& furthest :
       {Furthest{"cuda/sm90/attention_forward", 1024, 8, 64, {.tile_kv = 192, .stages = 3}},
        Furthest{"cuda/sm90/decode", 1, 2, 128, {.num_warps = 6}},
        Furthest{"cuda/sm80/attention_forward", 1024, 8, 128, {.tile_q = 64, .stages = 3}}}) {
    const auto spec = [&](std::int64_t rows, std::int64_t heads) {
      return make_spec(Dtype::bf16, std::array<std::int64_t, 4>{1, rows, heads, furthest.head_dim});
    };
    const ForwardProblem problem = validate({.q = spec(furthest.seqlen_q, 8),
                                             .k = spec(2048, furthest.num_heads_kv),
                                             .v = spec(2048, furthest.num_heads_kv)},
                                            "test");
    const Choice choice = find(furthest, problem, hopper);
    ASSERT_NE(choice.candidate, nullptr) << furthest.candidate;
    const jit::KernelText text = planned_kernels(plan_choice(problem, hopper, choice)).front().text;
    const jit::Cubin& cubin = compiled(text, {9, 0});
    EXPECT_FALSE(cubin.image.empty());
    EXPECT_EQ(cubin.report.spill_bytes, 0) << print_choice(winner_of(choice));
    EXPECT_EQ(cubin.report.num_wgmma_notes, 0) << print_choice(winner_of(choice));
  }
}

}  // namespace
}  // namespace fovea::cuda
