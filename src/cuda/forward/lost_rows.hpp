// The kernel behind attention of eight bits that computes rows of very large scores again: for which specs there is one,
// and its launch. Read device/common/lost_rows.cuh for the kernel.
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

/// Rows of all heads of a call.
std::int64_t num_rows_of_heads(const ForwardSpec& spec, const ForwardParams& call);

/// Of workspace, for notes; 0 where `spec` loses no row.
template <typename Spec>
std::size_t note_bytes(const Spec& spec, const ForwardProblem& f) {
  if (!spec.loses_far_rows()) return 0;
  const std::int64_t rows = f.is_varlen ? f.total_q : f.num_sequences * f.seqlen_q;
  return part_bytes(num_note_words(rows * f.num_heads_q) * std::int64_t{sizeof(std::uint32_t)});
}

/// Gives `rounding`, the launch before attention, room for notes to clear.
template <typename Spec>
void place_notes(const Spec& spec, const ForwardParams& call, std::byte* to,
                 QuantizeKvLaunch& rounding) {
  if (!spec.loses_far_rows()) return;
  rounding.params.notes = reinterpret_cast<std::uint32_t*>(to);
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
