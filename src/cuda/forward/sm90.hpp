// What Hopper's forward kernel needs on the host: its choice, its tensor maps, its launches. Read candidates.hpp for
// the table that it is a row of, device/sm90/attention_forward.cuh for the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda/device/shared/clear_counter.h"
#include "cuda/device/shared/forward_params_sm90.h"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/candidates.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/forward/lost_rows.hpp"
#include "cuda/forward/numbers_of_codes.hpp"
#include "cuda/forward/quantize_kv.hpp"
#include "cuda/params/tensor_maps.hpp"
#include "cuda/spec_text.hpp"

namespace fovea::cuda {

template <>
struct SpecText<Sm90ForwardSpec> {
  static constexpr std::string_view kName = "Sm90ForwardSpec";
  using Base = ForwardSpec;
  static constexpr std::tuple kMembers{FOVEA_SPEC_MEMBER(Sm90ForwardSpec, q_stages),
                                       FOVEA_SPEC_MEMBER(Sm90ForwardSpec, is_dynamic),
                                       FOVEA_SPEC_MEMBER(Sm90ForwardSpec, is_cached),
                                       FOVEA_SPEC_MEMBER(Sm90ForwardSpec, loads_by_cp_async),
                                       FOVEA_SPEC_MEMBER(Sm90ForwardSpec, has_coarse_mask),
                                       FOVEA_SPEC_MEMBER(Sm90ForwardSpec, multiplies_codes),
                                       FOVEA_SPEC_MEMBER(Sm90ForwardSpec, sums_codes),
                                       FOVEA_SPEC_MEMBER(Sm90ForwardSpec, rotates),
                                       FOVEA_SPEC_MEMBER(Sm90ForwardSpec, smooths_v),
                                       FOVEA_SPEC_MEMBER(Sm90ForwardSpec, k_codes),
                                       FOVEA_SPEC_MEMBER(Sm90ForwardSpec, v_codes)};
};

/// A call's parameters and grids; where they run is not known here.
struct Sm90Launch {
  Sm90ForwardParams params{};
  ForwardLaunch common{};  // range tables, and the combine kernel's where the spec is split
  ClearCounterParams counter{};
  std::uint32_t num_ctas = 0;    // 0: there are no rows
  bool has_counter = false;      // params.next_tile is read, and must be cleared
  QuantizeKvLaunch quantize;     // where the spec multiplies codes
  NumbersOfCodesLaunch numbers;  // where it multiplies numbers that codes of a cache become before
  LostRowsLaunch lost;           // where it multiplies codes, and loses rows of very large scores

  /// Range tables, the counter of row tiles, codes or numbers of K and V, where they are made, the kernel, then the
  /// combine kernel of splits, and rows of very large scores. The kernel starts while the one before it ends, and so do
  /// those behind it.
  KernelLaunches launches(const ForwardPlan& plan) const;
  /// The first two, whatever comes between them and the kernel.
  void add_before(KernelLaunches& all) const;
};

/// Other GPUs, more than the kernel counts, few queries of each head beside a cache: whatever K and V are.
std::optional<Refusal> refuses_hopper(const ForwardProblem& problem, const DeviceTraits& device);
/// Of tiles whose rows are one head's: rows that share a kv head, where they are few.
std::optional<Refusal> refuses_shared_tiles(const ForwardProblem& problem);

/// Of kernels whose roles load tiles by TMA: many rows, but few of each head, beside a cache; caches whose tiles are
/// not read, as places in pages are found by shifts.
std::optional<Refusal> refuses_few_queries(const ForwardProblem& problem);
std::optional<Refusal> refuses_cache_tiles(const ForwardProblem& problem);
/// Their tensor maps: of Q in boxes of a group's rows, or of the heads that share a tile; of K and V in boxes of keys.
void place_tensor_maps(const Sm90ForwardSpec& spec, std::int64_t group_rows,
                       const Operands& tensors, const TensorMapEncoder& encode,
                       Sm90ForwardParams& params);

/// All of a call of a kernel whose CTAs stay on their SMs but its tensor maps. `spec`: the plan's, or what it adds to.
Sm90Launch persistent_launch(const Sm90ForwardSpec& spec, const ForwardProblem& problem,
                             const ForwardPlan& plan, const AttentionForward& args,
                             const GrownCache* cache, void* workspace);

/// A row of the table of candidates: TMA loads.
struct Sm90Forward {
  using Spec = Sm90ForwardSpec;
  static constexpr std::string_view kName = "cuda/sm90/attention_forward";
  static constexpr std::string_view kHeader = "sm90/attention_forward.cuh";
  static constexpr std::string_view kEntry = "sm90::attention_forward";
  static constexpr std::string_view kParams = "Sm90ForwardParams";
  static constexpr bool kMultipliesByWgmma = true;
  static constexpr bool kIsChained = true;
  static constexpr bool kReadsNumbersOfCodes = false;

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  static bool reads(const AttentionForward& args, const GrownCache* cache);
  static constexpr decltype(Candidate::reads) kReads = reads;
  /// As for more rows than share a tile with their heads, however few there are.
  static std::optional<Refusal> refuses_many_rows(const ForwardProblem& problem,
                                                  const DeviceTraits& device);
  static Spec choose_many_rows(const ForwardProblem& problem);
  static std::size_t shared_bytes(const Spec& spec);
  /// Partial states, the counter of row tiles and a word for each 64 rows of a head.
  static std::size_t scratch_bytes(const Spec& spec, const ForwardProblem& problem);
  /// Of tensors that it reads. `workspace` holds plan.workspace_bytes.
  static Sm90Launch prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                            const AttentionForward& args, const GrownCache* cache, void* workspace,
                            const TensorMapEncoder& encode);
};

/// The same kernel for pages of any size and strides that TMA does not have: threads load.
struct Sm90ForwardCpAsync : Sm90Forward {
  static constexpr std::string_view kName = "cuda/sm90/attention_forward_cp_async";

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  static bool reads(const AttentionForward& args, const GrownCache* cache);
  static constexpr decltype(Candidate::reads) kReads = reads;
};

}  // namespace fovea::cuda
