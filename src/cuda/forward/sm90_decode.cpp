#include "cuda/forward/sm90_decode.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "cuda/device/shared/split.h"
#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {
namespace {

bool is_coded(const ForwardProblem& f) { return codes_of(f.problem.k.dtype) != Codes::none; }

/// More than 16 rows by mma.sync take longer than memory, of 64 twice the time: Hopper has wgmma for them, which codes
/// in registers are no operands of. Of those over pages more than 16 take longer by much (an H200). Blackwell's memory
/// is faster; no such GPU has measured it.
std::int64_t most_rows(const ForwardProblem& f, const DeviceTraits& device) {
  if (device.major != 9) return kDecodeRows;
  if (!is_coded(f)) return kFewRows;
  return f.is_paged ? kDecodeRows : 2 * kDecodeRows;
}

/// Beyond, sums, queries and scores of a warp have no registers.
constexpr std::int64_t kWidestHead = 128;
constexpr std::int32_t kKeysOfSlice = 16;  // the depth of one product
/// Of codes: as many bytes, and what a warp does once for a slice is less of it. docs/kernels/decode_coded_sm90.md.
constexpr std::int32_t kKeysOfCodedSlice = 32;
/// What a warpgroup multiplies at a time. Beside sums of 64 columns a thread has registers for scores of as many keys.
constexpr std::int32_t kKeysOfGroupSlice = 64;
constexpr std::int32_t kReaders = 8;  // warps that compute: two for each scheduler
/// Slices that one request brings: 16 KB at head_dim 128, twice. Measured on an H200: docs/kernels/decode_sm90.md.
/// Beside more rows shared memory has room for smaller boxes.
constexpr std::int32_t kSlicesOfBox = 4, kSlicesBesideManyRows = 2;
/// Over pages a box is several requests in any case. Of codes a warp looks at every box on its way to its own slice in
/// no more time than that takes.
constexpr std::int32_t kSlicesOfPagedCodes = 2;
/// Splits of all kv heads of one sequence: as many as large machines have SMs.
constexpr std::int64_t kSplitsOfHeads = 128;
/// 1.5 % of the keys' bytes at 256 keys a split, which is as much as fewer splits cost batches in balance.
constexpr std::int64_t kRowsOfSmallStates = 4;
/// From so many sequences and kv heads on for each SM a CTA may take all of a sequence.
constexpr std::int64_t kTenthsOfPairsOfAnSm = 18;
/// Keys of so many bytes leave L2 by its own order, where a CTA may take whole groups: it reads them faster. Fewer
/// leave first, so that what was there before need not be written to memory.
constexpr std::int64_t kBytesOfManyKeys = std::int64_t{400} << 20;
/// CTAs of a cluster: of two splits it is 1 us ahead of the combine kernel, of eight it is behind (an H200).
constexpr std::int32_t kMostOfCluster = 2;
/// Splits are counted in 32 bits.
constexpr std::int64_t kMostSplitsOfAll = std::int64_t{1} << 30;
/// The combine kernel's CTAs, two of them, are on the SM before this one's has ended.
constexpr std::int32_t kLeftForCombine = 2 * kReservedSharedBytes;

/// As many boxes as shared memory has room for, with as many slices of each computing warp; none where there is no
/// room.
Sm90DecodeSpec with_readers(Sm90DecodeSpec spec, std::int32_t readers, const DeviceTraits& device) {
  const int room = std::min(device.shared_bytes_per_cta,
                            device.shared_bytes_per_sm - kReservedSharedBytes - kLeftForCombine);
  spec.num_warps = readers + sm90_decode_helpers(spec);
  const std::int32_t step =
      std::max(sm90_decode_parts(spec) / spec.slices_of_box, sm90_decode_loaders(spec));
  spec.stages = step;
  while (sm90_decode_layout(spec).bytes <= room) spec.stages += step;
  spec.stages -= step;
  return spec;
}

/// Blocks of warps' rows, as many as divide the warps.
std::int32_t rows_of_blocks(const ForwardProblem& f) {
  const auto blocks =
      static_cast<std::uint64_t>((f.group * f.seqlen_q + kDecodeRows - 1) / kDecodeRows);
  return kDecodeRows * static_cast<std::int32_t>(std::bit_ceil(blocks));
}

/// Where partial states are bytes that count, no more splits than fill the machine with one sequence: longer ones are
/// joined and stored less often. Not by the batch, nor by the machine: bits follow from how keys are split.
std::int32_t most_splits(const ForwardProblem& f) {
  const std::int64_t rows = f.group * f.seqlen_q;
  // Codes come so fast that the end of a split counts in any case.
  const bool has_codes = codes_of(f.problem.k.dtype) != Codes::none;
  if (rows <= kRowsOfSmallStates && !has_codes) return kMostSplits;
  const auto of_a_head =
      static_cast<std::uint64_t>(kSplitsOfHeads / std::max<std::int64_t>(1, f.num_heads_kv));
  return std::clamp(static_cast<std::int32_t>(std::bit_floor(of_a_head)), kMostSplits / 4,
                    kMostSplits * kDecodeRows / rows_of_blocks(f));
}

Sm90DecodeSpec without_readers(const ForwardProblem& f) {
  Sm90DecodeSpec spec{common_spec(f)};
  spec.head_dim_qk = static_cast<std::int32_t>(panels_of(f.head_dim_qk));
  spec.head_dim_v = static_cast<std::int32_t>(panels_of(f.head_dim_v));
  spec.has_padded_head_dim = spec.head_dim_qk != f.head_dim_qk || spec.head_dim_v != f.head_dim_v;
  spec.k_codes = codes_of(f.problem.k.dtype);
  spec.v_codes = codes_of(f.problem.v.dtype);
  const bool has_few_rows = spec.has_codes() && f.group * f.seqlen_q <= kFewDecodeRows;
  spec.tile_q = has_few_rows ? kFewDecodeRows : rows_of_blocks(f);
  if (multiplies_by_wgmma(spec)) spec.tile_q = static_cast<std::int32_t>(kFewRows);
  spec.tile_kv = spec.has_codes()            ? kKeysOfCodedSlice
                 : multiplies_by_wgmma(spec) ? kKeysOfGroupSlice
                                             : kKeysOfSlice;
  spec.ctas_per_sm = 1;
  spec.heads_per_tile = packed_heads(f, spec.tile_q);
  spec.is_split = true;
  spec.most_splits = most_splits(f);
  spec.has_groups = spec.most_splits < kMostSplits;
  spec.slices_of_box = multiplies_by_wgmma(spec)   ? 1
                       : f.is_paged                ? (spec.has_codes() ? kSlicesOfPagedCodes : 1)
                       : spec.tile_q > kDecodeRows ? kSlicesBesideManyRows
                                                   : kSlicesOfBox;
  return spec;
}

/// And of values, as many as there may be.
std::int64_t bytes_of_keys(const ForwardProblem& f) {
  const auto bytes = static_cast<std::int64_t>(size_bytes(f.problem.k.dtype));
  return f.num_sequences * f.seqlen_kv * f.num_heads_kv * (f.head_dim_qk + f.head_dim_v) * bytes;
}

std::int64_t num_pairs(const Sm90DecodeSpec& spec, const ForwardProblem& f) {
  return f.num_sequences * f.num_heads_q / spec.heads_per_tile;
}

bool is_full_of_sequences(const Sm90DecodeSpec& spec, const ForwardProblem& f,
                          const DeviceTraits& device) {
  return 10 * num_pairs(spec, f) >= kTenthsOfPairsOfAnSm * device.num_sms;
}

/// Could the machine be full without a split of any sequence, or without one of any group of so many keys that partial
/// states cost more than the code that leaves them out? How long sequences are is seen on the device. Bits are the
/// same.
bool takes_groups(const Sm90DecodeSpec& spec, const ForwardProblem& f, const DeviceTraits& device) {
  const std::int64_t pairs = num_pairs(spec, f);
  const auto longest = static_cast<std::int32_t>(f.seqlen_kv);
  // States are as many bytes as there are rows: of 64 a group pays beside a quarter of the keys.
  const bool fills_by_groups =
      bytes_of_keys(f) * rows_of_blocks(f) >= kBytesOfManyKeys * kDecodeRows &&
      16 * pairs * num_groups(longest, spec.most_splits) >= 15 * device.num_sms;
  return spec.has_groups && (is_full_of_sequences(spec, f, device) || fills_by_groups);
}

/// Of a sequence's splits, as many as there may be, if all clusters are on the machine at once; else 1. Clusters take
/// an SM each of one part of the machine, which leaves some over.
std::int32_t ctas_of_cluster(const Sm90DecodeSpec& spec, const ForwardProblem& f,
                             const DeviceTraits& device) {
  const auto splits = static_cast<std::uint32_t>(max_splits(spec, f));
  const auto ctas = static_cast<std::int32_t>(std::bit_ceil(splits));
  const bool is_small =
      ctas <= kMostOfCluster && 4 * num_pairs(spec, f) * ctas <= 3 * device.num_sms;
  // Codes have none: their queries are asked for a split ahead, and a CTA of a cluster has one.
  const bool may_be = spec.has_groups && !spec.takes_groups && !spec.has_codes();
  return may_be && device.major == 9 && is_small ? ctas : 1;
}

}  // namespace

std::optional<Refusal> refuses_stream(const ForwardProblem& f, const DeviceTraits& device) {
  // Consumer GPUs of 12.0 have TMA too, but half of the shared memory; there each copy's address is tested before
  // (machine code).
  if (device.major != 9 && device.major != 10) {
    return Refusal{fmt::format("compute capability is {}.{}; expected 9.0, or 10.0 to 10.3",
                               device.major, device.minor)};
  }
  if (f.is_varlen && !f.is_cached)
    return Refusal{"sequences are packed; this kernel splits dense tensors and caches"};
  if (f.total_q > std::int64_t{0x7fffffff}) return Refusal{"more than 2^31 packed rows"};
  if (f.group * f.seqlen_q > most_rows(f, device)) {
    return Refusal{fmt::format("{} rows share a kv head; expected at most {}", f.group * f.seqlen_q,
                               most_rows(f, device))};
  }
  if (f.seqlen_kv <= kFewestKeysPerSplit) {
    return Refusal{fmt::format("{} keys are one split; expected more than {}", f.seqlen_kv,
                               kFewestKeysPerSplit)};
  }
  if (f.seqlen_kv >= std::int64_t{1} << 28) return Refusal{"more than 2^28 keys"};
  if (f.num_sequences * f.num_heads_q * kMostSplits >= kMostSplitsOfAll)
    return Refusal{"2^30 splits of all sequences and heads, or more"};
  if (auto refusal = refuses_boxes(f, "slice")) return refusal;
  const Problem& p = f.problem;
  const std::string why = why_no_tensor_maps({{"q", &p.q}, {"k", &p.k}, {"v", &p.v}});
  if (!why.empty()) return Refusal{why};
  if (Sm90Decode::choose(f, device).stages == 0) {
    return Refusal{fmt::format("a CTA takes more than the {} bytes of shared memory there are",
                               device.shared_bytes_per_cta)};
  }
  return std::nullopt;
}

std::optional<Refusal> Sm90Decode::refuses(const ForwardProblem& f, const DeviceTraits& device) {
  if (auto refusal = refuses_tensor_cores(f, device)) return refusal;
  if (auto refusal = refuses_head_dims(f, kWidestHead)) return refusal;
  return refuses_stream(f, device);
}

Sm90DecodeSpec Sm90Decode::choose(const ForwardProblem& f, const DeviceTraits& device) {
  Sm90DecodeSpec spec = without_readers(f);
  spec.takes_groups = takes_groups(spec, f, device);
  spec.ctas_of_cluster = ctas_of_cluster(spec, f, device);
  return with_readers(spec, kReaders, device);
}

std::vector<Sm90DecodeSpec> Sm90Decode::alternatives(const ForwardProblem& f,
                                                     const DeviceTraits& device) {
  std::vector<Sm90DecodeSpec> specs;
  for (const bool takes_groups : {false, true}) {
    Sm90DecodeSpec spec = without_readers(f);
    if (takes_groups && !spec.has_groups) break;
    spec.takes_groups = takes_groups;
    for (const std::int32_t readers : {kReaders / 2, kReaders})
      if (spec.tile_q <= kDecodeRows || readers == kReaders)
        specs.push_back(with_readers(spec, readers, device));
  }
  return specs;
}

bool Sm90Decode::reads(const AttentionForward& args, const GrownCache* cache) {
  const Operands tensors(args, cache);
  return have_tensor_maps({&tensors.q, &tensors.k, &tensors.v});
}

std::size_t Sm90Decode::shared_bytes(const Sm90DecodeSpec& spec) {
  return static_cast<std::size_t>(sm90_decode_layout(spec).bytes);
}

std::size_t Sm90Decode::scratch_bytes(const Sm90DecodeSpec& spec, const ForwardProblem& f) {
  return partial_bytes(spec, f);
}

DecodeLaunch Sm90Decode::prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                                 const AttentionForward& args, const GrownCache* cache,
                                 void* workspace, const TensorMapEncoder& encode) {
  const Operands tensors(args, cache);
  const auto& spec = plan.spec.as<Sm90DecodeSpec>();
  DecodeLaunch launch;
  launch.common = forward_launch(problem, plan, args, workspace, cache);
  place_range_tables(plan, workspace, launch.common);
  const std::int32_t keys_of_box = spec.slices_of_box * spec.tile_kv;
  launch.params.rows_per_box =
      spec.is_paged ? std::gcd(keys_of_box, launch.common.params.page_size) : keys_of_box;
  const bool by_panels = sm90_decode_loads_panels(spec, launch.params.rows_per_box);
  // A fetch of 256 bytes would bring the neighbouring panel with each, and memory would be asked for it twice.
  const auto map_of = [&](const TensorView& keys, std::int32_t rows, bool is_by_panels) {
    return tensor_map_of_rows(encode, tensors.keys_or_queries(keys),
                              {.rows = rows,
                               .by_panels = is_by_panels,
                               .l2_promotion = driver::TensorMapL2Promotion::bytes_128});
  };
  launch.params.k = map_of(tensors.k, launch.params.rows_per_box, by_panels);
  launch.params.v = map_of(tensors.v, launch.params.rows_per_box, by_panels);
  if (sm90_decode_query_loaders(spec) > 0) {
    launch.params.q = tensor_map_of_heads(encode, tensors.q, spec.tile_q / spec.heads_per_tile,
                                          spec.heads_per_tile);
  }
  if (spec.slices_of_box > 1 && !spec.is_paged) {
    launch.params.k_slice = map_of(tensors.k, spec.tile_kv, true);
    launch.params.v_slice = map_of(tensors.v, spec.tile_kv, true);
  }
  if (spec.has_codes()) {
    launch.params.k_scale = scale_param(cache->cache.k_scale);
    launch.params.v_scale = scale_param(cache->cache.v_scale);
  }
  launch.params.keys_go_first =
      spec.takes_groups && bytes_of_keys(problem) >= kBytesOfManyKeys ? 0 : 1;
  launch.params.common = launch.common.params;
  const int num_sms = usable_sms(problem, plan.device);
  const std::int64_t splits = std::int64_t{launch.common.grid.x} * max_splits(spec, problem);
  launch.num_ctas = static_cast<std::uint32_t>(std::min<std::int64_t>(splits, num_sms));
  if (is_clustered(spec)) launch.num_ctas = launch.common.grid.x * spec.ctas_of_cluster;
  if (spec.takes_groups) {
    // Of groups the first one comes sooner without (an H200).
    launch.params.rehearsals = is_full_of_sequences(spec, problem, plan.device) ? 1 : 0;
    const std::int64_t tiles = problem.num_heads_q / spec.heads_per_tile;
    launch.params.tiles_of_cta = launch.common.combine_params.tiles_of_cta =
        static_cast<float>(tiles) / static_cast<float>(launch.num_ctas);
  }
  return launch;
}

KernelLaunches DecodeLaunch::launches(const ForwardPlan& plan) const {
  KernelLaunches all;
  common.add_tables(all);
  // The kernel waits for no grid ahead: not for those of range tables, nor for the one that appends keys.
  KernelLaunch main = common.main_launch(plan, params);
  main.grid = {.x = num_ctas};
  all.add(main);
  if (is_clustered(plan.spec.as<Sm90DecodeSpec>())) {
    common.add_clear(all);
  } else {
    common.add_combine(plan, all);
  }
  return all;
}

}  // namespace fovea::cuda
