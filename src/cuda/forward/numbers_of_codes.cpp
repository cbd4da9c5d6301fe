#include "cuda/forward/numbers_of_codes.hpp"

#include <fmt/format.h>

#include <array>

#include "core/ceil_div.hpp"
#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {
namespace {

/// Of a tensor of all sequences, in bytes.
std::size_t part_of(const ForwardProblem& f, std::int64_t head_dim) {
  const std::int64_t numbers = f.num_sequences * f.seqlen_kv * f.num_heads_kv * head_dim;
  constexpr auto kBytes = std::int64_t{sizeof(std::uint16_t)};
  return static_cast<std::size_t>(round_up(numbers * kBytes, kNumbersAlignment));
}

TensorView numbers_view(const ForwardProblem& f, std::uint16_t* numbers, std::int64_t head_dim) {
  TensorSpec spec = make_spec(
      f.problem.q.dtype,
      std::array<std::int64_t, 4>{f.num_sequences, f.seqlen_kv, f.num_heads_kv, head_dim});
  spec.device = f.device();
  return {static_cast<void*>(numbers), spec};
}

}  // namespace

NumbersOfCodesSpec numbers_of_codes_spec(const ForwardProblem& f) {
  return {.element = element_of(f.problem.q.dtype),
          .k_codes = codes_of(f.problem.k.dtype),
          .v_codes = codes_of(f.problem.v.dtype),
          .is_paged = f.is_paged,
          .has_packed_q = f.is_varlen};
}

jit::KernelText numbers_of_codes_text(const NumbersOfCodesSpec& spec) {
  return {fmt::format("#include \"common/numbers_of_codes.cuh\"\n"
                      "namespace fovea::cuda {{\n{}}}\n"
                      "extern \"C\" __global__ void __launch_bounds__({}) {}("
                      "const __grid_constant__ fovea::cuda::NumbersOfCodesParams p) {{\n"
                      "  fovea::cuda::numbers_of_codes<fovea::cuda::spec>(p);\n}}\n",
                      print_spec(spec), kNumbersThreads, jit::kEntryName),
          fmt::format("common/numbers_of_codes {}", name(spec.element))};
}

std::size_t numbers_bytes(const ForwardProblem& f) {
  return part_of(f, f.head_dim_qk) + part_of(f, f.head_dim_v);
}

std::int64_t num_numbers_ctas(const ForwardProblem& f) {
  return f.num_sequences * ceil_div(f.seqlen_kv, std::int64_t{kRowsOfNumbers});
}

NumbersOfCodesLaunch numbers_of_codes_launch(const ForwardProblem& f, const ForwardParams& call,
                                             const KvCache& codes, void* to) {
  auto* const base = static_cast<std::byte*>(to);
  NumbersOfCodesLaunch launch;
  launch.params = {
      .common = call,
      .k_scale = scale_param(codes.k_scale),
      .v_scale = scale_param(codes.v_scale),
      .k = reinterpret_cast<std::uint16_t*>(base),
      .v = reinterpret_cast<std::uint16_t*>(base + part_of(f, f.head_dim_qk)),
      .rows = f.seqlen_kv,
      .num_tiles = static_cast<std::int32_t>(ceil_div(f.seqlen_kv, std::int64_t{kRowsOfNumbers}))};
  launch.num_ctas = static_cast<unsigned>(num_numbers_ctas(f));
  return launch;
}

KvCache cache_of_numbers(const ForwardProblem& f, const KvCache& codes,
                         const NumbersOfCodesLaunch& launch) {
  return {.k = numbers_view(f, launch.params.k, f.head_dim_qk),
          .v = numbers_view(f, launch.params.v, f.head_dim_v),
          .seqlens = codes.seqlens};
}

void NumbersOfCodesLaunch::add_to(KernelLaunches& all) const {
  KernelLaunch launch = kernel_launch(KernelRole::numbers, params);
  launch.grid = {.x = num_ctas};
  launch.num_threads = kNumbersThreads;
  all.add(launch);
}

}  // namespace fovea::cuda
