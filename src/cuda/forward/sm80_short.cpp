#include "cuda/forward/sm80_short.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace fovea::cuda {
namespace {

/// Of a warp, and the step in which tiles of keys grow.
constexpr std::int64_t kRowsOfWarp = 16;
/// Of a CTA, best first: the more rows, the fewer CTAs read the same keys; the fewer rows, the more room for others.
constexpr std::array<std::int64_t, 3> kMostRows = {128, 96, 64};
/// Scores of more take registers that another CTA would have; 128 keys are cut into two tiles, 257 into three.
constexpr std::int64_t kMostKeysOfTile = 112;
/// Measured (docs/kernels/attention_short_sm90.md): from there on Hopper's own kernel, whose products are twice as
/// fast, fills its tiles well enough; at head dims of half a panel it does not for long.
constexpr std::int64_t kMostTokens = 128, kMostNarrowTokens = 288, kNarrowHeadDim = 32;
std::int64_t most_tokens(const ForwardProblem& f) {
  return std::max(f.head_dim_qk, f.head_dim_v) <= kNarrowHeadDim ? kMostNarrowTokens : kMostTokens;
}

/// Beside sums of wider heads a few hundred keys leave no room for another CTA.
constexpr std::int64_t kWidestHeadDim = 128;
/// Fewer rows of a kv head are no work for the warps that it takes to load its keys.
constexpr std::int64_t kFewestRows = 17;

/// CTAs beside a CTA are what hides its loads.
constexpr int kFewestCtas = 2;
/// Of an SM; registers of a scheduler are one for each lane of a warp.
constexpr int kSchedulers = 4, kRegistersOfScheduler = 512;
constexpr int kFewestRegisters = 96, kMostRegisters = 255;  // of a thread

/// A length in equal parts of at most `most`, each of whole blocks of 16.
struct Parts {
  std::int32_t count, each;
};
Parts parts_of(std::int64_t length, std::int64_t most) {
  const std::int64_t count = std::max<std::int64_t>(1, (length + most - 1) / most);
  const std::int64_t blocks = (length + count * kRowsOfWarp - 1) / (count * kRowsOfWarp);
  return {static_cast<std::int32_t>(count),
          static_cast<std::int32_t>(std::max<std::int64_t>(1, blocks) * kRowsOfWarp)};
}

bool has_program(const ForwardProblem& f) {
  const Problem& p = f.problem;
  return !p.score.is_identity() || !p.mask.captures().tensors.empty() || p.dropout.p > 0;
}

/// That a thread wants: scores and sums of 16 rows, half a register for each column; addresses and operands on their
/// way, which grow with the sums; what masks, packed rows, maxima and programs add. As compiled: with less, specs of
/// tests/compile/cuda/short_specs_test.cpp spill.
int wanted_registers(const TeamSpec& spec, const ForwardProblem& f) {
  const bool has_more = spec.is_varlen || spec.wants_row_max || !f.problem.mask.is_all_visible();
  const int wanted = (spec.tile_kv + spec.head_dim_v) / 2 + spec.head_dim_v / 4 + 16 +
                     (has_more ? 8 : 0) + (has_program(f) ? 40 : 0);
  return std::clamp(wanted, kFewestRegisters, kMostRegisters);
}

/// That so many CTAs leave a thread: warps are dealt to schedulers, registers are dealt in eights.
int registers_beside(const TeamSpec& spec, int ctas) {
  const int warps = (ctas * spec.num_warps + kSchedulers - 1) / kSchedulers;
  return std::min(kMostRegisters, kRegistersOfScheduler / warps / 8 * 8);
}

std::int32_t ctas_that_fit(const TeamSpec& spec, const ForwardProblem& f,
                           const DeviceTraits& device) {
  const int bytes = sm80_forward_layout(spec).bytes + kReservedSharedBytes;
  int ctas = device.shared_bytes_per_sm / bytes;
  while (ctas > 0 && registers_beside(spec, ctas) < wanted_registers(spec, f)) --ctas;
  return ctas;
}

TeamSpec with_parts(const ForwardProblem& f, std::int64_t most_rows, std::int64_t most_keys,
                    const DeviceTraits& device) {
  TeamSpec spec{common_spec(f)};
  spec.holds_all_keys = true;
  spec.heads_per_tile = packed_heads(f, most_rows);
  const Parts rows = parts_of(spec.heads_per_tile * f.seqlen_q, most_rows);
  const Parts keys = parts_of(f.seqlen_kv, most_keys);
  spec.tile_q = rows.each;
  spec.num_warps = static_cast<std::int32_t>(rows.each / kRowsOfWarp);
  spec.tile_kv = keys.each;
  spec.stages = keys.count;
  spec.ctas_per_sm = ctas_that_fit(spec, f, device);
  return spec;
}

}  // namespace

std::optional<Refusal> Sm80ForwardShort::refuses(const ForwardProblem& f,
                                                 const DeviceTraits& device) {
  if (auto refusal = refuses_tensor_cores(f, device)) return refusal;
  if (auto refusal = refuses_margin(f)) return refusal;
  if (device.compute_capability() != 90) {
    return Refusal{
        fmt::format("compute capability is {}.{}; expected 9.0", device.major, device.minor)};
  }
  if (f.is_cached) return Refusal{"keys lie in a cache; expected those of a call"};
  // All packed rows bound a sequence too, but then what lies beside it would choose its kernel, and its bits.
  if (f.is_varlen && !(f.problem.seqlen_q && f.problem.seqlen_kv)) {
    return Refusal{
        "sequences are packed; expected bounds of their lengths, seqlen_q and seqlen_kv"};
  }
  if (auto refusal = refuses_head_dims(f, kWidestHeadDim)) return refusal;
  for (const auto& [label, length] :
       {std::pair{"seqlen_q", f.seqlen_q}, std::pair{"seqlen_kv", f.seqlen_kv}}) {
    if (length > most_tokens(f))
      return Refusal{fmt::format("{} is {}; expected at most {}", label, length, most_tokens(f))};
  }
  if (f.group * f.seqlen_q < kFewestRows) {
    return Refusal{fmt::format("{} rows share a kv head; expected at least {}",
                               f.group * f.seqlen_q, kFewestRows)};
  }
  const TeamSpec spec = choose(f, device);
  if (spec.ctas_per_sm >= kFewestCtas) return std::nullopt;
  return Refusal{fmt::format("{} keys of head dims {} and {} leave no room for {} CTAs on an SM",
                             f.seqlen_kv, f.head_dim_qk, f.head_dim_v, kFewestCtas)};
}

TeamSpec Sm80ForwardShort::choose(const ForwardProblem& f, const DeviceTraits& device) {
  TeamSpec spec;
  for (const std::int64_t rows : kMostRows) {
    spec = with_parts(f, rows, kMostKeysOfTile, device);
    if (spec.ctas_per_sm >= kFewestCtas) break;
  }
  return spec;
}

std::vector<TeamSpec> Sm80ForwardShort::alternatives(const ForwardProblem& f,
                                                     const DeviceTraits& device) {
  std::vector<TeamSpec> specs;
  for (const std::int64_t rows : kMostRows) {
    for (const std::int64_t keys : {48, 64, 96, 128}) {
      const TeamSpec spec = with_parts(f, rows, keys, device);
      if (spec.ctas_per_sm > 0) specs.push_back(spec);
    }
  }
  return specs;
}

}  // namespace fovea::cuda
