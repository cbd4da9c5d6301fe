#include "kernels/backward/emulated_rounding.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "common/quantize_kv.cuh"
#include "support/launch_memory.hpp"

namespace fovea::cuda {
namespace {

struct EmulatedRounding {
  QuantizeKvSpec spec;
  void (*mean)(const QuantizeKvParams& params);
  void (*round)(const QuantizeKvParams& params);
};

consteval QuantizeKvSpec numbers(Element element, std::int32_t head_dim_qk, std::int32_t head_dim_v,
                                 bool is_packed = false) {
  return {.element = element,
          .head_dim_qk = head_dim_qk,
          .head_dim_v = head_dim_v,
          .is_packed = is_packed,
          .rounds_q = true,
          .reads_elements = true,
          .writes_numbers = true};
}

/// Of rows that are rotated, and values without their mean.
consteval QuantizeKvSpec both(QuantizeKvSpec spec) {
  spec.rotates = spec.smooths_v = true;
  return spec;
}
consteval QuantizeKvSpec rotated(QuantizeKvSpec spec) {
  spec.rotates = true;
  return spec;
}

template <QuantizeKvSpec spec>
constexpr EmulatedRounding rounding() {
  return {spec, mean_of_keys<spec>, quantize_kv<spec>};
}

constexpr EmulatedRounding kRoundings[] = {rounding<numbers(Element::bf16, 64, 0)>(),
                                           rounding<numbers(Element::f16, 64, 0)>(),
                                           rounding<numbers(Element::bf16, 64, 0, true)>(),
                                           rounding<numbers(Element::bf16, 64, 64, true)>(),
                                           rounding<numbers(Element::f16, 64, 64)>(),
                                           rounding<numbers(Element::bf16, 128, 128)>(),
                                           rounding<rotated(numbers(Element::bf16, 128, 0))>(),
                                           rounding<rotated(numbers(Element::f16, 64, 0))>(),
                                           rounding<both(numbers(Element::bf16, 64, 64, true))>(),
                                           rounding<both(numbers(Element::f16, 64, 64))>()};

}  // namespace
}  // namespace fovea::cuda

namespace fovea::testing {

void run_rounding(const cuda::RoundedCall& call, const AttentionForward& args, std::byte* workspace,
                  std::size_t bytes, Emulation& emulation) {
  const cuda::QuantizeKvLaunch& launch = call.rounding;
  const auto* const found =
      std::ranges::find(cuda::kRoundings, launch.spec, &cuda::EmulatedRounding::spec);
  if (found == std::end(cuda::kRoundings)) throw std::out_of_range("no such rounding");
  for (const auto& [name, view] : {std::pair{"q", args.q},
                                   {"k", args.k},
                                   {"v", args.v},
                                   {"cu_seqlens_q", args.cu_seqlens_q},
                                   {"cu_seqlens_kv", args.cu_seqlens_kv}}) {
    const TensorBytes tensor = tensor_bytes(name, view);
    if (tensor.size > 0) emulation.device.register_buffer(tensor.name, tensor.begin, tensor.size);
  }
  emulation.device.register_buffer("workspace", workspace, bytes);
  emulation.launch({.x = launch.num_looking_ctas()}, cuda::kQuantizeThreads, cuda::kMeanSharedBytes,
                   [&] { found->mean(launch.params); });
  emulation.is_dependent = launch.overlaps;
  emulation.launch({.x = launch.num_ctas}, cuda::kQuantizeThreads,
                   static_cast<std::size_t>(cuda::quantize_shared_bytes(launch.spec)),
                   [&] { found->round(launch.params); });
  emulation.is_dependent = false;
  emulation.expect_launched(call.launches());
}

}  // namespace fovea::testing
