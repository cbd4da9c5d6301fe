#include "cuda/forward/lost_rows.hpp"

#include <fmt/format.h>

#include "expr/print_cuda.hpp"

namespace fovea::cuda {
namespace {

/// That registers are left for: of its own ptxas aims at four, and spills.
constexpr int kCtasPerSm = 2;

std::size_t bytes_of_notes(const ForwardProblem& f) {
  const std::int64_t rows = f.is_varlen ? f.total_q : f.num_sequences * f.seqlen_q;
  return part_bytes(num_note_words(rows * f.num_heads_q) * std::int64_t{sizeof(std::uint32_t)});
}

LostRowsSpec row_of(const ForwardSpec& attention) {
  LostRowsSpec spec{attention};
  spec.tile_q = spec.heads_per_tile = 1;
  spec.is_split = false;
  return spec;
}

LostRowsSpec spec_behind(const Sm90ForwardSpec& attention) {
  LostRowsSpec spec = row_of(attention);
  spec.rotates = attention.rotates;
  spec.sums_codes = attention.sums_codes;
  spec.reads_numbers = writes_values(quantize_kv_spec(attention));
  spec.smooths_v = attention.smooths_v;
  spec.is_cached = attention.is_cached;
  spec.k_codes = attention.k_codes;
  spec.v_codes = attention.v_codes;
  return spec;
}

LostRowsSpec spec_behind(const TeamSpec& attention, const Quantization& quant) {
  LostRowsSpec spec = row_of(attention);
  spec.head_dim_qk = 2 * attention.head_dim_qk;
  spec.has_query_codes = true;
  spec.scale_tile = attention.scale_tile;
  spec.sums_codes = attention.sums_codes;
  spec.reads_numbers = writes_values(quantize_kv_spec(attention, quant));
  spec.smooths_v = attention.smooths_v;
  return spec;
}

}  // namespace

std::optional<LostRowsSpec> lost_rows_spec(const ForwardPlan& plan) {
  if (const auto* sm90 = plan.spec.get_if<Sm90ForwardSpec>()) {
    if (sm90->loses_far_rows()) return spec_behind(*sm90);
  } else if (const auto* team = plan.spec.get_if<TeamSpec>()) {
    if (team->loses_far_rows()) return spec_behind(*team, plan.quant);
  }
  return std::nullopt;
}

jit::KernelText lost_rows_text(const ForwardPlan& plan, const LostRowsSpec& spec) {
  return {fmt::format("#include \"common/lost_rows.cuh\"\n#include \"{}\"\n"
                      "namespace fovea::cuda {{\n{}\n{}}}\n"
                      "extern \"C\" __global__ void __launch_bounds__({}, {}) {}("
                      "const __grid_constant__ fovea::cuda::LostRowsParams p) {{\n"
                      "  fovea::cuda::lost_rows<fovea::cuda::spec, fovea::cuda::Mods>(p);\n}}\n",
                      plan.program->include, plan.program->mods, print_spec(spec), kLostRowsThreads,
                      kCtasPerSm, jit::kEntryName),
          fmt::format("common/lost_rows {} d{}", name(spec.element), spec.head_dim_qk)};
}

std::size_t note_bytes(const TeamSpec& spec, const ForwardProblem& f) {
  return spec.loses_far_rows() ? bytes_of_notes(f) : 0;
}

std::size_t note_bytes(const Sm90ForwardSpec& spec, const ForwardProblem& f) {
  if (!leaves_row_scales(spec)) return spec.loses_far_rows() ? bytes_of_notes(f) : 0;
  const std::int64_t lists = f.num_heads_q * (f.is_varlen ? 1 : f.num_sequences);
  return part_bytes(
      lists * std::int64_t{sizeof(float)} *
      num_row_scales(f.is_varlen, f.num_sequences, f.is_varlen ? f.total_q : f.seqlen_q));
}

std::int64_t num_rows_of_heads(const ForwardSpec& spec, const ForwardParams& call) {
  const bool is_packed = spec.is_varlen || spec.has_packed_q;
  return call.num_heads_q *
         (is_packed ? call.total_q : std::int64_t{call.num_sequences} * call.seqlen_q);
}

LostRowsLaunch lost_rows_launch(const ForwardPlan& plan, const ForwardParams& call,
                                const QuantizeKvLaunch& rounded) {
  LostRowsLaunch launch;
  launch.overlaps = rounded.overlaps;
  const QuantizeCacheParams& written = rounded.params;
  if (written.notes == nullptr || rounded.num_ctas == 0) return launch;
  launch.params = {.call = call,
                   .rounded = written,
                   .k_scale = written.k_scale,
                   .v_scale = written.v_scale,
                   .notes = written.notes,
                   .num_rows = num_rows_of_heads(*plan.spec, call)};
  launch.num_ctas = static_cast<unsigned>(plan.device.num_sms);
  return launch;
}

void LostRowsLaunch::add_to(KernelLaunches& all) const {
  KernelLaunch launch = kernel_launch(KernelRole::lost_rows, params);
  launch.grid = {.x = num_ctas};
  launch.num_threads = kLostRowsThreads;
  launch.is_pdl = overlaps;
  all.add(launch);
}

}  // namespace fovea::cuda
