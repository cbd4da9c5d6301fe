#include "kernels/blackwell/blackwell_cases.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "cuda/forward/choices.hpp"
#include "cuda/forward/sm100.hpp"

namespace fovea::testing {
namespace {

constexpr std::string_view kHopper = "hopper_";
constexpr std::string_view kAwaiting = "awaiting";

constexpr std::array<std::string_view, 25> kShort = {
    "blackwell_parts_d64",         // parts of keys and rows, GQA, sinks
    "blackwell_infinite_cap",      // passes
    "blackwell_extreme_line",      // scores beyond the range of logarithms
    "blackwell_full_d128_103_",    // no polynomials
    "blackwell_causal_d96",        // panels of 32
    "blackwell_small_values_d64",  // the pass `low`
    "blackwell_unequal_narrow",    // padded, head dims unequal, a window
    "blackwell_climbing_row_max", "blackwell_no_keys",          "blackwell_dropout",
    "blackwell_descending_d64",  // which climbs as the walk goes: sums are scaled
    "blackwell_f32_out",         // by elements
    "blackwell_packed_d64",      // rows without keys, trailing rows, i64
    "blackwell_rows_awaiting",   // row tiles behind each other in one CTA, by the ISA's text
    "blackwell_causal_d128",
    "blackwell_unequal_padded",  // one group, two buffers; head dims 192, 128
    "blackwell_causal_d256",     // one buffer
    "blackwell_rows_54_window",   "blackwell_rows_24_infinite", "blackwell_rows_20_dropout",
    "blackwell_pages_of_8",       // many rows against a cache, one group
    "blackwell_packed_pages",     // two, of some sequences
    "blackwell_few_pages_of_16",  // splits, one and several
    "blackwell_few_slots_nan",    // behind the keys, and among them
    "blackwell_few_packed_slots"};

/// Those of Hopper's matrix that have an entry here, too.
template <class Named>
void add_of_hopper(std::vector<Named> from, std::string Named::*label, std::vector<Named>& to) {
  for (Named& each : from) {
    if (!(each.*label).starts_with(kHopper)) continue;
    each.*label = "blackwell_" + (each.*label).substr(kHopper.size());
    to.push_back(std::move(each));
  }
}

}  // namespace

std::vector<Case> blackwell_cases() {
  std::vector<Case> cases;
  add_of_hopper(hopper_cases(), &Case::label, cases);
  add_of_hopper(hopper_few_rows_cases(), &Case::label, cases);
  const auto like = [&](std::string_view label, const char* as) {
    Case copy = *std::ranges::find(cases, label, &Case::label);
    copy.label = as;
    return copy;
  };
  cases.push_back(like("blackwell_full_d128", "blackwell_full_d128_103_"));
  cases.push_back(like("blackwell_causal_d96", "blackwell_causal_d96_awaiting"));
  Case f32 = like("blackwell_infinite_f16_padded", "blackwell_f32_out");
  f32.out_dtype = Dtype::f32;
  cases.push_back(std::move(f32));
  Case rows = like("blackwell_causal_d128", "blackwell_rows_awaiting");
  rows.seqlen_q = rows.seqlen_kv = 600;  // three row tiles, of two kv tiles to five
  cases.push_back(rows);
  rows.label = "blackwell_rows";
  cases.push_back(std::move(rows));
  return cases;
}

std::vector<NamedCacheCase> blackwell_cache_cases() {
  std::vector<NamedCacheCase> cases;
  add_of_hopper(hopper_cache_cases(), &NamedCacheCase::label, cases);
  add_of_hopper(hopper_few_rows_cache_cases(), &NamedCacheCase::label, cases);
  return cases;
}

bool is_short_blackwell(std::string_view label) {
  return std::ranges::find(kShort, label) != kShort.end();
}

cuda::DeviceTraits small_blackwell(const ForwardProblem& problem, int minor) {
  cuda::DeviceTraits device = cuda::typical_device(10, minor);
  device.num_sms = problem.is_varlen ? 2 : 1;
  device.l2_bytes = 1 << 18;
  return device;
}

cuda::ForwardPlan blackwell_plan(const std::string& label, const ForwardProblem& problem) {
  const int minor = label.find("_103_") != std::string::npos ? 3 : 0;
  const cuda::DeviceTraits device = small_blackwell(problem, minor);
  cuda::Sm100ForwardSpec spec = cuda::Sm100Forward::choose(problem, device);
  spec.awaits_sums = label.ends_with(kAwaiting);
  return cuda::plan_choice(problem, device,
                           {&cuda::candidate_named(cuda::Sm100Forward::kName), spec});
}

}  // namespace fovea::testing
