#include "cuda/forward/candidates.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/check.hpp"
#include "cuda/device/shared/split.h"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/candidate_of.hpp"
#include "cuda/forward/cdna.hpp"
#include "cuda/forward/sm100.hpp"
#include "cuda/forward/sm100_fp4.hpp"
#include "cuda/forward/sm120_fp4.hpp"
#include "cuda/forward/sm80.hpp"
#include "cuda/forward/sm80_coded.hpp"
#include "cuda/forward/sm80_decode_coded.hpp"
#include "cuda/forward/sm80_f32.hpp"
#include "cuda/forward/sm80_quantized.hpp"
#include "cuda/forward/sm80_short.hpp"
#include "cuda/forward/sm80_wide.hpp"
#include "cuda/forward/sm90.hpp"
#include "cuda/forward/sm90_coded.hpp"
#include "cuda/forward/sm90_converted.hpp"
#include "cuda/forward/sm90_decode.hpp"
#include "cuda/forward/sm90_decode_coded.hpp"
#include "cuda/forward/sm90_decode_latent.hpp"
#include "cuda/forward/sm90_quantized.hpp"
#include "cuda/forward/sm90_short.hpp"
#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {
namespace {

/// Below, 1 / scale and score * scale leave f32.
constexpr float kSmallestFoldedScale = 1e-30F;

/// Rows of shared memory are swizzled in units of 32 elements.
std::int32_t padded(std::int64_t head_dim) {
  return static_cast<std::int32_t>((head_dim + 31) / 32 * 32);
}

/// Few rows over keys of more than one split.
bool is_split_among_ctas(const ForwardProblem& f) {
  return !has_packed_tiles(f) && has_few_rows(f) && f.seqlen_kv > kFewestKeysPerSplit;
}

// Sm100Forward has not run on a GPU yet: it stands behind what has, for `fovea tune` to choose where it is faster.
constexpr std::array kCandidates = {
    candidate_of<Sm90Decode>(),           candidate_of<Sm90DecodeLatent>(),
    candidate_of<Sm90ForwardShort>(),     candidate_of<Sm80ForwardShort>(),
    candidate_of<Sm90Forward>(),          candidate_of<Sm90ForwardCpAsync>(),
    candidate_of<Sm80Forward>(),          candidate_of<Sm100Forward>(),
    candidate_of<Sm80ForwardWide>(),      candidate_of<CdnaForward>(),
    candidate_of<Sm80ForwardF32>(),       candidate_of<Sm90ForwardQuantized>(),
    candidate_of<Sm80ForwardQuantized>(), candidate_of<Sm120ForwardFp4>(),
    candidate_of<Sm100ForwardFp4>(),      candidate_of<Sm90DecodeCoded>(),
    candidate_of<Sm80DecodeCoded>(),      candidate_of<Sm90ForwardConverted>(),
    candidate_of<Sm90ForwardCoded>(),     candidate_of<Sm80Coded>()};

Refusal refuses_amd(const DeviceTraits& device) {
  return {fmt::format("this is gfx{:x} of AMD; expected a GPU of NVIDIA", device.gfx)};
}

}  // namespace

std::optional<Refusal> refuses_before(jit::Architecture first, const DeviceTraits& device) {
  if (device.is_amd()) return refuses_amd(device);
  if (jit::Architecture{device.major, device.minor} >= first) return std::nullopt;
  return Refusal{fmt::format("compute capability is {}.{}; expected {}.{} or above", device.major,
                             device.minor, first.major, first.minor)};
}

std::optional<Refusal> refuses_any(const ForwardProblem& f, const DeviceTraits& device,
                                   Machines machines) {
  const Problem& p = f.problem;
  for (const auto& [label, spec] : {std::pair{"k", &p.k}, std::pair{"v", &p.v}}) {
    if (spec->dtype != p.q.dtype) {
      return Refusal{fmt::format("{} is {} and q is {}; expected one dtype", label,
                                 name(spec->dtype), name(p.q.dtype))};
    }
  }
  return refuses_numbers_or_codes(f, device, machines);
}

std::optional<Refusal> refuses_numbers_or_codes(const ForwardProblem& f, const DeviceTraits& device,
                                                Machines machines) {
  if (device.is_amd()) {
    if (machines == Machines::nvidia) return refuses_amd(device);
  } else if (machines == Machines::amd) {
    return Refusal{"this is a GPU of NVIDIA; expected one of AMD"};
  } else if (auto refusal = refuses_before(jit::kOldestArchitecture, device)) {
    return refusal;
  }
  const Problem& p = f.problem;
  if (!p.quant.is_none())
    return Refusal{fmt::format("quant is {}; this kernel rounds no operand", print(p.quant))};
  if (p.sm_margin > 0 && p.sm_margin >= device.num_sms) {
    return Refusal{fmt::format("sm_margin is {}; expected less than the {} SMs of the device",
                               p.sm_margin, device.num_sms)};
  }
  for (const auto& [label, length] :
       {std::pair{"seqlen_q", f.seqlen_q}, std::pair{"seqlen_kv", f.seqlen_kv}}) {
    if (length > kMostOfSequence)
      return Refusal{fmt::format("{} is {}; expected at most {}", label, length, kMostOfSequence)};
  }
  const std::int64_t rows = has_packed_tiles(f) ? f.total_q : f.num_sequences * f.seqlen_q;
  if ((rows / 16 + f.num_sequences + 1) * f.num_heads_q > std::int64_t{0x7fffffff})
    return Refusal{"more than 2^31 tiles of rows"};
  // Of each split of a row there is a partial state; who joins them, and Hopper's kernel, number them in 32 bits.
  if (is_split_among_ctas(f) && f.num_heads_q * rows > std::int64_t{0x7fffffff} / kMostSplits) {
    return Refusal{
        fmt::format("{} rows of all heads over more than {} keys; expected at most 2^31 / {}",
                    f.num_heads_q * rows, kFewestKeysPerSplit, kMostSplits)};
  }
  return std::nullopt;
}

std::optional<Refusal> refuses_16_bit(const ForwardProblem& f, const DeviceTraits& device,
                                      Machines machines) {
  if (auto refusal = refuses_any(f, device, machines)) return refusal;
  const Problem& p = f.problem;
  if (p.q.dtype == Dtype::f32) return Refusal{"inputs are f32; expected f16 or bf16"};
  if (p.q.dtype == Dtype::bf16 && !device.is_amd() && device.instructions() == Instructions::sm75) {
    return Refusal{fmt::format(
        "inputs are bf16, which tensor cores of compute capability {}.{} do not multiply; expected "
        "f16, or a kernel of f32",
        device.major, device.minor)};
  }
  if (p.compute_dtype == ComputeDtype::f32)
    return Refusal{"compute_dtype is f32; this kernel multiplies inputs of 16 bits"};
  if (p.compute_dtype == ComputeDtype::bf16 && p.q.dtype != Dtype::bf16)
    return Refusal{"compute_dtype is bf16 and inputs are f16; expected one of both"};
  return std::nullopt;
}

std::optional<Refusal> refuses_head_dims(const ForwardProblem& f, std::int64_t most) {
  for (const auto& [label, head_dim] :
       {std::pair{"head_dim_qk", f.head_dim_qk}, std::pair{"head_dim_v", f.head_dim_v}}) {
    if (head_dim > most)
      return Refusal{fmt::format("{} is {}; expected at most {}", label, head_dim, most)};
  }
  return std::nullopt;
}

std::optional<Refusal> refuses_tensor_cores(const ForwardProblem& f, const DeviceTraits& device) {
  if (auto refusal = refuses_16_bit(f, device)) return refusal;
  return refuses_head_dims(f, kMaxTensorCoreHeadDim);
}

std::optional<Refusal> refuses_shared_bytes(std::size_t bytes, const DeviceTraits& device) {
  if (bytes <= static_cast<std::size_t>(device.shared_bytes_per_cta)) return std::nullopt;
  return Refusal{
      fmt::format("tiles of these head dims take {} bytes of shared memory; there are {}", bytes,
                  device.shared_bytes_per_cta)};
}

std::optional<Refusal> refuses_margin(const ForwardProblem& f) {
  if (f.problem.sm_margin == 0) return std::nullopt;
  return Refusal{
      fmt::format("sm_margin is {}; this kernel has a CTA for each tile and leaves no SM free",
                  f.problem.sm_margin)};
}

int usable_sms(const ForwardProblem& f, const DeviceTraits& device) {
  return device.num_sms - f.problem.sm_margin;
}

std::optional<Refusal> refuses_boxes(const ForwardProblem& f, std::string_view part) {
  if (!f.is_cached) return std::nullopt;
  const CacheLayout& cache = f.cache;
  if (f.is_paged && cache.page_size % kFewestRowsOfBox != 0) {
    return Refusal{fmt::format("page_size is {}; expected a multiple of {}", cache.page_size,
                               kFewestRowsOfBox)};
  }
  if (f.is_paged && cache.has_left_padding) {
    return Refusal{
        fmt::format("left_padding is given; then keys of a {} begin inside a page", part)};
  }
  if (!cache.has_aligned_rows)
    return Refusal{"rows of q, out, k or v do not lie at multiples of 16 bytes, as TMA reads them"};
  return std::nullopt;
}

bool has_mask(const ForwardProblem& f) { return !f.problem.mask.is_all_visible(); }

bool has_few_rows(const ForwardProblem& f) { return f.group * f.seqlen_q <= kFewRows; }

bool has_packed_tiles(const ForwardProblem& f) {
  return f.is_varlen && !(f.is_cached && has_few_rows(f));
}

std::int32_t packed_heads(const ForwardProblem& f, std::int64_t rows) {
  const std::int64_t seqlen_q = std::max<std::int64_t>(1, f.seqlen_q);
  for (std::int64_t heads = std::min(f.group, rows / seqlen_q); heads > 1; --heads) {
    if (f.group % heads == 0) return static_cast<std::int32_t>(heads);
  }
  return 1;
}

ForwardSpec common_spec(const ForwardProblem& f) {
  const Problem& p = f.problem;
  ForwardSpec spec;
  spec.element = element_of(p.q.dtype);
  spec.out_element = element_of(p.out.dtype);
  spec.head_dim_qk = padded(f.head_dim_qk);
  spec.head_dim_v = padded(f.head_dim_v);
  spec.is_varlen = has_packed_tiles(f);
  spec.has_packed_q = f.is_varlen && f.is_cached;
  spec.is_paged = f.is_paged;
  spec.has_padded_head_dim = spec.head_dim_qk != f.head_dim_qk || spec.head_dim_v != f.head_dim_v;
  spec.is_prescaled = !p.score.is_identity() || f.softmax_scale < kSmallestFoldedScale;
  spec.has_dropout = p.dropout.p > 0;
  spec.reads_dropout_seed = spec.has_dropout && p.reads_dropout_seed;
  spec.has_dropout_places = spec.has_dropout && p.has_dropout_places;
  spec.wants_row_max = p.wants_row_max;
  return spec;
}

std::span<const Candidate> forward_candidates() { return kCandidates; }

const Candidate& candidate_named(std::string_view name) {
  const auto* candidate = std::ranges::find(kCandidates, name, &Candidate::name);
  FOVEA_ASSERT(candidate != kCandidates.end());
  return *candidate;
}

int max_splits(const ForwardSpec& spec, const ForwardProblem& f) {
  if (!spec.is_split) return 1;
  const std::int64_t fewest = fewest_keys_per_split(spec.most_splits);
  const std::int64_t most = (f.seqlen_kv + fewest - 1) / fewest;
  return static_cast<int>(std::clamp<std::int64_t>(most, 1, spec.most_splits));
}

std::size_t partial_bytes(const ForwardSpec& spec, const ForwardProblem& f) {
  if (!spec.is_split) return 0;
  const std::int64_t rows = f.num_sequences * f.seqlen_q * f.num_heads_q * max_splits(spec, f);
  return static_cast<std::size_t>(rows * (spec.head_dim_v + 2)) * sizeof(float);
}

}  // namespace fovea::cuda
