#include <algorithm>
#include <array>
#include <iterator>
#include <string_view>
#include <utility>

#include "kernels/forward_cases.hpp"
#include "support/features.hpp"

namespace fovea::testing {
namespace {

/// What is left out by the beginning of its label: tiles of other kernels, and what differs from a case that stays
/// neither in what lanes share nor in its tile, takes long, or is refused there. NVIDIA's kernels run each of them.
constexpr std::array<std::string_view, 21> kLeftOut = {
    "choice_",
    "bhsd",
    "odd_offset",
    "reversed",
    "shared_",
    "padded",
    "heavy_tailed",
    "negative_scale",
    "zero_scale",
    "plain_f16",
    "extreme_bf16",
    "extreme_f16",
    "packed_chunks_of_slots",
    "infinite_values_d128",
    "infinite_values_f16",
    "infinite_values_f32",
    "infinite_values_softcap",
    "several_tiles_d128",
    "several_tiles_d256",
    "wide_heads_",
    "paged_latent",
};
constexpr std::array<std::string_view, 2> kLong = {"packed_many", "packed_chunks"};

bool is_left_out(std::string_view label) {
  const auto begins = [&](std::string_view begin) { return label.starts_with(begin); };
  return std::ranges::any_of(kLeftOut, begins) || std::ranges::count(kLong, label) > 0;
}

/// What only wide warps tell apart: a walk over more tiles than a warp has lanes, of which it visits some of each half;
/// splits whose columns take more than half of the lanes.
std::vector<Case> wide_warps() {
  Case walk = plain_case(Dtype::f32);
  walk.label = "walk_of_many_tiles";
  walk.batch = walk.num_heads_q = walk.num_heads_kv = 1;
  walk.seqlen_q = 33;
  walk.seqlen_kv = 2200;
  walk.head_dim_qk = walk.head_dim_v = 8;
  walk.mask = window(1500, 0);
  Case split = plain_case(Dtype::f32);
  split.label = "split_of_many_columns";
  split.batch = 1;
  split.seqlen_q = 2;
  split.seqlen_kv = 600;
  split.head_dim_v = 160;
  return {walk, split};
}

}  // namespace

std::vector<Case> amd_cases() {
  std::vector<Case> cases = kernel_cases();
  std::erase_if(cases, [](const Case& each) { return is_left_out(each.label); });
  std::ranges::move(wide_warps(), std::back_inserter(cases));
  return cases;
}

std::vector<NamedCacheCase> amd_cache_cases() {
  std::vector<NamedCacheCase> cases = kernel_cache_cases();
  std::erase_if(cases, [](const NamedCacheCase& each) { return is_left_out(each.label); });
  return cases;
}

}  // namespace fovea::testing
