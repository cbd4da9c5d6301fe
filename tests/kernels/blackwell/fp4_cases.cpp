#include "kernels/blackwell/fp4_cases.hpp"

#include "cuda/forward/choices.hpp"
#include "cuda/forward/sm100_fp4.hpp"
#include "cuda/forward/sm120_fp4.hpp"
#include "kernels/forward_cases.hpp"

namespace fovea::testing {
namespace {

/// Two blocks of queries, three tiles of keys; two heads share keys.
Case base_case(const char* label, std::int64_t head_dim, const char* quant) {
  Case problem = rounded_case(label, head_dim, 140);
  problem.quant = parse_quantization(quant);
  return problem;
}

}  // namespace

std::vector<Case> fp4_cases() {
  Case full = base_case("fp4_full_d128_wide", 128, "nvfp4");
  full.batch = 2;
  Case causal_128 = base_case("fp4_causal_d128", 128, "nvfp4");
  causal_128.mask = causal();
  causal_128.has_sinks = true;
  causal_128.wants_row_max = true;
  // The same kernel; the outliers of Q and K are what smoothing takes out.
  Case heavy = causal_128;
  heavy.label = "fp4_heavy_d128";
  heavy.distribution = Distribution::heavy_tailed;
  heavy.seqlen_kv = 400;
  heavy.softmax_scale = 1;
  Case infinite = causal_128;
  infinite.label = "fp4_infinite_d128";
  infinite.has_infinite_values = true;
  Case full_64 = base_case("fp4_full_d64", 64, "nvfp4");
  full_64.dtype = Dtype::f16;
  full_64.seqlen_q = 70;
  full_64.seqlen_kv = 400;
  // Powers of two as scales; programs read whole scores.
  Case capped = base_case("mxfp4_softcap_d128", 128, "mxfp4");
  capped.score = softcap(3);
  capped.mask = causal() && window(150, 0);
  capped.wants_row_max = true;
  capped.out_dtype = Dtype::f32;
  // Tiles and means of each sequence: one has no keys, one no queries, one ends a tile; rows behind them are nobody's.
  Case packed = base_case("mxfp4_packed_d64", 64, "mxfp4");
  packed.sequences = {{0, 0}, {1, 1}, {140, 300}, {70, 0}, {0, 9}, {200, 128}, {3, 257}};
  packed.trailing_rows = 3;
  packed.mask = causal();
  packed.has_sinks = true;
  packed.has_infinite_values = true;
  // Columns that are no multiple of 8, in rows at odd addresses; groups that head dims cut.
  Case by_elements = base_case("fp4_by_elements", 77, "nvfp4");
  by_elements.head_dim_v = 29;
  by_elements.layout = by_elements.out_layout = Layout::odd_offset;
  by_elements.out_dtype = Dtype::f32;
  const TensorView table = by_elements.capture(Dtype::boolean, {140, 270},
                                               [](std::int64_t i) { return i * 7 % 11 < 5; });
  by_elements.mask = parse_mask_mod("seen[q_idx, kv_idx]", {.tensors = {{"seen", table}}});
  Case none = base_case("fp4_no_keys", 128, "nvfp4");
  none.batch = 1;
  none.seqlen_q = 70;
  none.seqlen_kv = 0;
  return {full, causal_128, heavy, infinite, full_64, capped, packed, by_elements, none};
}

cuda::ForwardPlan tensor_memory_fp4_plan(const std::string& label, const ForwardProblem& problem) {
  cuda::DeviceTraits device = cuda::typical_device(10, 0);
  device.num_sms = 2;  // CTAs claim more than one row tile, and buffers are filled again
  const std::size_t groups = label.ends_with("d64") ? 1 : 0;
  return cuda::plan_choice(problem, device,
                           {&cuda::candidate_named(cuda::Sm100ForwardFp4::kName),
                            cuda::Sm100ForwardFp4::alternatives(problem, device).at(groups)});
}

cuda::ForwardPlan fp4_plan(const std::string& label, const ForwardProblem& problem) {
  const cuda::DeviceTraits device = cuda::typical_device(12, 0);
  const std::size_t rows = label.ends_with("wide") ? 0 : 1;
  return cuda::plan_choice(problem, device,
                           {&cuda::candidate_named(cuda::Sm120ForwardFp4::kName),
                            cuda::Sm120ForwardFp4::alternatives(problem, device).at(rows)});
}

}  // namespace fovea::testing
