// The kernel behind attention of eight bits that computes rows of very large scores again: for which specs there is
// one, and its launch. Read device/common/lost_rows.cuh for the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>

#include "cuda/device/shared/lost_rows.h"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/quantize_kv.hpp"
#include "cuda/kernel_set.hpp"
#include "cuda/spec_text.hpp"

namespace fovea::cuda {

template <>
struct SpecText<LostRowsSpec> {
  static constexpr std::string_view kName = "LostRowsSpec";
  using Base = ForwardSpec;
  static constexpr std::tuple kMembers{
      FOVEA_SPEC_MEMBER(LostRowsSpec, has_query_codes), FOVEA_SPEC_MEMBER(LostRowsSpec, rotates),
      FOVEA_SPEC_MEMBER(LostRowsSpec, scale_tile),      FOVEA_SPEC_MEMBER(LostRowsSpec, sums_codes),
      FOVEA_SPEC_MEMBER(LostRowsSpec, reads_numbers),   FOVEA_SPEC_MEMBER(LostRowsSpec, smooths_v),
      FOVEA_SPEC_MEMBER(LostRowsSpec, is_cached),       FOVEA_SPEC_MEMBER(LostRowsSpec, k_codes),
      FOVEA_SPEC_MEMBER(LostRowsSpec, v_codes)};
};

/// Of the plan; none where its kernel loses no row.
std::optional<LostRowsSpec> lost_rows_spec(const ForwardPlan& plan);
jit::KernelText lost_rows_text(const ForwardPlan& plan, const LostRowsSpec& spec);

/// In the place of notes (device/shared/lost_rows.h).
constexpr bool leaves_row_scales(const TeamSpec&) { return false; }
constexpr bool leaves_row_scales(const Sm90ForwardSpec& spec) { return knows_lost_by_scale(spec); }

/// Rows of all heads of a call.
std::int64_t num_rows_of_heads(const ForwardSpec& spec, const ForwardParams& call);

/// Of workspace, for notes or, of Hopper's kernel without programs, scales of rows; 0 where `spec` loses no row.
std::size_t note_bytes(const TeamSpec& spec, const ForwardProblem& problem);
std::size_t note_bytes(const Sm90ForwardSpec& spec, const ForwardProblem& problem);

/// Gives `rounding`, the launch before attention, room for notes to clear.
template <typename Spec>
void place_notes(const Spec& spec, const ForwardParams& call, std::byte* to,
                 QuantizeKvLaunch& rounding) {
  if (!spec.loses_far_rows()) return;
  rounding.params.notes = reinterpret_cast<std::uint32_t*>(to);
  if (!leaves_row_scales(spec))
    rounding.params.num_notes = num_note_words(num_rows_of_heads(spec, call));
}

struct LostRowsLaunch {
  LostRowsParams params{};
  unsigned num_ctas = 0;  // 0: no row is lost
  bool overlaps = true;   // it starts while the kernel before it ends

  void add_to(KernelLaunches& all) const;
};

/// Behind the launch that has rounded the operands of this call, whose notes it has cleared. `call`: as it is given.
LostRowsLaunch lost_rows_launch(const ForwardPlan& plan, const ForwardParams& call,
                                const QuantizeKvLaunch& rounded);

}  // namespace fovea::cuda
