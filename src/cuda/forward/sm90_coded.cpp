#include "cuda/forward/sm90_coded.hpp"

#include <fmt/format.h>

#include <utility>

#include "cuda/forward/sm80_coded.hpp"
#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {
namespace {

/// Lanes have registers for so many codes of a row, with those of a tile that is under way; and read 16 at a time.
constexpr std::int64_t kMostHeadDim = 128;
constexpr std::int64_t kCodesAtOnce = 16;

constexpr std::int32_t kGroups = 2, kRowsOfGroup = 64, kKeys = 128;

}  // namespace

std::optional<Refusal> Sm90ForwardCoded::refuses(const ForwardProblem& f,
                                                 const DeviceTraits& device) {
  if (auto refusal = refuses_codes(f, device)) return refusal;
  if (auto refusal = refuses_hopper(f, device)) return refusal;
  if (auto refusal = refuses_shared_tiles(f)) return refusal;
  if (auto refusal = refuses_head_dims(f, kMostHeadDim)) return refusal;
  for (const auto& [label, head_dim] :
       {std::pair{"head_dim_qk", f.head_dim_qk}, std::pair{"head_dim_v", f.head_dim_v}}) {
    if (head_dim % kCodesAtOnce != 0) {
      return Refusal{
          fmt::format("{} is {}; expected a multiple of {}", label, head_dim, kCodesAtOnce)};
    }
  }
  if (!f.cache.has_aligned_rows)
    return Refusal{"rows of q, out, k or v do not lie at multiples of 16 bytes"};
  return std::nullopt;
}

Sm90ForwardSpec Sm90ForwardCoded::choose(const ForwardProblem& f, const DeviceTraits&) {
  Sm90ForwardSpec spec = choose_many_rows(f);
  spec.k_codes = codes_of(f.problem.k.dtype);
  spec.v_codes = codes_of(f.problem.v.dtype);
  spec.loads_by_cp_async = true;
  // Not the narrower panels that 16-bit elements may have: four lanes read 64 codes of a row.
  spec.head_dim_qk = static_cast<std::int32_t>(panels_of(f.head_dim_qk));
  spec.head_dim_v = static_cast<std::int32_t>(panels_of(f.head_dim_v));
  spec.tile_q = kGroups * kRowsOfGroup;
  spec.tile_kv = kKeys;
  spec.num_warps = sm90_num_warps(spec, kGroups);
  return spec;
}

std::vector<Sm90ForwardSpec> Sm90ForwardCoded::alternatives(const ForwardProblem& f,
                                                            const DeviceTraits& device) {
  return {choose(f, device)};
}

bool Sm90ForwardCoded::reads(const AttentionForward& args, const GrownCache* cache) {
  return Sm90ForwardCpAsync::reads(args, cache);
}

Sm90Launch Sm90ForwardCoded::prepare(const ForwardProblem& f, const ForwardPlan& plan,
                                     const AttentionForward& args, const GrownCache* cache,
                                     void* workspace, const TensorMapEncoder& encode) {
  Sm90Launch launch = Sm90Forward::prepare(f, plan, args, cache, workspace, encode);
  launch.params.k_scale = scale_param(cache->cache.k_scale);
  launch.params.v_scale = scale_param(cache->cache.v_scale);
  return launch;
}

}  // namespace fovea::cuda
