#include "cuda/forward/sm90_few_rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "cuda/device/shared/split.h"
#include "expr/passes.hpp"

namespace fovea::cuda {
namespace {

/// Rows that a partial state costs as much for as 16 rows cost with all splits.
constexpr std::int64_t kRowsOfMostSplits = 16;

/// Below, sums of 64 rows leave registers for the scores of 128 keys.
constexpr std::int32_t kWidestOfLongTiles = 128;

bool reads_q_head(const Program& program) {
  return expr::reads(program.expr().node(), expr::Variable::q_head);
}

std::optional<Refusal> refuses_program(const Program& program, std::string_view which) {
  if (reads_q_head(program))
    return Refusal{fmt::format("the {} reads q_head, and heads share a tile of rows", which)};
  if (!program.captures().tensors.empty()) {
    return Refusal{fmt::format("the {} reads tensor {}, and heads share a tile of rows", which,
                               program.captures().tensors.front().name)};
  }
  return std::nullopt;
}

/// As many buffers of K and V as shared memory has room for.
std::int32_t stages_that_fit(Sm90ForwardSpec spec, const DeviceTraits& device) {
  spec.stages = 1;
  while (sm90_forward_layout(spec).bytes <= device.shared_bytes_per_cta) ++spec.stages;
  return spec.stages - 1;
}

Sm90ForwardSpec with_tile(Sm90ForwardSpec spec, std::int32_t tile_kv, const DeviceTraits& device) {
  spec.tile_kv = tile_kv;
  spec.stages = stages_that_fit(spec, device);
  return spec;
}

}  // namespace

std::optional<Refusal> refuses_few_rows(const ForwardProblem& f) {
  const std::int64_t rows = f.group * f.seqlen_q;
  if (f.is_varlen && !f.is_cached) {
    return Refusal{
        fmt::format("sequences are packed and {} rows share a kv head; expected more than {}, "
                    "sequences of a batch, or keys in a cache",
                    rows, kFewRows)};
  }
  if (f.seqlen_kv <= kFewestKeysPerSplit) {
    return Refusal{fmt::format("{} keys are one split and {} rows share a kv head; expected more",
                               f.seqlen_kv, rows)};
  }
  if (packed_heads(f, kFewRows) == 1) return std::nullopt;
  if (auto refusal = refuses_program(f.problem.score, "score program")) return refusal;
  return refuses_program(f.problem.mask, "mask");
}

Sm90ForwardSpec with_few_rows(Sm90ForwardSpec spec, const ForwardProblem& f,
                              const DeviceTraits& device) {
  const std::int32_t widest = std::max(spec.head_dim_qk, spec.head_dim_v);
  spec.tile_q = static_cast<std::int32_t>(kFewRows);
  spec.heads_per_tile = packed_heads(f, kFewRows);
  spec.num_warps = 8;
  spec.ctas_per_sm = 1;
  spec.q_stages = widest <= kWidestOfLongTiles ? 2 : 1;  // wide queries would take a buffer of keys
  spec.is_split = true;
  const auto rows =
      static_cast<std::uint64_t>(f.group * f.seqlen_q + kRowsOfMostSplits - 1) / kRowsOfMostSplits;
  spec.most_splits = kMostSplits / static_cast<std::int32_t>(std::bit_ceil(rows));
  return with_tile(spec, widest <= kWidestOfLongTiles ? 128 : 64, device);
}

std::vector<Sm90ForwardSpec> few_rows_alternatives(const Sm90ForwardSpec& chosen,
                                                   const DeviceTraits& device) {
  std::vector<Sm90ForwardSpec> specs;
  for (const std::int32_t tile_kv : {64, 128}) {
    if (tile_kv <= chosen.tile_kv) specs.push_back(with_tile(chosen, tile_kv, device));
  }
  return specs;
}

}  // namespace fovea::cuda
