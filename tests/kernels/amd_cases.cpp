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
/// Long ones, and one that differs from another by its dtype alone.
constexpr std::array<std::string_view, 3> kLabelsLeftOut = {"packed_many", "packed_chunks",
                                                            "infinite_values_dropout"};

bool is_left_out(std::string_view label) {
  const auto begins = [&](std::string_view begin) { return label.starts_with(begin); };
  return std::ranges::any_of(kLeftOut, begins) || std::ranges::count(kLabelsLeftOut, label) > 0;
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

namespace {

/// Features that CDNA's kernel is run with: those that its own text makes true, not what the f32 kernel has too. Every
/// second one is run as on gfx950.
constexpr std::array<std::string_view, 17> kOfCdna = {"packed",
                                                      "more_queries_than_keys",
                                                      "gqa",
                                                      "bhsd",
                                                      "other_out_dtype",
                                                      "no_statistics",
                                                      "sinks",
                                                      "window",
                                                      "dropout",
                                                      "dropout_seed",
                                                      "softcap",
                                                      "minus_infinity_bias",
                                                      "causal",
                                                      "documents",
                                                      "nothing_visible",
                                                      "negative_scale",
                                                      "mask_text"};

/// Two waves with rows, two kv tiles, the second cut.
Case cdna_case(std::string label, Dtype dtype) {
  Case problem = plain_case(dtype);
  problem.label = std::move(label);
  problem.seqlen_q = 40;
  problem.head_dim_qk = problem.head_dim_v = 64;
  return problem;
}

/// Two tiles of rows, three of keys at least, both cut.
Case cdna_tiles(std::string label, std::int64_t head_dim_qk, std::int64_t head_dim_v, Dtype dtype) {
  Case problem = cdna_case(std::move(label), dtype);
  problem.batch = problem.num_heads_q = problem.num_heads_kv = 1;
  problem.seqlen_q = 140;
  problem.seqlen_kv = 270;
  problem.head_dim_qk = head_dim_qk;
  problem.head_dim_v = head_dim_v;
  problem.mask = causal();
  return problem;
}

/// Infinity of either sign and NaN among values: sums are taken in passes.
void add_infinite_values(std::vector<Case>& cases) {
  Case tiles = cdna_tiles("cdna_infinite_values", 64, 64, Dtype::bf16);
  Case wide = cdna_tiles("gfx950_infinite_values_f32_out", 128, 104, Dtype::f16);
  wide.out_dtype = Dtype::f32;
  Case split = cdna_case("cdna_infinite_values_split", Dtype::bf16);
  split.seqlen_q = 2;
  split.seqlen_kv = 600;
  split.dropout = kSomeDropped;
  split.mask = causal();
  for (Case each : {tiles, wide, split}) {
    each.has_infinite_values = true;
    cases.push_back(std::move(each));
  }
}

}  // namespace

std::vector<Case> cdna_cases() {
  std::vector<Case> cases = {cdna_tiles("cdna_d128", 128, 128, Dtype::bf16),
                             cdna_tiles("cdna_d128_64", 128, 64, Dtype::f16),
                             cdna_tiles("cdna_d64_128", 64, 128, Dtype::bf16),
                             cdna_tiles("gfx950_d64", 64, 64, Dtype::f16),
                             cdna_tiles("gfx950_d128", 128, 128, Dtype::bf16),
                             with_extreme_scores(cdna_tiles("cdna_extreme", 64, 64, Dtype::f16)),
                             cdna_tiles("cdna_d96", 96, 96, Dtype::bf16),
                             cdna_tiles("gfx950_d72_40", 72, 40, Dtype::f16)};
  // Rows narrower than tiles: NaN behind a row's last element, where the key behind it is one that no row sees; heads
  // of a group that share a tile, and parts of keys, whose partial states are as wide as the tile.
  for (const char* const target : {"cdna_", "gfx950_"}) {
    Case narrow = cdna_tiles(target + std::string("narrow_d40"), 40, 40, Dtype::bf16);
    narrow.mask = parse_mask_mod("kv_idx % 3 != 1");
    cases.push_back(narrow);
    Case split = cdna_case(target + std::string("narrow_split"), Dtype::f16);
    split.seqlen_q = 2;
    split.seqlen_kv = 600;
    split.num_heads_q = 6;
    split.head_dim_qk = 112;
    split.head_dim_v = 80;
    split.dropout = kSomeDropped;
    split.score = softcap(3);
    cases.push_back(std::move(split));
  }
  // Prompts of latent attention.
  for (const char* const target : {"cdna_", "gfx950_"}) {
    Case latent = cdna_tiles(target + std::string("latent_d192"), 192, 128, Dtype::bf16);
    latent.seqlen_kv = 150;
    if (amd_device_of(latent.label).gfx == 0x950) {
      latent.score = softcap(3);
      latent.dropout = kSomeDropped;
    }
    cases.push_back(std::move(latent));
  }
  Case lean = cdna_tiles("cdna_lean_d128", 128, 128, Dtype::bf16);  // tiles of 32 keys
  lean.seqlen_kv = 150;
  lean.score = softcap(3);
  lean.dropout = kSomeDropped;
  cases.push_back(std::move(lean));
  for (const Feature& feature : features()) {
    const auto at = std::ranges::find(kOfCdna, feature.name) - kOfCdna.begin();
    if (at == std::ssize(kOfCdna)) continue;
    const bool is_f16 = at % 2 == 0;
    Case problem = cdna_case(std::string(is_f16 ? "gfx950_" : "cdna_") + std::string(feature.name),
                             is_f16 ? Dtype::f16 : Dtype::bf16);
    feature.add(problem);
    cases.push_back(std::move(problem));
  }
  // Of 600 keys three splits; heads of a group that share a tile.
  Case split = cdna_case("cdna_split", Dtype::f16);
  split.seqlen_q = 2;
  split.seqlen_kv = 600;
  split.num_heads_q = 6;
  split.mask = causal();
  split.has_sinks = true;
  cases.push_back(std::move(split));
  // Two heads for each of eight dies, which take them in an order of their own.
  Case dies = cdna_case("cdna_heads_of_dies", Dtype::bf16);
  dies.num_heads_q = 16;
  dies.num_heads_kv = 16;
  dies.seqlen_q = 20;
  dies.batch = 1;
  cases.push_back(dies);
  dies.label = "cdna_packed_heads_of_dies";
  dies.sequences = {{9, 70}, {0, 3}, {33, 20}};
  dies.trailing_rows = 2;
  cases.push_back(std::move(dies));
  add_infinite_values(cases);
  return cases;
}

std::vector<NamedCacheCase> cdna_cache_cases() {
  std::vector<NamedCacheCase> cases;
  for (NamedCacheCase& each : kernel_cache_cases()) {
    constexpr std::array<std::string_view, 5> kLabels = {"packed_decode", "packed_chunks",
                                                         "odd_pages", "slots", "paged_prefill"};
    if (std::ranges::count(kLabels, each.label) == 0) continue;
    each.label = (cases.size() % 2 == 0 ? "cdna_" : "gfx950_") + each.label;
    if (each.label.ends_with("slots")) {
      each.problem.head_dim_v = 32;
    } else {
      each.problem.head_dim_v = cases.size() == 1 ? 128 : 64;
    }
    cases.push_back(std::move(each));
  }
  return cases;
}

cuda::DeviceTraits amd_device_of(std::string_view label) {
  return cuda::typical_amd_device(label.starts_with("gfx950_") ? 0x950 : 0x942);
}

std::vector<Case> amd_cases() {
  std::vector<Case> cases = kernel_cases();
  std::erase_if(cases, [](const Case& each) { return is_left_out(each.label); });
  // Of 16 bits cdna/attention_forward would take them.
  for (Case& each : cases) {
    if (each.dtype != Dtype::f32 && each.head_dim_qk <= 256 && each.head_dim_v <= 128)
      each.compute_dtype = ComputeDtype::f32;
  }
  std::ranges::move(wide_warps(), std::back_inserter(cases));
  return cases;
}

std::vector<NamedCacheCase> amd_cache_cases() {
  std::vector<NamedCacheCase> cases = kernel_cache_cases();
  std::erase_if(cases, [](const NamedCacheCase& each) { return is_left_out(each.label); });
  // Of 16 bits cdna/attention_forward would take those that lie in no pages.
  for (NamedCacheCase& each : cases) {
    CacheCase& problem = each.problem;
    if (problem.page_size == 0) problem.q_dtype = problem.k_dtype = problem.v_dtype = Dtype::f32;
  }
  return cases;
}

}  // namespace fovea::testing
