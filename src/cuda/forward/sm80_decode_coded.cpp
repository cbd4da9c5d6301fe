#include "cuda/forward/sm80_decode_coded.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/device/shared/split.h"
#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {
namespace {

/// Of a warp, an m of mma.sync.
constexpr std::int64_t kMostRows = 16;
constexpr std::int32_t kKeysOfSlice = 16;  // the depth of one product
/// Twelve warps of an SM have registers for their sums, queries and one slice each: three CTAs, so that one begins or
/// ends its split while others stream.
constexpr std::int32_t kWarps = 4;
constexpr std::int32_t kCtasPerSm = 3;
constexpr std::int32_t kCtasOfPrograms = 2;  // that read tensors: addresses take registers
/// Of 1,024 keys at 32,768: partial states of sixteen rows are a twentieth of the bytes of their keys.
constexpr std::int32_t kSplitsOfManyRows = kMostSplits / 2;
constexpr std::int64_t kRowsOfSmallStates = 4;

}  // namespace

std::optional<Refusal> Sm80DecodeCoded::refuses(const ForwardProblem& f,
                                                const DeviceTraits& device) {
  if (auto refusal = Sm80Coded::refuses(f, device)) return refusal;
  if (f.problem.q.dtype != Dtype::bf16)
    return Refusal{fmt::format("q is {}; this kernel multiplies bf16", name(f.problem.q.dtype))};
  if (f.group * f.seqlen_q > kMostRows) {
    return Refusal{fmt::format("{} rows share a kv head; expected at most {}", f.group * f.seqlen_q,
                               kMostRows)};
  }
  if (auto refusal = refuses_rows_of_codes(f)) return refusal;
  if (f.seqlen_kv <= kFewestKeysPerSplit) {
    return Refusal{fmt::format("{} keys are one split; expected more than {}", f.seqlen_kv,
                               kFewestKeysPerSplit)};
  }
  if (!f.cache.has_aligned_rows)
    return Refusal{"rows of q, out, k or v do not lie at multiples of 16 bytes"};
  return std::nullopt;
}

CodedDecodeSpec Sm80DecodeCoded::choose(const ForwardProblem& f, const DeviceTraits&) {
  CodedDecodeSpec spec{common_spec(f)};
  spec.k_codes = codes_of(f.problem.k.dtype);
  spec.v_codes = codes_of(f.problem.v.dtype);
  spec.tile_q = kMostRows;
  spec.tile_kv = kKeysOfSlice;
  spec.num_warps = kWarps;
  spec.stages = 1;
  const bool reads_tensors =
      !f.problem.score.captures().tensors.empty() || !f.problem.mask.captures().tensors.empty();
  spec.ctas_per_sm = reads_tensors ? kCtasOfPrograms : kCtasPerSm;
  spec.heads_per_tile = packed_heads(f, kMostRows);
  spec.is_split = true;
  spec.most_splits = f.group * f.seqlen_q <= kRowsOfSmallStates ? kMostSplits : kSplitsOfManyRows;
  return spec;
}

std::vector<CodedDecodeSpec> Sm80DecodeCoded::alternatives(const ForwardProblem& f,
                                                           const DeviceTraits& device) {
  return {choose(f, device)};
}

bool Sm80DecodeCoded::reads(const AttentionForward& args, const GrownCache* cache) {
  return is_aligned(args.q) && is_aligned(cache->cache.k) && is_aligned(cache->cache.v);
}

std::size_t Sm80DecodeCoded::shared_bytes(const CodedDecodeSpec& spec) {
  return static_cast<std::size_t>(decode_coded_bytes(spec));
}

std::size_t Sm80DecodeCoded::scratch_bytes(const CodedDecodeSpec& spec, const ForwardProblem& f) {
  return partial_bytes(spec, f);
}

CodedLaunch Sm80DecodeCoded::prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                                     const AttentionForward& args, const GrownCache* cache,
                                     void* workspace, const TensorMapEncoder& encode) {
  return Sm80Coded::prepare(problem, plan, args, cache, workspace, encode);
}

}  // namespace fovea::cuda
