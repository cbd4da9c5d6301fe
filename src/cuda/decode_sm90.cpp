#include "cuda/decode_sm90.hpp"

#include <fmt/format.h>

#include "cuda/device/shared/split.h"

namespace fovea::cuda {
namespace {

/// Each warp computes all of them. With 32, sm80/attention_forward is faster: 16 of them to a warp (docs/kernels/decode_sm90.md).
constexpr std::int32_t kMostRows = 16;
/// The sums of wider rows leave no registers for anything else.
constexpr std::int64_t kWidestHead = 128;

constexpr std::int32_t kWarps = 4;
constexpr std::int32_t kKeysPerSlice = 16;  // the depth of one product
constexpr std::int32_t kCtasPerSm = 2;
constexpr std::int32_t kStages = 3;  // of each warp: two CTAs fill the SM's shared memory

}  // namespace

std::optional<Refusal> refuses_decode(const ForwardProblem& f, const DeviceTraits& device) {
  if (device.compute_capability() < 90) {
    return Refusal{fmt::format("compute capability is {}.{}; expected 9.0 or above", device.major,
                               device.minor)};
  }
  if (f.is_varlen)
    return Refusal{"sequences are packed; this kernel splits dense tensors and caches"};
  if (f.group * f.seqlen_q > kMostRows) {
    return Refusal{fmt::format("{} rows share a kv head; expected at most {}", f.group * f.seqlen_q,
                               kMostRows)};
  }
  if (f.seqlen_kv <= kFewestKeysPerSplit) {
    return Refusal{fmt::format("{} keys are one split; expected more than {}", f.seqlen_kv,
                               kFewestKeysPerSplit)};
  }
  for (const auto& [label, head_dim] :
       {std::pair{"head_dim_qk", f.head_dim_qk}, std::pair{"head_dim_v", f.head_dim_v}}) {
    if (head_dim > kWidestHead)
      return Refusal{fmt::format("{} is {}; expected at most {}", label, head_dim, kWidestHead)};
  }
  const std::size_t bytes = decode_shared_bytes(choose_decode(f, device));
  if (bytes > static_cast<std::size_t>(device.shared_bytes_per_cta)) {
    return Refusal{fmt::format("a CTA takes {} bytes of shared memory; there are {}", bytes,
                               device.shared_bytes_per_cta)};
  }
  return std::nullopt;
}

ForwardSpec choose_decode(const ForwardProblem& f, const DeviceTraits&) {
  ForwardSpec spec = common_spec(f);
  spec.tile_q = kMostRows;
  spec.tile_kv = kWarps * kKeysPerSlice;
  spec.num_warps = kWarps;
  spec.stages = kStages;
  spec.ctas_per_sm = kCtasPerSm;
  spec.heads_per_tile = packed_heads(f, spec.tile_q);
  spec.keeps_queries = true;
  spec.is_split = true;
  spec.is_chained = true;
  return spec;
}

std::vector<ForwardSpec> decode_alternatives(const ForwardProblem& f, const DeviceTraits& device) {
  const ForwardSpec chosen = choose_decode(f, device);
  const std::int32_t slice = chosen.tile_kv / chosen.num_warps;
  std::vector<ForwardSpec> specs;
  for (const auto& [warps, ctas] : {std::pair{4, 1}, {4, 2}, {4, 3}, {8, 1}}) {
    for (const std::int32_t stages : {2, 3, 4, 6}) {
      ForwardSpec spec = chosen;
      spec.num_warps = warps;
      spec.tile_kv = warps * slice;
      spec.stages = stages;
      spec.ctas_per_sm = ctas;
      const auto bytes = static_cast<int>(decode_shared_bytes(spec)) + kReservedSharedBytes;
      if (ctas * bytes <= device.shared_bytes_per_sm) specs.push_back(spec);
    }
  }
  return specs;
}

std::size_t decode_shared_bytes(const ForwardSpec& spec) {
  return static_cast<std::size_t>(spec.num_warps * sm90_decode_warp_bytes(spec));
}

}  // namespace fovea::cuda
